"""Rotary position embedding (RoPE): splits a tensor that has q, k and v side by side, and rotates q and k by position.

`TransformerLM` holds a `RotaryEmbedding`, and its attention layers call it. On CUDA the kernel of fused_triton.py reads
the projections and writes q, k and v; in the backward it puts their gradients side by side again. Plain PyTorch, even
when torch.compile fuses it, reads pairs of neighbours one value at a time, at half the memory's speed. With `in_place`
the kernel reads and writes q and k alone, and v is never copied: attention reads all three as parts of one tensor.
Where no kernel can run (`fused.needs_plain_torch`), `_turn` does the same rotation in plain PyTorch: if you change the
kernel or `_turn`, change both.

Source: Su et al. 2021 (arXiv 2104.09864).

Legend: B batch, S sequence length, H query heads, Hkv key/value heads, D head dimension, N = H + 2 Hkv.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lmsys import autograd, values
from lmsys.attention.custom_ops import whole_of
from lmsys.kernels import custom_op
from lmsys.model import functions, fused


class RotaryEmbedding(nn.Module):
    """Rotates the pair of elements (2i, 2i + 1) of every query and key by the angle position · theta^(-2i / D).

    head_dim        D, an even number
    context_length  how many positions there are
    theta           the base of the angles, a positive number
    ValueError for other numbers.
    """

    def __init__(self, head_dim: int, context_length: int, theta: float, device: Any = None):
        super().__init__()
        self._sizes = (
            *values.counts(head_dim=head_dim, context_length=context_length),
            values.finite("theta", theta, above=0),
        )
        values.hold((head_dim % 2 == 0, f"{head_dim=} must be even: pairs are turned"))
        cos, sin = self._tables(values.instance("device", device, torch.device | str | int | None), torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, device: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of all positions and pairs, (context_length, D / 2) each."""
        head_dim, context_length, theta = self._sizes
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
        angles = torch.arange(context_length, dtype=torch.float64, device=device)[:, None] * frequencies  # (S, D / 2)
        return angles.cos().float().to(dtype), angles.sin().float().to(dtype)

    def _apply(self, *args: Any, **options: Any) -> Any:
        """Called when torch moves or casts the module: computes the tables anew, which `to_empty` leaves unwritten.

        They cannot come from a state dict, as they are buffers that are not saved.
        """
        super()._apply(*args, **options)
        self.cos, self.sin = self._tables(self.cos.device, self.cos.dtype)  # type: ignore[has-type]
        return self

    def forward(
        self, projected: Tensor, num_heads: int, positions: Tensor | None, in_place: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits `projected` into q, k and v, and rotates q and k by `positions`.

        projected (B, S, N D), positions (S) or (B, S), by default 0 ... S - 1 -> q (B, S, H, D) and k, v
        (B, S, Hkv, D), each in memory of its own, of projected's dtype.

        in_place  True: if the kernel runs, and torch.compile does not trace, q and k are written over `projected`, and
                  q, k and v are views of it. In the backward, gradients that lie side by side are rotated back in
                  place, too. Nothing else may read these tensors afterwards: autograd raises an error in a backward
                  that needs the old values of `projected`
        ValueError on a CPU for positions outside the context.
        """
        if positions is not None:
            functions.check_ids("positions", positions, "positions in the context", shapes=None, below=len(self.cos))
        cos, sin = (t[: projected.shape[1]] if positions is None else t[positions] for t in (self.cos, self.sin))
        heads = projected.unflatten(-1, (-1, 2 * cos.shape[-1]))  # (B, S, N, D)
        if not fused.needs_plain_torch(projected):
            rotation = _RotateInPlace if in_place and not torch.compiler.is_compiling() else _Rotate
            return rotation.apply(heads, cos, sin, num_heads)
        kv_heads = (heads.shape[2] - num_heads) // 2
        q, k, v = heads.split([num_heads, kv_heads, kv_heads], dim=2)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (..., S, 1, D / 2): the same for every head
        return _turn(q, cos, sin), _turn(k, cos, sin), v.contiguous()  # a view would keep all of `projected`

    def rotate(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotates one tensor: x (..., S, D), and positions that broadcast to (..., S), by default 0 ... S - 1.

        The result has x's shape and dtype. ValueError for shapes that do not fit, and on a CPU for positions outside
        the context.
        """
        length, head_dim = x.shape[-2:] if x.dim() > 1 else (0, 0)
        context, width = len(self.cos), 2 * self.cos.shape[-1]
        if head_dim != width or length > context:
            raise ValueError(f"x must be (..., S, {width}) with S <= {context}; got shape {tuple(x.shape)}")
        if positions is None:
            return _turn(x, self.cos[:length], self.sin[:length])
        functions.check_ids("positions", positions, "positions in the context", shapes=None, below=context)
        if not values.broadcasts(positions.shape, x.shape[:-1]):
            raise ValueError(f"positions must broadcast to {tuple(x.shape[:-1])}; got shape {tuple(positions.shape)}")
        return _turn(x, self.cos[positions], self.sin[positions])


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., D) with its pairs of neighbours rotated, in PyTorch; cos and sin broadcast to (..., D / 2)."""
    even, odd = functions.widened(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of `heads` (B, S, N, D), q and k rotated, by the kernel of fused_triton.py."""
    parts = _like_parts(heads, cos, sin, num_heads)
    fused.kernels().turn(heads.contiguous(), parts, cos.contiguous(), sin.contiguous(), num_heads, backward=False)
    return parts


