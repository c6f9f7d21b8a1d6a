"""Who is fastest in a setting: which run decides it there, by how much, and who was faster elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter

from lmsys.bench import fields, verdict
from lmsys.reports import cells, expressions, load, words

Rows = Sequence[fields.Record]  # cases that took turns
TIME = fields.Field("time_s", "s", "time", shown="ms")
ROW = itemgetter("impl")
NARROW = "bfloat16", "bf16"  # the precision that most readers ask for stands first
# The facts of a line where no two rows, one of them somebody else's, were undisturbed.
UNSETTLED = dict.fromkeys(("row", "called", "over", "speedup", "next", "lead", "mfu")) | {"fastest": 0}


@dataclass(frozen=True)
class Question:
    """Who is fastest, among cases that were sampled together; a line of the table for each value of `keys`.

    bases    names of rows that the fastest one is compared with: the first that was timed, else the next fastest
    contends expression that is true of the cases that do the work in question
    about    what is said of the words of its lines
    kind     the table that the rows are in
    way      the field that says how a row was run, where its ways are compared, too, and the fastest is named
    told     of `keys` those that a line tells also where all lines have one value, and other cases another
    mfu      a column tells it
    of_ours  a line may name the fastest of our own rows alone; else somebody else's must be among them
    values   expressions that give fields of the cases other values, such as those that older files mean
    before   rows that come before the `bases` where a case passes the test that stands beside them
    words    how values of fields are read
    """

    benchmark: str
    word: str
    title: str
    keys: Mapping[str, str]
    bases: Sequence[str]
    contends: str = "True"
    about: str = ""
    kind: str = ""
    way: str = ""
    told: Sequence[str] = ()
    mfu: bool = False
    of_ours: bool = False
    values: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Mapping[object, str]] = field(default_factory=dict)

    def enough(self, rows: Rows) -> bool:
        """True of rows that took turns of which a line may name the fastest: of ours alone the fastest may be slow."""
        return len(set(map(ROW, rows))) > 1 and (self.of_ours or any(case.get("peer") for case in rows))

    def settings(self, machine: load.Machine) -> dict[tuple[object, ...], list[fields.Record]]:
        """The timed cases by the values of the keys, in reading order; a row that was wrong in a section is left out.

        They have the `values` of the question.
        """
        cases = [case for case in machine.records if case["benchmark"] == self.benchmark]
        cases = list(filter(partial(expressions.value_of, self.contends), cases))
        wrong = {(case["section"], case["impl"]) for case in cases if case["outcome"] in verdict.FAILED}
        settings: dict[tuple[object, ...], list[fields.Record]] = {}
        for case in cases:
            if case.get("time_s") and (case["section"], case["impl"]) not in wrong:
                case = case | {name: expressions.value_of(text, case) for name, text in self.values.items()}
                settings.setdefault(tuple(case.get(name) or None for name in self.keys), []).append(case)
        return {key: settings[key] for key in sorted(settings, key=partial(reading_order, self.words))}

    def answer(self, machine: load.Machine, cases: Sequence[fields.Record]) -> fields.Record:
        """The facts of a setting's line; none where no rows that took turns are enough."""
        comparisons = fields.grouped((str(case["comparison"]), case) for case in cases)
        settled = list(filter(self.enough, comparisons.values()))
        if not settled:
            return {}
        bases = [name for name, test in self.before.items() if any(map(partial(expressions.value_of, test), cases))]
        deciders = verdict.deciding(settled, self.enough)
        decisive = Contest(machine, deciders or settled, bases + list(self.bases), self.way).of_one_run()
        flags = [bool(case.get("disturbed")) for case in chain.from_iterable(settled)]
        disturbed = "all" if all(flags) else "some" if any(flags) else None
        return {"disturbed": disturbed} | decisive.line(cases) | ({} if deciders else UNSETTLED)


