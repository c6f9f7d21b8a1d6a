"""`lmsys leaderboard FOLDER -o SITE`: one page of many result files of one workload, each verified first.

A file is ranked by the fastest of its own rows: those that no table of ours has, else all but the anchor. Its figure is
the sum of its times over the cases of the workload, which is that of most files; within a machine it is ranked by time,
and among machines by how often it is as fast as the anchor, a row that every file has measured beside its own. A file
is refused, with the reason, where `lmsys verify` finds something wrong or not proved, where no timed call of it could
be judged again, and where it lacks the workload or the anchor. Exit codes: 0 a file is ranked, 1 none is, 2 bad usage.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmsys import commands
from lmsys.bench.benchmark import Benchmark
from lmsys.bench.fields import Record
from lmsys.bench.record import load
from lmsys.reports.figures import Html, tag
from lmsys.reports.load import hardware_of, run_told, title_of
from lmsys.reports.page import fill, simple_page
from lmsys.reports.words import number
from lmsys.verify import FOLDERS, NOT_RECOMPUTED, benchmarks_in, verify

Workload = frozenset[str]  # ids of its cases, without the row


@dataclass(frozen=True)
class Standing:
    """A file's place: its row, the seconds of the workload, how many times as fast as the anchor that is."""

    file: str
    row: str
    time_s: float
    speedup: float
    machine: Record


def main(arguments: Sequence[str] | None = None) -> int:
    parser = commands.parser("leaderboard")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the result files")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="SITE", help="the folder of the page")
    parser.add_argument(
        "--anchor", default="naive", metavar="ROW", help="what every file measures, too; default: naive"
    )
    about = "where the benchmarks are; may be given several times (default: benchmarks and dev)"
    parser.add_argument("--benchmarks", action="append", type=Path, metavar="FOLDER", help=about)
    given = parser.parse_args(arguments)
    try:
        benchmarks = benchmarks_in(*given.benchmarks or FOLDERS)
        standings, refused, workload = ranked(sorted(given.folder.glob("*.json*")), benchmarks, given.anchor)
        fill(given.output, {"index.html": page(standings, refused, workload, given.anchor)})
    except (OSError, ValueError) as error:
        print(f"lmsys leaderboard: error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*map(_line, standings), *(f"refused: {file}: {reason}" for file, reason in refused.items())]))
    return int(not standings)


def ranked(
    paths: Sequence[Path], benchmarks: Mapping[str, Benchmark], anchor: str
) -> tuple[list[Standing], dict[str, str], Workload]:
    """The standings, the fastest beside the anchor first; of each file that has none the reason; the workload."""
    times, machines, refused = dict[str, dict[str, dict[str, float]]](), dict[str, Record](), dict[str, str]()
    for path in paths:
        try:
            times[path.name], machines[path.name] = _verified(path, benchmarks)
        except ValueError as error:
            refused[path.name] = str(error)
    workloads = Counter(frozenset(of[anchor]) for of in times.values() if anchor in of)
    workload = max(workloads, key=lambda one: (workloads[one], sorted(one)), default=frozenset())
    ours = {name for benchmark in benchmarks.values() for table in benchmark.tables.values() for name in table}
    standings = []
    for file, of in times.items():
        whole = {row: sum(of[row][case] for case in workload) for row in of if workload and workload <= of[row].keys()}
        anchor_s = whole.pop(anchor, 0.0)
        own = {row: time_s for row, time_s in whole.items() if row not in ours} or whole
        if not anchor_s or not own:
            refused[file] = f"it lacks a row, or the anchor {anchor!r}, in {', '.join(sorted(workload)) or 'any case'}"
            continue
        row = min(own, key=lambda name: own[name])
        standings.append(Standing(file, row, own[row], anchor_s / own[row], machines[file]))
    return sorted(standings, key=lambda one: -one.speedup), refused, workload


def _verified(path: Path, benchmarks: Mapping[str, Benchmark]) -> tuple[dict[str, dict[str, float]], Record]:
    """The times of a file by row and case, and its machine. ValueError with the first thing that is wrong with it."""
    done, sentences = verify(path, benchmarks)
    content, sealed = load(path), [one for one in sentences if "has no seal" in one]
    if wrong := [one for one in sentences if NOT_RECOMPUTED not in one] or sealed:
        raise ValueError(wrong[0] + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    if not done.calls:
        raise ValueError("no timed call could be judged again")
    times = dict[str, dict[str, float]]()
    for record in content["records"]:
        if record["outcome"] == "ok" and record.get("time_s"):
            times.setdefault(record["impl"], {})[record["id"].removesuffix(f"-{record['impl']}")] = record["time_s"]
    return times, content["machine"]


def _line(one: Standing) -> str:
    return f"{one.speedup:.3g} x  {number(1e3 * one.time_s)} ms  {one.row}  ({one.file}, {title_of(one.machine)})"


def page(standings: Sequence[Standing], refused: Mapping[str, str], workload: Workload, anchor: str) -> str:
    """The board: all files by their ratio to the anchor, each machine's by time, and those that are refused."""
    blocks = [
        tag("h1", "Leaderboard"),
        tag("p", f"Workload: {', '.join(sorted(workload)) or 'none'}. Every file was verified by lmsys verify."),
        tag("h2", f"All machines, by speed over {anchor}"),
        _table(standings),
    ]
    machines = {hardware_of(one.machine): title_of(one.machine) for one in standings}
    for hardware, title in machines.items() if len(machines) > 1 else ():
        here = [one for one in standings if hardware_of(one.machine) == hardware]
        blocks += [tag("h2", f"{title}, by time"), _table(sorted(here, key=lambda one: one.time_s))]
    if refused:
        rows = [tag("tr", tag("td", file), tag("td", reason)) for file, reason in refused.items()]
        blocks += [tag("h2", "Not ranked"), tag("table", *rows)]
    return simple_page("lmsys leaderboard", *blocks)


def _table(standings: Sequence[Standing]) -> Html:
    heads = ("rank", "row", "speed", "time, ms", "machine", "run", "file")
    rows = [
        (
            str(place),
            one.row,
            f"{one.speedup:.3g}",
            number(one.time_s),
            title_of(one.machine),
            run_told(one.machine),
            one.file,
        )
        for place, one in enumerate(standings, start=1)
    ]
    cells = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("table", tag("thead", tag("tr", *(tag("th", head) for head in heads))), tag("tbody", *cells))


if __name__ == "__main__":
    sys.exit(main())
