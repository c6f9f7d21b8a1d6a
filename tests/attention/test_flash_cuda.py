"""flash_cuda without a GPU: its source run by an emulator, faults seeded into it, what nvcc makes of it, its build."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.attention import ATTENTION, AttentionCase, Pattern, flash_cuda
from lmsys.attention.contract import DTYPES
from lmsys.attention.flash_cuda import HEAD_DIMS, Tile, Tiles
from lmsys.measure.memory import peak_bytes
from lmsys.testing import Oracle, make_inputs, run
from tests.support.variants import some

VARIANTS = [(dtype, head_dim) for dtype in ("float32", "float16", "bfloat16") for head_dim in HEAD_DIMS]
SMALL = Tiles(Tile(64, 32, 4, 32, False, 1), Tile(64, 32, 4, 16, False, 1), Tile(32, 64, 4, 16, False, 1))
KEPT = Tiles(Tile(64, 32, 4, 32, True, 1), Tile(64, 32, 4, 16, True, 1), Tile(32, 64, 4, 16, True, 1))
WINDOWS = [  # with queries that see nothing yet in their warp's first tile, and queries past the last window
    AttentionCase(1, 4, 2, 150, 133, 32, "float16", causal=True, grad=True, window=34),
    AttentionCase(2, 2, 1, 190, 70, 32, "float16", causal=True, grad=True, window=5),
]
CASES = [  # more keys than queries and fewer, in several tiles of SMALL, the last of them cut
    AttentionCase(1, 4, 2, 70, 150, 32, "float16", causal=True, grad=True),
    AttentionCase(2, 2, 1, 150, 133, 32, "float16", causal=False, grad=True),
]
STDS = (3.0, 1.0)  # of q and k; only with the larger does a maximum grow by enough to be followed


@cache
def emulated(source: str, header: str, dtype: torch.dtype, head_dim: int, tiles: Tiles, windowed: bool) -> ctypes.CDLL:
    """flash_cuda.cu for this machine's CPU."""
    folder = Path(mkdtemp(prefix="lmsys-"))
    (folder / "flash_cuda.cu").write_text(source)
    (folder / "flash_cuda.cuh").write_text(header)
    emulator = Path(__file__).parents[1] / "support" / "cuda_emulator.h"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-include", emulator]
    told = flash_cuda.macros(dtype, head_dim, tiles, windowed)
    done = subprocess.run(
        [*command, *told, "-x", "c++", folder / "flash_cuda.cu", "-o", folder / "out.so"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    library = flash_cuda.load(folder / "out.so")
    shutil.rmtree(folder)
    return library


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`emulate(right, wrong)`: flash_cuda then runs on CPU tensors, `right` in its source replaced by `wrong`."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator of CUDA needs g++")
    texts = [flash_cuda.SOURCE.read_text(), flash_cuda.SOURCE.with_suffix(".cuh").read_text()]

    def start(right: str = "", wrong: str = "") -> None:
        assert not right or "".join(texts).count(right) == 1, f"no single {right!r}; name the line anew"
        source, header = (text.replace(right, wrong) if right else text for text in texts)

        def library(
            dtype: torch.dtype, head_dim: int, device: torch.device, tiles: Tiles | None, windowed: bool
        ) -> ctypes.CDLL:
            tiles = tiles or flash_cuda.tiles_for(dtype, head_dim)
            return emulated(source, header, dtype, head_dim, tiles, windowed)

        monkeypatch.setattr(flash_cuda, "_library", library)
        monkeypatch.setattr(flash_cuda, "_stream", lambda device: 0)

    return start


def worst(
    case: AttentionCase, seed: int, tiles: Tiles | None = None, scale: float | None = None, std: float = 1.0
) -> float:
    pattern = Pattern(case.causal, case.window)

    def row(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None,
        pattern: Pattern | None = None,
    ) -> torch.Tensor:
        if tiles is None:
            return flash_cuda.flash_cuda(q, k, v, causal=causal, scale=scale, pattern=pattern)
        return flash_cuda.FlashCuda.apply(q, k, v, case.causal, scale, tiles, pattern)

    inputs = make_inputs(case, seed, std=std, memory="" if seed % 2 else "transposed")
    outputs = run(row, inputs, scale=scale, lse=True, pattern=pattern)
    return max(Oracle(case, inputs, scale, pattern=pattern).error_ratios(outputs).values())


@pytest.mark.parametrize(("dtype", "head_dim"), some(VARIANTS, 10))
def test_every_variant_matches_the_oracle(dtype: str, head_dim: int, emulate: Callable[..., None]) -> None:
    """o, the log-sum-exp and all gradients, with the tiles that ship, at any length, grouped or not, on views."""
    emulate()
    lengths = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 128, 129]), st.integers(1, 150))
    heads = st.sampled_from([(1, 1), (2, 1), (2, 2)])

    @settings(max_examples=3)
    @given(
        heads=heads,
        queries=lengths,
        keys=lengths,
        causal=st.booleans(),
        std=st.sampled_from(STDS),
        seed=st.integers(0, 2**31),
    )
    def holds(heads: tuple[int, int], queries: int, keys: int, causal: bool, std: float, seed: int) -> None:
        case = AttentionCase(1, *heads, queries, keys, head_dim, dtype, causal=causal, grad=True)
        scale = [None, 1.5, -0.5][seed % 3]
        assert worst(case, seed, scale=scale and scale * head_dim**-0.5, std=std) <= 1

    holds()


