"""Repeats a call on the same inputs: do the results have the same bits, and how far apart are they if not?

`lmsys.bench.trial` and `lmsys.check.attention` call `repeated` and `apart`. A call returns tensors by name. To support
tensors with elements of another size, add an integer dtype of that size to BITS.
"""

import time
from collections.abc import Callable, Mapping

import torch

LEAST, MOST = 3, 10  # the least and the most calls; not 2, as two calls may agree by chance
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # {bytes of an element: integers of its size}
Outputs = Mapping[str, torch.Tensor]


def repeated(
    call: Callable[[], Outputs], seconds: float = 0.0
) -> tuple[dict[str, torch.Tensor], int, dict[str, float]]:
    """(copies of the first call's tensors, the number of calls, the largest differences from these copies).

    The differences are by name, and only of tensors whose bits differed in some call. `call` is called at least LEAST
    times, then more often until `seconds` have passed, and MOST times at most.
    """
    first = {name: x.detach().clone() for name, x in call().items()}
    differ: dict[str, float] = {}
    calls, end = 1, time.perf_counter() + seconds
    while calls < LEAST or (calls < MOST and time.perf_counter() < end):
        differ |= {name: max(size, differ.get(name, 0.0)) for name, size in apart(call(), first).items()}
        calls += 1
    return first, calls, differ


def apart(outputs: Outputs, expected: Outputs) -> dict[str, float]:
    """{name: the largest difference among finite elements} of those outputs whose bits are not the expected ones."""
    return {name: _distance(outputs[name], x) for name, x in expected.items() if not _same(outputs[name], x)}


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    bits = BITS[x.element_size()]
    return torch.equal(x.detach().view(bits), y.view(bits))  # as bits NaN equals itself, and -0.0 differs from 0.0


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference between finite elements of two tensors."""
    # In parts of 2**24 elements, so that the copies in float64 need little memory.
    parts = zip(*(x.detach().reshape(-1).split(2**24) for x in (first, second)), strict=True)
    return max((x.double() - y.double()).abs().nan_to_num(0.0, posinf=0.0).max().item() for x, y in parts)
