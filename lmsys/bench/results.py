"""One pytest run of benchmarks: the selected cases, their results, and where these are kept. Imports no torch.

`lmsys.bench.plugin` makes one `Session` per pytest run, adds each benchmark to it, selects cases, asks for each result,
and has the result file written at the end. A *row* is an implementation under test, and a *case* is one row with one
set of sizes. A *group* is the cases that share inputs: the runner sets them up and measures them together. Each case
gets a record, whose form `lmsys.bench.record` describes. Here a record is called an *answer*, since `record` is the
name of that module. The *journal*, a file beside the result file, gets each record as soon as it is there, and keeps it
if the run is killed. For --resume, records of an earlier run's file are *carried over* into this run (`_stands` says
which). The lines at the end of a run come from `summary`. A new setting of a run is a field of `Session`, which
`plugin._session` fills, or of `Settings` if the runner needs it.
"""

import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lmsys.bench import record, verdict
from lmsys.bench.benchmark import Benchmark, Settings
from lmsys.bench.fields import COMMON, Grid, Record, Sweep, declared, grouped
from lmsys.files import cache_folder, replacing, write_json
from lmsys.values import hold

if TYPE_CHECKING:
    from lmsys.bench import isolation, paired
    from lmsys.bench.changes import Change
    from lmsys.bench.checkout import Checkout
    from lmsys.bench.runner import Runner

MARGIN_IN_TURNS = 0.02  # the default of `Session.margin`
# {field of a record: option of `lmsys check`}, for the commands that `_checks` suggests.
ASKED = {"head_dim": "--head-dim", "dtype": "--dtype"}
DONE = ("ok", "oom", "unsupported")  # outcomes that --resume takes over; cases that are wrong or failed run again
# Facts of the machine that a file states once for all its records: --resume refuses a file that differs in one of them.
SAME = ("name", "torch", "triton", "driver", "commit")
Key = tuple[str, str]  # a benchmark's name and a case's id


def _changes() -> Any:
    """`lmsys.bench.changes`, which imports numpy: a session that compares nothing does without it."""
    from lmsys.bench import changes

    return changes


