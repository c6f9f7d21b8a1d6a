"""Makes kernels differentiable: for eager PyTorch as an autograd Function, for torch.compile as a custom operator, one
node of known shapes into which it does not look."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import as_4d
from lmsys.attention.pattern import Pattern
from lmsys.autograd import once_differentiable
from lmsys.kernels.custom_op import define

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, ...]]


def _like(x: Tensor) -> Tensor:
    """An empty result of x's shape (B, H, S, D), in (B, S, H, D) memory, as the next projection reads it."""
    batch, heads, length, head_dim = x.shape
    return x.new_empty_strided(x.shape, (length * heads * head_dim, head_dim, heads * head_dim, 1))


def _laid_out(found: Tensor) -> Tensor:
    return found if found.transpose(1, 2).is_contiguous() else _like(found).copy_(found)


def custom_op(
    name: str, forward: Forward, backward: Backward
) -> Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]:
    """`lmsys::<name>`: (q, k, v, causal, scale) -> o on 4-D tensors, differentiable once.

    `forward(q, k, v, causal, scale)` gives o and the log-sum-exp, `backward(q, k, v, o, lse, do, causal, scale)`
    gives dq, dk, dv.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = forward(q, k, v, causal, scale)
        return _laid_out(o), lse

    def run_backward(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = backward(q, k, v, o, lse, do, causal, scale)
        return _laid_out(dq), _laid_out(dk), _laid_out(dv)

    def like_run(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        return _like(q), lse

    def like_run_backward(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _like(q), _like(k), _like(v)

    last = "bool causal, float scale"
    schemas = (
        f"(Tensor q, Tensor k, Tensor v, {last}) -> (Tensor, Tensor)",
        f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, {last}) -> (Tensor, Tensor, Tensor)",
    )
    forward_op = define(name, schemas[0], run, like_run)
    backward_op = define(f"{name}_backward", schemas[1], run_backward, like_run_backward)

    class CustomOp(torch.autograd.Function):
        """Stays out of the registered operators: in compiled code each call of one costs the host about 15 us."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
            ctx.causal, ctx.scale = causal, scale
            o, lse = forward_op(q, k, v, causal, scale)
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return *backward_op(*ctx.saved_tensors, grads[0], ctx.causal, ctx.scale), None, None

    return CustomOp.apply


def autograd_function(name: str, forward: Forward, backward: Backward) -> Any:
    """The class `name` with `.apply(q, k, v, causal, scale, tile, pattern)` on (..., H, S, D) or (B, S, D).

    The last four may be left out: `tile` is what `forward` and `backward`, else as for `custom_op`, take as one more
    argument; a `pattern`, which some of them take, they are given by its name. They take the maximum before they scale,
    so `scale` must be positive (ValueError); `attend` takes any.
    """

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            causal: bool = False,
            scale: float | None = None,
            tile: Any = None,
            pattern: Pattern | None = None,
        ) -> Tensor:
            ctx.causal, ctx.tile = causal, () if tile is None else (tile,)
            ctx.options = {} if pattern is None else {"pattern": pattern}
            ctx.scale = q.shape[-1] ** -0.5 if scale is None else float(scale)  # Triton would make an int a constant
            if ctx.scale <= 0:
                raise ValueError(f"{scale=} must be positive in {name}.apply; the row of the table takes any")
            if q.dim() == 4:  # apart, since each view costs the host two microseconds
                o, lse = forward(q, k, v, causal, ctx.scale, *ctx.tile, **ctx.options)
            else:
                o, lse = forward(as_4d(q), as_4d(k), as_4d(v), causal, ctx.scale, *ctx.tile, **ctx.options)
                o, lse = o.reshape(q.shape), lse.view(q.shape[:-1])
            ctx.save_for_backward(q, k, v, o, lse)
            return o

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> Any:
            q, k, v, o, lse = ctx.saved_tensors
            asked = ctx.causal, ctx.scale, *ctx.tile
            if q.dim() == 4:
                return *backward(q, k, v, o, lse, grads[0], *asked, **ctx.options), None, None, None, None
            q4, k4, v4, o4, do4 = (as_4d(x) for x in (q, k, v, o, grads[0]))
            found = backward(q4, k4, v4, o4, lse.view(q4.shape[:-1]), do4, *asked, **ctx.options)
            return *(dx.reshape(x.shape) for dx, x in zip(found, (q, k, v), strict=True)), None, None, None, None

    Flash.__name__ = Flash.__qualname__ = name
    Flash.kernels = forward, backward
    return Flash


def attend(
    eager: Any,
    compiled: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    pattern: Pattern | None = None,
) -> Any:
    """Calls an `autograd_function`, or inside torch.compile a `custom_op`. They need scale > 0; here any will do."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0:
        q, scale = q * (-1 if scale < 0 else 0), -scale or 1.0
    if pattern is not None:
        from lmsys.attention.untraced import under_pattern

        return under_pattern(eager, q, k, v, scale, pattern)
    return (compiled if torch.compiler.is_compiling() else eager.apply)(q, k, v, causal, scale)
