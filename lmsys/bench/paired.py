"""Runs --against: measures today's rows beside the same rows of an earlier state of the code, in turns.

A *row* is an implementation under test. There are two worker processes, one for each state of the code. Each group of
cases runs in both: round i of today's row is sampled right beside round i of the earlier row, on the same inputs. If a
row ends its worker, both workers end. The group then runs again from its beginning in two fresh workers, and the
worker of the row's state leaves this row out: so only times that were sampled in turns are compared.

`lmsys.bench.results.Session` uses `Paired` in place of `Isolated`. `lmsys.bench.checkout` makes the folder that the
earlier state's worker imports from, `lmsys.measure.turns` has the turns, and `lmsys.bench.changes` makes the verdicts
on the times.
"""

import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmsys.bench import fields, isolation, record
from lmsys.bench.benchmark import Benchmark, Cases, Collected, Settings
from lmsys.bench.case import Case
from lmsys.bench.checkout import Checkout


class Paired(isolation.Isolated):
    """Today's worker, and beside it the worker of an earlier state of the code.

    `Session` calls it as any `Isolated`: this object itself runs today's worker. Both workers run today's harness and
    today's benchmark; only the rows of the other worker are those of the earlier state. The results of a group are
    today's, then the earlier ones, whose names get a suffix (`record.earlier`).

    state    the earlier state of the code, as a folder that the other worker imports from
    earlier  the other worker, which runs the rows of the earlier state
    against  {"name", "commit", "margin"}, for the records of the earlier rows: the name of the earlier state, its hash,
             and the share by which a time must change to count
    """

    def __init__(self, settings: Settings, say: Callable[[str], None], checkout: Checkout, against: fields.Record):
        super().__init__(settings, say)
        self.state, self.against, self.earlier = (
            checkout,
            against,
            isolation.Isolated(replace(settings, earlier=True), say, checkout),
        )
        self._lines = self._joined()

    def collect(self, benchmark: Benchmark, grids: Sequence[fields.Grid], texts: Mapping[str, str]) -> Collected:
        """Does as `Isolated.collect`. Raises ValueError also if today's benchmark cannot run the earlier rows."""
        collected = super().collect(benchmark, grids, texts)
        check_rows(self.state, type(benchmark), collected[0])
        package = sys.modules[type(benchmark).__module__.partition(".")[0]]
        home = package.__path__[0] if hasattr(package, "__path__") else package.__file__ or ""
        # Both workers import today's benchmark: its file, or the whole package that it is in.
        self.state.use_today(Path(home).resolve())
        try:
            self.earlier.collect(benchmark, (), {})  # no grids: only imports the benchmark, and by it the earlier rows
        except Exception as error:  # whatever an earlier state raises when it is imported
            raise ValueError(
                f"--against {self.state.text}: today's benchmark {benchmark.name!r} cannot run its rows: {error}"
            ) from None
        return collected

    def ready(self) -> fields.Record:
        """The facts of the machine. The first call has a fresh worker of today measure them; both workers get them."""
        if self._machine is None:
            self.close()  # workers that have collected were started without the facts of the machine
            self.earlier._machine = super().ready()  # measures
        return super().ready()  # only returns what has been measured

    def run(self, benchmark: Benchmark, cases: Cases) -> Iterator[Any]:
        """Yields today's results of a group, then the earlier ones."""
        # {row: {"target", "supports"}} in the earlier state's tables, to replace these fields of today's `Entry`. A row
        # that only the earlier tables have is left out, since a row from a user's file may have its name.
        names = set[str]().union(*benchmark.tables.values())
        places = {name: place for name, place in self.earlier.ask("places", benchmark).items() if name in names}
        earlier = []
        for case in cases:
            target = {"target": self.state.target(case.entry.target)}
            entry = replace(case.entry, **places.get(case.entry.name, target))
            earlier.append(replace(case, entry=entry))
        results = None
        groups = isolation.Group(self, benchmark, cases), isolation.Group(self.earlier, benchmark, earlier)
        while results is None:
            results = self._together(groups)
        yield from results[0]
        yield from (record.earlier(result, self.against) for result in results[1])

    def _together(self, groups: Sequence[isolation.Group]) -> tuple[list[Any], list[Any]] | None:
        """(today's results, the earlier ones); None if a row has ended one of the workers and was blamed for it.

        The workers take turns by themselves (`lmsys.measure.turns`). Here both are only listened to.
        """
        results: tuple[list[Any], list[Any]] = [], []
        streams = [group.results(in_turns=True) for group in groups]
        going = {0, 1}  # sides (0 today, 1 earlier) that still have results
        try:
            while going:
                for side in sorted(going):
                    try:
                        message = next(streams[side])
                    except StopIteration:
                        going.discard(side)
                    else:
                        results[side].extend([message] if message else [])  # None: no message has come for a moment
            return results
        except isolation.Ended as fault:
            streams[1 - side].close()  # this also ends the worker that it reads from
            groups[side].blame(fault)
            for group in groups:
                group.left = dict(group.cases)
            return None
        finally:
            for stream in streams:
                stream.close()
            if going:
                self.close(0.0)

    def close(self, grace_s: float = 2.0) -> None:
        """Ends both workers. The next call starts two fresh ones."""
        super().close(grace_s)
        self.earlier.close(grace_s)
        for line in self._lines:
            line.close()
        self._lines = self._joined()

    def _joined(self) -> tuple[socket.socket, socket.socket]:
        """A pair of connected sockets for the next two workers, by which they take turns."""
        ours, theirs = socket.socketpair()
        # (socket, True if the worker with this end goes first)
        self.line, self.earlier.line = (ours.fileno(), True), (theirs.fileno(), False)
        return ours, theirs


def check_rows(checkout: Checkout, cls: type[Benchmark], cases: Mapping[str, Case]) -> None:
    """Raises ValueError for a row that is defined in its benchmark's file: that file is today's in both workers."""
    for case in cases.values():
        if case.entry.target.partition(":")[0] == cls.__module__:
            raise ValueError(
                f"--against {checkout.text}: the row {case.impl!r} stands in the file of its benchmark, which is "
                "today's: put it into a file of its own"
            )
