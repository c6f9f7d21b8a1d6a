"""Compares two ways of launching kernels, `DirectKernel` and Triton's own, by launches into a stub of the CUDA driver.

`python -m tests.support.launches 90` simulates a GPU with TMA, and 80 a GPU without. It prints a JSON line for each
launch, {"kernel": its name, "same": both ways passed the same grid, stream and bytes of parameters, "bytes": number of
these bytes, "descriptors": number of tensor descriptors kept so far, "most": the limit of that number}. Successive
calls differ in length, layout and address, and come back to earlier addresses: so a descriptor that was kept, but does
not fit any more, shows. The module must run without TRITON_INTERPRET, so tests start it in a process of its own.
"""

import ctypes
import json
import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.errors import OutOfResources

from lmsys.attention import Pattern, flash_triton, flash_triton_decode
from lmsys.attention.flash_gluon import launch as flash_gluon
from lmsys.attention.tuning import Tile
from lmsys.kernels import launch
from lmsys.model import fused_triton
from lmsys.training import muon_triton
from tests.support.driver_stub import Stub
from tests.support.gluon_simulator import simulated

MAX_DESCRIPTORS = 40  # so few that the limit is reached
BATCH, HEADS = 2, 4
TILE, OTHER = Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)
CASES = [  # key heads, head dimension, dtype, causal
    (4, 64, torch.bfloat16, True),
    (2, 20, torch.float32, False),
]
LENGTHS = (64, 40, 64, 33)  # of successive calls; 64 comes again at the same addresses


def main(capability: int) -> None:
    """Launches every kernel of `flash_triton` and, for capability 90, of `flash_gluon`, and prints the lines."""
    stub = Stub(capability)
    launch.MAX_DESCRIPTORS = MAX_DESCRIPTORS

    class Both:
        """Replaces `Kernel`: launches each call in both ways, and prints a line."""

        def __init__(self, *args: Any, **options: Any):
            self.ways = launch.DirectKernel(*args, **options), launch.PublicKernel(*args, **options)

        def __call__(self, *args: Any, **options: Any) -> None:
            (direct,), (public,) = (stub.launches(partial(way, *args, **options)) for way in self.ways)
            line = {"kernel": direct[0], "same": direct == public, "bytes": sum(map(len, direct[3]))}
            kept = {"descriptors": len(launch._descriptors), "most": MAX_DESCRIPTORS}
            print(json.dumps(line | kept), flush=True)

    flash_triton.Kernel = flash_triton_decode.Kernel = launch.Kernel = Both
    for module in (launch, flash_triton, flash_triton_decode, muon_triton):
        module.by_tma = lambda device: capability >= 90
    for case in CASES:
        for transposed in (False, True):
            for length in LENGTHS:
                attend(*case, length, transposed)
    for dtype in (torch.bfloat16, torch.float32):  # the same shape and address in two dtypes
        q, k, v = (memory[i].view(dtype)[: memory[i].numel()].view(BATCH, HEADS, max(LENGTHS), 64) for i in range(3))
        flash_triton._forward(q, k, v, True, 0.125, TILE)
    attend(*CASES[0], LENGTHS[0], False, Pattern(True, 7))
    several = Pattern(key_lengths=torch.tensor([40, 33]), softcap=2.0, alibi=torch.rand(1, HEADS))
    attend(*CASES[0], LENGTHS[0], False, several, torch.randn(BATCH, LENGTHS[0], HEADS).mT)
    many, few = Pattern(True, offset=150), Pattern(True, 7, 31, key_lengths=torch.tensor([40, 33]), softcap=2.0)
    ends = Pattern(True, 7, torch.tensor([36, 29]), key_lengths=torch.tensor([40, 33]))
    for pattern in (many, few, ends):  # decoding: keys in several parts, and in one part
        for length in (160, 153):
            q, k, v = (
                torch.randn(BATCH, heads, length, 64)[:, :, :keys] for heads, keys in ((4, 3), (2, 160), (2, 160))
            )
            flash_triton._forward(q, k, v, True, 0.125, None, pattern)
    for length in LENGTHS:
        heads = torch.randn(BATCH, length, 3 * HEADS, 256)  # on a grid of two dimensions
        parts = tuple(torch.empty(BATCH, length, HEADS, 256) for _ in range(3))
        fused_triton.turn(heads, parts, *torch.randn(2, length, 128), HEADS, backward=False)
    for length in LENGTHS:  # matrices in two layouts, one after another at the same addresses
        x = memory[0].view(torch.bfloat16)[: BATCH * length * 72].view(BATCH, length, 72)
        muon_triton.polynomial(x[..., :64] if length % 2 else x, 3.0, -4.0, 2.0)
    if capability == 90:
        gluon(stub)
        # Only with TMA does the next tile exceed shared memory.
        print(json.dumps({"kernel": "too large", "same": too_large() == too_large() != ""}))


