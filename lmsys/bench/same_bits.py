"""Repeatability of a row: the same bits on the same inputs, and for a part of the batch alone as in the whole of it.

    "same_bits": {"calls", "differ": {tensor: largest difference}, "elements", "alone": {tensor: ...}, "failure"}

`differ` has the tensors whose bits were not those of the first call. The `elements` of the batch were called alone, and
of what repeats `alone` has the tensors that then had other bits; without elements nobody has asked. A row that does not
repeat is not wrong.
"""

from functools import partial
from typing import Any

from torch import Tensor

from lmsys.bench.benchmark import Benchmark, Candidate
from lmsys.bench.fields import Record
from lmsys.measure.repeats import apart, repeated


def same_bits(benchmark: Benchmark, candidate: Candidate, setup: Any, seconds: float) -> Record:
    """The record's field, on the inputs as they stand. What fails here costs this finding only: `failure` says why."""
    found: Record = {"calls": 0, "differ": {}, "elements": [], "alone": {}, "failure": None}
    call = partial(benchmark.outputs, candidate, setup)
    repeats, failure = candidate.watched(repeated, call, seconds)
    if failure:
        return found | {"failure": failure[1]}
    first, found["calls"], found["differ"] = repeats
    stable = {name: x for name, x in first.items() if name not in found["differ"]}
    alone, failure = candidate.watched(_alone, benchmark, candidate, call, stable)
    return found | ({"failure": failure[1]} if failure else alone)


def _alone(benchmark: Benchmark, candidate: Candidate, call: Any, whole: dict[str, Tensor]) -> Record:
    """The elements that were called alone, the first and the last, and what was not as in the `whole` batch."""
    batch = benchmark.batch_of(candidate)
    elements = [0, batch - 1] if batch > 1 else []
    differ: dict[str, float] = {}
    for element in elements:
        part = {name: x[element : element + 1] for name, x in whole.items()}
        for name, size in apart(call(element), part).items():
            differ[name] = max(size, differ.get(name, 0.0))
    return {"elements": elements, "alone": differ}
