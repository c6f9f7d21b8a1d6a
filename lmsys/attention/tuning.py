"""Picks tiles for `flash_triton` by timing them once, and keeps the choices on disk between runs.

`flash_triton` calls `tune` with the `candidates` for a kernel: tiles, which are numbers of queries and keys with the
warps and stages that the kernel is compiled for. The file is `tuning.json` in $LMSYS_CACHE_DIR (default
~/.cache/lmsys). A choice belongs to one GPU model, Triton version and version of the kernels' source (`_sources`);
choices for others are kept beside it. To try another tile, add it to BY_TMA or BY_ADDRESSES.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from lmsys import strict_json, values
from lmsys.kernels.trial import digest_of

MOST_SIZE = 2**16  # the largest number that a tile in the file may have; a larger one is a fault of the file

SHORT_MS, STEADY_MS = 20.0, 300.0  # milliseconds of launches in a sample: for a first choice, and for the final one
NEAR = 1.2  # tiles that take this many times as long as the best one in short samples, or less, are timed once more
HOST_MS = 0.1  # launches that are shorter may wait for the host


@dataclass(frozen=True)
class Tile:
    """A tile: its queries and keys, and the warps and pipeline stages that its kernel is compiled for."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# Candidates by (kernel, largest head dimension), for kernels that move tiles by TMA, as Tile(queries, keys, warps,
