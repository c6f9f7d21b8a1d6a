"""Calls that torch.compile does not trace. They are imported where they are made, since a mark of torch's imports the
compiler, which takes about a second."""

from typing import Any

import torch
from torch import Tensor

from lmsys.attention.pattern import Pattern


@torch.compiler.disable
def under_pattern(eager: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, pattern: Pattern) -> Tensor:
    """Calls an autograd Function with a pattern, which no custom operator takes: torch.compile's graph ends here."""
    return eager.apply(q, k, v, pattern.causal, scale, None, pattern)
