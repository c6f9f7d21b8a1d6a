"""Attention within documents that are packed into one sequence, which torch.compile does not trace.

Imported when the first documents come: `torch.compiler.disable` imports the compiler, for about a second.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lmsys.attention import Documents, Pattern
from lmsys.attention.contract import told


class Packed:
    """A row's function that lets a query see its own document alone. New for each batch, so no graph knows it."""

    def __init__(self, row: Callable[..., Tensor], documents: Documents):
        self._row, self._told = row, told(row, Pattern(causal=True, documents=documents))

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        assert causal
        return self._row(q, k, v, **self._told)
