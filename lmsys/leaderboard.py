"""`lmsys leaderboard FOLDER -o SITE`: one page of many result files of one workload, each verified first.

A file is ranked by the fastest of its own rows: the rows that are in no table of ours, or if there are none all but the
anchor. The anchor is a row that every file has measured too. The workload is the set of cases that most files have of
the anchor; a row's time is the sum over these cases. Within a machine files are ranked by time, and among machines by
speed: the anchor's time over the row's. A file is refused, with the reason, where `lmsys verify` finds something wrong
or not proved, where no timed call of it could be judged again, and where it lacks the workload or the anchor.
Exit codes: 0 a file is ranked, 1 none is, 2 bad usage.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmsys import commands, values
from lmsys.bench.benchmark import Benchmark
from lmsys.bench.fields import Record, grouped
from lmsys.bench.record import load
from lmsys.reports import words
from lmsys.reports.load import hardware_of, run_told, title_of
from lmsys.reports.page import fill, render
from lmsys.verify import FOLDERS, benchmarks_in, verify

HEADS = ("rank", "on its machine", "row", "speed", "time, ms", "machine", "run", "file")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = commands.parser("leaderboard")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the result files")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="SITE", help="the folder of the page")
    parser.add_argument(
        "--anchor", default="naive", metavar="ROW", help="what every file measures, too; default: naive"
    )
    parser.add_argument(
        "--benchmarks",
        action="append",
        type=Path,
        metavar="FOLDER",
        help="where the benchmarks are; may be given several times (default: benchmarks and dev)",
    )
    given = parser.parse_args(arguments)
    try:
        benchmarks = benchmarks_in(*given.benchmarks or FOLDERS)
        standings, refused, workload = ranked(sorted(given.folder.glob("*.json*")), benchmarks, given.anchor)
        known = {"heads": HEADS, "refused": refused, "workload": sorted(workload), "anchor": given.anchor}
        rows = [x.values() for x in standings]
        fill(given.output, {"index.html": render("leaderboard.html", rows=rows, **known)})
    except (OSError, ValueError) as error:
        print(f"lmsys leaderboard: error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*("  ".join(x.values()) for x in standings), *(f"refused: {x}: {y}" for x, y in refused.items())]))
    return int(not standings)


def ranked(
    paths: Sequence[Path], benchmarks: Mapping[str, Benchmark], anchor: str
) -> tuple[list[dict[str, str]], dict[str, str], frozenset[str]]:
    """(the lines of the table by HEADS, fastest first; by refused file the reason; the cases of the workload)."""
    times, machines, refused = dict[str, dict[str, dict[str, float]]](), dict[str, Record](), dict[str, str]()
    for path in paths:
        try:
            times[path.name], machines[path.name] = _verified(path, benchmarks)
        except ValueError as error:
            refused[path.name] = str(error)
    workloads = Counter(frozenset(of[anchor]) for of in times.values() if anchor in of)
    workload = max(workloads, key=lambda cases: (workloads[cases], sorted(cases)), default=frozenset[str]())
    ours = {name for benchmark in benchmarks.values() for rows in benchmark.tables.values() for name in rows}
    places = list[tuple[float, float, str, str]]()
    for file, of in times.items():
        whole = {row: sum(of[row][case] for case in workload) for row in of if workload and workload <= of[row].keys()}
        anchor_s = whole.pop(anchor, 0.0)
        rows = {row: time_s for row, time_s in whole.items() if row not in ours} or whole
        if anchor_s and rows:
            row = min(rows, key=lambda name: rows[name])
            places.append((anchor_s / rows[row], rows[row], row, file))
        else:
            refused[file] = f"it lacks a row, or the anchor {anchor!r}, in {', '.join(sorted(workload)) or 'any case'}"
    return _standings(sorted(places, reverse=True), machines), refused, workload


def _standings(places: Sequence[tuple[float, float, str, str]], machines: Mapping[str, Record]) -> list[dict[str, str]]:
    """The lines of the table, by HEADS. places: (speed, seconds, row, file), the largest speed first."""
    standings = []
    for rank, (speed, time_s, row, file) in enumerate(places, start=1):
        here = [s for _, s, _, other in places if hardware_of(machines[other]) == hardware_of(machines[file])]
        machine = title_of(machines[file]), run_told(machines[file])
        values = rank, sorted(here).index(time_s) + 1, row, f"{speed:.2f}", words.number(1e3 * time_s), *machine, file
        standings.append(dict(zip(HEADS, map(str, values), strict=True)))
    return standings


def _verified(path: Path, benchmarks: Mapping[str, Benchmark]) -> tuple[dict[str, dict[str, float]], Record]:
    """(seconds by row and case, the machine) of a file. ValueError with the first thing that is wrong with it."""
    done, faults = verify(path, benchmarks)
    content, unsealed = load(path), [sentence for sentence in done.left_out if "has no seal" in sentence]
    if wrong := faults or unsealed:
        raise ValueError(wrong[0] + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    values.hold((done.calls, "no timed call could be judged again"))
    timed = (x for x in content["records"] if x["outcome"] == "ok" and x.get("time_s"))
    rows = grouped((x["impl"], (x["id"].removesuffix(f"-{x['impl']}"), x["time_s"])) for x in timed)
    return {row: dict(cases) for row, cases in rows.items()}, content["machine"]


if __name__ == "__main__":
    sys.exit(main())
