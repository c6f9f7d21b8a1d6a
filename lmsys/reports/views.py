"""`View`: some cases of one benchmark on one machine, and how to read, label and colour them.

A case is one record of a result file, a dict by field name: one row (an implementation) as it was measured with one
value for each axis. `view_of` makes the view of all cases of a benchmark, for `__main__` and `answers` (the page),
`layout.rehearse` and `terminal` (a run's summary). `layout` and `steps` then derive views from views: fewer cases,
other fields, other words. `tables` and `plots` draw a view. A view is never changed: each method returns a new one.

*Reading order* is the order in which tables and legends list the values of a field (`View.place`). A method that
layouts may name is also listed in `steps.STEPS`; add one in both places.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

from lmsys.bench.fields import Field, Record, grouped
from lmsys.bench.validate import check_value
from lmsys.reports import expressions, load, words
from lmsys.reports.words import Style
from lmsys.values import hold

OPTIONAL = re.compile(r"\[([^][]*\{(\w+)\}[^][]*)\]")  # "[text with {field}]" in a template of `View.cut`
LIMIT = "memory_limit_bytes"  # the field with the limit under which a case ran; None: it had none
OF_THE_ROW = ("label", "peer")  # axes that depend on a case's row alone: all cases of a row have the same values
NOT_IN_CAPTIONS = ("section",) + OF_THE_ROW + ("device",)  # axes that headings and titles state, not captions
Key = tuple[Any, ...]  # values of some fields, in the order in which the fields were named


def key_of(case: Record, names: Iterable[str]) -> Key:
    """The values of these fields in a case."""
    return tuple(map(case.__getitem__, names))


def view_of(machine: load.Machine, benchmark: str, baseline: str | None = None) -> "View":
    """The view of all cases of a benchmark.

    baseline  the row that the user wants speeds to be relative to; None: the table of rows decides

    ValueError for a record whose value is not of its declared kind, such as a text in place of a number.
    """
    fields = machine.fields[benchmark]
    declared = {name: declaration.to_json() for name, declaration in fields.items()}
    cases = [dict.fromkeys(fields) | case for case in machine.records if case["benchmark"] == benchmark]
    for case in cases:
        for name, declaration in declared.items():
            # The declaration may come from another file than the case, and differ from that of the case's file.
            check_value(f"record {case['id']!r}: {name}", case[name], declaration)
    return View(
        machine, benchmark, fields, cases, machine.words_of(benchmark), wanted=baseline, stem=machine.slug
    ).styled()


@dataclass(frozen=True)
class View:
    """Some cases, and how to read them.

    fields    the declaration of each field, by name
    words     {field: {value: word}}, in reading order
    styles    {field: {value: its colour and marker}}, in reading order
    wanted    the row that the user wants speeds to be relative to; None: the table of rows decides
    base      the row that the speedups of these cases are relative to; None before speedups are added
    stem      begins the file names of this view's tables and plots; `tail` ends them
    heading   what the cases have in common, in words
    untold    fields that captions leave out, since the heading, table or plot shows them
    remark    a sentence that ends captions
    """

    machine: load.Machine
    benchmark: str
    fields: Mapping[str, Field]
    cases: Sequence[Record]
    words: Mapping[str, Mapping[Any, str]]
    styles: Mapping[str, Mapping[Any, Style]] = field(default_factory=dict)
    wanted: str | None = None
    base: str | None = None
    stem: str = ""
    tail: str = ""
    heading: str = ""
    untold: tuple[str, ...] = ()
    remark: str = ""

    @property
    def first(self) -> Record:
        """The first case, to read a value that all cases share; {} without cases."""
        return self.cases[0] if self.cases else {}

    def of(self, cases: Sequence[Record]) -> "View":
        """A view like this one, but of these cases."""
        return replace(self, cases=cases)

    def column(self, name: str) -> list[Any]:
        """The value of a field in each case; None in a case that does not have the field."""
        return [case.get(name) for case in self.cases]

    def only(self, test: Callable[[Record], Any] | str) -> "View":
        """The cases that pass a test: a function, or an expression (`lmsys.reports.expressions`)."""
        return self.of(list(filter(test if callable(test) else self.expression(test), self.cases)))

    def expression(self, text: str) -> Callable[[Record], Any]:
        """A function that evaluates an expression for a case; ValueError for a name that no field has."""
        known = {**self.fields, **self.first}
        hold(
            *(
                (name in known or not self.cases, f"in {text!r}: {load.no_field(name, known)}")
                for name in expressions.names_in(text)
            )
        )
        return partial(expressions.value_of, text)

    def having(self, name: str, values: Iterable[Any]) -> "View":
        """The cases that have one of these values of a field."""
        return self.of([case for case in self.cases if case[name] in values])

    def ordered(self, *names: str) -> "View":
        """The cases sorted by these fields (names as in `chosen`), the values of each in reading order."""
        chosen = self.chosen(names)
        return self.of(sorted(self.cases, key=lambda case: [self.place(name, case[name]) for name in chosen]))

    def groups(self, names: Sequence[str]) -> "dict[Key, View]":
        """{values: view} for each combination of values of these fields, in order of first appearance."""
        groups = grouped((key_of(case, names), case) for case in self.cases)
        return {key: self.of(cases) for key, cases in groups.items()}

    def index(self, names: Sequence[str]) -> dict[Key, Record]:
        """{values of these fields: the case that has them}; of several such cases the last."""
        return {key_of(case, names): case for case in self.cases}

    def adding(self, facts: Callable[[Record], Record] | Record) -> "View":
        """Adds fields to each case: the same ones to all, or those that a function returns for the case."""
        return self.of([case | (facts(case) if callable(facts) else facts) for case in self.cases])

    def expanded(self, lines: Callable[[Record], Iterable[Record]]) -> "View":
        """Puts several cases in place of each: for each record that `lines` returns for it, a copy with its fields."""
        return self.of([case | line for case in self.cases for line in lines(case)])

    def cut(self, stem: str, heading: str, tail: bool = False) -> "Iterator[View]":
        """Splits the view by the fields that the two templates name in braces, and by memory limit; yields the parts.

        For example `cut("loss-N{tokens}", "{section}[, {precision}]")` yields a view for each section, precision and
        number of tokens.

        stem     goes into the part's file names, with stored values in place of the names: behind the stem of this
                 view, or with `tail` at the end
        heading  begins the part's heading, with words in place of the names; the heading of this view follows

        Text in brackets is left out of a template if the field in it does not vary. KeyError for a name that no field
        has.
        """
        stem, heading = (OPTIONAL.sub(lambda part: part[1] * self.varies(part[2]), text) for text in (stem, heading))
        in_stem, in_heading = words.NAMES.findall(stem), words.NAMES.findall(heading)
        limits = [] if LIMIT in self.untold else [LIMIT]
        for part in self.groups(in_heading + in_stem + limits).values():
            limit = part.text(LIMIT, part.first[LIMIT]) if limits else ""
            heads = words.filled(heading, part.constants(in_heading)), limit and f"memory limit {limit}", self.heading
            ends = words.filled(stem, part.first), limit.replace(" ", "").lower()
            end = "".join(f"-{text}" for text in ends if text)
            yield replace(
                part,
                stem=self.stem + end * (not tail),
                tail=self.tail + end * tail,
                heading=", ".join(filter(None, heads)),
                untold=self.untold + tuple(in_heading + limits),
            )

    def file(self, word: str = "") -> str:
        """The name, without its ending, of a file that `word` distinguishes from others of this view."""
        return load.file_name("-".join(filter(None, [self.stem, word])) + self.tail)

    def named(self, stem: str) -> "View":
        """Adds `stem` to the beginning of file names; names in braces stand for the values of the first case."""
        return replace(self, stem=f"{self.stem}-{words.filled(stem, self.first)}")

    def silent(self, *names: str) -> "View":
        """Makes captions leave these fields out."""
        return replace(self, untold=self.untold + names)

    def remarked(self, text: str) -> "View":
        """Makes captions end in the value of an expression for the first case."""
        return replace(self, remark=self.expression(text)(self.first)) if self.cases else self

    def checked(self, numbers: Sequence[str] = (), words: Sequence[str] = ()) -> "View":
        """The view itself. ValueError for a case in which one of `numbers` is no number, or one of `words` no text."""
        kinds = dict.fromkeys(words, (str,)) | dict.fromkeys(numbers, (int, float))
        hold(
            *(
                (
                    isinstance(case.get(name), kind),
                    f"{self.benchmark} record {case['id']!r}: {name}={case.get(name)!r} is not what its chapter needs",
                )
                for case in self.cases
                for name, kind in kinds.items()
            ),
            error=load.ValuesError,
        )
        return self

    def read_as(self, name: str, words: Any) -> "View":
        """Sets the words for a field's values, and their reading order. words: {value: word}, or pairs of these."""
        return replace(self, words={**self.words, name: dict(words)})

    def labelled(self, **labels: str) -> "View":
        """Gives some fields other labels."""
        return self.with_fields([self.fields[name].called(label=label) for name, label in labels.items()])

    def quiet(self, *names: str) -> "View":
        """Gives axes the role "detail": neither captions nor the key columns of tables show them."""
        return self.with_fields([self.fields[name].called(role="detail") for name in self.fields.keys() & names])

    def with_fields(self, fields: Iterable[Field]) -> "View":
        """Adds fields. A field with `of` is computed for each case; it is None if the case lacks what `of` needs."""
        known, cases = dict(self.fields), list(map(dict, self.cases))
        for declared in fields:
            known[declared.name] = declared
            for case in cases if declared.of else ():
                case[declared.name] = declared.value(case)
        return replace(self, fields=known, cases=cases)

    def styled(self, name: str = "impl", row: str = "", label: str = "") -> "View":
        """Gives each value of the field `name` a colour and a marker: those of a row in the table of rows.

        row    the field that names this row in each case; "": the field `name` itself
        label  a field whose values in the cases are the labels in legends and tables; "": the values of `name` are
        """
        row = row or name
        return replace(
            self, styles={**self.styles, name: words.styles_of(self.cases, name, row, label, self.table(row))}
        )

    def table(self, row: str = "impl") -> Mapping[Any, Record]:
        """The rows, by name, of the table that holds the values of a field, with their traits.

        row  the field

        The table is the one with the name of the field or of the benchmark, if there is one; else the one with most of
        the field's values. If no table has any of these values, the result has the values with words, without traits.
        """
        tables, values = self.machine.rows, set(self.column(row))
        named = {kind: table for kind, table in tables.items() if kind in (row, self.benchmark)}
        table = max((named or tables).values(), key=lambda table: len(values & table.keys()), default={})
        return table if values & table.keys() else dict.fromkeys(self.words.get(row, ()), {})

    def labels(self, names: Iterable[str]) -> list[str]:
        """The labels of these fields, without units."""
        return [words.label_of(self.fields[name]) for name in names]

    def has(self, name: str) -> bool:
        """True if any case has a value of the field, even if it is 0 or empty."""
        return self.column(name).count(None) < len(self.cases)

    def has_any(self, name: str) -> bool:
        """True if any case has a value of the field that is neither 0 nor empty."""
        return any(self.column(name))

    def varies(self, name: str) -> bool:
        """True if the cases have several values of the field."""
        return len(set(map(itemgetter(name), self.cases))) > 1

    def axes(self) -> list[str]:
        """The fields of the role "axis" of which any case has a value."""
        return [name for name, field in self.fields.items() if field.role == "axis" and self.has(name)]

    def metrics(self) -> list[str]:
        """The metrics that were measured, and always the time: its cell tells how a case ended."""
        return [
            name
            for name, field in self.fields.items()
            if field.role == "metric" and (name == "time_s" or self.has(name))
        ]

    def chosen(self, names: Sequence[str]) -> list[str]:
        """The fields that these names stand for, in order. Here `a` is the name of a field, and `b` a value of it.

        "a?"  a, if it varies               "*"  all metrics that are not in `names` themselves
        "a!"  a, if any case has a value    "@"  all axes that are not in `names` themselves; "@?": those that vary
        "a+"  a, if any case has a value of it other than 0 and empty
        "-a"  nothing; "*" and "@" leave a out
        "a|"  a, if no field was chosen before it
        "a~b" a, unless its value is b in all cases

        ValueError for a name that no field has.
        """
        known = [name.strip("-?!+|").partition("~")[0] for name in names]
        declared = {**self.fields, **self.first, "*": "", "@": ""}
        # A step may have made a field of the cases, and without cases nothing tells its name.
        hold(*((name in declared or not self.cases, load.no_field(name, self.fields)) for name in known))
        axes = [name for name in self.axes() if name not in (*known, "section", *OF_THE_ROW)]
        several = {
            "*": [name for name in self.metrics() if name not in known],
            "@": axes,
            "@?": list(filter(self.varies, axes)),
        }
        tests = {"?": self.varies, "!": self.has, "+": self.has_any, "|": lambda _: not chosen}
        chosen: list[str] = []
        for name in names:
            axis, tilde, usual = name.partition("~")
            if name in several:
                chosen += several[name]
            elif name[-1] in tests:
                chosen += [name[:-1]] * tests[name[-1]](name[:-1])
            elif tilde:
                chosen += [axis] * (self.values(axis) != [usual])
            elif not name.startswith("-"):
                chosen.append(name)
        return chosen

    def filled(self, text: str) -> str:
        """The text with values in place of the names in braces of fields that do not vary; {lines} counts the cases."""
        names = filter(self.fields.__contains__, words.NAMES.findall(text))
        return words.filled(text, {"lines": len(self.cases), **self.constants(names)})

    def values(self, name: str) -> list[Any]:
        """Each value of a field once, in reading order; texts without a place in it come last, as they appear."""
        return sorted(dict.fromkeys(map(itemgetter(name), self.cases)), key=lambda value: self.place(name, value)[:2])

    def identifying(self, names: Sequence[str], others: Sequence[str] = ()) -> list[str]:
        """`names`, and every axis without which two cases would agree in all of these and of `others`."""
        identifying = list(names)
        for name in self.axes():
            known = identifying + list(filter(None, others))
            if name not in OF_THE_ROW and len(self.groups(known)) < len(self.groups(known + [name])):
                identifying.append(name)
        return identifying

    def place(self, name: str, value: Any) -> tuple[int, float, str]:
        """A key that sorts a field's values into reading order.

        First come the values that its styles list (else its words), in that order, then numbers by size, then texts by
        the alphabet.
        """
        known = list(self.styles.get(name) or self.words.get(name, {}))
        if value in known:
            return 0, known.index(value), ""
        return (1, value, "") if isinstance(value, (int, float)) else (2, 0, str(value or ""))

    def text(self, name: str, value: Any) -> str:
        """A value as readers see it: its label, its word, or the number with its unit."""
        if value is None:
            return ""
        if value in self.styles.get(name, ()):
            return self.style(name, value).label
        if value in self.words.get(name, ()):
            return self.words[name][value]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return {True: "yes", False: "no"}.get(value, str(value))
        unit, factor = words.unit_of(self.fields[name])
        return f"{words.exact(value * factor)} {unit}".strip()

    def texts(self, names: Iterable[str], case: Record) -> list[str]:
        """The values of these fields in a case, as readers see them."""
        return [self.text(name, case[name]) for name in names]

    def constants(self, names: Iterable[str]) -> dict[str, str]:
        """{field: its value as readers see it}, for those of these fields that do not vary."""
        return {name: self.text(name, self.first[name]) for name in names if not self.varies(name)}

    def style(self, name: str, value: Any) -> Style:
        """The look of a field's value. Its label joins those of the cases: "auto: A", "auto: B" give "auto: A or B"."""
        style, part = self.styles[name][value], self.having(name, [value])
        labels = list(filter(None, part.column(style.said_by)))
        if name == "impl" and not labels:
            labels = list(map(self.machine.called, part.cases))
        first, *others = dict.fromkeys(labels) or [style.label]
        return replace(style, label=" or ".join([first] + [label.removeprefix(f"{value}: ") for label in others]))

    def caption(self, about: str, clocked: bool = False) -> str:
        """The caption of a table or plot, in lines: what is shown, what is held constant, and how it was timed.

        about    says what is shown
        clocked  True: there is a line on how the cases were timed

        The second line states the axes: one value, or a range of numbers. It leaves out an axis whose several values
        are words, since these are in the table or plot itself.
        """
        held = []
        for name in self.axes():
            values = self.values(name)
            is_range = all(type(value) in (int, float) and value not in self.words.get(name, ()) for value in values)
            if name not in self.untold + NOT_IN_CAPTIONS and (is_range or len(values) == 1):
                ends = self.text(name, values[0]), self.text(name, values[-1])
                held.append(f"{words.label_of(self.fields[name])} {words.span(ends)}")
        facts = words.sentence("; ".join(filter(None, [self.heading, ", ".join(held), self.remark])))
        return f"{self.filled(about)}.\n{facts}.\n{words.timing(self.cases) if clocked else ''}".strip()
