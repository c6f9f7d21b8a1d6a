"""Norms in the museum of published faults, and right norms, which HONEST lists.

`lmsys check` must refuse each fault, and must not accuse the right norms. A new fault is a function or an autograd
Function with the decorator `exhibit(kind, where it was published, what users saw, a part of the mistake's name)`.
A fault of a backward has the decorator `with_backward` below it.

Legend: N rows, M width.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmsys.model.fused import add_norm
from lmsys.model.transformer import RMSNorm
from lmsys.registry import Entry
from tests.museum.exhibit import exhibit

# (x, weight, eps, upstream) -> (dx, dw), in the backward of a norm: see `with_backward`.
Gradients = Callable[[Tensor, Tensor, float, Tensor], tuple[Tensor | None, Tensor | None]]


def mean_of(x: Tensor) -> Tensor:
    """(N, 1): the mean of each row."""
    return x.mean(dim=-1, keepdim=True)


def normalised(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square: RMSNorm without a weight."""
    return x * (mean_of(x * x) + eps).rsqrt()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normalised(x.float(), eps) * weight.float()).to(x.dtype)


def with_backward(gradients: Gradients) -> Callable[..., Tensor]:
    """A decorator: RMSNorm with another backward, and the name of `gradients`, which makes (dx, dw) in float32.

    If it returns None in place of dx or dw, the right gradient is taken.
    """

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.eps = eps
            return rms_norm(x, weight, eps)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, weight = (saved.detach().float().requires_grad_() for saved in ctx.saved_tensors)
            with torch.enable_grad():
                right = torch.autograd.grad(rms_norm(x, weight, ctx.eps), (x, weight), grads[0].float())
            made = gradients(x.detach(), weight.detach(), ctx.eps, grads[0].float())
            dx, dw = (a if b is None else b for a, b in zip(right, made, strict=True))
            return dx.to(ctx.saved_tensors[0].dtype), dw.to(ctx.saved_tensors[1].dtype), None

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return Norm.apply(x, weight, eps)

    norm.__name__, norm.__module__ = gradients.__name__, gradients.__module__
    return norm


