"""Calls that torch.compile does not trace. They are imported where they are made, since a mark of torch's imports the
compiler, which takes about a second."""

from typing import Any

import torch
from torch import Tensor

from lmsys.attention.lse import NEEDS, attend_with_lse
from lmsys.attention.pattern import Pattern


@torch.compiler.disable
def under_pattern(eager: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, pattern: Pattern) -> Any:
    """Calls an autograd Function with a pattern, which no custom operator takes: torch.compile's graph ends here."""
    if pattern.options.keys() & NEEDS:
        return attend_with_lse(eager.kernels, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, pattern)
    return eager.apply(q, k, v, pattern.causal, scale, None, pattern)
