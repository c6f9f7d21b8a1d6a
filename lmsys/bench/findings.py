"""Findings about a row beside its samples: which code ran, whether its results repeat bit for bit, its calls' energy.

`lmsys.bench.trial` calls these functions and puts what they return into the record:

    "proof": {"generator", "seed", "source": {"name", "sha256"}, "kernels": {name: hash}, "calls": [...]}
    "same_bits": {"calls", "differ": {tensor: largest difference}, "elements", "alone": {tensor: ...}, "failure"}

The proof lets others check the times (`lmsys verify`). Each of its calls is a timed call that was checked: its number
among the samples, the draw of its inputs, the key that says which parts of its result were judged, the errors over
their budgets, and the evidence that its benchmark left. Kernels that Triton's interpreter runs are noticed here, too:
such rows are verified, and never timed.

`differ` has the tensors whose bits differed from the first call's. The `elements` of the batch were then called alone;
`alone` has the tensors, of those that repeat, whose bits then differed. Without elements it was not asked. A row that
does not repeat is not wrong.

Energy is measured on request (--energy), after a case's samples and its memory, with nothing else on the device.
"""

import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from lmsys.bench import fields, instruments
from lmsys.bench.benchmark import Benchmark
from lmsys.bench.case import Candidate
from lmsys.measure import clock, energy, repeats
from lmsys.measure.step import Failure, Step
from lmsys.registry import Entry

OF_OTHERS = "energy is measured of calls that the bench's own process makes again and again: here others make them"


def source_of(entry: Entry) -> fields.Record:
    """{"name", "sha256"} of the file that a row's implementation stands in; {} if there is no such file."""
    try:
        path = Path(inspect.getsourcefile(inspect.unwrap(entry.load())) or "")
        return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except (ImportError, OSError, TypeError):
        return {}


@contextmanager
def loaded_kernels() -> Iterator[dict[str, str]]:
    """Within: a dict that gets the name and Triton's hash of each kernel when the process first loads it."""
    hashes: dict[str, str] = {}

    def note(module: Any, function: Any, name: str, group: Any, hash: str) -> None:
        hashes[name] = hash

    with ExitStack() as stack:
        if importlib.util.find_spec("triton"):
            import triton

            hooks = triton.knobs.runtime.kernel_load_end_hook
            hooks.add(note)
            stack.callback(hooks.remove, note)
        yield hashes


@contextmanager
def interpreted_kernels() -> Iterator[list[Any]]:
    """Within: a list that gets every kernel that Triton's interpreter runs."""
    launched: list[Any] = []
    with ExitStack() as stack:
        if importlib.util.find_spec("triton"):
            from triton.runtime.interpreter import GridExecutor

            launch = GridExecutor.__call__

            def noted(self: Any, *args: Any, **options: Any) -> Any:
                launched.append(self)
                return launch(self, *args, **options)

            stack.enter_context(mock.patch.object(GridExecutor, "__call__", noted))
        yield launched


def same_bits(benchmark: Benchmark, candidate: Candidate, setup: Any, seconds: float) -> fields.Record:
    """The record's field `same_bits`, on the inputs as they stand; more calls while `seconds` are left.

    A failure costs this finding alone, and stands in its `failure`.
    """
    record: fields.Record = {"calls": 0, "differ": {}, "elements": [], "alone": {}, "failure": None}
    call = partial(benchmark.outputs, candidate, setup)
    again, failure = candidate.watched(repeats.repeated, call, seconds)
    if failure:
        return record | {"failure": failure[1]}
    first, record["calls"], record["differ"] = again
    whole = {name: x for name, x in first.items() if name not in record["differ"]}

    def alone() -> fields.Record:
        """The elements that were called alone, the first and the last, and what was not as in the whole batch."""
        batch, differ = benchmark.batch_of(candidate), dict[str, float]()
        elements = [0, batch - 1] if batch > 1 else []
        for element in elements:
            sizes = repeats.apart(call(element), {name: x[[element]] for name, x in whole.items()})
            differ |= {name: max(size, differ.get(name, 0.0)) for name, size in sizes.items()}
        return {"elements": elements, "alone": differ}

    finding, failure = candidate.watched(alone)
    return record | ({"failure": failure[1]} if failure else finding)


def energy_fields(
    candidate: Candidate,
    step: Callable[[], Step],
    runner: instruments.Instruments,
    impossible: Callable[[float], Failure | None],
    tokens: int | None,
) -> fields.Record:
    """The record's fields on the energy of a step's calls, or `energy_note`, which says why there is none.

    impossible  says why calls cannot take so few seconds each, or None
    tokens      how many tokens a call works on, for the energy of a token
    """
    if why_not := runner.sensors.why_no_joules:
        return {"energy_note": why_not}

    def wait() -> None:
        clock.synchronize(runner.settings.device)
        runner.heartbeat.renew(runner.settings.deadline_s)  # the deadline is that of a few calls

    measured, failure = candidate.watched(lambda: energy.of_step(step(), runner.sensors, wait))
    failure = failure or impossible(measured.call_s)
    return {"energy_note": failure[1]} if failure else measured.record(tokens)