@exhibit(
    "norm",
    "unslothai/unsloth#1867",
    "LayerNorm is wrong where the width is no power of two: padded columns enter the variance.",
    "padded columns count in the variance",
)
def padded_variance(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    width, wide = x.shape[-1], x.float()
    block = 1 << (width - 1).bit_length()
    mean = mean_of(wide)
    centred = F.pad(wide, (0, block - width)) - mean
    y = centred[..., :width] * (centred.square().sum(dim=-1, keepdim=True) / width + eps).rsqrt()
    return (y * weight.float() + bias.float()).to(x.dtype)


@exhibit(
    "norm",
    "pytorch/pytorch#51102",
    "The variance of large numbers that lie close together is 0, negative, or noise.",
    "mean(x^2) - mean(x)^2, which cancels",
)
def variance_in_one_pass(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float()
    mean = mean_of(wide)
    variance = mean_of(wide * wide) - mean * mean
    return ((wide - mean) * (variance + eps).rsqrt() * weight.float() + bias.float()).to(x.dtype)


@exhibit("norm", "linkedin/Liger-Kernel#74", "A model has the norm of another: everything is scaled.", "1 + weight")
def one_more_weight(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, 1 + weight, eps)


@exhibit("norm", "pytorch/pytorch#133085", "In float16 rows become 0 once a value is above 256.", "squares overflow")
def squares_in_float16(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    squares = x.pow(2) if x.dtype == torch.float16 else x.float().pow(2)
    return (x.float() * (mean_of(squares).float() + eps).rsqrt() * weight.float()).to(x.dtype)


@exhibit("norm", "fla-org/flash-linear-attention#508", "Small rows are scaled wrongly.", "added to the root")
def eps_outside(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide / (mean_of(wide * wide).sqrt() + eps) * weight.float()).to(x.dtype)


@exhibit(
    "norm", "apache/tvm#15856", "eps is a constant of the kernel, whatever the caller gives.", "eps is always 1e-05"
)
def eps_of_its_own(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, 1e-5)


@exhibit(
    "norm",
    "facebookresearch/xformers#785",
    "Columns beyond the largest block count nowhere, and wide rows are cut without a word.",
    "columns from 128 on do not count",
)
def first_block_of_columns(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * (mean_of(wide[..., :128].square()) + eps).rsqrt() * weight.float()).to(x.dtype)


@exhibit(
    "norm",
    "flagos-ai/FlagGems#5392",
    "Of inputs of three dimensions the backward sees as many rows as the first one has.",
    "only the first 5 rows add",
)
@with_backward
def rows_of_the_first_axis(x: Tensor, weight: Tensor, eps: float, do: Tensor) -> tuple[None, Tensor]:
    return None, (do * normalised(x, eps)).flatten(0, -2)[: x.shape[0]].sum(0)


@exhibit(
    "norm",
    "tenstorrent/tt-metal#53215",
    "The weight's gradient holds the last block of rows alone; a tolerance of 0.5 in the test hid it.",
    "only the last block of",
)
@with_backward
def last_block_of_rows(x: Tensor, weight: Tensor, eps: float, do: Tensor) -> tuple[None, Tensor]:
    return None, (do * normalised(x, eps)).flatten(0, -2).split(32)[-1].sum(0)


@exhibit("norm", "flagos-ai/FlagGems#59", "Right only where a program holds a single row.", "over the whole tensor")
def mean_of_the_tile(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean() + eps).rsqrt() * weight.float()).to(x.dtype)


@exhibit(
    "norm",
    "flagos-ai/FlagGems#5771",
    "The forward keeps the variance where the backward reads its inverse root: gradients are nearly 0.",
    "dx is multiplied by mean(x^2) + eps",
)
@with_backward
def variance_for_its_root(x: Tensor, weight: Tensor, eps: float, do: Tensor) -> tuple[Tensor, None]:
    g, y, kept = do * weight, normalised(x, eps), mean_of(x * x) + eps
    return kept * (g - y * mean_of(g * y)), None


@exhibit(
    "norm",
    "karpathy/llm.c#763",
    "dx is right only where all weights are 1, as they are in a test.",
    "dx is not multiplied",
)
@with_backward
def weight_forgotten(x: Tensor, weight: Tensor, eps: float, do: Tensor) -> tuple[Tensor, None]:
    y = normalised(x, eps)
    return (do - y * mean_of(do * y)) * (mean_of(x * x) + eps).rsqrt(), None


@exhibit(
    "norm", "GeeeekExplorer/nano-vllm#170", "In float32 the caller's residual is overwritten.", "changes its input"
)
class OverItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.detach().float()  # float32: the same memory
        wide.mul_((mean_of(wide * wide) + eps).rsqrt())
        return wide.to(x.dtype) * weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None


@exhibit(
    "norm",
    "Oneflow-Inc/oneflow#6149",
    "The gradients of weight and bias have the same shape and are returned in the wrong order.",
    "exchanged",
)
class GradientsExchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = F.layer_norm(leaves[0], leaves[0].shape[-1:], *leaves[1:], ctx.eps)
        dx, dw, db = torch.autograd.grad(y, leaves, grads[0])
        return dx, db, dw, None


# Right norms.


def fused_with_an_addition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`add_norm` of lmsys, which takes the norm as a module, with nothing to add."""
    norm = SimpleNamespace(weight=weight, eps=eps)
    if x.is_cuda and x.dtype != torch.float64:
        return add_norm(x, None, norm)[1]
    return add_norm(x, None, partial(rms_norm, weight=weight, eps=eps))[1]


def as_llama_has_it(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounds before it applies the weight, as Llama's code does."""
    return weight * normalised(x.float(), eps).to(x.dtype)


class Written(nn.Module):
    """RMSNorm as a module, as students write it."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d_model)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


HONEST = [
    *(
        Entry(function.__name__, f"{__name__}:{function.__name__}")
        for function in (rms_norm, fused_with_an_addition, as_llama_has_it, Written, RMSNorm)
    ),
    Entry("torchs_rms_norm", "torch.nn.functional:rms_norm"),
    Entry("torchs_layer_norm", "torch.nn.functional:layer_norm"),
    Entry("torchs_RMSNorm", "torch.nn:RMSNorm"),
    Entry("torchs_LayerNorm", "torch.nn:LayerNorm"),
]
