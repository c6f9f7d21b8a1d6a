"""Computes x Wᵀ under autocast with float32 weight gradients, and keeps copies of weights in the narrow dtype.

The layers of transformer.py call `linear`. loss.py has a matmul of its own, and calls `matmul_dtype` and `rounded` for
it. transformer.py and fused.py call `matmul_dtype`, too; benchmarks call `matmul_dtype` and `linear` to repeat what a
model computes. `TransformerLM.fuse_blocks` makes a `RoundedWeights`, which `lmsys.training.gradients` finds in READ.

Autocast casts the weights W (O, M) and the input x to a narrow dtype (bfloat16 or float16), multiplies these copies,
rounds the weight's gradient to the narrow dtype too, and widens it again. The GPU's matmul units add up in float32
anyway. `linear` makes them write that sum as the gradient, which is more exact, moves fewer bytes and needs no kernel
to widen it. Since the cast copies each weight anyway, several weights that multiply one input are copied side by side,
for one matmul in place of several.

`RoundedWeights` keeps such copies, as the weights' attribute `rounded`: then a copy is read, and nothing is cast.
Copies that lie side by side in memory are read as one tensor. The gradient is still that of the weight, in float32.
`lmsys.training.optimizer.AdamW` writes the copies in the pass that steps the weights. Otherwise a copy is made again
when its weight has changed. A change shows in the weight's address, or in its version counter, which every change in
place raises. torch's fused optimizers do not raise the counter, so a hook here does so after their steps. A change
through `.data` does not raise it either: call `torch.autograd.graph.increment_version` after such a change.

Legend: T tokens, M input features, O output features.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lmsys.autograd import is_transformed, once_differentiable


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """x (..., M), weights (O1, M), (O2, M), ... -> (..., O1 + O2 + ...): each x Wᵀ, side by side.

    Where autocast would cast float32 weights, it is one matmul in the autocast dtype, which is differentiable once;
    weight gradients are float32, and those of one call are rows of one tensor. Elsewhere it is `F.linear` for each
    weight, in the dtype that it is given.
    """
    dtype = None if x.dtype == torch.float64 else _cast_to(weights)  # autocast, too, leaves float64 alone
    if dtype is not None and not is_transformed():
        return _NarrowLinear.apply(x, dtype, [rounded(w, dtype) for w in weights], *weights)
    parts = [torch.nn.functional.linear(x, w) for w in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives x for a matmul: it leaves float64 alone."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else x.dtype


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The kept copy of a weight, if there is one in that dtype; else the weight itself."""
    copy = getattr(weight, "rounded", None)
    return copy if copy is not None and copy.dtype == dtype else weight


def _cast_to(weights: Sequence[Tensor]) -> torch.dtype | None:
    """The narrow dtype that autocast would cast these weights to; None: it would not, or not all are float32."""
    dtype = matmul_dtype(weights[0])
    return dtype if dtype.itemsize < 4 and all(t.dtype == torch.float32 for t in weights) else None


class _NarrowLinear(torch.autograd.Function):
    """`linear` of several weights in the dtype `dtype`. sources: the weights themselves, or their kept copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, sources: list[Tensor], *weights: Tensor) -> Tensor:
        narrow, weight = x.reshape(-1, x.shape[-1]).to(dtype), _side_by_side(sources, dtype)  # (T, M), (O, M)
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        kept = sources if all(w.dtype == dtype for w in sources) else [weight]  # kept copies are in memory anyway
        ctx.save_for_backward(narrow if any(needs_weights) else None, *(kept if needs_x else ()))
        ctx.wide, ctx.rows = x.dtype, list(map(len, weights))
        return (narrow @ weight.mT).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        narrow, *kept = ctx.saved_tensors
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        grad = grads[0].reshape(-1, grads[0].shape[-1])  # (T, O)
        dx, d_weights = None, [None] * len(needs_weights)
        if needs_x:
            weight = _side_by_side(kept, grad.dtype)
            dx = (grad @ weight).to(ctx.wide).view(*grads[0].shape[:-1], weight.shape[-1])
        if any(needs_weights):
            # Float32 sums of products of narrow factors: on CUDA nothing is rounded before they are summed.
            wide = torch.mm(grad.mT, narrow, out_dtype=torch.float32) if grad.is_cuda else (grad.mT @ narrow).float()
            d_weights = wide.split(ctx.rows)
        return dx, None, None, *(d if need else None for d, need in zip(d_weights, needs_weights, strict=True))


def _side_by_side(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows of all weights as one tensor of that dtype: a view if they follow one another in memory, else a copy.

    torch.compile fuses cast and copy. Without it torch.cat does both in one pass, by its argument `out`.
    """
    if len(weights) == 1:
        return weights[0].to(dtype)
    if torch.compiler.is_compiling():
        return torch.cat([w.to(dtype) for w in weights])
    rows, width = sum(map(len, weights)), weights[0].shape[-1]
    # Contiguous tensors of that dtype may lie in one storage, each from the end of the one before.
    if all(w.dtype == dtype and w.is_contiguous() for w in weights) and all(
        before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and after.data_ptr() - before.data_ptr() == before.nbytes
        for before, after in pairwise(weights)
    ):
        return weights[0].as_strided((rows, width), (width, 1))
    return torch.cat(weights, out=weights[0].new_empty(rows, width, dtype=dtype))


