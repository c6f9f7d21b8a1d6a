"""Cases of a benchmark, the state of a row while it is measured, and what was measured. Imports no torch.

A *row* is an implementation under test. A benchmark subclasses `Case` with its axes as fields. `lmsys.bench.trial`
makes a `Measurement` for each case, and a `Candidate` for each row: more exactly, for all cases of one `Benchmark.key`.
The benchmark's hooks get the case and the `Candidate`. A fact of every case that is known before it runs is added to
`facts_of`, and declared in `fields.COMMON`.

The *budget* of an error is the largest error that is allowed. Benchmarks give errors over budgets: 1 or less is right.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lmsys.bench.fields import Record
from lmsys.measure.step import Failure, Kept
from lmsys.registry import Entry


@dataclass(frozen=True)
class Case:
    """One test, in plain values: a row, and the axes (such as length or dtype) that a subclass adds as fields.

    section     the name of the case's grid, which begins its id; a grid has the values of each axis (`fields.Grid`)
    entry       the row, as its table has it
    device      "cpu" or "cuda"
    group       cases with equal groups share inputs, and run one after another
    comparison  cases with equal comparisons are sampled together, so that their times can be compared
    id          the test's id, by which a record is found again
    """

    section: str
    entry: Entry
    device: str

    @property
    def axes(self) -> Record:
        """The subclass's own fields, which go into the record as they are."""
        return {axis.name: getattr(self, axis.name) for axis in fields(self)[len(fields(Case)) :]}

    @property
    def impl(self) -> str:
        """The name of the row in records and reports; subclasses may add its options to it."""
        return self.entry.name

    @property
    def label(self) -> str:
        """The name of the row in tables and plots."""
        return self.entry.label or self.entry.name

    @property
    def peer(self) -> bool:
        """True if the row is not ours, but code of others to compare with."""
        return self.entry.peer

    @property
    def comparison(self) -> str:
        return "-".join([self.section] + list(map(str, self.axes.values())))

    @property
    def group(self) -> str:
        return self.comparison

    @property
    def id(self) -> str:
        return f"{self.comparison}-{self.impl}"


def facts_of(case: Case) -> Record:
    """The fields of a case's record that are known before it runs, but for the benchmark's name."""
    return {
        "id": case.id,
        "section": case.section,
        "impl": case.impl,
        "label": case.label,
        "peer": case.peer,
        **case.axes,
        "device": case.device,
    }


@dataclass
class Candidate:
    """The state of a row while the runner opens, checks and times it.

    case         the first of its cases
    outcome, reason  "ok" so far, or how it failed and why
    error_ratio  the largest ratio so far of an error to its budget; None before a check
    call         the callable that `Benchmark.open` has made
    state        whatever else the benchmark's hooks keep for the row
    compile_s    seconds of the first call
    interpreted  True if the first call ran kernels in Triton's interpreter
    notes        fields of the records of all its cases
    watched      a function: watched(call, *args) calls call(*args), and returns (its result, None), or (None, how it
                 failed). The call has a deadline, and changes that it makes in the process are undone. The trial sets
                 this to `lmsys.bench.watch.Watch.watched` for the row
    """

    case: Any
    outcome: str = "ok"
    reason: str | None = None
    error_ratio: float | None = None
    call: Any = None
    state: Any = None
    compile_s: float | None = None
    interpreted: bool = False
    notes: Record = field(default_factory=dict)
    watched: Callable[..., tuple[Any, Failure | None]] = field(init=False, repr=False)

    @property
    def entry(self) -> Entry:
        return self.case.entry

    def failed(self, outcome: str, reason: str) -> None:
        """Notes how the row has failed: with an outcome of `record.OUTCOMES`, and why."""
        self.outcome, self.reason = outcome, reason

    def judge(self, ratios: Mapping[str, float], judged_as: str = "") -> None:
        """Judges errors over their budgets, by tensor: one above 1, or NaN, makes the candidate "wrong".

        judged_as  as in `verdict`
        """
        self.error_ratio, wrong = verdict(ratios, judged_as)
        if wrong:
            self.failed(*wrong)

    def attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        """The result of call(*args); where that fails, None, and the candidate has failed."""
        result, failure = self.watched(call, *args)
        if failure:
            self.failed(*failure)
        return result


@dataclass
class Measurement:
    """Results of one case: its samples, how it failed, and evidence of the checks of its timed calls.

    samples  seconds of each timed call; None if it was not timed
    failure  how its timed calls failed, if they did
    record   more fields of its record, such as those of `Benchmark.inspect`
    kept     timed calls that are still to be checked
    proof    for each timed call that was checked: its number, the seed of its inputs, its errors over their budgets,
             and the evidence that the check has left. From this in the record `lmsys verify` checks the call again
    """

    samples: list[float] | None = None
    failure: Failure | None = None
    record: Record = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    proof: list[Record] = field(default_factory=list)


def verdict(ratios: Mapping[str, float], judged_as: str = "") -> tuple[float | None, Failure | None]:
    """(the worst error ratio, None if it is NaN or inf; a failure if it is above 1, negative or NaN, else None).

    A negative ratio counts as the worst, as NaN does: no absolute value was taken of the error, so its size is unknown.

    ratios     {tensor: its error over its budget}, of one tensor or more
    judged_as  text that is put in brackets behind the failure's reason; empty: none
    """
    name, ratio = max(ratios.items(), key=lambda item: item[1] if item[1] >= 0 else math.inf)
    worst = ratio if math.isfinite(ratio) else None
    if 0 <= ratio <= 1:
        return worst, None
    size = "holds NaN or inf" if worst is None else f"is {worst:.3g} times the allowed error"
    return worst, ("wrong", f"{name} {size}" + (f" ({judged_as})" if judged_as else ""))
