"""flash_cuda without a GPU: an emulator runs its source for sm_80 and for sm_75, and notices faults planted into it.

The emulator, `tests/support/cuda_emulator.h`, lets g++ compile the CUDA source for the CPU. Kernels that the row builds
with nvcc are tested in `test_flash_cuda_build.py`.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.attention import ATTENTION, AttentionCase, Pattern, flash_cuda
from lmsys.attention.flash_cuda import HEAD_DIMS, Tile, Tiles
from lmsys.measure.memory import peak_bytes
from lmsys.testing import Oracle, make_inputs, run
from tests.support.variants import few_by_default

VARIANTS = [(dtype, head_dim) for dtype in ("float32", "float16", "bfloat16") for head_dim in HEAD_DIMS]
AMPERE, TURING = (8, 0), (7, 5)  # compute capabilities, each with instructions of its own
BUILDS = few_by_default([(*variant, AMPERE) for variant in VARIANTS], one_in=10)
BUILDS += few_by_default([(*variant, TURING) for variant in [*VARIANTS[3:6], *VARIANTS[:3]]], one_in=6)


def capability_id(value: Any) -> str | None:
    """The id of a compute capability among the parameters of a test."""
    return f"sm_{value[0]}{value[1]}" if isinstance(value, tuple) else None


SMALL = Tiles(Tile(64, 32, 4, 32, False, 1), Tile(64, 32, 4, 16, False, 1), Tile(32, 64, 4, 16, False, 1))
KEPT = Tiles(Tile(64, 32, 4, 32, True, 1), Tile(64, 32, 4, 16, True, 1), Tile(32, 64, 4, 16, True, 1))
WINDOWS = [  # in the first, some queries see no key of their warp's first tile; in the second, some see no key at all
    AttentionCase(1, 4, 2, 150, 133, 32, "float16", causal=True, grad=True, window=34),
    AttentionCase(2, 2, 1, 190, 70, 32, "float16", causal=True, grad=True, window=5),
]
CASES = [  # more keys than queries, and fewer; several tiles of SMALL, of which the last is not full
    AttentionCase(1, 4, 2, 70, 150, 32, "float16", causal=True, grad=True),
    AttentionCase(2, 2, 1, 150, 133, 32, "float16", causal=False, grad=True),
]
STDS = (3.0, 1.0)  # standard deviations of q and k; only the larger makes running maxima grow much from tile to tile


@cache
def emulated(source: str, header: str, architecture: int, *variant: Any) -> ctypes.CDLL:
    """flash_cuda.cu as a library for this machine's CPU. `variant`: the arguments of `flash_cuda.macros`."""
    folder = Path(mkdtemp(prefix="lmsys-"))
    (folder / "flash_cuda.cu").write_text(source)
    (folder / "flash_cuda.cuh").write_text(header)
    emulator = Path(__file__).parents[1] / "support" / "cuda_emulator.h"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-D__CUDA_ARCH__={architecture}"]
    command += ["-include", emulator, *flash_cuda.macros(*variant), "-x", "c++", folder / "flash_cuda.cu"]
    done = subprocess.run([*command, "-o", folder / "out.so"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = flash_cuda.load(folder / "out.so")
    shutil.rmtree(folder)
    return library


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function (capability, right, wrong): after its call flash_cuda runs on CPU tensors, as on such a GPU.

    In its source the piece `right`, if one is given, is replaced by `wrong`.
    """
    if shutil.which("g++") is None:
        pytest.skip("the emulator of CUDA needs g++")
    texts = [flash_cuda.SOURCE.read_text(), flash_cuda.SOURCE.with_suffix(".cuh").read_text()]

    def start(capability: tuple[int, int] = AMPERE, right: str = "", wrong: str = "") -> None:
        assert not right or "".join(texts).count(right) == 1, f"no single {right!r}; name the line anew"
        source, header = (text.replace(right, wrong) if right else text for text in texts)

        def library(
            dtype: torch.dtype, head_dim: int, device: torch.device, tiles: Tiles | None, windowed: bool
        ) -> ctypes.CDLL:
            tiles = tiles or flash_cuda.tiles_for(dtype, head_dim, capability)
            architecture = 100 * capability[0] + 10 * capability[1]
            return emulated(source, header, architecture, dtype, head_dim, tiles, windowed)

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


@pytest.mark.parametrize(("dtype", "head_dim", "capability"), BUILDS, ids=capability_id)
def test_every_variant_matches_the_oracle(
    dtype: str, head_dim: int, capability: tuple[int, int], emulate: Callable[..., None]
) -> None:
    """o, the log-sum-exp and all gradients, with the tiles that ship, at any length, grouped or not, on views.

    Half of the cases have a window: of one key, within a tile, or over several. With fewer keys than queries some
    queries then see none.
    """
    emulate(capability)
    lengths = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 128, 129]), st.integers(1, 150))

    @settings(max_examples=4)
    @given(
        heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
        queries=lengths,
        keys=lengths,
        causal=st.booleans(),
        window=st.one_of(st.sampled_from([1, 16, 32, 33, 64, 65]), st.integers(1, 150)),
        std=st.sampled_from(STDS),
        seed=st.integers(0, 2**31),
    )
    def holds(
        heads: tuple[int, int], queries: int, keys: int, causal: bool, window: int, std: float, seed: int
    ) -> None:
        case = AttentionCase(1, *heads, queries, keys, head_dim, dtype, causal=causal, grad=True)
        scale = [None, 1.5, -0.5][seed % 3]
        assert worst(case, seed, scale=scale and scale * head_dim**-0.5, std=std) <= 1
        assert worst(replace(case, causal=True, window=window), seed, std=std) <= 1

    holds()


def test_a_window_visits_the_tiles_that_are_seen(emulate: Callable[..., None]) -> None:
    """Only tiles in which some query sees some key are copied. A warp multiplies only those that its own rows see."""
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


@pytest.mark.parametrize(
    ("tiles", "capability"),
    [*few_by_default([(SMALL, AMPERE), (SMALL, TURING)], 2), *few_by_default([(KEPT, TURING), (KEPT, AMPERE)], 2)],
    ids=["small-sm_80", "small-sm_75", "kept-sm_75", "kept-sm_80"],
)
@pytest.mark.parametrize(
    "case", few_by_default([*CASES, *WINDOWS], one_in=4), ids=["causal", "not causal", "window", "blind"]
)
def test_the_tile_does_not_matter(
    tiles: Tiles, capability: tuple[int, int], case: AttentionCase, emulate: Callable[..., None]
) -> None:
    emulate(capability)
    assert max(worst(case, 0, tiles, std=std) for std in STDS) <= 1


LAYOUTS = "a slice of wider rows", "every other element", "odd offset", "one for all rows"


@pytest.mark.parametrize("layout", few_by_default(LAYOUTS, one_in=2))
def test_rows_of_any_layout(layout: str, emulate: Callable[..., None]) -> None:
    """Layouts whose rows cannot be moved 16 bytes at a time are copied first. Gradients have the inputs' shapes."""
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


FAULTS = {  # name -> (a piece of the right source, the faulty piece that replaces it)
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
# Faults of copies that arrive late, of which sm_75 has none.
ON_AMPERE = "a tile used before it is here", "keys arriving over the results"
TURING_FAULTS = {
    "the deeper half of a product left out": ("mma_k8(Half(), c, a[2], a[3], b1);", ""),
    "rows and columns of an operand swapped": ("c, a[0], a[1], b0);", "c, a[0], a[2], b0);"),
    "the deeper half multiplied by the other's": ("a[2], a[3], b1);", "a[2], a[3], b0);"),
    "what is past the end left as it was": (
        "*static_cast<Bytes*>(to) = inside ? *static_cast<const Bytes*>(from) : Bytes{};",
        "if (inside) *static_cast<Bytes*>(to) = *static_cast<const Bytes*>(from);",
    ),
    "half of each copy": ("copy_now<uint4>(to, from, inside)", "copy_now<float2>(to, from, inside)"),
    "half of each pair of statistics": ("copy_now<float2>(to, from, inside)", "copy_now<float>(to, from, inside)"),
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


SEEDED = [
    *few_by_default([(AMPERE, FAULTS, name) for name in FAULTS], one_in=20),
    *few_by_default([(TURING, TURING_FAULTS, name) for name in TURING_FAULTS], one_in=10),
    *few_by_default([(TURING, FAULTS, name) for name in [*FAULTS][::-1] if name not in ON_AMPERE], one_in=20),
    *few_by_default([(AMPERE, WINDOW_FAULTS, name) for name in WINDOW_FAULTS], one_in=13),
]


@pytest.mark.parametrize(("capability", "faults", "name"), SEEDED)
def test_a_seeded_fault_is_rejected(
    capability: tuple[int, int], faults: dict[str, tuple[str, str]], name: str, emulate: Callable[..., None]
) -> None:
    emulate(capability, *faults[name])
    cases = WINDOWS if faults is WINDOW_FAULTS else CASES
    assert any(not worst(case, 0, tiles, std=std) <= 1 for tiles, std, case in product((KEPT, SMALL), STDS, cases))
