"""SwiGLU in the museum of published faults, and in HONEST right functions, which `lmsys check` must not accuse.

A new fault is a function with the decorator `exhibit(kind, where it was published, what users saw, a part of the
mistake's name)`. A function takes gate and up (N, F), or x (N, D) and the weights of a whole feed-forward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.model.functions import silu
from lmsys.model.fused import swiglu as fused
from lmsys.registry import Entry
from tests.museum.exhibit import exhibit


@exhibit("swiglu", "ml-explore/mlx-lm#767", "Another function, of plausible outputs.", "gate and up are exchanged")
def exchanged(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(up) * gate


@exhibit("swiglu", "Nijikadesu/breakdown-minimind#3", "The model trains all the same.", "silu is taken of the product")
def silu_of_the_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate * up)


@exhibit(
    "swiglu", "kakaobrain/trident#101", "Both halves are activated, and outputs are too small.", "silu is taken of both"
)
def both_activated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * F.silu(up)


@exhibit("swiglu", "huggingface/candle#3745", "A model's gate is computed with another activation.", "gelu(gate)")
def another_activation(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


@exhibit(
    "swiglu",
    "tinygrad/tinygrad#1113",
    "Gates far below 0 have a gradient of NaN.",
    "whose backward gives inf · 0 = NaN",
)
def backward_overflows(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


@exhibit("swiglu", "trymirai/lalamo#328", "Saturated gates are NaN.", "exp(x) / (1 + exp(x))")
def sigmoid_overflows(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = F.linear(x, w1)
    return F.linear(gate * (gate.exp() / (1 + gate.exp())) * F.linear(x, w3), w2)


# Right functions.


def product(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def ours_fused(gate: Tensor, up: Tensor) -> Tensor:
    return fused(torch.cat([gate, up], dim=-1))


class ByHand(torch.autograd.Function):
    """Computes in float32, with an explicit backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = (x.float() for x in ctx.saved_tensors)
        s, do = gate.sigmoid(), grads[0].float()
        return (do * up * s * (1 + gate * (1 - s))).to(grads[0].dtype), (do * gate * s).to(grads[0].dtype)


def feed_forward(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


HONEST = [
    Entry(function.__name__, f"{__name__}:{function.__name__}")
    for function in (product, ours_fused, ByHand, feed_forward)
]