@dataclass
class Session:
    """The selected cases, their results, the journal and the final file.

    settings  how to measure
    sweep     the grids of each benchmark, and how long each row is sampled
    output    the path of the result file; None: no file is written
    texts     values of axes on the command line, as text, by option or axis name
    say       called with each line for the user
    carried   records of the file that --resume names, which are not measured again, by benchmark and case id
    carried_entries, carried_head  the rest of that file: pytest-benchmark's entries, and all under "lmsys" but records
    results   the records that this run has measured, by benchmark and case id
    isolated  True: rows run in a worker process
    retries   True: --resume also runs again the cases that had ended their process
    repeats   how often each group is measured, each time in a fresh process; the last measurement is kept
    checkout  an earlier state of the code, whose rows take turns with today's (--against)
    margin    for verdicts of --against: a smaller change of time, as a share, counts as none
    fail_on   outcomes that make a run fail
    faults    sentences on why the result could not be written
    benchmarks  by name, those that have been added
    """

    settings: Settings
    sweep: Sweep = Sweep()
    output: Path | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None
    carried: dict[Key, Record] = field(default_factory=dict)
    carried_entries: list[Record] = field(default_factory=list)
    carried_head: Record = field(default_factory=lambda: {"machine": {}, "fields": {}, "rows": {}, "layouts": {}})
    results: dict[Key, Record] = field(default_factory=dict)
    isolated: bool = False
    retries: bool = False
    repeats: int = 1
    checkout: "Checkout | None" = None
    margin: float = MARGIN_IN_TURNS
    fail_on: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)
    benchmarks: dict[str, Benchmark] = field(default_factory=dict)
    _took: dict[str, float] = field(default_factory=dict)  # seconds of each group, by "benchmark group"
    _cases: dict[Key, Any] = field(default_factory=dict)  # all cases, selected or not
    _rows: dict[tuple[str, str], Record] = field(default_factory=dict)  # by kind and name
    _groups: dict[Key, list[Any]] = field(default_factory=dict)  # selected cases, by (benchmark, group)
    _failed: dict[Key, str] = field(default_factory=dict)  # by (benchmark, group), why the bench could not run it
    _early: dict[Key, Record] | None = None  # carried records, rated before the first group

    def add(self, cls: type[Benchmark]) -> list[str]:
        """Adds a benchmark, with the command line's values of its axes. Returns the ids of its cases.

        With --against there are also the ids of the same cases in the earlier state of the code. ValueError for bad
        values of axes, and for two benchmarks of one name.
        """
        benchmark = self.benchmarks.setdefault(cls.name, cls())
        hold((type(benchmark) is cls, f"two benchmarks are called {cls.name!r}: {type(benchmark)} and {cls}"))
        if self.checkout and (benchmark.streams or not benchmark.opens):
            raise ValueError(
                f"--against {self.checkout.text}: not for the benchmark {cls.name!r}: its rows take no turns with those"
                " of another process; compare two result files"
            )
        cases, rows = self.runner.collect(benchmark, self.sweep.grids.get(cls.name, (Grid("default"),)), self.texts)
        suffixes = ("", f"@{self.checkout.name}") if self.checkout else ("",)
        by_id = {name + suffix: case for name, case in cases.items() for suffix in suffixes}
        self._cases |= {(cls.name, name): case for name, case in by_id.items()}
        self._rows |= rows
        return list(by_id)

    def select(self, keys: Iterable[Key]) -> None:
        """Keeps the cases that pytest has selected, by -k and similar options; a group then has these cases alone.

        ValueError if, with --against, a case is selected without the same case in the other state of the code.
        ValueError also if --resume carries over records of a benchmark that this run does not collect: it could not
        compute their rates again.
        """
        unknown, keys = sorted({name for name, _ in self.carried} - self.benchmarks.keys()), dict.fromkeys(keys)
        hold(
            (
                not unknown,
                f"--resume: it has records of {', '.join(unknown)}, which this run has not: run the files that it was"
                " made of, and choose among their cases by -k",
            )
        )
        if self.checkout:
            suffix = f"@{self.checkout.name}"
            for benchmark, name in keys:
                other = name.removesuffix(suffix) if name.endswith(suffix) else name + suffix
                hold(
                    ((benchmark, other) in keys, f"--against {self.checkout.text}: select {other}, too, beside {name}")
                )
                if not {(benchmark, name), (benchmark, other)} <= self.carried.keys():
                    self.carried.pop((benchmark, name), None)  # the two are measured in turns, or not at all
        # Ids with the suffix of --against are left out: the runner measures a case in both states of the code.
        asked = [key for key in keys if key not in self.carried and key[1] == self._cases[key].id]
        self._groups = grouped(((key[0], self._cases[key].group), self._cases[key]) for key in asked)

    def made_up(self) -> Record:
        """A result file's content with made-up records, by which mistakes of metrics and plots show before the run.

        There is a record for the first and the last case of each section and row. ValueError for a benchmark whose
        metrics return a field that is declared nowhere.
        """
        alike = grouped(
            ((name, case.section, case.impl), (self.benchmarks[name], case))
            for (name, _), cases in self._groups.items()
            for case in cases
        )
        # The first case, and the last one if there are several.
        ends = [case for cases in alike.values() for case in cases[:1] + cases[1:][-1:]]
        return dict(
            json.loads(
                json.dumps(self._head({}) | self.runner.ask("made_up", ends), default=str),
                parse_constant=lambda _: None,  # NaN and inf, which made-up numbers may give and measured ones do not
            )
        )

    @property
    def sections(self) -> str:
        """The benchmarks of all cases, each with its sections, for a reader."""
        sections = grouped((name, case.section) for (name, _), case in self._cases.items())
        return "; ".join(f"{name}: {', '.join(dict.fromkeys(several))}" for name, several in sections.items())

    def facts(self, keys: Iterable[Key]) -> list[str]:
        """The names of the fields that say what a case is, with the axes that all of these cases have in common.

        keys  one case or more
        """
        shared = set.intersection(*(set(self._cases[key].axes) for key in keys))
        return ["benchmark", "section", "impl", "device", *sorted(shared)]

    def result(self, key: Key) -> Record:
        """Returns the case's record. The first call for a case of a group runs the whole group."""
        group = key[0], self._cases[key].group
        if group in self._failed:
            raise RuntimeError(f"{group[1]} could not be run: {self._failed[group]}")
        if key not in self.results:
            try:
                self._run(group)
            except KeyboardInterrupt:
                # A new one: a traceback into the middle of a kernel can hold frames that pytest fails to print.
                raise KeyboardInterrupt(f"interrupted in {group[1]}") from None
            except Exception as error:
                self._failed[group] = f"{type(error).__name__}: {error}"
                raise
        return self.results[key]

    def _run(self, group: Key) -> None:
        """Prints which group comes and how long the rest should take, and has the runner measure the group."""
        self.runner.ready()
        if self.carried and self.settings.timed and self._early is None:
            self._early = {}
            with suppress(Exception):  # `complete` rates once more, and says what is wrong
                self._early = self._rated(again=False)
        cases = self._groups[group]
        number = list(self._groups).index(group) + 1
        count = {" ".join(key): len(members) for key, members in self._groups.items()}
        # The sweep's seconds were measured on another machine. They help only once this machine's pace is known, that
        # is, once a group has run here.
        usual = self._usual if self._took or self._earlier.keys() & self.sweep.took_s.keys() else self._earlier
        left = time_left(self._took, count, usual, doubt=" if the rest costs as much a case")
        self.say(f"[{number}/{len(self._groups)}{left}] {group[1]}: checking, then sampling {len(cases)} cases")
        begin = time.monotonic()
        try:
            if self.repeats > 1 or self.checkout:
                self._repeat(group, cases)
            else:
                for answer in self.runner.run(self.benchmarks[group[0]], cases):
                    self._keep(group, answer)
        finally:
            self._took[" ".join(group)] = time.monotonic() - begin

    def _keep(self, group: Key, answer: Record) -> None:
        """Adds a record to `results` and to the journal."""
        # `results` comes first: if an interrupt falls between the two, the final file has the record.
        self.results[group[0], answer["id"]] = answer
        if self.output:
            self.journal.add(answer)

    def _repeat(self, group: Key, cases: list[Any]) -> None:
        """Measures a group several times. Keeps each case's last result, or its first that is not ok.

        Each kept record says by how much the case's times differ between the runs.
        """
        runs: list[list[Record]] = []
        try:
            # Two processes of the same code can differ in time, too, since their memory lies elsewhere: so a group in
            # which a case looks changed is measured again, in fresh processes.
            while len(runs) < self.repeats or (self.checkout and len(runs) == 1 and _changes().look_changed(runs[0])):
                if runs:
                    self.runner.close()
                    why = ": a case looks changed" if self.checkout else f", {len(runs) + 1} of {self.repeats}"
                    self.say(f"  again{why}")
                runs.append(list(self.runner.run(self.benchmarks[group[0]], cases)))
        finally:  # also after an interrupt: the complete runs are kept
            spreads = _changes().spreads_between(runs)
            for answers in zip(*runs, strict=True):
                answer = next((answer for answer in answers if answer["outcome"] != "ok"), answers[-1])
                if spread := spreads.get(answer["id"]):
                    answer["between_runs"] = spread
                answer["seal"] = record.seal(answer)
                self._keep(group, answer)

    @property
    def _durations(self) -> Path:
        """The file that keeps the seconds of groups between runs."""
        return cache_folder() / f"durations_{self.settings.device}.json"

    @cached_property
    def _usual(self) -> dict[str, float]:
        """Seconds that groups should take: those of a group's last run on this machine, where it has run here.

        For other groups they are the sweep's seconds, scaled by the pace of this machine.
        """
        pace = pace_of(self._earlier, self.sweep.took_s)
        return {name: pace * seconds for name, seconds in self.sweep.took_s.items()} | self._earlier

    @cached_property
    def _earlier(self) -> dict[str, float]:
        """Seconds of groups in the last run of each on this machine; nothing where no run has left them."""
        try:
            return {str(name): float(seconds) for name, seconds in json.loads(self._durations.read_text()).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    @cached_property
    def runner(self) -> "Runner | isolation.Isolated | paired.Paired":
        """The runner of the rows: this process, a worker, or with --against two workers."""
        from lmsys.bench import isolation, paired

        if self.isolated and self.checkout:
            against = {"name": self.checkout.name, "commit": self.checkout.commit, "margin": self.margin}
            return paired.Paired(self.settings, self.say, self.checkout, against)
        if self.isolated:
            return isolation.Isolated(self.settings, self.say)
        from lmsys.bench.runner import Runner

        return Runner(self.settings, self.say)

    @cached_property
    def journal(self) -> record.Journal:
        """The journal, which is begun when the first record comes."""
        assert self.output is not None
        # The journal states the ceilings of this run, so the records that are carried over must be rated by them. This
        # is done only now: a run that ends without a record leaves the file that it resumes as it is.
        self._take(self._early or {}, self.carried_entries)
        return record.Journal(self.output, self._head(self.runner.machine), self.carried.values())

    @property
    def records(self) -> list[Record]:
        return [*self.carried.values(), *self.results.values()]

    def _head(self, machine: Record) -> Record:
        """A file's facts about its records: the machine, fields and layouts by benchmark, the rows of their tables."""
        fields = {
            name: [field.to_json() for field in declared(COMMON, benchmark.fields).values()]
            for name, benchmark in self.benchmarks.items()
        }
        tables = [pair for benchmark in self.benchmarks.values() for pair in benchmark.tables.items()]
        rows = {(kind, entry.name): entry.to_json() for kind, table in tables for entry in table.values()} | self._rows
        return {
            "machine": machine,
            "fields": self.carried_head["fields"] | fields,
            "layouts": self.carried_head["layouts"]
            | {name: benchmark.layout for name, benchmark in self.benchmarks.items() if benchmark.layout},
            "rows": self.carried_head["rows"] | grouped((kind, row) for (kind, _), row in rows.items()),
        }

    def complete(self, output_json: Record) -> None:
        """Completes pytest-benchmark's JSON in place: with carried entries, our part of the file, and its seal."""
        from lmsys.bench.isolation import Ended

        if self.settings.timed and self.results:
            try:
                self._take(self._rated(again=True), self.entries_of_carried + output_json["benchmarks"])
            except (KeyboardInterrupt, Ended) as error:  # the measured records are kept
                self.runner.machine["ceilings_moved"] = [
                    f"ceilings were not measured again: {str(error) or 'interrupted'}"
                ]
            self.runner.machine["took_s"] = self._took
        output_json["benchmarks"] = self.entries_of_carried + output_json["benchmarks"]
        content = self.content | {"others": record.others_seal(output_json)}
        output_json["lmsys"] = content | {"seal": record.seal(content)}

    @property
    def content(self) -> Record:
        """Our part of the result file, as a reader gets it, but for its seal."""
        machine = self.runner.machine if self.results else self.carried_head["machine"]
        return dict(json.loads(json.dumps(record.payload(self._head(machine), self.records))))

    def save(self, content: Record) -> None:
        """Writes the result file, or leaves the old one as it was; then removes the journal.

        If it cannot be written, `faults` gets a sentence and the journal stays.
        """
        assert self.output is not None
        journal = self.output.with_name(self.output.name + ".partial")
        try:
            with replacing(self.output.resolve()) as file:
                file.write(json.dumps(content, indent=4).encode())
        except OSError as error:
            kept = f"; {journal} holds the records" if journal.is_file() else ""
            self.faults.append(f"cannot write the result to {self.output}: {error.strerror}{kept}")
        else:
            journal.unlink(missing_ok=True)

    @property
    def failing(self) -> list[str]:
        """Sentences on why the run fails; empty if it does not.

        A wrong result fails the run, unless it is that of a peer (code of others) or of the earlier state of --against.
        """
        counts = Counter(answer["outcome"] for answer in self.records)
        failed = [f"{counts[outcome]} {outcome}" for outcome in self.fail_on if counts[outcome]]
        worse = Counter(change.verdict for change in self.changes if change.is_bad)
        wrong = dict.fromkeys(
            answer["impl"]
            for answer in self.records
            if answer["outcome"] == "wrong" and not (answer.get("peer") or answer.get("against"))
        )
        return [
            *self.faults,
            *([f"wrong, which fails the run, as a peer's would not: {', '.join(wrong)}"] if wrong else []),
            *([f"--fail-on: {', '.join(failed)}"] if failed else []),
            *([f"--against: {', '.join(f'{count} {verdict}' for verdict, count in worse.items())}"] if worse else []),
        ]

    @cached_property
    def changes(self) -> "list[Change]":
        """Verdicts on rows beside their earlier state (--against), at the end of the run."""
        return _changes().compare_in_turns(self.records, self.margin) if self.checkout else []

    def _rated(self, again: bool) -> dict[Key, Record]:
        """All records with rates by the machine's ceilings, which are measured once more if `again`.

        Carried records are rated anew, too: a file has the ceilings of the run that wrote it. A record is left out if
        this run has not collected its case, and the case cannot be made again from the record.
        """
        held = self.carried | self.results
        # Rates are computed under the names of today's rows; `record.earlier` gives records of --against theirs again.
        asked = {
            key: (self.benchmarks[key[0]], case, record.today(answer))
            for key, answer in held.items()
            if (case := self._cases.get(key) or self.benchmarks[key[0]].case_of(answer))
        }
        machine, records = self.runner.ask("rate", list(asked.values()), again)
        self.runner.machine.update(machine)
        return {key: record.earlier(new, held[key].get("against")) for key, new in zip(asked, records, strict=True)}

    def _take(self, rated: Mapping[Key, Record], entries: Iterable[Record]) -> None:
        """Replaces records by the rated ones, also their values in `extra_info` of pytest-benchmark's `entries`."""
        self.carried |= {key: answer for key, answer in rated.items() if key in self.carried}
        self.results |= {key: answer for key, answer in rated.items() if key in self.results}
        for entry in entries:
            info = entry["extra_info"]
            if answer := rated.get((info.get("benchmark"), info.get("id"))):
                info |= {name: value for name, value in answer.items() if name in info}

    def resume(self, earlier: Record, entries: Sequence[Record]) -> None:
        """Takes over the records that an earlier run has measured under the same memory limit, and their entries.

        ValueError when the machine or the code was another.
        """
        here = self.runner.ask("facts")
        hold(
            *(
                (
                    earlier["machine"].get(fact) == here[fact],
                    f"its {'processor' if fact == 'name' else fact} is {earlier['machine'].get(fact)!r}, here it is"
                    f" {here[fact]!r}: measure into another file",
                )
                for fact in SAME
            )
        )
        self.carried |= {
            (answer["benchmark"], answer["id"]): answer for answer in earlier["records"] if self._stands(answer)
        }
        self.carried_entries += entries
        self.carried_head = {key: earlier[key] for key in ("machine", "fields", "rows", "layouts")}

    @property
    def entries_of_carried(self) -> list[Record]:
        """pytest-benchmark's entries of the records that are carried over, without those of records that are not."""
        ids = {name for _, name in self.carried}
        return [entry for entry in self.carried_entries if entry["extra_info"].get("id") in ids]

    def _stands(self, answer: Record) -> bool:
        """True if --resume carries the record over; False if its case is to be run again."""
        same_question = answer.get("memory_limit_bytes") == self.settings.memory_limit_bytes
        answered = answer["outcome"] != "ok" or answer.get("time_s") is not None or not self.settings.timed
        done = answer["outcome"] in DONE or (answer.get("crashed") and not self.retries)
        return bool(done and answered and same_question)

    def summary(self) -> Iterator[str]:
        """Yields the lines that a run ends with."""
        yield from verdict.lines(self.records)
        if self._took:
            took = grouped((name.partition("-")[0].replace("_", " "), seconds) for name, seconds in self._took.items())
            sections = Counter({section: sum(seconds) for section, seconds in took.items()})
            shares = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sections.most_common())
            yield f"it took {sections.total():.0f} s: {shares}"
        if self.checkout:
            yield f"against {self.checkout.text}, in turns; ROW@{self.checkout.name} is a row as it was there:"
            yield from _changes().lines(self.changes, self.margin)
        if self.settings.nvtx:
            yield "no case was timed: --nvtx calls each in ranges of its id, for nsys and ncu"
        machine = self.runner.machine if self.results else {}
        yield from (f"at the end of the run {text}" for text in machine.get("ceilings_moved", ()))
        yield from self.failing
        yield from self._checks()
        if self.output and not self.faults and self.records:
            yield f"the report of it: lmsys report {shlex.quote(str(self.output))} -o site"

    def _checks(self) -> Iterator[str]:
        """Yields a `lmsys check` command for each row that was wrong or failed, if `lmsys check` knows its kind."""
        from lmsys.check.kinds import KINDS

        for (outcome, impl, name), (answer, *_) in verdict.failed(self.records).items():
            case = self._cases.get((name, answer["id"]))
            names = (case.entry.target, case.entry.name) if case else ()
            asked = [f"{option}={answer[axis]}" for axis, option in ASKED.items() if answer.get(axis)]
            kinds = [kind for kind in self.benchmarks[name].tables if kind in KINDS]
            known = [(row, kind) for kind in kinds for row in names if ".py:" in row or row in list(KINDS[kind].table)]
            for row, kind in known[:1]:
                yield f"why {impl} was {outcome}: lmsys check {shlex.join([row, f'--kind={kind}', *asked])}"

    def standing(self, answer: Record) -> Record:
        """Facts about a record's row that the summary at a run's end needs: {"contends": bool, "own": bool}.

        contends  it may be called the fastest: it does the same work as those it is compared with
        own       it is from a file of the user's

        Both are False for records of the earlier state of the code (--against), and of cases that this run has not
        collected.
        """
        case = None if answer.get("against") else self._cases.get((answer["benchmark"], answer["id"]))
        return {
            "contends": case is not None and self.benchmarks[answer["benchmark"]].contends(case),
            "own": case is not None and ".py:" in case.entry.target,
        }

    def close(self) -> None:
        """Ends the runner, and saves how long groups took: from this the next run estimates the time left."""
        if self._took and self.settings.timed:
            with suppress(OSError):  # a folder that cannot be written: the next run learns it anew
                write_json(self._durations, self._earlier | self._took)
        if "runner" in self.__dict__:
            self.runner.close()


