"""Questions whose answer is a tensor, each judged by float64, with the mistakes that are known.

A result is right when it differs by less than 1e-4 of the largest value, as the course's tests have it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys import draws
from lmsys.check import places
from lmsys.check.question import Fault, Question

Questions = Iterator[tuple[Question, bool]]  # and whether each goes beyond the handout
ROOM = 1e-4


def drawn(about: str, *shape: int) -> Tensor:
    return draws.values(draws.key(0, about), 0, math.prod(shape)).view(shape)


def asked(
    about: str,
    call: Callable[[], Any],
    expected: Tensor,
    mistakes: Mapping[str, Tensor] | None = None,
    beyond: bool = False,
) -> tuple[Question, bool]:
    """A question whose answer is a tensor. mistakes: by a mistake in words, the answer that it gives."""
    return Question(about, partial(_fault, call, expected, mistakes or {})), beyond


def _fault(call: Callable[[], Any], expected: Tensor, mistakes: Mapping[str, Tensor]) -> Fault | None:
    x = call()
    if not isinstance(x, Tensor) or x.shape != expected.shape:
        kind = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__}"
        return Fault(f"  the result is {kind}; expected a tensor of shape {tuple(expected.shape)}")
    if (error_ratio := _apart(x.detach(), expected)) <= 1:
        return None
    at = places.worst(x.detach().double(), expected.double())
    text = f"  at [{', '.join(map(str, at))}]: expected {expected[at].item():.6g}, got {x[at].item():.6g}"
    mistake = next((words for words, other in mistakes.items() if _apart(x.detach(), other) <= 1), None)
    return Fault.explained(text, mistake, error_ratio)


def _apart(x: Tensor, y: Tensor) -> float:
    """The largest difference over what is allowed; NaN is equal to NaN, and infinitely far from numbers."""
    if x.shape != y.shape or not torch.equal(x.isnan(), y.isnan()):
        return math.inf
    x, y = x.double().nan_to_num(0.0), y.double().nan_to_num(0.0)
    return float((x - y).abs().max()) / (ROOM * max(1.0, float(y.abs().max())))