@pytest.mark.parametrize(("dtype", "head_dim"), some(VARIANTS, 10))
def test_a_window_matches_the_oracle(dtype: str, head_dim: int, emulate: Callable[..., None]) -> None:
    """Windows of one key, within a tile and of several; queries that see nothing are among those past all keys."""
    emulate()
    lengths, windows = st.integers(1, 150), st.one_of(st.sampled_from([1, 16, 32, 33, 64, 65]), st.integers(1, 150))

    @settings(max_examples=4)
    @given(lengths, lengths, windows, st.sampled_from(STDS), st.integers(0, 2**31))
    def holds(queries: int, keys: int, window: int, std: float, seed: int) -> None:
        case = AttentionCase(1, 2, 1, queries, keys, head_dim, dtype, causal=True, grad=True, window=window)
        assert worst(case, seed, std=std) <= 1

    holds()


def test_a_window_visits_the_tiles_that_are_seen(emulate: Callable[..., None]) -> None:
    """Copied are tiles in which a query sees a key, and a warp multiplies those in which its own rows do."""
    emulate()
    case = AttentionCase(1, 1, 1, 192, 192, 32, "float16", causal=True, grad=True, window=20)
    library = flash_cuda._library(torch.float16, 32, torch.device("cpu"), SMALL, True)
    copies, products = (ctypes.c_longlong.in_dll(library, name) for name in ("num_copies", "num_products"))
    copies.value = products.value = 0
    assert worst(case, 0, SMALL) <= 1
    seen = Pattern(True, case.window).seen(192, 192, torch.device("cpu"))

    def tiles(queries: int, keys: int) -> int:
        return int(seen.view(192 // queries, queries, 192 // keys, keys).any(3).any(1).sum())

    rows = 192 * (1 + 2 + 2)  # of q; of q and do; of k and v
    rows += 2 * (32 * tiles(64, 32) + 32 * tiles(64, 32) + 32 * tiles(32, 64))
    assert copies.value == rows * 32 // 8, "of 16 bytes each"
    one = 16 * 32 * 32 // (16 * 8 * 16)  # mma.sync of 16 rows, one tile of 32 and head dimension 32
    assert products.value == one * ((2 + 3) * tiles(16, 32) + 4 * tiles(32, 16))


@pytest.mark.parametrize("tiles", [SMALL, KEPT], ids=["small", "kept"])
@pytest.mark.parametrize("case", some([*CASES, *WINDOWS], 4), ids=["causal", "not causal", "window", "blind"])
def test_the_tile_does_not_matter(tiles: Tiles, case: AttentionCase, emulate: Callable[..., None]) -> None:
    emulate()
    assert max(worst(case, 0, tiles, std=std) for std in STDS) <= 1


LAYOUTS = "a slice of wider rows", "every other element", "odd offset", "one for all rows"


@pytest.mark.parametrize("layout", some(LAYOUTS, 2))
def test_rows_of_any_layout(layout: str, emulate: Callable[..., None]) -> None:
    """As they are where 16 bytes can be moved at once, else by a copy; gradients come in the shape of the inputs."""
    emulate()
    inputs = make_inputs(CASES[0], 0)
    wide = torch.randn(*inputs.v.shape[:-1], 80, generator=torch.Generator().manual_seed(1)).to(inputs.v.dtype)
    inputs.v = {
        "a slice of wider rows": wide[..., 8:40],
        "every other element": wide[..., :64:2],
        "odd offset": wide[..., 3:35],
        "one for all rows": wide[..., :1, 8:40].expand_as(inputs.v),
    }[layout]
    outputs = run(flash_cuda.flash_cuda, inputs, causal=True)
    assert max(Oracle(CASES[0], inputs).error_ratios(outputs).values()) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), VARIANTS)
