"""Triton kernels, and functions that launch them on inputs of their own: targets for tests of `dev.targets`.

`python -m dev.targets` compiles the kernels that a target launches, for any cards. Tests name one
as a user does, by this file and a function. A new target is a function without arguments that launches kernels.
"""

import os

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GIVEN = [  # the first, with many stages, does not fit cards with little shared memory
    triton.Config({"ROWS": 64, "COLUMNS": 64}, num_warps=4, num_stages=stages) for stages in (9, 2)
]


@triton.autotune(GIVEN, key=["n"])
@triton.jit
def product(x_ptr, y_ptr, z_ptr, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, 64)
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, n, 64):
        x = tl.load(x_ptr + rows[:, None] * n + (first + inner)[None, :])
        y = tl.load(y_ptr + (first + inner)[:, None] * n + columns[None, :])
        z = tl.dot(x, y, z)
    tl.store(z_ptr + rows[:, None] * n + columns[None, :], z.to(z_ptr.dtype.element_ty))


def _set_block(arguments):
    arguments["x_desc"].block_shape = [arguments["ROWS"], 64]


@triton.autotune([triton.Config({"ROWS": rows}, pre_hook=_set_block) for rows in (16, 64)], key=[])
@triton.jit
def described(x_desc, y_ptr, ROWS: tl.constexpr):
    x = x_desc.load([0, 0])
    tl.store(y_ptr + tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :], x)


@triton.jit
def no_such_thing(x_ptr):
    tl.store(x_ptr, tl.no_such_function())


@triton.jit
def ends_the_compiler(x_ptr):
    tl.store(x_ptr, 0.0)


def end(*_, **__):
    """Ends the process as LLVM does if it has no instruction for something."""
    os.write(2, b"some lines of a module\nLLVM ERROR: Cannot select: intrinsic\n")
    os.abort()


ends_the_compiler.add_pre_run_hook(end)


@triton.jit
def small_product(x_ptr, z_ptr):
    at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(z_ptr + at, tl.dot(x, x))


@triton.jit
def double(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)


tuned = triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 128)], key=[])(double)


@torch.library.custom_op("lmsys_test::doubled", mutates_args=(), device_types="cuda")
def doubled(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, device=torch.cuda.current_device())
    assert x.is_cuda and y.get_device() == 0
    with torch.cuda.device(x.device):
        double[1,](x, y, 64)
    return y


doubled.register_autograd(lambda _, gradient: doubled(gradient))


def matrices(count, dtype=torch.float16):
    made = [torch.randn(512, 512, device="cuda", dtype=dtype) for _ in range(count)]
    assert all(x.is_cuda for x in made)
    return made


def launch_products():
    x, y, z = matrices(3)
    for _ in range(2):
        product[lambda given: (512 // given["ROWS"], 512 // given["COLUMNS"])](x, y, z, 512)
    described[1,](TensorDescriptor(x, [512, 64], [512, 1], [1, 64]), y)


def launch_what_does_not_compile():
    no_such_thing[1,](*matrices(1))
    x, z = (torch.zeros(32, 32, device="cuda", dtype=dtype) for dtype in (torch.int8, torch.int32))
    small_product[1,](x, z)
    small_product[1,](*matrices(2, torch.bfloat16))


def launch_what_ends_the_compiler():
    ends_the_compiler[1,](*matrices(1))
    double[1,](*matrices(2), 64)
    raise RuntimeError("no such card")


def launch_as_libraries_do():
    print("words of the target")
    target = triton.runtime.driver.active.get_current_target()
    limits = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    assert torch.version.hip is not None if target.backend == "hip" else torch.version.cuda is not None
    assert limits["warpSize"] == target.warp_size == torch.cuda.get_device_properties(0).warp_size
    assert limits["multiprocessor_count"] in (40, 304)
    torch.cuda.set_device(0)
    x = torch.ones(64).pin_memory().to("cuda").requires_grad_()
    doubled(x).sum().backward()
    warm = double.warmup(x, x, 32, grid=(1,))
    warm._init_handles()
    assert 0 < warm.n_regs <= 255 and warm.metadata.shared == 0
    warm[1, 1, 1](x, x, 32)
    triton.testing.do_bench_cudagraph(lambda: tuned[1,](x, x))
    assert tuned.best_config.kwargs["BLOCK"] in (16, 128)


def copied(q, k, v):
    """Attention as the command sees it: a function of q, k and v, without a mask."""
    o = torch.empty_like(q)
    double[1,](q, o, 64)
    return o


class Copied(torch.autograd.Function):
    """Attention as an autograd Function, whose backward launches the kernel with another block."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return copied(q, k, v)

    @staticmethod
    def backward(ctx, do):
        dq = torch.empty_like(do)
        double[1,](do, dq, 32)
        return dq, dq, dq, None


def end_the_process():
    os.abort()


def leave():
    raise SystemExit("enough")


def launch_nothing():
    matrices(1)


def takes_too_little(x):
    return x
