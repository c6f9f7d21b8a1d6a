"""FlashAttention-2 in CUDA C++ (flash_cuda.cu): built by nvcc on first use, called through ctypes.

`custom_ops.flash` makes the row `flash_cuda` (an implementation in the table of table.py) from `_forward` and
`_backward` here. There is one library for each dtype and head dimension, with a window and without: a *variant* of the
source. nvcc compiles it for this machine's GPU, in seconds, without torch's headers. It is kept in $LMSYS_CACHE_DIR
(default ~/.cache/lmsys) under a hash of its sources, its flags and nvcc's version. This command builds all libraries:
`python -m lmsys.attention.flash_cuda`. Change tile sizes in TILES, and the kernels in flash_cuda.cu. A new argument of
the kernels is a field of `_Problem` here and of `Problem` there.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lmsys.attention import contract, custom_ops
from lmsys.attention.pattern import PLAIN, Pattern
from lmsys.files import cache_folder, check_private

SOURCE = Path(__file__).with_name("flash_cuda.cu")  # includes flash_cuda.cuh
FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC")  # options of nvcc
ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}  # types of CUDA C++
HEAD_DIMS = (32, 64, 128)  # those with tiles in `tiles_for`: `flash_cuda_supports` says what another one needs
# By dtype: the lowest compute capability that the row runs on.
OLDEST = {torch.float32: (7, 5), torch.float16: (7, 5), torch.bfloat16: (8, 0)}
NO_NVCC = "it is compiled on first use: put nvcc of the CUDA toolkit on the PATH, or set CUDA_HOME"
TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")  # fields of `_Problem` that are a `_View`


class Tile(NamedTuple):
    """The tile sizes of one kernel: the fields and the order of `Tile` in flash_cuda.cu. Change both together.

    A thread block owns a tile of queries (fwd and dq) or of keys (dkdv). It loops over tiles of the other kind, and
    loads each into a stage, which is one of two places in shared memory.

    block_q  queries of a tile. In fwd and dq, where the block owns it, a multiple of 16 · warps
    block_k  keys of a tile. In dkdv, where the block owns it, a multiple of 16 · warps
    warps    warps of a thread block
    at_once  columns of scores that a warp of dq or dkdv holds at a time; fwd does not read it
    kept     True: the owned tiles are kept in registers
    blocks   thread blocks that a multiprocessor should hold at a time
    """

    block_q: int
    block_k: int
    warps: int
    at_once: int
    kept: bool
    blocks: int


class Tiles(NamedTuple):
    """The tile sizes of the three kernels: fwd is the forward, dq and dkdv are the backward."""

    fwd: Tile
    dq: Tile
    dkdv: Tile


# {(compute capability is 8.0 or later, dtype is float32, head_dim is 128): Tiles(fwd, dq, dkdv)}. Each of the three is
# a Tile(block_q, block_k, warps, at_once, kept, blocks).
TILES = {
    (True, True, True): Tiles(
        Tile(64, 32, 4, 32, False, 1), Tile(64, 16, 4, 16, False, 1), Tile(16, 64, 4, 16, False, 1)
    ),
    (True, True, False): Tiles(
        Tile(64, 64, 4, 64, False, 1), Tile(64, 32, 4, 32, False, 1), Tile(32, 64, 4, 32, False, 1)
    ),
    (True, False, True): Tiles(
        Tile(128, 64, 4, 64, False, 2), Tile(128, 32, 4, 32, False, 2), Tile(64, 64, 4, 32, False, 2)
    ),
    (True, False, False): Tiles(
        Tile(128, 128, 4, 128, False, 2), Tile(128, 64, 4, 32, True, 2), Tile(64, 128, 4, 32, False, 2)
    ),
    # Tiles that fit 64 KiB of shared memory. Most of those for float16 take half of it, so that one thread block
    # computes while another waits for its copies.
    (False, True, True): Tiles(
        Tile(64, 16, 4, 16, False, 1), Tile(32, 16, 2, 16, False, 1), Tile(8, 32, 2, 8, False, 1)
    ),
    (False, True, False): Tiles(
        Tile(64, 32, 4, 32, False, 1), Tile(64, 32, 4, 32, False, 1), Tile(16, 64, 4, 16, False, 1)
    ),
    (False, False, True): Tiles(
        Tile(64, 32, 4, 32, True, 2), Tile(64, 32, 4, 32, True, 2), Tile(16, 64, 4, 16, False, 1)
    ),
    (False, False, False): Tiles(
        Tile(128, 64, 4, 64, True, 2), Tile(128, 64, 4, 16, True, 2), Tile(32, 64, 4, 32, True, 2)
    ),
}


def tiles_for(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> Tiles:
    """The tiles for a dtype, head dimension and compute capability.

    For bfloat16 and head_dim 64 and 128 they were the fastest measured on one H200. Those of float32 and other head
    dimensions were not tuned, but are like these. Tiles for compute capabilities below 8.0 fit 64 KiB of shared memory
    and spill no registers; they were not timed. For tiles that need more shared memory than SHARED_BYTES in
    flash_cuda.cu (99 KiB from 8.0 on), and for float32 with `kept`, nvcc stops at a static_assert. Nothing checks that
    owned tiles are multiples of 16 · warps, as `Tile` says.
    """
    return TILES[capability >= (8, 0), dtype == torch.float32, head_dim == 128]


class _View(ctypes.Structure):
    """A tensor (B, H, S, D) with strides in elements: the struct `View` in flash_cuda.cu. Change both together."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int),
    )