def test_a_growing_maximum_is_followed_on_a_gpu(dtype: str, head_dim: int) -> None:
    capability = torch.cuda.get_device_capability()
    case = AttentionCase(
        2, 4, 2, 700, 1000, head_dim, dtype, causal=True, grad=True, device="cuda", capability=capability
    )
    if reason := ATTENTION["flash_cuda"].why_not(case):
        pytest.skip(reason)
    assert max(worst(case, seed, std=3.0) for seed in range(3)) <= 1


@pytest.mark.gpu
def test_memory_is_linear_in_the_length() -> None:
    peak = {}
    case = AttentionCase(1, 8, 8, 8192, 8192, 64, "float32", causal=True, device="cuda")
    inputs = make_inputs(case, 0)
    for name in ("flash_cuda", "naive"):
        if reason := ATTENTION[name].why_not(case):
            pytest.skip(reason)
        row = ATTENTION[name].load()
        peak[name] = peak_bytes(partial(run, row, inputs, causal=True, grad=False), "cuda")
    assert peak["flash_cuda"] <= peak["naive"] / 5


FAULTS = {  # name -> the piece that is right, the one that is not
    "dropped rescale of the sum of values": ("acc[i / 2][j / 2][i % 2 * 2 + j % 2] *= rescale;", ";"),
    "dropped rescale of the sum of weights": ("total[i / 2][i % 2] *= rescale;", ""),
    "maximum of one thread's columns only": ("largest = row_max(largest);", ""),
    "one key too many": ("key <= query;", "key <= query + 1;"),
    "one key too few": ("key <= query;", "key < query;"),
    "a key past the end": ("if (key >= p.keys ||", "if (key > p.keys ||"),
    "one key too many in dk and dv": ("if (cut && !sees(query, key, p))", "if (cut && !sees(query + 1, key, p))"),
    "first tile on the diagonal left out of dk and dv": ("col / BLOCK_Q * BLOCK_Q", "(col / BLOCK_Q + 1) * BLOCK_Q"),
    "a tile used before it is here": (
        "wait_for_copies();\n        __syncthreads(); // this stage is here, and all have done with the other",
        "__syncthreads();",
    ),
    "a tile overwritten while it is used": (
        "__syncthreads(); // this stage is here, and all have done with the other",
        "",
    ),
    "what is kept overwritten before it is read": ("grad.keep();\n        __syncthreads();", "grad.keep();"),
    "results over what is still read": ("__syncthreads();\n    store_rows(q_tile, acc,", "store_rows(q_tile, acc,"),
    "keys arriving over the results": ("wait_for_copies(); // of k and v, where no query sees these keys", ""),
    "unwritten tail row": ("if (row + i / CHUNKS < length)", "if (row + i / CHUNKS < length - 1)"),
    "delta left out of dq": ("(dp[block][i / 4][i % 4] - delta[block][i % 4 / 2])", "dp[block][i / 4][i % 4]"),
    "delta of the neighbour in dk": ("ds = weight * (ds - (i % 2 ? two.w : two.y));", "ds = weight * (ds - two.w);"),
    "swapped scale of dk": (
        "dk[i / (D / 2)][i / 4 % (D / 8)][i % 4] *= p.scale",
        "dk[i / (D / 2)][i / 4 % (D / 8)][i % 4] /= p.scale",
    ),
    "query head reads its neighbour's keys": (
        "const Head k = p.k.head(batch, head / p.group), v = p.v.head(batch, head / p.group);\n    const auto load",
        "const Head k = p.k.head(batch, head % (p.heads / p.group)), v = p.v.head(batch, head / p.group);\n"
        "    const auto load",
    ),
    "swapped halves of a matrix": ("lane() % 8 + lane() / 16 * 8, lane() / 8 % 2)", "lane() % 16, lane() / 16)"),
    "log-sum-exp in base 2": ("+ log2f(sum)) * LN_2", "+ log2f(sum))"),
}