def reading_order(words: Mapping[str, Mapping[object, str]], key: Sequence[object]) -> list[tuple[int, float, str]]:
    """Sorts into reading order: a narrow precision first, words as these list them, numbers by size."""
    known = list(chain.from_iterable(words.values()))
    places = []
    for value in key:
        first = 0 if value is None or value in NARROW else 1 + known.index(value) if value in known else 99
        places.append((first, float(value) if isinstance(value, int | float) else 0.0, str(value)))
    return places


@dataclass(frozen=True)
class Contest:
    """Comparisons of one setting.

    comparisons  cases that took turns, a list for each shape and run
    bases        names that the fastest row is compared with: the first that was timed, else the next fastest
    way          the field that says how a row was run, where its ways are compared, too; else empty
    """

    machine: load.Machine
    comparisons: Sequence[Rows]
    bases: Sequence[str]
    way: str

    @property
    def cases(self) -> list[fields.Record]:
        return list(chain.from_iterable(self.comparisons))

    def of_one_run(self) -> "Contest":
        """The comparisons of one run, by these criteria in order: it measured the most preferred base; it has most rows
        that win a shape in any run; most shapes in which all of these took turns; most rows; it is the latest.

        A run without what a user would otherwise take, or without rows that won elsewhere, may lack the fastest.
        """
        shapes = fields.grouped(zip(map(_shape, self.cases), self.cases, strict=True))
        winners = {self.run_as(min(cases, key=verdict.time_of)) for cases in shapes.values()}
        runs = fields.grouped((rows[0]["run"], rows) for rows in self.comparisons)

        def worth(run: int) -> tuple[int, int, int, int, int]:
            cases = list(chain.from_iterable(runs[run]))
            names = set(chain.from_iterable(map(_names, cases)))
            place = next((at for at, base in enumerate(self.bases) if base in names), len(self.bases))
            rows = set(map(self.run_as, cases))
            together = sum(winners.issubset(map(self.run_as, comparison)) for comparison in runs[run])
            return -place, len(rows & winners), together, len(rows), run

        return replace(self, comparisons=runs[max(runs, key=worth)])

    def run_as(self, case: fields.Record) -> tuple[str, ...]:
        """A case's row, and the way in which it was run where ways are compared."""
        return (case["impl"], str(case.get(self.way))) if self.way else (case["impl"],)

    def line(self, others: Sequence[fields.Record]) -> fields.Record:
        """The fastest row, its speed over a base and over the next; `others`: cases of the setting in all runs."""
        winner = verdict.fastest(self.comparisons)
        best = best_of([[case for case in rows if case["impl"] == winner.row] for rows in self.comparisons], winner.row)
        run, speed, figures = best[0]["run"], self._speed(winner.row), self._figures(best)
        over, following = best_of(self.comparisons, speed["over"]), best_of(self.comparisons, speed["next"])
        called = {", ".join((self.machine.called(case), *self.run_as(case)[1:])) for case in best}
        rows = sorted(set(map(ROW, self.cases)))
        shapes = f"{winner.comparisons} shape" + "s" * (winner.comparisons != 1)
        details = [
            self.machine.run_of(self.cases[0]),
            f"{', '.join(rows)} took turns",
            f"in {winner.first} of {shapes} no other was more than {verdict.NEAR_TEXT} faster",
            f"time and rate in its longest shape: {figures['shape']}" * bool(figures["shape"]),
        ]
        names = sorted({str(case.get("strategy") or case["impl"]) for case in self.cases})
        means = {name: cells.geometric_mean(self.ratios(name, winner.row)) for name in names}
        facts = {
            "row": winner.row,
            "called": " or ".join(sorted(called)),
            self.way: " or ".join(sorted({str(case.get(self.way)) for case in best})),
            "fastest": winner.first,
            "comparisons": winner.comparisons,
            "rows": len(rows),
            **speed,
            "mfu": max((float(case.get("mfu") or 0) for case in best), default=0) or None,
            **figures,
            "date": self.machine.runs[run].get("date"),
            "commit": self.machine.runs[run].get("commit"),
            "details": cells.DETAILS.join(filter(None, details)),
            "standing": {name: mean for name, (mean, count) in means.items() if count},
            "named": names,
            "unsteady": any((words.spread_of(case) or 0.0) > cells.STEADY for case in best + over),
            "over_as": self._as(speed["over"], over),
            "next_as": self._as(speed["next"], following),
            "run": run,
            "rivals": self._rivals(best, others),
        }
        facts.pop("", None)  # where ways are not compared, none is named
        return facts

    def _as(self, name: str | None, best: Sequence[fields.Record]) -> str:
        """A row's name, and how it was run where that is one way."""
        ways = {self.run_as(case)[1:] for case in best}
        return ", ".join((name, *(ways.pop() if len(ways) == 1 else ()))) if name else ""

    def ratios(self, ours: str, theirs: str) -> list[float | None]:
        return [ratio_of_best(rows, ours, theirs) for rows in self.comparisons]

    def _speed(self, row: str) -> fields.Record:
        """The speed over the first base that took turns with the row, and over the next: the fastest other one."""
        rows = set(map(ROW, self.cases))
        means = {name: cells.geometric_mean(self.ratios(row, name)) for name in rows.union(self.bases) - {row}}
        speeds = {name: (-count, mean) for name, (mean, count) in means.items() if count}
        if not speeds:
            return {"over": None, "speedup": None, "next": None, "lead": None}
        following = min(sorted(rows & speeds.keys()), key=speeds.__getitem__)  # of most shapes, then the fastest
        base = next(filter(speeds.__contains__, self.bases), following)
        return {"over": base, "speedup": speeds[base][1], "next": following, "lead": speeds[following][1]}

    def _rivals(self, best: Sequence[fields.Record], others: Sequence[fields.Record]) -> list[str]:
        """Rows that took no turns with the fastest, and in another run less time for the same shape."""
        times = dict(zip(map(_shape, best), map(verdict.time_of, best), strict=True))
        elsewhere = [case for case in others if case["run"] != best[0]["run"]]
        faster = [case for case in elsewhere if verdict.time_of(case) * verdict.NEAR < times.get(_shape(case), 0)]
        return sorted(map(", ".join, set(map(self.run_as, faster)).difference(map(self.run_as, self.cases))))

    def _figures(self, best: Sequence[fields.Record]) -> fields.Record:
        """Time and rate of a row in the case that takes it longest; `measured`: the two in words; `shape`: which case.

        The rate is the first that its benchmark declares; without one there is no word for it.
        """
        case, shown, sizes = max(best, key=verdict.time_of), [TIME], list[str]()
        for known in self.machine.fields[case["benchmark"]].values():
            if known.role == "axis" and len({each.get(known.name) for each in best}) > 1:
                sizes.append(f"{words.label_of(known)} {words.exact(case[known.name])}")
            if known.role == "metric" and known.unit.endswith("/s") and case.get(known.name) and len(shown) == 1:
                shown.append(known)
        facts = {known.name: case[known.name] for known in shown}
        texts = [f"{words.number(words.scaled(x, case[x.name]))}\N{NO-BREAK SPACE}{words.unit_of(x)[0]}" for x in shown]
        return facts | {"shape": ", ".join(sizes), "measured": (texts + [""])[:2]}


def best_of(comparisons: Sequence[Rows], name: str | None) -> list[fields.Record]:
    """The fastest case of a row in each comparison that has it; none where the row is None."""
    best = []
    for rows in comparisons:
        cases = [case for case in rows if name and name in _names(case)]
        if cases:
            best.append(min(verdict.undisturbed(cases), key=verdict.time_of))
    return best


def ratio_of_best(rows: Rows, ours: str, theirs: str) -> float | None:
    """The ratio of two rows or strategies, theirs over ours, by the fastest case of each, such as the best size of
    buckets; None without."""
    pair = best_of([rows], ours) + best_of([rows], theirs)
    return verdict.ratio_of(pair[0], pair[1]) if len(pair) == 2 else None


def _names(case: fields.Record) -> tuple[str, str]:
    """By these a base may name a case: a strategy is several rows, such as one for each size of buckets."""
    return case["impl"], case.get("strategy") or ""


def _shape(case: fields.Record) -> str:
    """The comparison without its date."""
    return str(case["comparison"]).partition(" ")[0]