def _stamps(weights: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """{id of a weight: (its version, its address)}: a different value shows that the weight has changed."""
    return {id(weight): (weight._version, weight.data_ptr()) for weight in weights}


# torch.compile of a whole step would trace this call and drop it. So the compiled graph must break here.
_count_up = torch._disable_dynamo(torch.autograd.graph.increment_version)


def _count_fused_steps(optimizer: Optimizer, *_: Any) -> None:
    """Raises the version counters of weights that a fused optimizer of torch has stepped: its kernels do not."""
    if weights := [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]:
        _count_up(weights)


register_optimizer_step_post_hook(_count_fused_steps)  # of all optimizers of this process


# The `RoundedWeights` that forwards have read since this set was last cleared. Code that captures a CUDA graph clears
# it first, and calls `refresh` before each replay for all that the capture has read.
READ: WeakSet["RoundedWeights"] = WeakSet()


class RoundedWeights:
    """Copies of the weights of `layers`; the copies of one inner list lie side by side, as one matmul reads them.

    A copy of this object, or one that is unpickled, has the layers and begins without copies of their weights.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Module]]):
        self._layers = layers
        self._weights: list[Any] = []
        self._copies: dict[int, Tensor] = {}  # by id of the weight
        self._made_of: dict[int, tuple[int, int]] = {}  # what `_stamps` gave for the weights when they were copied

    def __reduce__(self) -> Any:
        return type(self), (self._layers,)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A context in which, under autocast, weights have their copies as the attribute `rounded` (for `linear`)."""
        groups = [[layer.weight for layer in group] for group in self._layers]
        weights = list(chain(*groups))
        dtype = None if "rounded" in vars(weights[0]) else _cast_to(weights)
        have_versions = all(isinstance(weight, nn.Parameter) and not weight.is_inference() for weight in weights)
        if dtype is None or not have_versions:
            yield  # weights have their copies already, nothing is cast, or changes of a weight are not counted
            return
        if len(weights) != len(self._weights) or any(
            weight is not other
            or (self._copies[id(weight)].dtype, self._copies[id(weight)].device) != (dtype, weight.device)
            for weight, other in zip(weights, self._weights, strict=True)
        ):
            self._weights, self._copies, self._made_of = weights, {}, {}
            for group in groups:
                rows, device = list(map(len, group)), group[0].device
                copies = torch.empty(sum(rows), group[0].shape[-1], dtype=dtype, device=device).split(rows)
                self._copies.update(zip(map(id, group), copies, strict=True))
        self.refresh()
        READ.add(self)
        for weight in weights:
            weight.rounded = self._copies[id(weight)]
        try:
            yield
        finally:
            for weight in weights:
                vars(weight).pop("rounded", None)  # a weight that two layers share is there twice

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies again the weights that have changed."""
        now = _stamps(self._weights)
        stale = [weight for weight in self._weights if self._made_of.get(id(weight)) != now[id(weight)]]
        if not stale:
            return
        torch._foreach_copy_([self._copies[id(weight)] for weight in stale], stale)
        if stale[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a capture only records the copy, which replays make later: no copy is up to date yet
        self._made_of = now

    def of(self, weight: Tensor) -> Tensor | None:
        """The copy of a weight, for an optimizer to write; None where there is none."""
        return self._copies.get(id(weight))

    def follow(self, weights: Iterable[Tensor]) -> None:
        """Called by an optimizer that has stepped these weights and written their copies: notes that they are equal."""
        self._made_of |= _stamps(weight for weight in weights if id(weight) in self._copies)
