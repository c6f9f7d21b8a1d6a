"""Kernels as custom operators: to torch.compile one node of known shapes, into which it does not look."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmsys.operator import define

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _like(x: Tensor) -> Tensor:
    """Room for a result of x's shape (B, H, S, D), in (B, S, H, D) memory: what the projections around it read."""
    batch, heads, length, head_dim = x.shape
    return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _laid_out(found: Tensor) -> Tensor:
    return found if found.transpose(1, 2).is_contiguous() else _like(found).copy_(found)


def operator(
    name: str, forward: Forward, backward: Backward
) -> Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]:
    """`lmsys::<name>`: (q, k, v, causal, scale) -> o on 4-D tensors, differentiable once.

    `forward(q, k, v, causal, scale)` gives o and the log-sum-exp, `backward(q, k, v, o, lse, do, causal, scale)`
    gives dq, dk, dv.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = forward(q, k, v, causal, scale)
        return _laid_out(o), lse

    def gradients(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = backward(q, k, v, o, lse, do, causal, scale)
        return _laid_out(dq), _laid_out(dk), _laid_out(dv)

    def like_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        return _like(q), lse

    def like_gradients(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _like(q), _like(k), _like(v)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output)

    def differentiate(ctx: Any, do: Tensor, _: Any) -> Any:
        return *backward_operator(*ctx.saved_tensors, do, ctx.causal, ctx.scale), None, None

    last = "bool causal, float scale"
    schemas = (
        f"(Tensor q, Tensor k, Tensor v, {last}) -> (Tensor, Tensor)",
        f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, {last}) -> (Tensor, Tensor, Tensor)",
    )
    forward_operator = define(name, schemas[0], attend, like_attend)
    backward_operator = define(f"{name}_backward", schemas[1], gradients, like_gradients)
    torch.library.register_autograd(f"lmsys::{name}", differentiate, setup_context=setup_context)
    return lambda q, k, v, causal, scale: forward_operator(q, k, v, causal, scale)[0]
