"""Activation, softmax and loss of a language model, as functions of tensors.

Legend: V classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.config import IGNORED
from lmsys.model.ids import check_ids
from lmsys.model.loss import LossOptions, counts_of, reduced


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), element by element (Elfwing et al. 2017, arXiv 1702.03118)."""
    return F.silu(x)


def softmax(x: Tensor, dim: int) -> Tensor:
    """exp(x) divided by its sum along `dim`, of x's shape and dtype.

    The largest element is subtracted before, so that no exponential overflows.
    """
    return torch.softmax(x, dim)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_z_loss: bool = False,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
) -> Any:
    """The mean of -log softmax(logits)[target]: logits (..., V), targets (...) of class indices -> a scalar.

    Targets of `ignore_index` count for nothing. The dtype is that of the logits, at least float32. ValueError when the
    shapes do not fit, and on a CPU for other targets outside 0 to V - 1. The other options are those of
    `linear_cross_entropy`, which makes the logits, too, and holds only some of them at once.
    """
    if logits.dim() < 1:
        raise ValueError("logits (..., V) must have at least one dimension; got a scalar")
    options = LossOptions(reduction, label_smoothing, z_loss, softcap, ignore_index)
    check_ids("targets", targets, "class indices", [tuple(logits.shape[:-1])], logits.shape[-1], but=ignore_index)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
    counts = counts_of(token_weights, targets, options, wide.dtype)
    wide = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    losses = F.cross_entropy(
        wide,
        targets.flatten().long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    counted = targets.flatten() != ignore_index
    z_losses = z_loss * wide.logsumexp(dim=-1).square().where(counted, 0) if z_loss else torch.zeros_like(losses)
    loss = reduced(losses + z_losses, counts, reduction)
    return (loss, reduced(z_losses, counts, reduction).detach()) if return_z_loss else loss