# stages). The first is good for the most cases. Those that do not fit a GPU are left out when they are timed.
BY_TMA = {
    ("fwd", 64): (Tile(64, 64, 4, 3), Tile(64, 128, 4, 3), Tile(128, 64, 4, 3)),
    ("dq", 64): (Tile(64, 64, 4, 3), Tile(64, 128, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
    ("dkdv", 64): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 4, 2)),
    ("fwd", 128): (Tile(64, 64, 4, 3), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("dq", 128): (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 32, 4, 3), Tile(64, 32, 4, 2)),
    ("dkdv", 128): (Tile(64, 64, 4, 2), Tile(64, 128, 8, 3), Tile(32, 64, 4, 2)),
    **dict.fromkeys(
        (("fwd", 256), ("dq", 256), ("dkdv", 256)),
        (Tile(64, 64, 4, 2), Tile(64, 64, 8, 1), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 4, 1)),
    ),
}
# Candidates for kernels that move tiles by addresses, without TMA, in the same form. The first of each fits 99 KiB of
# shared memory, and spills no register in its loop on any GPU that takes this form. Up to head dimension 128 the warps
# divide the rows that a program owns: with 32 rows for each warp, the warps read half as much from shared memory. Those
# tiles were timed as code for sm_80 on an H100.
BY_ADDRESSES = {
    ("fwd", 64): (Tile(128, 64, 4, 3), Tile(64, 64, 2, 3), Tile(64, 64, 2, 2)),
    ("dq", 64): (Tile(128, 32, 4, 3), Tile(64, 32, 2, 3), Tile(128, 64, 4, 2)),
    ("dkdv", 64): (Tile(64, 64, 4, 3), Tile(32, 128, 4, 3), Tile(32, 64, 2, 3)),
    ("fwd", 128): (Tile(128, 64, 8, 2), Tile(128, 32, 4, 3), Tile(128, 32, 4, 2)),
    ("dq", 128): (Tile(128, 64, 8, 2), Tile(128, 32, 4, 2), Tile(128, 32, 4, 3), Tile(64, 32, 4, 3)),
    ("dkdv", 128): (Tile(32, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
    ("fwd", 256): (Tile(64, 32, 8, 2), Tile(64, 64, 8, 2)),
    ("dq", 256): (Tile(32, 32, 4, 2), Tile(64, 32, 8, 2)),
    ("dkdv", 256): (Tile(32, 32, 4, 2), Tile(32, 64, 8, 2)),
}


@cache
def candidates(kernel: str, dtype: torch.dtype, block_d: int, precision: str, by_tma: bool = True) -> tuple[Tile, ...]:
    """Tiles worth timing for `kernel`, "fwd", "dq" or "dkdv"; the first is good for the most cases.

    `block_d` is what the function `block_d` returns, `precision` the `input_precision` of products of float32, and
    `by_tma` chooses BY_TMA or BY_ADDRESSES.
    """
    if precision == "tf32":
        return Tile(64, 32, 4, 2), Tile(64, 64, 4, 1), Tile(32, 32, 4, 2), Tile(16, 32, 4, 1)
    if dtype == torch.float32:  # no tensor cores: operands live in registers, and large tiles spill
        wide = Tile(64, 64, 8, 1) if kernel == "fwd" else Tile(32, 32, 4, 1)
        return (wide if block_d <= 128 else Tile(16, 16, 8, 1),)
    return (BY_TMA if by_tma else BY_ADDRESSES)[kernel, max(64, block_d)]


def block_d(head_dim: int) -> int:
    """Columns of a tile of q, k or v: head_dim rounded up to a power of two; at least 16, which tensor cores need."""
    return max(16, triton.next_power_of_2(head_dim))


def _tile(sizes: Any) -> Tile:
    """The tile that an object in the file describes; ValueError where the object is no tile."""
    names = [field.name for field in fields(Tile)]
    values.hold(
        (
            isinstance(sizes, dict) and sizes.keys() == set(names),
            f"a tile must be an object with {', '.join(names)}; got {values.shortly(sizes)}",
        )
    )
    for name, size in sizes.items():
        values.whole(name, size, least=1, most=MOST_SIZE)
    return Tile(**sizes)


# The file of kept choices: its name, what it holds and how to make that again (words for messages), and the parser of
# an entry.
KEPT = strict_json.Kept("tuning.json", "tuned choices", "tune", _tile)
_chosen: dict[tuple[object, ...], Tile] = {}  # by (index of the device, *case)


def tune(case: tuple[object, ...], tiles: Sequence[Tile], launch: Callable[[Tile], None], device: torch.device) -> Tile:
    """The fastest of `tiles` for `case`: remembered, read from disk, or timed now by calling `launch`.

    `case` is a key of plain values. `launch(tile)` must give the same result however often it is called. While a CUDA
    graph is captured nothing can be timed: an unknown case then gets the first tile, and nothing is remembered.
    RuntimeError if no tile fits the GPU.
    """
    if len(tiles) == 1:
        return tiles[0]
    if (device.index, *case) not in _chosen:
        key = "/".join(map(str, (torch.cuda.get_device_name(device), triton.__version__, _sources(), *case)))
        known = KEPT.read()
        if key not in known:
            if torch.cuda.is_current_stream_capturing():
                return tiles[0]
            known[key] = _fastest(tiles, launch)
            KEPT.add(key, asdict(known[key]))
        _chosen[device.index, *case] = known[key]
    return _chosen[device.index, *case]


def _fastest(tiles: Sequence[Tile], launch: Callable[[Tile], None]) -> Tile:
    """The tile whose launch takes the least time in work that goes on for long.

    Short samples leave out the tiles that are clearly slower. The others are timed by STEADY_MS of launches without a
    pause, in order and then in reverse order, and the two times are added. Within that time a GPU at its power cap
    lowers its clock, the further the more power a tile takes. So the tile that takes less energy is faster there, by up
    to 14 % on an H200, where bursts of 20 ms in turns preferred another tile. One sample that does not count comes
    first, since a GPU that was idle has a higher clock. By the reverse order a clock that falls meanwhile slows all
    tiles equally.
    """
    short = {tile: _time(tile, launch, SHORT_MS) for tile in tiles if _fits(tile, launch)}
    if not short:
        sizes = ", ".join(f"{tile.block_q} x {tile.block_k}" for tile in tiles)
        raise RuntimeError(f"no tile of {sizes} fits this GPU's shared memory and registers; take another row")
    near = [tile for tile in short if short[tile] <= NEAR * min(short.values())]
    times = dict.fromkeys(near, 0.0)
    if len(near) > 1:
        _time(near[0], launch, STEADY_MS)
        for tile in (*near, *reversed(near)):
            times[tile] += _time(tile, launch, STEADY_MS)
    return min(times, key=lambda tile: times[tile])


def _fits(tile: Tile, launch: Callable[[Tile], None]) -> bool:
    """False if the tile does not fit the GPU.

    It launches the kernel once with this tile. That compiles it, so that the GPU is not idle between timings.
    """
    try:
        launch(tile)
    except triton.runtime.OutOfResources:
        return False
    return True


def _time(tile: Tile, launch: Callable[[Tile], None], total_ms: float) -> float:
    """Milliseconds of a launch, from about `total_ms` of launches without a pause between them.

    For launches below HOST_MS, which the host may not keep up with, it is the median of single ones.
    """
    single_ms = _burst(tile, launch, 1)
    if single_ms < HOST_MS:  # `warmup` and `rep` are milliseconds
        return triton.testing.do_bench(lambda: launch(tile), warmup=5, rep=20, return_mode="median")
    count = round(total_ms / single_ms)
    return _burst(tile, launch, count) if count > 1 else single_ms


def _burst(tile: Tile, launch: Callable[[Tile], None], count: int) -> float:
    """Milliseconds of one of `count` launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        launch(tile)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


@cache
def _sources() -> str:
    """A hash of the source of the kernels and of their candidates."""
    return digest_of(*map(Path(__file__).with_name, ("flash_triton.py", "flash_triton_kernels.py", "tuning.py")))
