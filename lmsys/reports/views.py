"""Some cases of one benchmark on one machine: typed by their declared fields, cut by axes, put into words and styled.

A row has one colour and one label in every plot of a report.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

from lmsys.bench.fields import Field, Record, grouped
from lmsys.bench.validate import check_value
from lmsys.reports import expressions, load, words
from lmsys.reports.words import Style

OPTIONAL = re.compile(r"\[([^][]*\{(\w+)\}[^][]*)\]")
LIMIT = "memory_limit_bytes"
UNSAID = ("section", "label", "peer", "device")  # axes that captions leave out
Key = tuple[Any, ...]


def key_of(case: Record, names: Iterable[str]) -> Key:
    """The values that a case has of some fields."""
    return tuple(map(case.__getitem__, names))


class Fields(dict[str, Field]):
    """Declared fields by name. InputError for one that is read and not declared, as in a file that was changed."""

    def __missing__(self, name: str) -> Field:
        raise load.InputError(f"the result file declares no field {name!r}, which its records' chapter reads")


def view_of(machine: load.Machine, benchmark: str, baseline: str | None = None) -> "View":
    """All cases of a benchmark. InputError for a record that has something else where a number is declared."""
    fields = Fields(machine.fields[benchmark])
    declared = {name: declaration.to_json() for name, declaration in fields.items()}
    cases = [dict.fromkeys(fields) | case for case in machine.records if case["benchmark"] == benchmark]
    for case in cases:
        for name, declaration in declared.items():
            try:  # another file may have declared the field otherwise
                check_value(f"record {case['id']!r}: {name}", case[name], declaration)
            except ValueError as error:
                raise load.InputError(str(error)) from None
    view = View(machine, benchmark, fields, cases, machine.words_of(benchmark), wanted=baseline, stem=machine.slug)
    return view.styled()


@dataclass(frozen=True)
class View:
    """Some cases, and how to read them.

    fields    how each field is read, by name
    words     how values are read, by field, in reading order
    styles    how rows look, by field, in reading order
    wanted    the row that the user wants speeds to be relative to; `base` is the one that they are relative to
    stem      begins the names of files, and `tail` ends them
    heading   what all the cases have in common; it says the fields `said`, and `also` is what captions say besides
    """

    machine: load.Machine
    benchmark: str
    fields: Fields
    cases: Sequence[Record]
    words: Mapping[str, Mapping[Any, str]]
    styles: Mapping[str, Mapping[Any, Style]] = field(default_factory=dict)
    wanted: str | None = None
    base: str | None = None
    stem: str = ""
    tail: str = ""
    heading: str = ""
    said: tuple[str, ...] = ()
    also: str = ""

    @property
    def first(self) -> Record:
        """The first case, which stands for what all have alike; empty without cases."""
        return self.cases[0] if self.cases else {}

    def of(self, cases: Sequence[Record]) -> "View":
        """The view with other cases."""
        return replace(self, cases=cases)

    def column(self, name: str) -> list[Any]:
        """The value of a field in each case; None in a case that does not have the field."""
        return [case.get(name) for case in self.cases]

    def only(self, test: Callable[[Record], Any] | str) -> "View":
        """The cases that pass a test: a function, or an expression (`lmsys.reports.expressions`)."""
        passes = test if callable(test) else partial(expressions.value_of, test)
        return self.of(list(filter(passes, self.cases)))

    def having(self, name: str, values: Iterable[Any]) -> "View":
        """The cases that have one of these values of a field."""
        return self.of([case for case in self.cases if case[name] in values])

    def ordered(self, *names: str) -> "View":
        """The cases in the reading order of these fields."""
        chosen = self.chosen(names)
        return self.of(sorted(self.cases, key=lambda case: [self.place(name, case[name]) for name in chosen]))

    def groups(self, names: Sequence[str]) -> "dict[Key, View]":
        """The cases by the values of some fields, in order of appearance."""
        groups = grouped((key_of(case, names), case) for case in self.cases)
        return {key: self.of(cases) for key, cases in groups.items()}

    def by(self, names: Sequence[str]) -> dict[Key, Record]:
        """The case that has these values of some fields; the last of several."""
        return {key_of(case, names): case for case in self.cases}

    def adding(self, facts: Callable[[Record], Record]) -> "View":
        """The cases, each with what a function makes of it."""
        return self.of([case | facts(case) for case in self.cases])

    def with_facts(self, **facts: Any) -> "View":
        """The cases, each with these facts."""
        return self.of([case | facts for case in self.cases])

    def opened(self, lines: Callable[[Record], Iterable[Record]]) -> "View":
        """A case for each line that a function makes of a case: the case with what the line says."""
        return self.of([case | line for case in self.cases for line in lines(case)])

    def named_in(self, text: str) -> list[str]:
        """The fields that stand in a text in braces."""
        return list(filter(self.fields.__contains__, words.NAMES.findall(text)))

    def cut(self, stem: str, heading: str, tail: bool = False) -> "list[View]":
        """The cases by the fields that stand in braces and by memory limit, each part named by their values.

        The names of files get `stem` behind what they begin with, or with `tail` at their end. What stands in brackets
        is left out unless the field in it varies.
        """
        stem, heading = (OPTIONAL.sub(lambda part: part[1] * self.varies(part[2]), text) for text in (stem, heading))
        in_heading = self.named_in(heading)
        limits = [] if LIMIT in self.said else [LIMIT]
        parts = []
        for part in self.groups(in_heading + self.named_in(stem) + limits).values():
            limit = part.text(LIMIT, part.first[LIMIT]) if limits else ""
            heads = words.filled(heading, part.constants(in_heading)), limit and f"memory limit {limit}", self.heading
            part = replace(part, heading=", ".join(filter(None, heads)), said=self.said + tuple(in_heading + limits))
            ends = words.filled(stem, part.first), limit.replace(" ", "").lower()
            end = "".join(f"-{text}" for text in ends if text)
            parts.append(replace(part, tail=self.tail + end) if tail else replace(part, stem=self.stem + end))
        return parts

    def file(self, word: str = "") -> str:
        """The stem of a file's name."""
        return load.file_name("-".join(filter(None, [self.stem, word])) + self.tail)

    def named(self, stem: str) -> "View":
        """Names of files begin with this, too, in which names in braces are what the first case has."""
        return replace(self, stem=f"{self.stem}-{words.filled(stem, self.first)}")

    def silent(self, *names: str) -> "View":
        """Captions say nothing of these fields."""
        return replace(self, said=self.said + names)

    def said_also(self, text: str) -> "View":
        """Captions say besides what an expression gives for the first case."""
        return replace(self, also=expressions.value_of(text, self.first)) if self.cases else self

    def checked(self, numbers: Sequence[str] = (), words: Sequence[str] = ()) -> "View":
        """The view, unchanged. InputError for a case in which one of these fields is missing, or something else."""
        kinds = dict.fromkeys(words, (str,)) | dict.fromkeys(numbers, (int, float))
        for case in self.cases:
            for name, kind in kinds.items():
                if not isinstance(case.get(name), kind):
                    needed = f"is not what a record of {self.benchmark!r} needs"
                    raise load.InputError(f"record {case['id']!r}: {name}={case.get(name)!r} {needed}")
        return self

    def read_as(self, name: str, words: Any) -> "View":
        """Gives the values of a field words, in reading order: a mapping, or pairs."""
        return replace(self, words={**self.words, name: dict(words)})

    def called(self, names: Iterable[str], **changes: Any) -> "View":
        """Declares some fields otherwise."""
        return self.with_fields([self.fields[name].called(**changes) for name in names])

    def labelled(self, **labels: str) -> "View":
        """Gives some fields other labels."""
        return self.with_fields([self.fields[name].called(label=label) for name, label in labels.items()])

    def quiet(self, *names: str) -> "View":
        """Makes these fields details, which neither captions nor keys of tables tell."""
        return self.called(self.fields.keys() & names, role="detail")

    def with_fields(self, fields: Iterable[Field]) -> "View":
        """Adds declarations. One with `of` is a function of the others; None where a case lacks what it needs."""
        known, cases = Fields(self.fields), list(map(dict, self.cases))
        for declared in fields:
            known[declared.name] = declared
            for case in cases if declared.of else ():
                case[declared.name] = declared.value(case)
        return replace(self, fields=known, cases=cases)

    def styled(self, name: str = "impl", row: str = "", label: str = "") -> "View":
        """Gives each value of a field a look, by the row of a table that the field `row` names."""
        row = row or name
        looks = words.styles_of(self.cases, name, row, label, self.table(row))
        return replace(self, styles={**self.styles, name: looks})

    def table(self, row: str = "impl") -> Mapping[Any, Record]:
        """The table that the values of a field are rows of: that of its name, else the one that has most of them.

        Where no table has any, it is the words for the field's values.
        """
        tables, values = self.machine.rows, set(self.column(row))
        named = {kind: table for kind, table in tables.items() if kind in (row, self.benchmark)}
        table = max((named or tables).values(), key=lambda table: len(values & table.keys()), default={})
        return table if values & table.keys() else dict.fromkeys(self.words.get(row, ()), {})

    def labels(self, names: Iterable[str]) -> list[str]:
        return [words.label_of(self.fields[name]) for name in names]

    def heads(self, names: Iterable[str]) -> list[str]:
        """Labels with units."""
        return [words.head_of(self.fields[name]) for name in names]

    def has(self, name: str) -> bool:
        return self.column(name).count(None) < len(self.cases)

    def has_any(self, name: str) -> bool:
        return any(self.column(name))

    def varies(self, name: str) -> bool:
        return len(set(map(itemgetter(name), self.cases))) > 1

    def axes(self) -> list[str]:
        return [name for name, field in self.fields.items() if field.role == "axis" and self.has(name)]

    def metrics(self) -> list[str]:
        """The fields to show: those that were measured, and the time, whose place says how a case ended."""
        names = [name for name in self.fields if name == "time_s" or self.has(name)]
        return [name for name in names if self.fields[name].role == "metric"]

    def chosen(self, names: Sequence[str]) -> list[str]:
        """The fields that some names stand for.

        "a?"  a, if it varies               "*"  all metrics that no other of these names
        "a!"  a, if any case has it         "@"  all axes that no other of these names; "@?": those that vary
        "a+"  a, if any case has more of it than 0
        "-a"  nothing: left out of "*" and "@"
        "a|"  a, if no other was chosen
        "a~b" a, unless all cases have b of it
        """
        known = {name.strip("-?!+|") for name in names}
        axes = [name for name in self.axes() if name not in {"section", "label", "peer"} | known]
        metrics = [name for name in self.metrics() if name not in known]
        several = {"*": metrics, "@": axes, "@?": list(filter(self.varies, axes))}
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
        """The text with what all cases have alike in place of fields in braces, and with the number of {lines}."""
        return words.filled(text, {"lines": len(self.cases), **self.constants(self.named_in(text))})

    def distinct(self, names: Sequence[str]) -> list[Key]:
        """The values that some fields have together, in order of appearance."""
        return list(self.groups(names))

    def values(self, name: str) -> list[Any]:
        """The values of a field, in reading order; words that have none, in order of appearance."""
        return sorted(dict.fromkeys(map(itemgetter(name), self.cases)), key=lambda value: self.place(name, value)[:2])

    def telling(self, names: Sequence[str], others: Sequence[str] = ()) -> list[str]:
        """These fields, and those axes without which, and without the `others`, cases would fall together."""
        telling = list(names)
        for name in self.axes():
            known = telling + list(filter(None, others))
            if name not in ("label", "peer") and len(self.distinct(known)) < len(self.distinct(known + [name])):
                telling.append(name)
        return telling

    def place(self, name: str, value: Any) -> tuple[int, float, str]:
        """Where a value stands in reading order: as its style or its words do, else by size, else by the alphabet."""
        known = list(self.styles.get(name) or self.words.get(name, {}))
        if value in known:
            return 0, known.index(value), ""
        return (1, value, "") if isinstance(value, (int, float)) else (2, 0, str(value or ""))

    def text(self, name: str, value: Any) -> str:
        """A value as it is read."""
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
        """The values that a case has of some fields, as they are read."""
        return [self.text(name, case[name]) for name in names]

    def constants(self, names: Iterable[str]) -> dict[str, str]:
        """Those of these fields that all cases have alike, as they are read."""
        return {name: self.text(name, self.first[name]) for name in names if not self.varies(name)}

    def style(self, name: str, value: Any) -> Style:
        """A value's look, with its label in these cases: of "auto: A" and "auto: B" it is "auto: A or B"."""
        style, part = self.styles[name][value], self.having(name, [value])
        labels = list(filter(None, part.column(style.said_by)))
        if name == "impl" and not labels:
            labels = list(map(self.machine.called, part.cases))
        first, *others = dict.fromkeys(labels) or [style.label]
        return replace(style, label=" or ".join([first, *(label.removeprefix(f"{value}: ") for label in others)]))

    @property
    def title(self) -> str:
        return words.sentence(self.heading)

    def caption(self, about: str, clocked: bool = False) -> str:
        """The caption, in lines: what is shown, every axis that is held or a range of numbers, and how it was timed.

        Words that vary stand in the table or plot itself.
        """
        held = []
        for name in self.axes():
            values = self.values(name)
            is_range = all(type(value) in (int, float) and value not in self.words.get(name, ()) for value in values)
            if name not in self.said + UNSAID and (is_range or len(values) == 1):
                texts = self.text(name, values[0]), self.text(name, values[-1])
                held.append(f"{words.label_of(self.fields[name])} {words.span(texts)}")
        facts = words.sentence("; ".join(filter(None, [self.heading, ", ".join(held), self.also])))
        return f"{self.filled(about)}.\n{facts}.\n{words.timing(self.cases) if clocked else ''}".strip()
