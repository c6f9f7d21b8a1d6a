"""A mini model of two blocks in plain PyTorch, whose operations can be replaced by faults, for loss curves in gates.py.

OPERATIONS has, for each kind, a plain function to compare with, inputs, and the way in which an implementation is
called. An implementation may have any of the signatures that `lmsys check` accepts.

Legend: B batch, S tokens of a sequence, D width, H heads, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmsys import draws
from lmsys.check.loss import roles_of
from lmsys.check.norm import ROLES as NORM
from lmsys.check.question import Options
from lmsys.check.rotary import HALVES, pairs_of
from lmsys.check.rotary import ROLES as ROTARY
from lmsys.check.swiglu import ROLES as SWIGLU
from lmsys.signature import called

B, S, D, H, V = 4, 64, 32, 2, 64
Function = Callable[..., Any]


def drawn(seed: int, name: str, *shape: int) -> Tensor:
    """Near-normal values of this shape, by seed and name, with the same bits on any machine."""
    return draws.values(draws.key(seed, name), 0, torch.Size(shape).numel()).view(shape)


def tokens_of(seed: int, step: int = 0, rank: int = 0) -> Tensor:
    """Random tokens (B, S) of a step on a rank."""
    key = draws.key(seed, f"tokens {step} {rank}")
    return draws.whole_numbers(key, 0, B * S, V).view(B, S)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """x (..., S, D) with the pairs of columns (0, 1), (2, 3), ... rotated; positions are (S,)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin, even, odd = angles.cos(), angles.sin(), x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


@dataclass(frozen=True)
class Operation:
    """How implementations of a kind are called.

    plain   the operation in plain PyTorch
    inputs  seed -> arguments, of which tensors are near-normal
    call    (implementation, *arguments) -> output: passes the arguments as this implementation names and orders them
    """

    plain: Function
    inputs: Callable[[int], tuple[Any, ...]]
    call: Callable[..., Tensor]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotary_halves(x: Tensor, positions: Tensor) -> Tensor:
    """x as in `rotary`, with the pairs of columns (0, D / 2), (1, D / 2 + 1), ... rotated."""
    neighbours = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat([rotary(neighbours, positions)[..., part::2] for part in (0, 1)], dim=-1)


def plain_of(kind: str, implementation: Function) -> Function:
    """The operation in plain PyTorch that the implementation should equal.

    It has a bias if the implementation has one, and rotates the pairs of columns that the implementation rotates.
    """
    if kind == "norm" and called(implementation, NORM).has("bias"):
        return layer_norm
    if kind == "rotary" and pairs_of(implementation, Options()) == HALVES:
        return rotary_halves
    return OPERATIONS[kind].plain


def _norm_by(implementation: Function, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = {"x": x, "weight": weight, "bias": torch.zeros_like(weight), "eps": eps, "shape": x.shape[-1:]}
    return called(implementation, NORM)(values)


def _rotary_by(implementation: Function, x: Tensor, positions: Tensor) -> Tensor:
    return called(implementation, ROTARY)({"x": x, "positions": positions, "theta": 10_000.0})


def _swiglu_by(implementation: Function, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up by an implementation. A whole feed-forward gets weights of 0 and 1 that select gate and up."""
    whole, both = torch.eye(gate.shape[-1]), torch.eye(2 * gate.shape[-1])
    w1, w3 = both.split(gate.shape[-1])
    values = {"gate": gate, "up": up, "x": torch.cat([gate, up], dim=-1), "w1": w1, "w2": whole, "w3": w3}
    return called(implementation, SWIGLU)(values)


def _loss_by(implementation: Function, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss by an implementation. If it contains the head, it gets the logits as hidden states, and the identity."""
    weight = torch.eye(logits.shape[-1])
    values = {"logits": logits, "hidden": logits, "weight": weight, "targets": targets, "ignore_index": -100}
    return called(implementation, roles_of(implementation))(values)


def _attention_by(implementation: Function, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from lmsys.attention.contract import adapt

    result: Tensor = adapt(implementation)(q, k, v, causal=True)
    return result


OPERATIONS: dict[str, Operation] = {
    "attention": Operation(
        attention, lambda seed: tuple(drawn(seed, name, 2, 4, 256, 64) for name in "qkv"), _attention_by
    ),
    "norm": Operation(
        norm, lambda seed: (drawn(seed, "x", 64, 256), 1 + drawn(seed, "weight", 256) / 8, 1e-5), _norm_by
    ),
    "rotary": Operation(rotary, lambda seed: (drawn(seed, "x", 2, 4, 256, 64), torch.arange(256)), _rotary_by),
    "swiglu": Operation(swiglu, lambda seed: (drawn(seed, "gate", 64, 256), drawn(seed, "up", 64, 256)), _swiglu_by),
    "loss": Operation(loss, lambda seed: (drawn(seed, "logits", 256, V), tokens_of(seed).flatten()), _loss_by),
}


class Block(nn.Module):
    """A pre-norm block (B, S, D) -> (B, S, D), which calls its operations by call(kind, *arguments)."""

    def __init__(self, call: Callable[..., Tensor]):
        super().__init__()
        self.call = call
        self.norms = nn.ParameterList([torch.ones(D), torch.ones(D)])
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.call("norm", x, self.norms[0], 1e-5)).view(len(x), S, 3, H, D // H).permute(2, 0, 3, 1, 4)
        q, k = (self.call("rotary", heads[i].contiguous(), torch.arange(S, device=x.device)) for i in (0, 1))
        o = self.call("attention", q, k, heads[2].contiguous())
        x = x + self.out(o.transpose(1, 2).reshape(x.shape))
        gate, up = self.up(self.call("norm", x, self.norms[1], 1e-5)).chunk(2, dim=-1)
        return x + self.down(self.call("swiglu", gate.contiguous(), up.contiguous()))


class MiniModel(nn.Module):
    """tokens (B, S) -> the loss of predicting the next token. `replaced`: {kind: implementation that is called}."""

    def __init__(self, seed: int, replaced: Mapping[str, Function] | None = None):
        super().__init__()
        self.replaced = dict(replaced or {})
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Block(self._call) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(D))
        self.head = nn.Linear(D, V, bias=False)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    p.copy_(drawn(seed, name, *p.shape) * p.shape[-1] ** -0.5)

    def _call(self, kind: str, *arguments: Any) -> Tensor:
        operation = OPERATIONS[kind]
        return operation.call(self.replaced.get(kind, operation.plain), *arguments)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self._call("norm", x, self.norm, 1e-5))
        return self._call("loss", logits[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1))
