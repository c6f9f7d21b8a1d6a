"""Measures of a row besides its samples: which code ran, and whether its results repeat bit for bit.

`lmsys.bench.trial` calls these functions for each row and builds parts of its record from them. A new measure is a
function here, a call in trial.py and a `Field` in `fields.COMMON`.

- `source_of` and `loaded_kernels` give "source" and "kernels" of the record's "proof". With its "calls", which trial.py
  collects, the proof lets others check the times (`lmsys verify`).
- `interpreted_kernels` notices kernels that Triton's interpreter runs: such rows are verified, and never timed.
- `same_bits` returns the record's "same_bits".
"""

import hashlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from lmsys.bench import fields
from lmsys.bench.benchmark import Benchmark
from lmsys.bench.case import Candidate
from lmsys.measure import repeats
from lmsys.registry import Entry


def source_of(entry: Entry) -> fields.Record:
    """{"name", "sha256"} of the file that defines a row's implementation; {} if there is no such file."""
    try:
        # The code of a row in a process of its own is not loaded here: its target names the file.
        path = Path(
            (entry.target.rpartition(":")[0] if entry.apart else inspect.getsourcefile(inspect.unwrap(entry.load())))
            or ""
        )
        return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except (ImportError, OSError, TypeError):
        return {}


@contextmanager
def loaded_kernels() -> Iterator[dict[str, str]]:
    """A context whose dict {name: Triton's hash} gets each kernel that the process first loads within it.

    It stays empty where triton is not installed.
    """
    hashes: dict[str, str] = {}

    # Triton calls it with these arguments after it has loaded a kernel.
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
    """A context whose list gets every kernel that Triton's interpreter runs within it."""
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
    """The record's field `same_bits`, found by repeated calls on the present inputs for about `seconds`:

    calls     how many calls were compared
    differ    {tensor: largest difference} of the tensors whose bits differed from the first call's
    elements  the elements of the batch that were then called alone; [] if a batch cannot be divided
    alone     {tensor: largest difference} of the tensors that repeat, but had other bits when called alone
    failure   why this could not be found, or None: the row's other results stay

    A row whose calls differ is not wrong.
    """
    record: fields.Record = {"calls": 0, "differ": {}, "elements": [], "alone": {}, "failure": None}
    call = partial(benchmark.outputs, candidate, setup)
    again, failure = candidate.watched(repeats.repeated, call, seconds)
    if failure:
        return record | {"failure": failure[1]}  # (outcome, reason): the reason
    first, record["calls"], record["differ"] = again
    whole = {name: x for name, x in first.items() if name not in record["differ"]}

    def alone() -> fields.Record:
        """`elements` and `alone`: calls the first and the last element of the batch alone."""
        batch, differ = benchmark.batch_of(candidate), dict[str, float]()
        elements = [0, batch - 1] if batch > 1 else []
        for element in elements:
            sizes = repeats.apart(call(element), {name: x[[element]] for name, x in whole.items()})
            differ |= {name: max(size, differ.get(name, 0.0)) for name, size in sizes.items()}
        return {"elements": elements, "alone": differ}

    finding, failure = candidate.watched(alone)
    return record | ({"failure": failure[1]} if failure else finding)
