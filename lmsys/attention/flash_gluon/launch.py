"""Launches compiled kernels with no more of Python than the driver needs.

Triton's own launch looks the kernel up by all its arguments, and encodes each tensor descriptor again: 57 us, and
17 us for each descriptor, against 10 us or less for the kernel of a short sequence. Here a kernel is compiled once
and kept by its caller, and descriptors are kept by address and geometry: they own no memory, and any tensor that
later takes the same place is described by them as well. Written for the launcher of triton 3.6.0.
"""

import inspect
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language import bfloat16 as gl_bfloat16
from triton.experimental.gluon.language import float16 as gl_float16
from triton.experimental.gluon.language import float32 as gl_float32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GLUON_DTYPES = {torch.bfloat16: gl_bfloat16, torch.float16: gl_float16, torch.float32: gl_float32}
MAX_DESCRIPTORS = 8192  # about 1 KiB each

_descriptors: dict[tuple[Any, ...], tuple[Any, ...]] = {}
raw_stream = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else None


def layout(block: list[int], dtype: torch.dtype) -> NVMMASharedLayout:
    """Of a block in shared memory, as TMA writes and wgmma reads it."""
    if len(block) == 1:
        return NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[dtype])


def geometry(x: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides for a descriptor. Strides of dimensions of length 1 never matter, but are checked."""
    shape = list(x.shape)
    strides = [s if n > 1 else 16 * shape[-1] for s, n in zip(x.stride(), shape, strict=True)]
    strides[-1] = 1
    return shape, strides


class Kernel:
    """One binary of `function`, compiled for constants and for the dtypes and blocks of its descriptors.

    `early`: it may begin before the kernel before it in its stream has ended, and waits for that one by itself.

    `blocks`: block shape of each descriptor, the first arguments. `others`: a value for each further argument,
    for its type alone; tensors among them are pointers.
    """

    def __init__(
        self, function: Any, tensors: list[Tensor], blocks: list[list[int]], others: list[Any],
        early: bool = False, **options: Any,
    ):  # fmt: skip
        described = [
            TensorDescriptor(x, *geometry(x), block, layout(block, x.dtype))
            for x, block in zip(tensors, blocks, strict=True)
        ]
        compiled = function.warmup(*described, *others, grid=(1, 1, 1), num_warps=4, **options)
        launcher = compiled.run  # loads the binary
        assert launcher.global_scratch_size == launcher.profile_scratch_size == 0
        self.compiled = compiled
        self._launch = launcher.launch
        self._metas = [
            (i, (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], *meta["block_size"]))
            for i, meta in enumerate(compiled.metadata.tensordesc_meta or [])
        ]
        if self._metas:  # what encodes the descriptors again wraps what takes them encoded
            self._launch = inspect.getclosurevars(self._launch).nonlocals["launcher"]
        assert len(self._metas) == len(tensors)
        self._constants = (None,) * (len(function.arg_names) - len(tensors) - len(others))
        self._head = compiled.function, False, early, None, None, compiled.packed_metadata, None, None, None
        self._encode = triton.runtime.driver.active.utils.fill_tma_descriptor

    def __call__(self, grid: int, stream: int, tensors: tuple[Tensor, ...], others: tuple[Any, ...]) -> None:
        """Launches on `stream`. `others`: ints, floats, and pointers as ints."""
        args: list[Any] = []
        for i, meta in self._metas:
            x = tensors[i]
            key = x.data_ptr(), x.shape, x.stride(), meta
            found = _descriptors.get(key)
            args += self._described(x, key) if found is None else found
        self._launch(grid, 1, 1, stream, *self._head, *args, *others, *self._constants)

    def _described(self, x: Tensor, key: tuple[Any, ...]) -> tuple[Any, ...]:
        swizzle, element_size, element_type, *block = key[3]
        shape, strides = geometry(x)
        encoded = self._encode(key[0], swizzle, element_size, element_type, block, shape, strides, 0)
        if len(_descriptors) >= MAX_DESCRIPTORS:
            _descriptors.clear()
        _descriptors[key] = encoded, *shape, *strides
        return _descriptors[key]