WINDOW_FAULTS = {
    "one key too many": ("unsigned(query - key) < unsigned", "unsigned(query - key) <= unsigned"),
    "one key too few": ("unsigned(query - key) < unsigned(p.window)", "unsigned(query - key) + 1 < unsigned(p.window)"),
    "a tile begun one key too late": ("query - p.window + 1)", "query - p.window + 2)"),
    "a tile that the window cuts not masked": (
        "(WINDOWED && col < first_key(last_row, p)))\n            hide",
        "false)\n            hide",
    ),
    "a tile that one query sees passed over": (
        "col + BLOCK_K <= first_key(own_row, p)) continue;\n        const T",
        "col + BLOCK_K <= first_key(last_row, p)) continue;\n        const T",
    ),
    "the last query left out of dk and dv": ("col + BLOCK_K - 1 + p.window", "col + BLOCK_K - 2 + p.window"),
    "a tile that one key needs passed over in dk and dv": ("row >= last_col + p.window", "row >= own_col + p.window"),
    "a tile that the window cuts not masked in dk and dv": (
        "(WINDOWED && row + BLOCK_Q > own_col + p.window)",
        "false",
    ),
    "a query that has seen nothing yet rescaled": ("== -INF) rescale = 1;", "== INF) rescale = 1;"),
    "weights over the maximum of nothing": ("WINDOWED && top[i / 2][i % 2] == -INF ? 0 : top", "top"),
    "values over a sum of nothing": ("WINDOWED && sum == 0 ? 0 : 1 / sum", "1 / sum"),
    "the log-sum-exp of nothing in dq": ("if (WINDOWED && lse[i / 2][i % 2] == -INF)", "if (false)"),
    "queries arriving over the results": (
        "wait_for_copies(); // of all, where no query sees a key\n    __syncthreads();\n    store_rows(q_tile, acc",
        ";\n    __syncthreads();\n    store_rows(q_tile, acc",
    ),
}


@pytest.mark.parametrize("fault", some(FAULTS, 10))
def test_a_seeded_fault_is_rejected(fault: str, emulate: Callable[..., None]) -> None:
    emulate(*FAULTS[fault])
    assert any(worst(case, 0, tiles, std=std) > 1 for tiles in (KEPT, SMALL) for std in STDS for case in CASES)


@pytest.mark.parametrize("fault", some(WINDOW_FAULTS, 13))
def test_a_fault_seeded_into_windows_is_rejected(fault: str, emulate: Callable[..., None]) -> None:
    emulate(*WINDOW_FAULTS[fault])
    assert any(not worst(case, 0, SMALL) <= 1 for case in WINDOWS)


