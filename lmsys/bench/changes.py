"""Compares two runs of the same cases: says of each case if it became faster or slower, is the same, or is unclear.

`lmsys report --before` calls `compare`, and a run with --against calls `compare_in_turns`: both return a list of
`Change`, one for each case that can be compared, with a verdict (VERDICTS). A run with --repeat, which measures each
case in several processes, calls `spreads_between`: how far do times of one state of the code differ?

A *row* is an implementation under test; a *round* is one sample of each row of a comparison. Rows of one run take
turns, rows of two runs do not, and the clock of a machine moves from run to run. So a row is compared by its ratio,
round by round, to an *anchor*: a peer, somebody else's row, that took turns with it in both runs. Without an anchor,
`ratio` is that of the plain times, and the verdict on a case that was right in both runs is "unclear": the clock may
have moved. A row of ours cannot be the anchor, since it may have changed itself.

A row that took turns with its own earlier state (--against) needs no anchor: the ratio of the two, round by round, is
the change.

A change is an estimate with an error (`Shift`). Both come from the ranks of times (their places in sorted order), so
that a few slow rounds do not move them. Source: Hodges and Lehmann 1963, "Estimates of Location Based on Rank Tests".
Intervals invert the rank test of Mann and Whitney or, for rows that took turns, that of Wilcoxon. Neighbouring rounds
resemble one another, so they count as fewer independent rounds. This widens the error, and is why intervals are those
of Student's t distribution and not of the normal one. Where noise changes so slowly that all rounds resemble one
another, cases that have not changed may be called changed more often than FALSE_DISCOVERIES says.

To change a threshold, edit the constants below; the margin of `--against` is `MARGIN_IN_TURNS` in results.py. A new
verdict is a constant, a place in VERDICTS (and in BAD, if it is to fail a comparison), a case in `_verdict` or
`_change`, and a sentence in MEANINGS of `lmsys.reports.against`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, starmap
from statistics import NormalDist, median
from typing import Any

import numpy as np

from lmsys.bench import fields, record

FASTER, SLOWER, SAME, UNCLEAR, BROKEN, MENDED, ONLY_NOW = (
    "faster",
    "slower",
    "same",
    "unclear",
    "broken",
    "mended",
    "only now",  # it is right, and could not be run before
)
VERDICTS = (BROKEN, SLOWER, FASTER, MENDED, ONLY_NOW, UNCLEAR, SAME)  # in the order of how much they matter
BAD = (BROKEN, SLOWER)
# A smaller change between two runs counts as none: clocks that move from run to run change times by less.
MARGIN = 0.05
FALSE_DISCOVERIES = 0.05  # the expected share of false ones among the verdicts "faster" and "slower"
MOST_LINES = 20  # the most changes that are listed in a terminal
LARGEST_LOGARITHM = 700.0  # math.exp of a larger logarithm overflows
Z = NormalDist().inv_cdf(0.975)  # half a two-sided interval of 95 %, in standard errors
FEWEST_ROUNDS = 5  # with fewer rounds there is no estimate
MOST_ROUNDS = 1000  # only the first MOST_ROUNDS rounds count, since every pair of rounds is compared
MOST_CORRELATION = 0.98  # a larger one of neighbouring rounds counts as this: with 1, no round would be independent
Key = tuple[Any, ...]  # values of fields by which a case of one run is found in another run
Pair = tuple[fields.Record, fields.Record]  # the records of one case: of the earlier run, of the later run


@dataclass(frozen=True)
class Shift:
    """An estimate of the natural logarithm of new time over old, and its standard error.

    freedom  the degrees of freedom of the error: the number of independent rounds, less one per sample

    Student's t distribution is taken by Wallace's approximation ("Bounds on Normal Approximations to Student's and the
    Chi-Square Distributions", 1959), for intervals and p-values alike. With few degrees it is too wide: an interval by
    4 % with two, and by 38 % with one.
    """

    estimate: float
    error: float
    freedom: float = 1e6

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the 95 % confidence interval."""
        half = self.error * math.sqrt(self.freedom * math.expm1((Z * self._narrowing) ** 2 / self.freedom))
        return self.estimate - half, self.estimate + half

    @property
    def _narrowing(self) -> float:
        return (8 * self.freedom + 3) / (8 * self.freedom + 1)

    def _chance_beyond(self, distance: float) -> float:
        """The chance that an estimate lies this far, or farther, on one side of the true shift."""
        # A larger number of errors than 1e100 counts as this, whose square is no overflow.
        z = math.sqrt(self.freedom * math.log1p(min(abs(distance) / self.error, 1e100) ** 2 / self.freedom))
        return NormalDist().cdf(-math.copysign(z / self._narrowing, distance))

    def p_beyond(self, margin: float) -> float:
        """The p-value of this estimate if the true shift is no larger than the margin.

        That is the chance of an estimate at least as far from zero, on either side, where the true shift is the margin.
        """
        if self.error == 0:
            return 0.0 if abs(self.estimate) > margin else 1.0
        return sum(self._chance_beyond(abs(self.estimate) - side) for side in (margin, -margin))


def between(old: Sequence[float], new: Sequence[float]) -> Shift:
    """The shift from `old` to `new`: logarithms of times in two runs, of FEWEST_ROUNDS rounds or more each.

    The candidates for the shift are all differences new[i] - old[j].
    """
    x, y = (np.asarray(values[:MOST_ROUNDS], dtype=float) for values in (old, new))
    return _shift(
        np.subtract.outer(y, x).ravel(),
        variance=len(x) * len(y) * (len(x) + len(y) + 1) / 12,
        rounds=min(len(x), len(y)),
        samples=1 + min(len(x), len(y)) / max(len(x), len(y)),
        correlation=max(_correlation(x), _correlation(y)),
    )


def paired(differences: Sequence[float]) -> Shift:
    """The shift of two samples of FEWEST_ROUNDS rounds or more that took turns.

    differences  by round: the logarithm of the new time, less that of the old one

    The candidates for the shift are the Walsh averages: (x[i] + x[j]) / 2 for all i <= j.
    """
    x = np.asarray(differences[:MOST_ROUNDS], dtype=float)
    means = np.add.outer(x, x)[np.triu_indices(len(x))] / 2
    return _shift(
        means,
        variance=len(x) * (len(x) + 1) * (2 * len(x) + 1) / 24,
        rounds=len(x),
        correlation=_correlation(x),
    )


def _shift(candidates: np.ndarray, variance: float, rounds: int, correlation: float, samples: float = 1.0) -> Shift:
    """The median of all candidates for the shift; its error comes from the confidence interval of the rank test.

    variance     the variance of the rank test's statistic
    rounds       of the sample, or of the shorter one
    correlation  that of neighbouring rounds
    samples      how many samples give degrees of freedom, each as many as `rounds` gives: 2 if both have the same
                 length, fewer if one is longer, since the shorter one then makes most of the error (Welch 1947)
    """
    ordered = np.sort(candidates)
    # The test's 95 % interval runs from the candidate at `place` to the one as far from the other end: it is 2 Z errors
    # wide. Rounds that follow one another as an autoregressive process of order 1 count as fewer independent ones.
    place = max(0, math.floor(len(ordered) / 2 - Z * math.sqrt(variance)))
    error = float(ordered[-1 - place] - ordered[place]) / (2 * Z)
    independent = rounds * (1 - correlation) / (1 + correlation)
    return Shift(
        float(np.median(ordered)), error * math.sqrt(rounds / independent), max(1.0, samples * (independent - 1))
    )


def _correlation(values: np.ndarray) -> float:
    """The correlation of ranks with those of the round before, from 0 to `MOST_CORRELATION`.

    Equal values share their mean rank: ranks in the order of rounds would make a coarse clock look like a drift. In a
    sample of n rounds it comes out too low, by about (1 + 4 r) / n, which is added (Kendall, "Note on Bias in the
    Estimation of Autocorrelation", 1954).
    """
    ranks = sum(np.searchsorted(np.sort(values), values, side) for side in ("left", "right"))  # twice the mean rank
    if len(values) < FEWEST_ROUNDS or not (np.ptp(ranks[:-1]) and np.ptp(ranks[1:])):
        return 0.0
    measured = float(np.corrcoef(ranks[:-1], ranks[1:])[0, 1])
    return min(MOST_CORRELATION, max(0.0, measured + (1 + 4 * measured) / len(values)))


def discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """For each of many tests, True if it counts as a discovery: a share of at most `rate` of these is expected false.

    Source: Benjamini and Hochberg 1995, "Controlling the False Discovery Rate".
    """
    ranked = enumerate(sorted(p_values), start=1)
    most = max((p for rank, p in ranked if p <= rate * rank / len(p_values)), default=-1.0)
    return [p <= most for p in p_values]


@dataclass(frozen=True)
class Change:
    """One case in two runs.

    old, new  its records
    verdict   one of VERDICTS
    beside    the row that the case was compared with: its anchor, or with --against its own earlier state; "" if there
              was none, and then the verdict of a case that was right in both runs is "unclear"
    shift     how far the time moved; None if too few rounds were timed
    """

    old: fields.Record
    new: fields.Record
    verdict: str = UNCLEAR
    beside: str = ""
    shift: Shift | None = None

    @property
    def is_bad(self) -> bool:
        return self.verdict in BAD

    @property
    def is_changed(self) -> bool:
        return self.verdict not in (SAME, UNCLEAR)

    @property
    def disturbed(self) -> str:
        """Says in which run the machine was disturbed while the case was measured, and by what; empty for neither."""
        sides = {"before": self.old.get("disturbed"), "after": self.new.get("disturbed")}
        return "; ".join(f"disturbed {side}: {reason}" for side, reason in sides.items() if reason)

    @property
    def of_anchor(self) -> str:
        """Says that most of a change comes from the anchor, or the clock, and not from the row; empty for others."""
        if self.shift is None or self.verdict not in (FASTER, SLOWER) or self.old.get("against"):
            return ""
        own = median(self.new["samples_s"]) / median(self.old["samples_s"])
        return f"its own time is {own:.3f} of that before: rather {self.beside} has changed, or the clock" * (
            2 * abs(math.log(own)) < abs(self.shift.estimate)
        )

    @property
    def ratio(self) -> float | None:
        """New time over old, each relative to the anchor if there is one; None if too few rounds were timed."""
        return _exponential(self.shift.estimate) if self.shift else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of `ratio`."""
        return (_exponential(self.shift.interval[0]), _exponential(self.shift.interval[1])) if self.shift else None

    @property
    def texts(self) -> tuple[str, str]:
        """The ratio and its interval as they are read; empty where nothing is known."""
        if self.ratio is None or self.interval is None:
            return "", ""
        return f"{self.ratio:.3f}", f"{self.interval[0]:.3f} to {self.interval[1]:.3f}"


def compare(old: Iterable[fields.Record], new: Iterable[fields.Record], margin: float = MARGIN) -> list[Change]:
    """The changes of the cases that both runs timed, or that only one run got right; those that matter most first.

    margin  a change of less than this share counts as none

    The error of a change that has an anchor also includes how much estimates differ between two runs of one commit.
    `--repeat` measures this as a standard deviation, which records hold as `between_runs`. Here the largest of three
    such values counts: that of the old record, that of the new one, and the median of the benchmark's cases (`_usual`).
    """
    old, new = list(old), list(new)
    usual = _usual(old + new)
    return _judged(
        [
            _change(before, after, anchor, max(usual.get(after["benchmark"], 0.0), *_spreads(before, after)))
            for before, after, anchor in _pairs(old, new)
        ],
        margin,
    )


def compare_in_turns(records: Iterable[fields.Record], margin: float) -> list[Change]:
    """The changes in a run with --against, in which rows took turns with their own earlier state.

    margin  a change of less than this share counts as none
    """
    return _judged([_change(old, new) for old, new in in_turns(records)], margin)


def in_turns(records: Iterable[fields.Record]) -> list[Pair]:
    """Pairs (earlier record, today's record) of rows that took turns with their own earlier state.

    Both records of a pair have one key: the case's identity with today's id, and the comparison, since one file may
    hold two runs, whose comparisons differ.
    """
    records = list(records)
    now = {(*_key(case), case.get("comparison")): case for case in records if not case.get("against")}
    keys = [(case, (*_key(record.today(case)), case.get("comparison"))) for case in records if case.get("against")]
    return [(old, now[key]) for old, key in keys if key in now]


def look_changed(records: Iterable[fields.Record]) -> bool:
    """True where a case of a run with --against would count as changed if it were the only one.

    `lmsys.bench.results` then measures the group once more.
    """
    return any(
        change.shift and change.shift.p_beyond(math.log1p(change.old["against"]["margin"])) <= FALSE_DISCOVERIES
        for change in starmap(_change, in_turns(records))
    )


def lines(changes: Sequence[Change], margin: float) -> Iterator[str]:
    """Yields the lines of a table for a terminal: how many of each verdict there are, and what changed."""
    summary = ", ".join(
        f"{cases} {verdict}{of_them_disturbed(disturbed)}" for verdict, (cases, disturbed) in counts_of(changes).items()
    )
    yield f"{summary or 'nothing to compare'}, by a margin of {margin:.3g}"
    if changed := [change for change in changes if change.is_changed]:
        yield f"{'verdict':8} {'after / before':>14} {'95 %':>16}  case"
    for change in changed[:MOST_LINES]:
        ratio, interval = change.texts
        reasons = {MENDED: change.old["reason"], ONLY_NOW: change.old["reason"], BROKEN: change.new["reason"]}
        why = "; ".join(filter(None, (reasons.get(change.verdict), change.of_anchor, change.disturbed)))
        yield f"{change.verdict:8} {ratio:>14} {interval:>16}  {change.new['id']}" + f": {why}" * bool(why)
    if len(changed) > MOST_LINES:
        yield f"and {len(changed) - MOST_LINES} more, on the page"
    if disturbed := sum(bool(change.disturbed) for change in changes):
        yield (
            f"{disturbed} {'cases were' if disturbed > 1 else 'case was'} measured while the machine was disturbed, and"
            " the verdict may come from that: measure again"
        )


def counts_of(changes: Sequence[Change]) -> dict[str, tuple[int, int]]:
    """{verdict: (cases, how many of these were disturbed)} of the verdicts that occur, in the order of VERDICTS."""
    cases = Counter(change.verdict for change in changes)
    disturbed = Counter(change.verdict for change in changes if change.disturbed)
    return {verdict: (cases[verdict], disturbed[verdict]) for verdict in VERDICTS if cases[verdict]}


def of_them_disturbed(count: int) -> str:
    """The text behind a number of cases; empty where none of them was disturbed."""
    return f" ({count} disturbed)" if count else ""


def _judged(changes: Sequence[Change], margin: float) -> list[Change]:
    """The changes with their verdicts, the most important first.

    Cases that were not timed in both runs are left out, unless they were right in only one of the two. Among many cases
    some differ by chance: verdicts of "faster" and "slower" allow for that (`discoveries`).
    """
    edge = math.log1p(margin)  # the margin as a logarithm, as shifts are
    compared = [(change, change.shift) for change in changes if change.beside and change.shift]
    counted = discoveries([shift.p_beyond(edge) for _, shift in compared], FALSE_DISCOVERIES)
    judged = [
        replace(change, verdict=_verdict(shift, edge, is_change))
        for (change, shift), is_change in zip(compared, counted, strict=True)
    ]
    judged += [
        change
        for change in changes
        if not (change.beside and change.shift)
        and (change.verdict != UNCLEAR or (change.old.get("time_s") and change.new.get("time_s")))
    ]
    return sorted(judged, key=_importance)


def of_one_run(
    old: Iterable[fields.Record], new: Iterable[fields.Record]
) -> tuple[list[fields.Record], list[fields.Record]]:
    """The cases that only the run before has, and those that only the run after has."""
    before, after = _by_key(old), _by_key(new)
    return [before[key] for key in before if key not in after], [after[key] for key in after if key not in before]


def spreads_between(runs: Sequence[Iterable[fields.Record]]) -> dict[str, float]:
    """{case id: standard deviation of the difference between the case's estimates in two successive runs}.

    The estimate is the logarithm of the case's time over that of its anchor. In runs with `--against` it is the
    logarithm of today's time over the earlier one, and the id is today's.
    """
    by_run = list(map(list, runs))
    # `shifts`: the differences of each case's estimate from run to run, by the case's id.
    if any(case.get("against") for case in chain.from_iterable(by_run)):
        estimates = _estimates(starmap(_change, chain.from_iterable(map(in_turns, by_run))))
        shifts = {name: list(np.diff(of_case)) for name, of_case in estimates.items()}
    else:
        pairs = [pair for run, later in pairwise(by_run) for pair in _pairs(run, later)]
        shifts = _estimates(change for change in starmap(_change, pairs) if change.beside)
    return {name: math.hypot(*of_case) / math.sqrt(len(of_case) or 1) for name, of_case in shifts.items()}


def _estimates(changes: Iterable[Change]) -> dict[str, list[float]]:
    """{case id: estimates of the changes that have one}."""
    return fields.grouped((change.new["id"], change.shift.estimate) for change in changes if change.shift)


def _usual(records: Sequence[fields.Record]) -> dict[str, float]:
    """{benchmark: median of `between_runs` of its records that --repeat measured}."""
    spreads = fields.grouped(
        (case["benchmark"], float(case["between_runs"])) for case in records if case.get("between_runs")
    )
    return {name: median(values) for name, values in spreads.items()}


def _verdict(shift: Shift, edge: float, is_change: bool) -> str:
    """The verdict on a shift.

    edge       the logarithm of the margin. The verdict is "same" if the whole interval lies between -edge and edge
    is_change  True, as `discoveries` has decided: the verdict is "faster" or "slower"
    """
    if is_change:
        return SLOWER if shift.estimate > 0 else FASTER
    low, high = shift.interval
    return SAME if -edge <= low and high <= edge else UNCLEAR


def _importance(change: Change) -> tuple[int, float, str]:
    """The key by which changes are sorted: by verdict, then the largest shift first, then by id."""
    return VERDICTS.index(change.verdict), -abs(change.shift.estimate if change.shift else 0.0), str(change.new["id"])


def _by_key(records: Iterable[fields.Record]) -> dict[Key, fields.Record]:
    """Today's records by their identity; earlier rows of --against are left out."""
    return {_key(case): case for case in records if not case.get("against")}


def _key(case: fields.Record) -> Key:
    """The identity of a case, which its records in two runs share."""
    return tuple(case.get(name) for name in fields.IDENTITY)


def _pairs(
    old: Iterable[fields.Record], new: Iterable[fields.Record]
) -> list[tuple[fields.Record, fields.Record, Pair | None]]:
    """(old record, new record, anchor) of each case that both runs have.

    The anchor is the steadiest peer that took turns with the case in both runs, or None.
    """
    before = _by_key(old)
    both = [(before[key], after) for key, after in _by_key(new).items() if key in before]
    of_peers = sorted(
        (pair for pair in both if pair[0].get("peer") and _is_timed(pair) and _comparisons(pair)),
        key=lambda pair: (max(map(_unsteadiness, pair)), str(pair[0]["impl"])),
    )
    peers = fields.grouped((_comparisons(pair), pair) for pair in of_peers)
    return [(*pair, _anchor_of(pair, peers.get(_comparisons(pair), ()))) for pair in both]


def _anchor_of(pair: Pair, peers: Sequence[Pair]) -> Pair | None:
    """The first of `peers` whose row is another than that of `pair`; None if there is none."""
    return next((peer for peer in peers if peer[0]["impl"] != pair[0]["impl"]), None)


def _comparisons(pair: Pair) -> Key:
    """(the case's comparison in the earlier run, that in the later run); () if it was timed alone in one of them.

    Rows that took turns with one another in both runs have the same value.
    """
    names = tuple(side.get("comparison") for side in pair)
    return names if all(names) and not any(side.get("alone") for side in pair) else ()


def _is_timed(pair: Pair) -> bool:
    """True if both records have samples enough for an estimate."""
    return all(case["outcome"] == "ok" and len(case.get("samples_s") or ()) >= FEWEST_ROUNDS for case in pair)


def _unsteadiness(case: fields.Record) -> float:
    """The median distance of the case's samples from their median, as a share of that median.

    The anchor is the peer for which this is least. Only the peer's own samples count: by ratios to the judged row, a
    peer that happened to vary like that row would be preferred.
    """
    middle = median(case["samples_s"])
    return median(abs(sample - middle) for sample in case["samples_s"]) / middle


def _change(old: fields.Record, new: fields.Record, anchor: Pair | None = None, between_runs: float = 0.0) -> Change:
    """The change of a case; its verdict stays open, unless the case was right in only one of the two runs."""
    was_right, is_right = (case["outcome"] == "ok" for case in (old, new))
    if was_right != is_right:
        return Change(old, new, BROKEN if was_right else ONLY_NOW if old["outcome"] == "unsupported" else MENDED)
    beside = old if old.get("against") else anchor[0] if anchor else {"impl": ""}
    shift = _shift_of(old, new, anchor, between_runs) if _is_timed((old, new)) else None
    return Change(old, new, beside=str(beside["impl"]), shift=shift)


def _shift_of(old: fields.Record, new: fields.Record, anchor: Pair | None, between_runs: float) -> Shift:
    """The shift of a case.

    It is computed from rounds in turns with the earlier row (--against), else from ratios to the anchor, else from the
    times alone. In the first two ways its error includes the spread between runs and the tick of the clock. The spread
    is `between_runs`, but with --against that of the two records (`_spreads`).
    """
    if old.get("against"):
        shift, between_runs = paired(_ratios(new, old)), max(_spreads(old, new))
    elif anchor:
        shift = between(_ratios(old, anchor[0]), _ratios(new, anchor[1]))
    else:
        return between(_logarithms(old), _logarithms(new))
    between_runs = math.hypot(between_runs, *(_rounding(*pair) for pair in ((old, new), anchor) if pair))
    return replace(
        shift,
        error=math.hypot(shift.error, between_runs),
        # This part of the error counts as exactly known: the larger it is, the more degrees of freedom (Satterthwaite
        # 1946).
        freedom=shift.freedom * (1 + (between_runs / max(shift.error, 1e-9)) ** 2) ** 2,
    )


def _rounding(*cases: fields.Record) -> float:
    """The error of a ratio of two times that comes from the tick of their clock, as a share of the ratio.

    A rank test does not see this error, since samples within one tick are equal. The tick is taken to be the smallest
    distance of two samples. If no samples are equal, the clock is finer than that, and the error is 0. The error is 0
    as well if all samples are equal, since the tick is then unknown. The part of a time that a tick cuts off is taken
    to be uniformly distributed.
    """
    samples = [sample for case in cases for sample in case["samples_s"]]
    values = np.unique(samples)
    if len(values) in (1, len(samples)):
        return 0.0
    tick = float(np.diff(values).min())
    return math.hypot(*(tick / median(case["samples_s"]) for case in cases)) / math.sqrt(12)


def _spreads(*records: fields.Record) -> list[float]:
    """The field `between_runs` of each record, which --repeat measures; 0 where a record has none."""
    return [case.get("between_runs") or 0.0 for case in records]


def _logarithms(case: fields.Record) -> list[float]:
    return [math.log(sample) for sample in case["samples_s"]]


def _ratios(ours: fields.Record, theirs: fields.Record) -> list[float]:
    """Logarithms of our time over theirs, round by round; surplus rounds of the faster row are left out."""
    return [a - b for a, b in zip(_logarithms(ours), _logarithms(theirs), strict=False)]


def _exponential(value: float) -> float:
    """exp(value). A value beyond LARGEST_LOGARITHM, or below its negative, is first set to that bound."""
    return math.exp(max(-LARGEST_LOGARITHM, min(LARGEST_LOGARITHM, value)))
