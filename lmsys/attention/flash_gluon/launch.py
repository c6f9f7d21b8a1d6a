"""Kernels in Gluon for `lmsys.kernels.launch`: their descriptors say how a block lies in shared memory."""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language import bfloat16 as gl_bfloat16
from triton.experimental.gluon.language import float16 as gl_float16
from triton.experimental.gluon.language import float32 as gl_float32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmsys.kernels.launch import DirectKernel, geometry

GLUON_DTYPES = {torch.bfloat16: gl_bfloat16, torch.float16: gl_float16, torch.float32: gl_float32}


def layout(block: list[int], dtype: torch.dtype) -> NVMMASharedLayout:
    """The layout of a block in shared memory, as TMA writes and wgmma reads it."""
    if len(block) == 1:
        return NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[dtype])


class Kernel(DirectKernel):
    """`tensors` and `blocks`: of the descriptors, an example of each and its block. `others`: as of `DirectKernel`."""

    def __init__(
        self, function: Any, tensors: list[Tensor], blocks: list[list[int]], others: list[Any], **options: Any
    ):
        described = [
            TensorDescriptor(x, *geometry(x), block, layout(block, x.dtype))
            for x, block in zip(tensors, blocks, strict=True)
        ]
        super().__init__(function, described, others, num_warps=4, **options)
