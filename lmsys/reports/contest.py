"""The cases of one setting: which run decides who is fastest there, by how much, and who was faster elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lmsys.bench import fields, verdict
from lmsys.reports import cells, load, words

Rows = Sequence[fields.Record]  # cases that took turns
TIME = fields.Field("time_s", "s", "time", shown="ms")


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
        shapes = fields.grouped((_shape(case), case) for case in self.cases)
        winners = {self.run_as(min(cases, key=verdict.time_of)) for cases in shapes.values()}
        runs = fields.grouped((rows[0]["run"], rows) for rows in self.comparisons)

        def worth(run: int) -> tuple[int, int, int, int, int]:
            measured = set(chain.from_iterable(map(_names, chain.from_iterable(runs[run]))))
            place = next((i for i, base in enumerate(self.bases) if base in measured), len(self.bases))
            together = [set(map(self.run_as, rows)) for rows in runs[run]]
            rows = set[tuple[str, ...]]().union(*together)
            return -place, len(rows & winners), sum(map(winners.issubset, together)), len(rows), run

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
        ways = " or ".join(sorted({str(case.get(self.way)) for case in best}))
        rows = sorted({str(case["impl"]) for case in self.cases})
        shapes = f"{winner.comparisons} shape" + "s" * (winner.comparisons != 1)
        details = [
            self.machine.run_of(self.cases[0]),
            f"{', '.join(rows)} took turns",
            f"in {winner.first} of {shapes} no other was more than {verdict.NEAR_TEXT} faster",
        ]
        if figures["shape"]:
            details.append(f"time and rate in its longest shape: {figures['shape']}")
        names = sorted({str(case.get("strategy") or case["impl"]) for case in self.cases})
        ratios = {name: self.ratios(name, winner.row) for name in names}
        facts = {
            "row": winner.row,
            "called": " or ".join(sorted(called)),
            self.way: ways,
            "fastest": winner.first,
            "comparisons": winner.comparisons,
            "rows": len(rows),
            **speed,
            "mfu": max((float(case.get("mfu") or 0) for case in best), default=0) or None,
            **figures,
            **{name: self.machine.runs[run].get(name) for name in ("date", "commit")},
            "details": cells.DETAILS.join(details),
            "standing": {name: cells.geometric_mean(ratios[name])[0] for name in names if any(ratios[name])},
            "named": names,
            "unsteady": any((words.spread_of(case) or 0.0) > cells.STEADY for case in chain(best, over)),
            "over_as": self._as(speed["over"], over),
            "next_as": self._as(speed["next"], following),
            "run": run,
            "rivals": self._rivals(best, others),
        }
        return {name: fact for name, fact in facts.items() if name}  # where ways are not compared, none is named

    def _as(self, name: str | None, best: Sequence[fields.Record]) -> str:
        """A row's name, and how it was run where that is one way."""
        ways = {self.run_as(case)[1:] for case in best}
        return ", ".join((name, *(ways.pop() if len(ways) == 1 else ()))) if name else ""

    def ratios(self, ours: str, theirs: str) -> list[float | None]:
        return [ratio_of_best(rows, (ours, theirs)) for rows in self.comparisons]

    def _speed(self, row: str) -> fields.Record:
        """The speed over the first base that took turns with the row, and over the next: the fastest other one."""
        rows = {str(case["impl"]) for case in self.cases}
        ratios = {name: self.ratios(row, name) for name in rows.union(self.bases) - {row}}
        speeds = {name: cells.geometric_mean(ratios[name]) for name in ratios if any(ratios[name])}
        if not speeds:
            return {"over": None, "speedup": None, "next": None, "lead": None}
        # Of most shapes, then the fastest.
        following = min(sorted(rows & speeds.keys()), key=lambda name: (-speeds[name][1], speeds[name][0]))
        base = next(filter(speeds.__contains__, self.bases), following)
        return {"over": base, "speedup": speeds[base][0], "next": following, "lead": speeds[following][0]}

    def _rivals(self, best: Sequence[fields.Record], others: Sequence[fields.Record]) -> list[str]:
        """Rows that took no turns with the fastest, and in another run less time for the same shape."""
        times = {_shape(case): verdict.time_of(case) for case in best}
        others = [case for case in others if case["run"] != best[0]["run"]]
        faster = {
            self.run_as(case) for case in others if verdict.time_of(case) * verdict.NEAR < times.get(_shape(case), 0)
        }
        return sorted(map(", ".join, faster.difference(map(self.run_as, self.cases))))

    def _figures(self, best: Sequence[fields.Record]) -> fields.Record:
        """Time and rate of a row in the case that takes it longest; `measured`: the two in words; `shape`: which case.

        The rate is the first that its benchmark declares; without one there is no word for it.
        """
        case, declared = max(best, key=verdict.time_of), self.machine.fields[best[0]["benchmark"]].values()
        rates = [field for field in declared if field.role == "metric" and field.unit.endswith("/s")]
        shown = [TIME] + [rate for rate in rates if case.get(rate.name)][:1]
        axes = [
            field for field in declared if field.role == "axis" and len({each.get(field.name) for each in best}) > 1
        ]
        sizes = ", ".join(f"{words.label_of(axis)} {words.exact(case[axis.name])}" for axis in axes)
        texts = [
            f"{words.number(words.scaled(field, case[field.name]))}\N{NO-BREAK SPACE}{words.unit_of(field)[0]}"
            for field in shown
        ]
        return {**{field.name: case[field.name] for field in shown}, "shape": sizes, "measured": (texts + [""])[:2]}


def best_of(comparisons: Sequence[Rows], name: str | None) -> list[fields.Record]:
    """The fastest case of a row in each comparison that has it; none where the row is None."""
    cases = ([case for case in rows if name and name in _names(case)] for rows in comparisons)
    return [min(verdict.undisturbed(timed), key=verdict.time_of) for timed in cases if timed]


def ratio_of_best(rows: Rows, names: Sequence[str]) -> float | None:
    """The ratio of two rows or strategies, theirs over ours, by the fastest case of each, such as the best size of
    buckets; None without."""
    pair = sum((best_of([rows], name) for name in names), [])
    return verdict.ratio_of(*pair) if len(pair) == 2 else None


def _names(case: fields.Record) -> Iterable[str]:
    """By these a base may name a case: a strategy is several rows, such as one for each size of buckets."""
    return case["impl"], case.get("strategy") or ""


def _shape(case: fields.Record) -> str:
    """The comparison without its date."""
    return str(case["comparison"]).partition(" ")[0]