@pytest.mark.long
@pytest.mark.skipif(flash_cuda.nvcc() is None, reason="needs nvcc of the CUDA toolkit")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "windowed"),
    some([(*one, windowed) for one in VARIANTS[3:] + VARIANTS[:3] for windowed in (True, False)], 18),
)
def test_what_ships_compiles_for_ampere_and_hopper_and_hardly_spills(
    dtype: str, head_dim: int, windowed: bool, tmp_path: Path
) -> None:
    """Some words that the loop over tiles does not change may spill, no more."""

    def compiled(capability: tuple[int, int]) -> str:
        tiles = flash_cuda.tiles_for(DTYPES[dtype], head_dim)
        command = flash_cuda.nvcc_command(DTYPES[dtype], head_dim, capability, tiles, windowed)
        out = tmp_path / f"{capability[0]}.so"
        done = subprocess.run([*command, "-Xptxas", "-v", "-o", out], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    with ThreadPoolExecutor(2) as pool:
        for told in pool.map(compiled, [(8, 0), (9, 0)]):
            assert sorted(re.findall(r"entry function '_Z\d+(\w+)_kernel", told)) == ["dkdv", "dq", "fwd"]
            registers = [int(n) for n in re.findall(r"Used (\d+) registers", told)]
            spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", told)]
            assert len(registers) == len(spilled) == 3 and max(registers) <= 255
            assert max(spilled) <= (128 if dtype == "float32" else 32), told


@pytest.mark.long
@pytest.mark.skipif(flash_cuda.nvcc() is None, reason="needs nvcc of the CUDA toolkit")
@pytest.mark.parametrize("head_dim", some(HEAD_DIMS, 3))
def test_every_product_runs_on_tensor_cores(head_dim: int, tmp_path: Path) -> None:
    """In SASS: the mma.sync that the products of a tile need, operands by ldmatrix, tiles by cp.async."""
    triton = pytest.importorskip("triton", reason="pip install triton==3.6.0 for its cuobjdump")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tiles = flash_cuda.tiles_for(torch.bfloat16, head_dim)
    command = flash_cuda.nvcc_command(torch.bfloat16, head_dim, (8, 0), tiles)
    subprocess.run([*command, "-o", tmp_path / "out.so"], check=True)
    sass = subprocess.run([tool, "-sass", tmp_path / "out.so"], capture_output=True, text=True, check=True).stdout
    found = {part.split("_kernel")[0].lstrip("_Z0123456789"): part for part in sass.split("Function : ")[1:]}
    for kernel, products in (("fwd", 2), ("dq", 3), ("dkdv", 4)):
        tile = getattr(tiles, kernel)
        rows = tile.block_k if kernel == "dkdv" else tile.block_q
        needed = products * (rows // tile.warps // 16) * (tile.at_once // 8) * (head_dim // 16)
        assert found[kernel].count("HMMA.16816.F32.BF16") == needed
        assert "LDSM.16.M88.4" in found[kernel] and "LDGSTS.E.BYPASS.128" in found[kernel]


@pytest.fixture
def counting_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that notes each compilation in the file returned, and fails where ELEMENT is __half."""
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


def test_a_build_is_kept_by_what_it_was_made_of(
    counting_nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    variant = torch.bfloat16, 64, (9, 0)
    first = flash_cuda.build(*variant)
    assert first.read_text() == "library\n" and list(first.parent.iterdir()) == [first]
    assert capsys.readouterr().err.count("\n") == 1, "one line of progress"
    assert flash_cuda.build(*variant) == first and not capsys.readouterr().err
    others = [flash_cuda.build(torch.float32, 64, (9, 0)), flash_cuda.build(torch.bfloat16, 128, (9, 0))]
    others += [flash_cuda.build(torch.bfloat16, 64, (8, 0)), flash_cuda.build(*variant, SMALL)]
    others.append(flash_cuda.build(*variant, windowed=True))
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


def test_a_build_that_fails_leaves_nothing_and_says_what_nvcc_said(counting_nvcc: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such element"):
        flash_cuda.build(torch.float16, 64, (9, 0))
    assert not list((tmp_path / "cache").iterdir())


def test_what_it_cannot_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase(1, 2, 2, 8, 8, 64, "bfloat16", device="cuda", capability=(9, 0))
    supports = flash_cuda.flash_cuda_supports
    monkeypatch.setattr(flash_cuda, "nvcc", lambda: "nvcc")
    assert supports(case) is None
    assert "80 is none of 32, 64, 128" in str(supports(replace(case, head_dim=80)))
    assert "float64" in str(supports(replace(case, dtype="float64")))
    assert "CUDA only" in str(supports(replace(case, device="cpu")))
    assert "this GPU has 7.5" in str(supports(replace(case, capability=(7, 5))))
    monkeypatch.setattr(flash_cuda, "nvcc", lambda: None)
    assert "nvcc" in str(supports(case))