def _rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `heads`, by the same kernel."""
    heads, parts = _like_heads(dq, dk, dv, cos, sin), (dq.contiguous(), dk.contiguous(), dv.contiguous())
    fused.kernels().turn(heads, parts, cos.contiguous(), sin.contiguous(), dq.shape[2], backward=True)
    return heads


def _like_parts(heads: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty q, k and v, for the results of `_rotate`."""
    batch, length, total, head_dim = heads.shape
    q, k, v = (heads.new_empty(batch, length, n, head_dim) for n in (num_heads, *[(total - num_heads) // 2] * 2))
    return q, k, v


def _like_heads(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """An empty tensor for the result of `_rotate_backward`."""
    return dq.new_empty(*dq.shape[:2], dq.shape[2] + 2 * dk.shape[2], dq.shape[3])


class _RotateInPlace(torch.autograd.Function):
    """Rotates q and k in place, and in the backward their gradients if these lie side by side in one tensor.

    Some implementations of attention write gradients in this form (`custom_ops.gradients_like`).
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        heads = heads.detach().contiguous()
        # The second argument, None here and in the backward: q and k are rotated within the first argument.
        fused.kernels().turn(heads, None, cos.contiguous(), sin.contiguous(), num_heads, backward=False)
        torch.autograd.graph.increment_version(heads)  # autograd does not see what a kernel writes
        kv_heads = (heads.shape[2] - num_heads) // 2
        return heads.split([num_heads, kv_heads, kv_heads], dim=2)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The tensor (B, S, N, D) whose parts the gradients dq, dk and dv are; None if they are apart in memory.
        if (together := whole_of(*(g.transpose(1, 2) for g in grads))) is None:
            return _rotate_backward(*grads, *ctx.saved_tensors), None, None, None
        fused.kernels().turn(
            together, None, *(t.contiguous() for t in ctx.saved_tensors), grads[0].shape[2], backward=True
        )
        return together, None, None, None


# The operators of `_rotate` and `_rotate_backward`, for torch.compile; cos and sin are (S, D / 2) or (B, S, D / 2).
ANGLES, THREE = "Tensor cos, Tensor sin", "(Tensor, Tensor, Tensor)"
rotate = custom_op.define("rotate", f"(Tensor heads, {ANGLES}, int num_heads) -> {THREE}", _rotate, _like_parts)
rotate_backward = custom_op.define(
    "rotate_backward", f"(Tensor dq, Tensor dk, Tensor dv, {ANGLES}) -> Tensor", _rotate_backward, _like_heads
)


class _Rotate(torch.autograd.Function):
    """The rotation into new tensors.

    It is not registered as the operators' autograd: in compiled code each call would cost the host about 15 us.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return (rotate if torch.compiler.is_compiling() else _rotate)(heads, cos, sin, num_heads)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        backward = rotate_backward if torch.compiler.is_compiling() else _rotate_backward
        return backward(*grads, *ctx.saved_tensors), None, None, None
