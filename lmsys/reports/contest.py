"""Finds the fastest row in each setting, such as each dtype and direction: the answers that a page begins with.

A row is an implementation; a case is one record of a result file, of one row. A comparison is the cases that "took
turns": they were sampled together, round by round, in one run. A setting usually has a comparison for each shape and
run. A case was disturbed if the machine was busy or slowed while it was measured.

`answers.questions` makes a `Question` of what a benchmark's layout says under "fastest", or without a layout of the
benchmark's axes. `Question.settings` sorts the timed cases into settings. `Question.answer` gives the facts of a
setting's line, which `answers.fastest_of` writes into a table. A `Contest` compares the rows of one setting, and
`verdict.fastest` says which row wins.

A new attribute of `Question` may at once be given in layouts. A new fact of `Contest.line` goes into the table's CSV
unless `answers.INNER` names it; `answers._texts` decides what readers of the table see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter

from lmsys.bench import fields, verdict
from lmsys.reports import cells, expressions, load, words
from lmsys.values import choice, hold

Rows = Sequence[fields.Record]  # cases that took turns, one for each row
ROW = itemgetter("impl")
# What a line has in place of the facts that name a winner, if some cases of its setting were undisturbed, but in no
# comparison enough of them to decide. The line then says "not settled". `Contest.line` explains these facts.
UNSETTLED = dict.fromkeys(("row", "called", "over", "speedup", "next", "lead", "mfu")) | {"fastest": 0}


@dataclass(frozen=True)
class Question:
    """Which row of a benchmark is fastest? The answer is a table with a line for each setting.

    word      ends the name of the table's file
    keys      the fields whose values make a setting, each with its label
    bases     rows that the fastest row is compared with: the first that took turns with it, else the next fastest row
    contends  an expression (expressions.py); the cases for which it is false do other work and take no part, such as
              the forwards of models if the question is about training steps
    about     a sentence for the caption that explains words of the lines
    kind      the kind of the table that has the labels and colours of these rows: a key of `Machine.rows`
    way       a field that says how a row was run, such as `compile`: each way counts as a row of its own; "" for none
    told      keys that lines show even if all lines have the same value, if a setting without a line has another one
    mfu       True: a column shows the MFU (model FLOP utilisation)
    of_ours   True: a line may compare rows of this project only; else one of them must be a peer, somebody else's row
    values    expressions that replace values of fields, such as a default that older files leave out
    before    {row: expression}: the row comes before the `bases` in a setting if the expression is true of any case
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

    def hold_names(self, machine: load.Machine) -> None:
        """ValueError for a name that no field of the benchmark has, and for a base that is no row of a table.

        Only layouts of this version are held to this. A file that is older than a field or a row may lack it.
        """
        fields = {**machine.fields[self.benchmark], **self.values}
        tests = self.contends, *self.values.values(), *self.before.values()
        named = chain(self.keys, self.told, filter(None, [self.way]), *map(expressions.names_in, tests))
        hold(*((name in fields, load.no_field(name, fields)) for name in named))
        for name in (*self.bases, *self.before):
            choice(name, chain(*machine.rows.values()), f"the row {name!r} to compare with: ")

    def enough(self, rows: Rows) -> bool:
        """True if a line may name the fastest of these rows: two or more, one of them a peer unless `of_ours`."""
        return len(set(map(ROW, rows))) > 1 and (self.of_ours or any(case.get("peer") for case in rows))

    def settings(self, machine: load.Machine) -> dict[tuple[object, ...], list[fields.Record]]:
        """The timed cases of each setting, with the `values` of the question; settings are in reading order.

        A row that was wrong or failed (`verdict.FAILED`) in any case of a section is left out in all of the section.
        """
        cases = [
            case
            for case in machine.records
            if case["benchmark"] == self.benchmark and expressions.value_of(self.contends, case)
        ]
        wrong = {(case["section"], case["impl"]) for case in cases if case["outcome"] in verdict.FAILED}
        settings: dict[tuple[object, ...], list[fields.Record]] = {}
        for case in cases:
            if case.get("time_s") and (case["section"], case["impl"]) not in wrong:
                case = case | {name: expressions.value_of(text, case) for name, text in self.values.items()}
                # A value that is False, 0 or empty counts as None, as does a field that the case lacks.
                settings.setdefault(tuple(case.get(name) or None for name in self.keys), []).append(case)
        return {
            key: settings[key] for key in sorted(settings, key=partial(reading_order, machine.words_of(self.benchmark)))
        }

    def answer(self, machine: load.Machine, cases: Sequence[fields.Record]) -> fields.Record:
        """The facts of a setting's line, as in `Contest.line`; {} if no comparison has `enough` rows.

        cases  all cases of the setting

        The fact `disturbed` says how many of the compared cases were disturbed: "all", "some", or None for none.
        """
        compared = list(filter(self.enough, fields.grouped((str(case["comparison"]), case) for case in cases).values()))
        if not compared:
            return {}
        bases = [name for name, test in self.before.items() if any(map(partial(expressions.value_of, test), cases))]
        deciders = verdict.deciding(compared, self.enough)  # their undisturbed cases, or all if none was undisturbed
        decisive = Contest(machine, deciders or compared, bases + list(self.bases), self.way).of_best_run()
        flags = [bool(case.get("disturbed")) for case in chain.from_iterable(compared)]
        disturbed = "all" if all(flags) else "some" if any(flags) else None
        return {"disturbed": disturbed} | decisive.line(cases) | ({} if deciders else UNSETTLED)