def time_left(took: Mapping[str, float], cases: Mapping[str, int], usual: Mapping[str, float], doubt: str = "") -> str:
    """How long the rest should take, as text for a reader; empty where it cannot be estimated.

    took   seconds of each group that has run
    cases  number of cases of every group, whether it has run or not
    usual  seconds of groups in an earlier run; the estimate scales them by this run's pace so far
    doubt  appended if the estimate covers groups that have not run before
    """
    to_do = cases.keys() - took.keys()
    if not took and to_do - usual.keys():
        return ""
    pace = pace_of(took, usual)
    mean = sum(took.values()) / max(1, sum(cases[name] for name in took))
    left = sum(pace * usual[name] if name in usual else mean * cases[name] for name in to_do)
    # Below 150 s a minute is too coarse.
    text = f", about {left / 60:.0f} min left" if left >= 150 else f", about {left:.0f} s left"
    return text if to_do <= usual.keys() else text + doubt


def pace_of(took: Mapping[str, float], usual: Mapping[str, float]) -> float:
    """The seconds that groups took over their usual seconds; 1 if no group has both.

    It is the median over groups, since one group that had to compile is no guide.
    """
    ratios = [math.log(seconds / usual[name]) for name, seconds in took.items() if seconds and usual.get(name)]
    return math.exp(median(ratios)) if ratios else 1.0


def read_results(path: Path) -> Iterator[tuple[Record, list[Record]]]:
    """(our part, pytest-benchmark's entries) of a result file, then of the journal of a killed run that resumed it."""
    file = record.load_file(path)  # where there is no file, this is the journal
    yield file["lmsys"], file.get("benchmarks", [])
    journal = path.with_name(path.name + ".partial")
    if journal.is_file():
        yield record.load(journal), []