class _Problem(ctypes.Structure):
    """The arguments of every kernel: the struct `Problem` in flash_cuda.cu. Change both together.

    group   query heads of each key/value head (G)
    lse     log-sum-exp (B, H, Q): fwd writes it, dq reads it
    stats   (B, H, Q, 2): dq writes it, dkdv reads it; see `_backward`
    window  how many keys a query sees at most, its own included; 0: no window
    device  the number of the GPU
    stream  the address of the CUDA stream on which the kernels run
    """

    _fields_ = (
        *((name, _View) for name in TENSORS),
        *((name, ctypes.c_void_p) for name in ("lse", "stats")),
        *((name, ctypes.c_int) for name in ("batch", "heads", "group", "queries", "keys", "causal")),
        ("scale", ctypes.c_float),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("window", ctypes.c_int),
    )


@cache
def nvcc() -> str | None:
    """The path of CUDA's compiler: from $PATH, else under $CUDA_HOME or /usr/local/cuda; None if there is none."""
    return shutil.which("nvcc") or shutil.which(os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/nvcc")


@cache
def _nvcc_version() -> str:
    """The text that `nvcc --version` prints."""
    return subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True, check=True).stdout


def macros(dtype: torch.dtype, head_dim: int, tiles: Tiles, windowed: bool = False) -> list[str]:
    """nvcc's `-D` options that select a variant of flash_cuda.cu. windowed: True for calls with a window."""
    tile_macros = [
        f"-D{name.upper()}_TILE={','.join(str(int(x)) for x in tile)}" for name, tile in tiles._asdict().items()
    ]
    return [f"-DELEMENT={ELEMENTS[dtype]}", f"-DHEAD_DIM={head_dim}", f"-DWINDOWED={int(windowed)}", *tile_macros]


def nvcc_command(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], tiles: Tiles, windowed: bool = False
) -> list[str]:
    """The command that builds a variant, without `-o` and the path of the result."""
    return [
        str(nvcc()),
        *FLAGS,
        f"-arch=sm_{capability[0]}{capability[1]}",
        *(macro.replace(",", "\\,") for macro in macros(dtype, head_dim, tiles, windowed)),  # nvcc splits at commas
        str(SOURCE),
    ]