def reading_order(words: Mapping[str, Mapping[object, str]], key: Sequence[object]) -> list[tuple[int, float, str]]:
    """A key that sorts settings: bfloat16 first, other words in the order of `words`, numbers by size.

    words  by field {value: word}, in reading order
    key    the setting's values
    """
    known = list(chain.from_iterable(words.values()))
    places = []
    for value in key:
        first = 0 if value in (None, "bfloat16", "bf16") else 1 + known.index(value) if value in known else 99
        places.append((first, float(value) if isinstance(value, int | float) else 0.0, str(value)))
    return places


@dataclass(frozen=True)
class Contest:
    """The comparisons of one setting.

    comparisons  for each its cases, usually of one shape in one run
    bases, way   as in `Question`

    `Question.answer` makes a Contest, chooses a run by `of_best_run`, and asks it for its `line`.
    """

    machine: load.Machine
    comparisons: Sequence[Rows]
    bases: Sequence[str]
    way: str

    @property
    def cases(self) -> list[fields.Record]:
        """The cases of all comparisons."""
        return list(chain.from_iterable(self.comparisons))

    def of_best_run(self) -> "Contest":
        """The comparisons of one run alone: the run that names the fastest row most reliably, by `rank`.

        A run that lacks the preferred base, or a row that was fastest in another run, may lack the fastest row.
        """
        shapes = fields.grouped(zip(map(_shape, self.cases), self.cases, strict=True))
        winners = {self.run_as(min(cases, key=verdict.time_of)) for cases in shapes.values()}
        runs = fields.grouped((rows[0]["run"], rows) for rows in self.comparisons)

        def rank(run: int) -> tuple[int, int, int, int, int]:
            """A key that is greatest for the best run.

            It says in this order: how early in `bases` the first base stands that the run has; how many of the run's
            rows were the fastest of a shape in any run; in how many of its comparisons all such rows took turns; how
            many rows it has; how late it is.
            """
            cases = list(chain.from_iterable(runs[run]))
            names = set(chain.from_iterable(map(_names, cases)))
            place = next((at for at, base in enumerate(self.bases) if base in names), len(self.bases))
            rows = set(map(self.run_as, cases))
            together = sum(winners.issubset(map(self.run_as, comparison)) for comparison in runs[run])
            return -place, len(rows & winners), together, len(rows), run

        return replace(self, comparisons=runs[max(runs, key=rank)])

    def run_as(self, case: fields.Record) -> tuple[str, ...]:
        """(the case's row, the way in which it was run), or (the case's row,) where no `way` counts."""
        return (case["impl"], str(case.get(self.way))) if self.way else (case["impl"],)

    def line(self, others: Sequence[fields.Record]) -> fields.Record:
        """The facts of the setting's line, by name. `others`: the setting's cases in all runs.

        row, called           the name of the fastest row, and the name with the way it was run, as readers see it
        the field `way`       how the fastest row was run; left out if `way` is ""
        fastest, comparisons  in how many comparisons the row was fastest or near it (`verdict.NEAR`), and in how many
                              it took part
        rows                  how many rows took turns
        over, speedup         the base, and the fastest row's geometric mean speedup over it
        next, lead            the next fastest row, and the speedup over it
        time_s, FIELD         the time and the rate (under its field's name) of the fastest row in its longest case
        shape, measured       the axes of that case, and its (time, rate), both in words
        mfu                   the highest MFU of the fastest row
        run, date, commit     the run that decides: its place in `Machine.runs`, its date and its commit
        unsteady              True if samples of the fastest row or of the base spread far (`cells.STEADY`)
        rivals                other rows that took less time for a shape in another run
        standing              {row: its speed as a share of the fastest row's}
        details, named, over_as, next_as  texts for the table, which `answers.INNER` explains
        """
        row, first, comparisons = verdict.fastest(self.comparisons)
        best = best_of([[case for case in rows if case["impl"] == row] for rows in self.comparisons], row)
        run, speed, figures = best[0]["run"], self._speed(row), self._figures(best)
        over, following = best_of(self.comparisons, speed["over"]), best_of(self.comparisons, speed["next"])
        called = {", ".join((self.machine.called(case),) + self.run_as(case)[1:]) for case in best}
        rows = sorted(set(map(ROW, self.cases)))
        shapes = f"{comparisons} shape" + "s" * (comparisons != 1)
        details = [
            load.run_told(self.machine.runs[self.cases[0]["run"]]),
            f"{', '.join(rows)} took turns",
            f"in {first} of {shapes} no other was more than {verdict.NEAR_TEXT} faster",
            f"time and rate in its longest shape: {figures['shape']}" * bool(figures["shape"]),
        ]
        names = sorted({str(case.get("strategy") or case["impl"]) for case in self.cases})
        means = {name: cells.geometric_mean(self.ratios(name, row)) for name in names}
        ways = " or ".join(sorted({str(case.get(self.way)) for case in best}))
        return {
            "row": row,
            "called": " or ".join(sorted(called)),
            **({self.way: ways} if self.way else {}),
            "fastest": first,
            "comparisons": comparisons,
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

    def _as(self, name: str | None, best: Sequence[fields.Record]) -> str:
        """The name of a row, and how it was run if all its `best` cases were run alike; "" if the name is None."""
        ways = {self.run_as(case)[1:] for case in best}
        return ", ".join((name,) + (ways.pop() if len(ways) == 1 else ())) if name else ""

    def ratios(self, ours: str, theirs: str) -> list[float | None]:
        """The speed of one row over another in each comparison; None if a comparison lacks one of them."""
        return [ratio_of_best(rows, ours, theirs) for rows in self.comparisons]

    def _speed(self, row: str) -> fields.Record:
        """The facts `over`, `speedup`, `next` and `lead` of `line`, for this row.

        The base is the first of `bases` that took turns with the row, else the next fastest row.
        """
        rows = set(map(ROW, self.cases))
        means = {name: cells.geometric_mean(self.ratios(row, name)) for name in rows.union(self.bases) - {row}}
        speeds = {name: (-count, mean) for name, (mean, count) in means.items() if count}
        if not speeds:
            return {"over": None, "speedup": None, "next": None, "lead": None}
        following = min(sorted(rows & speeds.keys()), key=speeds.__getitem__)  # of most shapes, then the fastest
        base = next(filter(speeds.__contains__, self.bases), following)
        return {"over": base, "speedup": speeds[base][1], "next": following, "lead": speeds[following][1]}

    def _rivals(self, best: Sequence[fields.Record], others: Sequence[fields.Record]) -> list[str]:
        """Rows outside of this contest that, in another run, took less time for a shape than the fastest row took here.

        best    the fastest row's cases
        others  the setting's cases in all runs
        """
        times = dict(zip(map(_shape, best), map(verdict.time_of, best), strict=True))
        elsewhere = [case for case in others if case["run"] != best[0]["run"]]
        faster = [case for case in elsewhere if verdict.time_of(case) * verdict.NEAR < times.get(_shape(case), 0)]
        return sorted(map(", ".join, set(map(self.run_as, faster)).difference(map(self.run_as, self.cases))))

    def _figures(self, best: Sequence[fields.Record]) -> fields.Record:
        """The facts `time_s`, the rate, `shape` and `measured` of `line`, for the longest of these cases of a row.

        The rate is the first metric in a unit "per second" that the benchmark declares and the case has; if there is
        none, its text in `measured` is empty.
        """
        case, shown, sizes = max(best, key=verdict.time_of), [fields.TIME], list[str]()
        for known in self.machine.fields[case["benchmark"]].values():
            if known.role == "axis" and len({each.get(known.name) for each in best}) > 1:
                sizes.append(f"{words.label_of(known)} {words.exact(case[known.name])}")
            if known.role == "metric" and known.unit.endswith("/s") and case.get(known.name) and len(shown) == 1:
                shown.append(known)
        texts = [f"{words.number(words.scaled(x, case[x.name]))}\N{NO-BREAK SPACE}{words.unit_of(x)[0]}" for x in shown]
        # "measured" is (time, rate) in words.
        return {x.name: case[x.name] for x in shown} | {"shape": ", ".join(sizes), "measured": (texts + [""])[:2]}


def best_of(comparisons: Sequence[Rows], name: str | None) -> list[fields.Record]:
    """The fastest case of the row or strategy `name` in each comparison that has it; [] if the name is None."""
    best = []
    for rows in comparisons:
        if cases := [case for case in rows if name and name in _names(case)]:
            best.append(min(verdict.undisturbed(cases), key=verdict.time_of))
    return best


def ratio_of_best(rows: Rows, ours: str, theirs: str) -> float | None:
    """The time of `theirs` over that of `ours`, two rows or strategies; None where one of them has no case.

    Each of the two is represented by its fastest case, such as that with the best size of buckets.
    """
    pair = best_of([rows], ours) + best_of([rows], theirs)
    return verdict.ratio_of(pair[0], pair[1]) if len(pair) == 2 else None


def _names(case: fields.Record) -> tuple[str, str]:
    """The names of a case in `bases`: its row, and its strategy, which has a row for each size of buckets."""
    return case["impl"], case.get("strategy") or ""


def _shape(case: fields.Record) -> str:
    """The name of the case's comparison without the date of the run, which stands behind a space."""
    return str(case["comparison"]).partition(" ")[0]
