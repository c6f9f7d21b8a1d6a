"""Rotary embeddings in the museum of published faults, and in HONEST right ones, which `lmsys check` must not accuse.

A rotary embedding turns pairs of columns of x by angles that grow with the position.
A new fault is a function or an autograd Function with the decorator `exhibit(kind, where it was published, what users
saw, a part of the mistake's name)`.

Legend: S sequence length, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lmsys.model.rotary import RotaryEmbedding
from lmsys.registry import Entry
from tests.museum.exhibit import exhibit

THETA = 10_000.0
_tables: dict[int, Tensor] = {}  # the angles that `table_by_length` keeps


def angles_of(x: Tensor, positions: Tensor, theta: float = THETA) -> Tensor:
    """The angles (S, D / 2) in float32, one for each pair of columns."""
    columns = torch.arange(0, x.shape[-1], 2, dtype=torch.float32, device=x.device)
    return positions.float()[:, None] / theta ** (columns / x.shape[-1])


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x (..., S, D) with the pairs of columns (i, i + D / 2) rotated."""
    whole, (first, second) = torch.cat([angles, angles], dim=-1), x.chunk(2, dim=-1)
    turned_by_90_degrees = torch.cat([-second, first], dim=-1)
    return (x.float() * whole.cos() + turned_by_90_degrees.float() * whole.sin()).to(x.dtype)


@exhibit(
    "rotary",
    "huggingface/transformers#29285",
    "In bfloat16 positions above 256 fall together: long contexts degrade.",
    "positions are rounded to the dtype of x",
)
def positions_in_bfloat16(x: Tensor, positions: Tensor) -> Tensor:
    return rotated(x, angles_of(x, positions.to(x.dtype)))


@exhibit(
    "rotary",
    "raiyanyahya/how-to-train-your-gpt#6",
    "Tables are laid out for neighbours and halves are turned: norms stay nearly right, and quality drops.",
    "pairs are mixed up",
)
def mixed_pairs(x: Tensor, positions: Tensor) -> Tensor:
    whole = angles_of(x, positions).repeat_interleave(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x.float() * whole.cos() + torch.cat([-second, first], dim=-1).float() * whole.sin()).to(x.dtype)


@exhibit(
    "rotary",
    "lucidrains/rotary-embedding-torch#11",
    "A table is kept by length, and read again at another offset.",
    "the table of an earlier call",
)
def table_by_length(x: Tensor, positions: Tensor) -> Tensor:
    key = len(positions), x.shape[-1]
    return rotated(x, _tables.setdefault(hash(key), angles_of(x, positions)))


@exhibit(
    "rotary",
    "pytorch/executorch#2010",
    "Tokens of a decoding step are turned as if they were the first ones.",
    "positions are ignored",
)
def from_the_first_position(x: Tensor, positions: Tensor) -> Tensor:
    return rotated(x, angles_of(x, torch.arange(len(positions), device=x.device)))


@exhibit("rotary", "huggingface/candle#3612", "Queries and keys do not train: the graph ends here.", "detached")
def detached(x: Tensor, positions: Tensor) -> Tensor:
    return rotated(x.detach(), angles_of(x, positions))


@exhibit(
    "rotary",
    "baidu-baige/LoongForge#106",
    "The gradient is turned the wrong way; its length is right.",
    "the backward turns the same way as the forward",
)
class BackwardTurnsOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.angles = angles_of(x, positions)
        return rotated(x, ctx.angles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return rotated(grads[0], ctx.angles), None


@exhibit(
    "rotary", "unslothai/unsloth#5001", "The caller's queries are turned too, and then again.", "changes its input"
)
class OverItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.angles = angles_of(x, positions)
        return x.data.copy_(rotated(x, ctx.angles)).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return rotated(grads[0], -ctx.angles), None


@exhibit("rotary", "lyogavin/airllm#368", "A model of theta 500,000 is turned with 10,000.", "theta is always 10,000")
def theta_ignored(x: Tensor, positions: Tensor, theta: float = THETA) -> Tensor:
    return rotated(x, angles_of(x, positions))


# Right embeddings.


def halves(x: Tensor, positions: Tensor, theta: float = THETA) -> Tensor:
    return rotated(x, angles_of(x, positions, theta))


def in_the_dtype_of_x(x: Tensor, positions: Tensor) -> Tensor:
    """Rounds cosines and sines to the dtype of x, as Hugging Face's models do, but not the angles."""
    whole, (first, second) = angles_of(x, positions).repeat(1, 2), x.chunk(2, dim=-1)
    return x * whole.cos().to(x.dtype) + torch.cat([-second, first], dim=-1) * whole.sin().to(x.dtype)


def of_complex_numbers(x: Tensor, positions: Tensor) -> Tensor:
    """Takes neighbouring columns as complex numbers, as Llama's first code does."""
    turns = torch.polar(torch.ones(()).to(x.device), angles_of(x, positions))
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def of_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Takes tables of cosines and sines (S, D / 2) in place of positions."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Ours(nn.Module):
    """`lmsys.model.rotary` in a module with the constructor that CS336 asks for."""

    def __init__(self, theta: float, d_k: int, max_seq_len: int):
        super().__init__()
        self.rope = RotaryEmbedding(d_k, max_seq_len, theta)

    def forward(self, x: Tensor, token_positions: Tensor) -> Tensor:
        return self.rope.rotate(x, token_positions)


HONEST = [
    Entry(function.__name__, f"{__name__}:{function.__name__}")
    for function in (halves, in_the_dtype_of_x, of_complex_numbers, of_tables, Ours)
]
