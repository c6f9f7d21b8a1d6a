"""Calls repeated on the same inputs: do their results have the same bits, and how far apart are they if not?

`lmsys.bench.findings.same_bits` calls both functions. Knows no kernel.
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LEAST, MOST = 3, 10  # number of calls: the first two may agree by chance
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Outputs = Mapping[str, Tensor]


def repeated(call: Callable[[], Outputs], seconds: float = 0.0) -> tuple[dict[str, Tensor], int, dict[str, float]]:
    """(copies of the first call's tensors, the number of calls, how far at most each tensor was from its copy where
    its bits differed, by name). At least LEAST calls, one right behind another; more while `seconds` are left, at most
    MOST."""
    first = {name: x.detach().clone() for name, x in call().items()}
    differ: dict[str, float] = {}
    calls, end = 1, time.perf_counter() + seconds
    while calls < LEAST or (calls < MOST and time.perf_counter() < end):
        differ |= {name: max(size, differ.get(name, 0.0)) for name, size in apart(call(), first).items()}
        calls += 1
    return first, calls, differ


def apart(outputs: Outputs, expected: Outputs) -> dict[str, float]:
    """The largest difference of each expected tensor whose bits are not those found, among its finite elements."""
    return {name: _distance(outputs[name], x) for name, x in expected.items() if not _same(outputs[name], x)}


def _same(x: Tensor, y: Tensor) -> bool:
    bits = BITS[x.element_size()]
    return torch.equal(x.detach().view(bits), y.view(bits))  # NaN is itself, and -0.0 is not 0.0


def _distance(first: Tensor, second: Tensor) -> float:
    parts = zip(*(x.detach().reshape(-1).split(2**24) for x in (first, second)), strict=True)
    return max((x.double() - y.double()).abs().nan_to_num(0.0, posinf=0.0).max().item() for x, y in parts)