def build(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], tiles: Tiles | None = None, windowed: bool = False
) -> Path:
    """The path of a variant's shared library, from the cache or compiled now.

    RuntimeError with nvcc's messages if it does not compile; ValueError if other users could write the file.

    tiles  None: those of `tiles_for`
    """
    command = nvcc_command(dtype, head_dim, capability, tiles or tiles_for(dtype, head_dim, capability), windowed)
    sources = SOURCE.read_bytes() + SOURCE.with_suffix(".cuh").read_bytes()
    given = "\0".join([*command[1:-1], _nvcc_version()]).encode()  # without the paths of nvcc and of the source
    name = f"flash_cuda-{hashlib.sha256(sources + given).hexdigest()[:16]}.so"
    path = cache_folder() / name
    if not path.exists():
        variant = f"{contract.DTYPE_NAMES[dtype]}, head_dim {head_dim}, sm_{capability[0]}{capability[1]}"
        variant += ", with a window" if windowed else ""
        print(f"lmsys: compiling flash_cuda for {variant} (once, some seconds)", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            result = Path(folder) / name
            done = subprocess.run([*command, "-o", str(result)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"nvcc could not compile {SOURCE}:\n{done.stdout}{done.stderr}")
            os.replace(result, path)  # atomic: if two processes compile, the later result replaces the earlier
    check_private(path)
    return path


@cache
def _library(
    dtype: torch.dtype, head_dim: int, device: torch.device, tiles: Tiles | None, windowed: bool
) -> ctypes.CDLL:
    """The library for a dtype, head dimension and device, loaded once. tiles None: those of `tiles_for`."""
    return load(build(dtype, head_dim, torch.cuda.get_device_capability(device), tiles, windowed))


def load(path: Path) -> ctypes.CDLL:
    """Loads the library at `path`. For ctypes all results are ints, so the type of `flash_error`, a text, is set."""
    library = ctypes.CDLL(str(path))
    library.flash_error.restype = ctypes.c_char_p
    return library


def _stream(device: torch.device) -> int:
    """The address of the device's current CUDA stream."""
    return torch.cuda.current_stream(device).cuda_stream


def _addressable(x: Tensor) -> Tensor:
    """x itself if its rows can be moved 16 bytes at a time and their stride fits an int32, else a copy."""
    return contract.aligned(x if x.stride(-2) < 2**31 else x.contiguous())


def _run(
    kernels: tuple[str, ...],
    tensors: dict[str, Tensor],
    causal: bool,
    scale: float,
    tiles: Tiles | None,
    pattern: Pattern | None,
) -> None:
    """Launches kernels one after another. RuntimeError names a kernel that fails.

    kernels  their names, which are fields of `Tiles`
    tensors  {field of `_Problem`: tensor}
    tiles    None: those of `tiles_for`
    pattern  None: no options besides `causal`
    """
    q, k = tensors["q"], tensors["k"]
    pattern = pattern or PLAIN[causal]
    problem = _Problem(
        batch=q.shape[0],
        heads=q.shape[1],
        group=q.shape[1] // k.shape[1],
        queries=q.shape[2],
        keys=k.shape[2],
        causal=pattern.causal,
        scale=scale,
        device=q.get_device(),
        stream=_stream(q.device),
        window=0 if pattern.left is None else min(pattern.left + 1, q.shape[2]),  # a window wider than Q hides no more
    )
    # TENSORS are passed with their strides; lse and stats are contiguous, so their address suffices.
    for name, x in tensors.items():
        setattr(problem, name, _View(x.data_ptr(), *x.stride()[:3]) if name in TENSORS else x.data_ptr())
    library = _library(q.dtype, q.shape[3], q.device, tiles, pattern.window is not None)
    with torch.cuda.device_of(q):
        for kernel in kernels:
            if error := getattr(library, f"flash_{kernel}")(ctypes.byref(problem)):  # 0: it was launched
                raise RuntimeError(f"the {kernel} kernel of flash_cuda: {library.flash_error(error).decode()}")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    tiles: Tiles | None = None,
    pattern: Pattern | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D) and lse (B, H, Q), natural log, float32."""
    o = _addressable(torch.empty_like(q))  # o has q's memory layout: (B, Q, H, D) if a projection has written q
    q, k, v = map(_addressable, (q, k, v))
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    _run(("fwd",), {"q": q, "k": k, "v": v, "o": o, "lse": lse}, causal, scale, tiles, pattern)
    return o, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    tiles: Tiles | None = None,
    pattern: Pattern | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, H, Q, D), dk and dv (B, Hkv, K, D), for q, k, v, o, lse of `_forward`, and do, the gradient of o."""
    dq, dk, dv = (_addressable(torch.empty_like(x)) for x in (q, k, v))
    # The log-sum-exp in base 2, and delta = rowsum(o * do). The kernel dq writes them and dkdv reads them, so dq must
    # run first.
    stats = torch.empty(*lse.shape, 2, dtype=torch.float32, device=q.device)
    inputs = {name: _addressable(x) for name, x in zip(TENSORS[:5], (q, k, v, o, do), strict=True)}
    others = {"dq": dq, "dk": dk, "dv": dv, "lse": lse.contiguous(), "stats": stats}
    _run(("dq", "dkdv"), inputs | others, causal, scale, tiles, pattern)
    return dq, dk, dv


# FlashCuda is the autograd Function: FlashCuda.apply(q, k, v, causal, scale, tiles, pattern). flash_cuda is the row, a
# function without `tiles`: it takes those of `tiles_for`.
FlashCuda, flash_cuda = custom_ops.flash("flash_cuda", "FlashCuda", _forward, _backward)


def flash_cuda_supports(case: contract.AttentionCase) -> str | None:
    """The reason why the row cannot run `case`, or None. table.py names this function as the row's `supports`.

    A new head dimension needs an entry in HEAD_DIMS, tiles in `tiles_for` that compile, and, unless it is a power of
    two, another permutation of chunks in flash_cuda.cuh.
    """
    if reason := contract.why_not_plain(case, "window"):
        return reason
    if case.head_dim not in HEAD_DIMS:
        return f"head_dim {case.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if case.dtype == "float64":
        return "float64 has no kernel; use naive"
    if case.device != "cuda":
        return "runs on CUDA only"
    major, minor = OLDEST[contract.DTYPES[case.dtype]]
    if case.capability is not None and case.capability < (major, minor):
        needed = f"{case.dtype} needs compute capability {major}.{minor} or later"
        return f"{needed}; this GPU has {case.capability[0]}.{case.capability[1]}"
    return NO_NVCC if nvcc() is None else None


def main() -> int:
    """Builds every variant for the GPUs of this machine, in parallel. The exit code is 3 without nvcc or a GPU."""
    if nvcc() is None or not torch.cuda.is_available():
        print("flash_cuda is not built:", "there is no CUDA device" if nvcc() else NO_NVCC, file=sys.stderr)
        return 3
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The arguments of `build`: dtype, head_dim, capability, tiles (None: the usual ones), windowed.
        variants = itertools.product(ELEMENTS, HEAD_DIMS, capabilities, [None], [False, True])
        possible = [variant for variant in variants if variant[2] >= OLDEST[variant[0]]]
        for path in pool.map(lambda variant: build(*variant), possible):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
