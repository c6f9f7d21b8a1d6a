"""Two runs of the same cases compared: which became faster or slower, which did not, and which nobody can tell.

Rows of one run took turns, rows of two runs did not, and the clock of a machine moves from run to run. So a row is
compared by its ratio, round by round, to an anchor: a row that ran beside it both times, somebody else's where there is
one. A row without an anchor has no verdict; nor has a peer beside our rows alone, since those are what changes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lmsys.bench.fields import Record
from lmsys.measure.shift import Shift, between, discoveries

FASTER, SLOWER, SAME, UNCLEAR, BROKEN, MENDED = "faster", "slower", "same", "unclear", "broken", "mended"
VERDICTS = (BROKEN, SLOWER, FASTER, MENDED, UNCLEAR, SAME)  # in the order of how much they matter
BAD = (BROKEN, SLOWER)
MARGIN = 0.05  # of two runs: clocks that moved are within it
FALSE_DISCOVERIES = 0.05  # the expected share of changes that are none
FAILED = ("wrong", "error", "oom")
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Change:
    """One case in two runs. `shift` is None where it was not timed in both; `beside`: the anchor, "" without one."""

    old: Record
    new: Record
    verdict: str = UNCLEAR
    beside: str = ""
    shift: Shift | None = None

    @property
    def ratio(self) -> float | None:
        """New time over old, as its anchor was in both."""
        return math.exp(self.shift.estimate) if self.shift else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return (math.exp(self.shift.interval[0]), math.exp(self.shift.interval[1])) if self.shift else None


def compare(
    old: Iterable[Record], new: Iterable[Record], margin: float = MARGIN, between_runs: float = 0.0
) -> list[Change]:
    """The cases that were timed in both runs, or ended otherwise in one; those that matter most first.

    margin        a change of less than this share is none
    between_runs  what estimates of two runs of one commit differ by, as a standard deviation: `spread_between`; of the
                  cases that `--repeat` measured, theirs counts where it is more, and what is usual among them
    """
    ended: list[Change] = []
    alone: list[Change] = []
    judged: list[tuple[Change, Shift]] = []
    old, new = list(old), list(new)
    usual = _root_mean_square([one["between_runs"] for one in (*old, *new) if one.get("between_runs") is not None])
    for pair in _pairs(_by_key(old), _by_key(new)):
        own = [one.get("between_runs") or 0.0 for one in pair[:2]]
        if change := _ended(*pair):
            ended.append(change)
        elif (change := _timed(*pair, max(between_runs, usual, *own))).shift:
            if change.beside:
                judged.append((change, change.shift))
            else:
                alone.append(change)
    edge = math.log1p(margin)
    counted = discoveries([shift.p_beyond(edge) for _, shift in judged], FALSE_DISCOVERIES)
    told = [
        replace(change, verdict=_verdict(shift, edge, is_change))
        for (change, shift), is_change in zip(judged, counted, strict=True)
    ]
    return sorted([*ended, *told, *alone], key=_weight)


def spread_between(runs: Sequence[Iterable[Record]], name: str | None = None) -> float:
    """The standard deviation of what two runs of one commit differ by, over all cases or of the case of that id.

    0 of fewer than two runs, and of cases without an anchor.
    """
    known = [_by_key(run) for run in runs]
    pairs = [pair for one, other in zip(known, known[1:], strict=False) for pair in _pairs(one, other)]
    found = [_timed(*pair, 0.0) for pair in pairs if name in (None, pair[1]["id"])]
    return _root_mean_square([one.shift.estimate for one in found if one.shift and one.beside])


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else 0.0


def _verdict(shift: Shift, edge: float, is_change: bool) -> str:
    if is_change:
        return SLOWER if shift.estimate > 0 else FASTER
    low, high = shift.interval
    return SAME if -edge <= low and high <= edge else UNCLEAR


def _weight(change: Change) -> tuple[int, float, str]:
    return VERDICTS.index(change.verdict), -abs(change.shift.estimate if change.shift else 0.0), str(change.new["id"])


def _key(one: Record) -> Key:
    return tuple(one.get(name) for name in ("benchmark", "section", "id", "memory_limit_bytes"))


def _by_key(records: Iterable[Record]) -> dict[Key, Record]:
    return {_key(one): one for one in records}


Pair = tuple[Record, Record, list[tuple[Record, Record]]]


def _pairs(old: dict[Key, Record], new: dict[Key, Record]) -> list[Pair]:
    """Each case of both, with the cases that were sampled beside it both times."""
    together: dict[tuple[Any, Any], list[tuple[Record, Record]]] = {}
    both = [(old[key], one) for key, one in new.items() if key in old]
    for pair in both:
        if all(one.get("samples_s") for one in pair):
            together.setdefault((pair[0].get("comparison"), pair[1].get("comparison")), []).append(pair)
    return [(*pair, together.get((pair[0].get("comparison"), pair[1].get("comparison")), [])) for pair in both]


def _ended(old: Record, new: Record, _: Any) -> Change | None:
    if new["outcome"] in FAILED and old["outcome"] == "ok":
        return Change(old, new, BROKEN)
    return Change(old, new, MENDED) if old["outcome"] in FAILED and new["outcome"] == "ok" else None


def _timed(old: Record, new: Record, together: Sequence[tuple[Record, Record]], between_runs: float) -> Change:
    """The shift beside the anchor whose ratio to this row was steadiest, or without one of the times themselves."""
    if not (old.get("samples_s") and new.get("samples_s")):
        return Change(old, new)
    others = [pair for pair in together if pair[0]["impl"] != old["impl"]]
    anchors = [pair for pair in others if pair[0]["peer"]] or ([] if old["peer"] else others)
    found = [(_ratios(old, then), _ratios(new, now), str(then["impl"])) for then, now in anchors]
    found = found or [(_logarithms(old), _logarithms(new), "")]
    before, after, anchor = min(found, key=lambda one: max(_width(one[0]), _width(one[1])))
    shift = between(before, after)
    return Change(old, new, UNCLEAR, anchor, shift and shift.widened(between_runs))


def _logarithms(one: Record) -> list[float]:
    return [math.log(sample) for sample in one["samples_s"]]


def _ratios(ours: Record, theirs: Record) -> list[float]:
    """Round by round: they began together, and the faster row may have more rounds."""
    return [a - b for a, b in zip(_logarithms(ours), _logarithms(theirs), strict=False)]


def _width(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(one - middle) for one in values)
