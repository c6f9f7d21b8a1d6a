"""flash_cuda as nvcc builds it: its registers and SASS, the cache of builds, refusals, and code for sm_75 on a GPU."""

import ctypes
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lmsys.attention import AttentionCase, flash_cuda
from lmsys.attention.contract import DTYPES
from lmsys.attention.flash_cuda import HEAD_DIMS
from tests.attention import test_attention, test_flash_cuda, test_patterns
from tests.attention.test_flash_cuda import AMPERE, SMALL, TURING, VARIANTS, capability_id
from tests.support.attention_rows import Row
from tests.support.variants import few_by_default


@pytest.mark.long
@pytest.mark.skipif(flash_cuda.nvcc() is None, reason="needs nvcc of the CUDA toolkit")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "windowed"),
    few_by_default([(*one, windowed) for one in VARIANTS[3:] + VARIANTS[:3] for windowed in (True, False)], one_in=18),
)
def test_all_variants_compile_for_turing_ampere_and_hopper_and_hardly_spill(
    dtype: str, head_dim: int, windowed: bool, tmp_path: Path
) -> None:
    """For Turing no register may spill; otherwise only as many bytes as values have that the loop does not change."""
    most = {TURING: 0, AMPERE: 128 if dtype == "float32" else 32}
    most[9, 0] = most[AMPERE]
    if dtype == "bfloat16":
        del most[TURING]

    def compiled(capability: tuple[int, int]) -> str:
        tiles = flash_cuda.tiles_for(DTYPES[dtype], head_dim, capability)
        command = flash_cuda.nvcc_command(DTYPES[dtype], head_dim, capability, tiles, windowed)
        out = tmp_path / f"{capability[0]}.so"
        done = subprocess.run([*command, "-Xptxas", "-v", "-o", out], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    with ThreadPoolExecutor(2) as pool:
        for capability, messages in zip(most, pool.map(compiled, most), strict=True):
            assert sorted(re.findall(r"entry function '_Z\d+(\w+)_kernel", messages)) == ["dkdv", "dq", "fwd"]
            registers = [int(n) for n in re.findall(r"Used (\d+) registers", messages)]
            spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", messages)]
            assert len(registers) == len(spilled) == 3 and max(registers) <= 255
            assert max(spilled) <= most[capability], messages


@pytest.mark.long
@pytest.mark.skipif(flash_cuda.nvcc() is None, reason="needs nvcc of the CUDA toolkit")
@pytest.mark.parametrize("capability", [AMPERE, TURING], ids=capability_id)
@pytest.mark.parametrize("head_dim", few_by_default(HEAD_DIMS, one_in=3))
def test_every_product_runs_on_tensor_cores(head_dim: int, capability: tuple[int, int], tmp_path: Path) -> None:
    """SASS has as many mma.sync as a tile's products need, ldmatrix for operands, and cp.async or loads for tiles."""
    triton = pytest.importorskip("triton", reason="pip install triton==3.6.0 for its cuobjdump")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    dtype, instruction, depth, copy = {
        AMPERE: (torch.bfloat16, "HMMA.16816.F32.BF16", 16, "LDGSTS.E.BYPASS.128"),
        TURING: (torch.float16, "HMMA.1688.F32", 8, "LDG.E.128"),
    }[capability]
    tiles = flash_cuda.tiles_for(dtype, head_dim, capability)
    command = flash_cuda.nvcc_command(dtype, head_dim, capability, tiles)
    subprocess.run([*command, "-o", tmp_path / "out.so"], check=True)
    sass = subprocess.run([tool, "-sass", tmp_path / "out.so"], capture_output=True, text=True, check=True).stdout
    found = {part.split("_kernel")[0].lstrip("_Z0123456789"): part for part in sass.split("Function : ")[1:]}
    for kernel, products in (("fwd", 2), ("dq", 3), ("dkdv", 4)):
        tile = getattr(tiles, kernel)
        rows = tile.block_k if kernel == "dkdv" else tile.block_q
        needed = products * (rows // tile.warps // 16) * (tile.at_once // 8) * (head_dim // depth)
        assert found[kernel].count(instruction) == found[kernel].count("HMMA") == needed
        assert "LDSM.16.M88.4" in found[kernel] and copy in found[kernel]


@pytest.mark.long
@pytest.mark.skipif(flash_cuda.nvcc() is None, reason="needs nvcc of the CUDA toolkit")
def test_tiles_that_do_not_fit_turing_do_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="static assertion failed"):
        flash_cuda.build(torch.float32, 128, TURING, flash_cuda.tiles_for(torch.float32, 128, AMPERE))


@pytest.fixture
def counting_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces nvcc by a script that fails if ELEMENT is __half. The file returned gets a line for each compilation."""
    notes, script = tmp_path / "compiled", tmp_path / "nvcc"
    script.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        'case "$*" in --version) echo release 1.0; exit;; *__half*) echo no such element >&2; exit 1;; esac\n'
        f'echo "$*" >> {notes}; echo library > "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(flash_cuda, "nvcc", lambda: str(script))
    monkeypatch.setattr(flash_cuda, "_nvcc_version", lambda: "1.0")
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path / "cache"))
    return notes


def test_a_build_is_kept_until_its_sources_options_or_nvcc_change(
    counting_nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    variant = torch.bfloat16, 64, (9, 0)
    first = flash_cuda.build(*variant)
    assert first.read_text() == "library\n" and list(first.parent.iterdir()) == [first]
    assert capsys.readouterr().err.count("\n") == 1, "one line of progress"
    assert flash_cuda.build(*variant) == first and not capsys.readouterr().err
    others = [
        flash_cuda.build(torch.float32, 64, (9, 0)),
        flash_cuda.build(torch.bfloat16, 128, (9, 0)),
        flash_cuda.build(torch.bfloat16, 64, (8, 0)),
        flash_cuda.build(*variant, SMALL),
        flash_cuda.build(*variant, windowed=True),
    ]
    monkeypatch.setattr(flash_cuda, "_nvcc_version", lambda: "1.1")
    others.append(flash_cuda.build(*variant))
    for changed in (".cu", ".cuh"):
        for suffix in (".cu", ".cuh"):
            text = flash_cuda.SOURCE.with_suffix(suffix).read_text()
            (tmp_path / f"copy{suffix}").write_text(text + "//" if suffix == changed else text)
        with monkeypatch.context() as patch:
            patch.setattr(flash_cuda, "SOURCE", tmp_path / "copy.cu")
            others.append(flash_cuda.build(*variant))
    assert len({first, *others}) == len(counting_nvcc.read_text().splitlines()) == 9


@pytest.mark.parametrize("what", ["the library", "its folder"])
def test_a_library_that_others_can_write_is_not_taken(what: str, counting_nvcc: Path) -> None:
    variant = torch.bfloat16, 64, (9, 0)
    library = flash_cuda.build(*variant)
    place = library if what == "the library" else library.parent
    place.chmod(place.stat().st_mode | 0o002)
    with pytest.raises(ValueError, match=f"^{place}: others can write it, and code would be run from there"):
        flash_cuda.build(*variant)
    assert library.exists() and len(counting_nvcc.read_text().splitlines()) == 1


def test_a_build_that_fails_leaves_no_file_and_has_nvccs_message(counting_nvcc: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such element"):
        flash_cuda.build(torch.float16, 64, (9, 0))
    assert not list((tmp_path / "cache").iterdir())


def test_a_gpu_gets_the_variants_that_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(flash_cuda, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(flash_cuda, "build", lambda *variant: built.append(variant))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [TURING, AMPERE][index])
    assert flash_cuda.main() == 0
    dtypes = {each: {dtype for dtype, _, capability, *_ in built if capability == each} for each in (TURING, AMPERE)}
    assert dtypes == {TURING: {torch.float32, torch.float16}, AMPERE: {*dtypes[TURING], torch.bfloat16}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"capability": (8, 0)}, ""),
        ({"capability": TURING, "dtype": "float16"}, ""),
        ({"capability": TURING, "dtype": "float32"}, ""),
        ({"capability": TURING}, "bfloat16 needs compute capability 8.0 or later; this GPU has 7.5"),
        ({"capability": (7, 0), "dtype": "float16"}, "float16 needs compute capability 7.5 or later; this GPU has 7.0"),
        ({"head_dim": 80}, "80 is none of 32, 64, 128"),
        ({"dtype": "float64"}, "float64"),
        ({"device": "cpu"}, "CUDA only"),
    ],
)
def test_cases_that_it_cannot_run_have_a_reason(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(AttentionCase(1, 2, 2, 8, 8, 64, "bfloat16", device="cuda", capability=(9, 0)), **changes)
    monkeypatch.setattr(flash_cuda, "nvcc", lambda: "nvcc")
    found = flash_cuda.flash_cuda_supports(case)
    assert reason in str(found) if reason else found is None
    monkeypatch.setattr(flash_cuda, "nvcc", lambda: None)
    assert reason or "nvcc" in str(flash_cuda.flash_cuda_supports(case))


@pytest.fixture
def as_turing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes flash_cuda run its code for Turing GPUs: PTX for compute_75, which the driver translates for this GPU."""
    command = flash_cuda.nvcc_command

    def to_ptx(*variant: Any) -> list[str]:
        return [part.replace("-arch=sm_75", "-arch=compute_75") for part in command(*variant)]

    @cache
    def library(dtype: torch.dtype, head_dim: int, device: torch.device, tiles: Any, windowed: bool) -> ctypes.CDLL:
        return flash_cuda.load(flash_cuda.build(dtype, head_dim, TURING, tiles, windowed))

    monkeypatch.setattr(flash_cuda, "nvcc_command", to_ptx)
    monkeypatch.setattr(flash_cuda, "_library", library)
    monkeypatch.setattr(Row, "dtypes", ["float16", "float32"])


LAWS = [
    test_attention.test_matches_the_oracle,
    test_attention.test_values_of_one_give_one,
    test_attention.test_large_logits_stay_finite,
    test_attention.test_a_causal_prefix_does_not_change,
    test_attention.test_one_vector_added_to_all_keys_changes_nothing,
    test_attention.test_the_order_of_keys_does_not_matter,
    test_attention.test_batch_entries_and_heads_are_independent,
    test_attention.test_grouped_heads_equal_repeated_keys,
    test_attention.test_split_keys_merged_by_log_sum_exp_equal_the_whole,
    test_attention.test_repeats_are_bitwise_equal,
    test_attention.test_three_dimensions_equal_four,
    test_patterns.test_a_row_under_a_pattern_matches_the_oracle,
    test_patterns.test_a_pattern_equals_the_mask_of_what_it_hides,
    test_patterns.test_a_window_as_long_as_the_sequence_is_causal,
    test_patterns.test_a_window_of_one_is_the_value_at_its_place,
]


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS, ids=[law.__name__.removeprefix("test_") for law in LAWS])
def test_a_law_holds_for_turings_code(law: Callable[[str, str], None], as_turing: None) -> None:
    law("flash_cuda", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [variant for variant in VARIANTS if variant[0] != "bfloat16"])
def test_a_growing_maximum_is_followed_by_turings_code(dtype: str, head_dim: int, as_turing: None) -> None:
    test_flash_cuda.test_a_growing_maximum_is_followed_on_a_gpu(dtype, head_dim)
