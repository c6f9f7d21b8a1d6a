"""Cross-entropy of a language model's head, without the logits of the whole batch.

The head and the loss are one function here: for a chunk of tokens it makes the logits, their loss and, in the same
pass, their gradient, and forgets them. Nothing of size tokens x vocabulary is ever held, and no matmul is made twice.
The idea: Wijmans et al. 2024, "Cut Your Losses" (arXiv 2411.09009); Hsu et al. 2024, "Liger Kernel" (arXiv 2410.10989).

Legend: N tokens, C tokens of a chunk, V vocabulary, M d_model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmsys.attention.compiled import compile_for, layout_key, why_no_compiler

CHUNK_LOGITS = 2**28  # at once: 512 MiB in bfloat16
IGNORED = -100  # targets of this value count for nothing, as in torch


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """mean over tokens of cross_entropy(hidden weightᵀ, targets): a scalar in float32, differentiable once.

    hidden (..., M), weight (V, M), targets (...) of class indices, those of IGNORED left out. Matmuls run in the
    autocast dtype when autocast is on, else in hidden's; the loss in float32. `chunk`: tokens at once, by default as
    many as keep the logits at CHUNK_LOGITS. ValueError when the shapes do not fit.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1] or weight.dim() != 2:
        raise ValueError(
            "hidden (..., M), weight (V, M) and targets (...) must fit together; got shapes"
            f" {tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"{chunk=} must be at least one token")
    chunk = chunk or max(1, CHUNK_LOGITS // weight.shape[0])
    return _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        with torch.autocast(device, enabled=False):
            operand = weight.to(dtype)  # (V, M)
            total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
            d_hidden = torch.empty_like(hidden) if needs_hidden else None
            d_weight = torch.zeros_like(weight) if needs_weight else None
            for start in range(0, len(hidden), chunk):
                rows, labels = hidden[start : start + chunk].to(dtype), targets[start : start + chunk]
                logits = rows @ operand.mT  # (C, V)
                loss, d_logits = _loss_and_gradient(logits, labels)
                total += loss
                if d_hidden is not None:
                    d_hidden[start : start + chunk] = d_logits @ operand
                if d_weight is not None:
                    _add_product(d_weight, d_logits.mT, rows)
            scale = 1 / (targets != IGNORED).sum()  # of a batch without targets the mean is NaN, as in torch
        ctx.save_for_backward(scale, *(x for x in (d_hidden, d_weight) if x is not None))
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Only here do 1 / N and a loss scale meet the gradients: before, float16 would round the small ones to zero.
        scale, *gradients = ctx.saved_tensors
        kept = iter([(x.to(grads[0].dtype) * (scale * grads[0])).to(x.dtype) for x in gradients])
        return *(next(kept) if need else None for need in ctx.needs_input_grad[:2]), None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, on CUDA accumulated in total's dtype also where a and b are narrower."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and its gradient by the logits (C, V) in their dtype."""
    if logits.is_cuda and why_no_compiler("cuda") is None:
        return compile_for(_plain_loss_and_gradient, layout_key(logits, labels))(logits, labels)
    return _plain_loss_and_gradient(logits, labels)


def _plain_loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = wide.logsumexp(dim=-1, keepdim=True)  # (C, 1)
    counted = (labels != IGNORED)[:, None]
    label = labels.clamp_min(0)[:, None]
    loss = torch.where(counted, lse - wide.gather(1, label), 0).sum()
    hit = torch.arange(logits.shape[1], device=logits.device) == label  # (C, V)
    d_logits = torch.where(counted, (wide - lse).exp() - hit.to(wide.dtype), 0)
    return loss, d_logits.to(logits.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The same from logits (..., V) that are there anyway: torch's own, in float32 whatever their dtype."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED)