def gluon(stub: Stub) -> None:
    """A forward and a backward of `flash_gluon`, dense and under a pattern."""
    kernel = flash_gluon.Kernel

    class Both:
        """Replaces `flash_gluon.Kernel`. Triton's own way is given a tensor in place of an address."""

        def __init__(self, function: Any, tensors: list[Tensor], blocks: list[list[int]], others: list[Any], **options):
            self.direct = kernel(function, tensors, blocks, others, **options)
            self.function, self.blocks, self.options = function, blocks, options | launch.FUSED
            self.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in others]

        def __call__(self, grid: int, stream: int, tensors: tuple[Tensor, ...], others: tuple[Any, ...]) -> None:
            described = [
                TensorDescriptor(x, *launch.geometry(x), block, flash_gluon.layout(block, x.dtype))
                for x, block in zip(tensors, self.blocks, strict=True)
            ]
            plain = [x if dtype is None else begins_at(x, dtype) for x, dtype in zip(others, self.dtypes, strict=True)]
            public = partial(self.function[(grid,)], *described, *plain, num_warps=4, **self.options)
            direct = partial(self.direct, grid, stream, tensors, others)
            (ours,), (theirs,) = stub.launches(direct), stub.launches(public)
            print(json.dumps({"kernel": ours[0], "same": ours == theirs, "bytes": sum(map(len, ours[3]))}), flush=True)

    q, k, v, do = (torch.randn(1, heads, 200, 64, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    with simulated(), patch.object(flash_gluon, "Kernel", Both):
        for pattern in (None, Pattern(True, 70)):
            o, lse = flash_gluon._forward(q, k, v, True, 0.125, pattern=pattern)
            flash_gluon._backward(q, k, v, o, lse, do, True, 0.125, False, pattern=pattern)


def begins_at(address: int, dtype: torch.dtype) -> Tensor:
    """A tensor of one element at this address."""
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


def too_large() -> str:
    """The message of Triton's error about a tile that is too large for any GPU; "" if there is none."""
    q = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16)
    try:
        flash_triton._forward(q, q, q, True, 0.125, Tile(128, 128, 4, 6))
    except OutOfResources as error:
        return str(error)
    return ""


memory = torch.zeros(6, BATCH * HEADS * max(LENGTHS) * 64)  # float32: room for q, k, v, o, do in any dtype


def attend(
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    length: int,
    transposed: bool,
    pattern: Pattern | None = None,
    dlse: Tensor | None = None,
) -> None:
    """A forward and a backward of flash_triton, on tensors that begin at the same addresses in every call."""

    def placed(i: int, heads: int) -> Tensor:
        """A tensor (BATCH, heads, length, head_dim) that begins where row i of `memory` does."""
        place = memory[i].view(dtype)
        if transposed:
            place = place[: BATCH * length * heads * head_dim]
            return place.view(BATCH, length, heads, head_dim).transpose(1, 2)
        place = place[: BATCH * heads * max(LENGTHS) * head_dim]
        return place.view(BATCH, heads, max(LENGTHS), head_dim)[:, :, :length]

    q, o, do = (placed(i, HEADS) for i in range(3))
    k, v = (placed(i, kv_heads) for i in range(3, 5))
    lse = memory[5, length % 2 :][: BATCH * HEADS * length].view(BATCH, HEADS, length)  # aligned, or not
    for tile in (TILE, OTHER):
        flash_triton._forward(q, k, v, causal, 0.125, tile, pattern)
    flash_triton._backward(q, k, v, o, lse, do, causal, 0.125, TILE, pattern, dlse=dlse)


if __name__ == "__main__":
    main(int(sys.argv[1]))
