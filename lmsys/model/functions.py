"""Activation, softmax and loss of a language model, as functions of tensors.

Legend: V classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.config import IGNORED
from lmsys.model.ids import check_ids


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), element by element (Elfwing et al. 2017, arXiv 1702.03118)."""
    return F.silu(x)


def softmax(x: Tensor, dim: int) -> Tensor:
    """exp(x) divided by its sum along `dim`, of x's shape and dtype.

    The largest element is subtracted before, so that no exponential overflows.
    """
    return torch.softmax(x, dim)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log softmax(logits)[target]: logits (..., V), targets (...) of class indices -> a scalar.

    Targets of -100 count for nothing. The dtype is that of the logits, at least float32. ValueError when the shapes do
    not fit, and on a CPU for other targets outside 0 to V - 1. `linear_cross_entropy` makes the logits, too, and holds
    only some of them at once.
    """
    if logits.dim() < 1:
        raise ValueError("logits (..., V) must have at least one dimension; got a scalar")
    check_ids("targets", targets, "class indices", [tuple(logits.shape[:-1])], logits.shape[-1], but=IGNORED)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2) if wide.dim() > 1 else wide[None], targets.flatten().long())
