"""What torch.compile does not trace. Imported where it is called: a mark of torch's imports the compiler, for about a
second."""

from typing import Any

import torch
from torch import Tensor

from lmsys.attention.pattern import Pattern


@torch.compiler.disable
def under_pattern(eager: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, pattern: Pattern) -> Tensor:
    """Calls an autograd Function with a pattern, which no custom operator takes: torch.compile's graph ends here."""
    return eager.apply(q, k, v, pattern.causal, scale, None, pattern)
