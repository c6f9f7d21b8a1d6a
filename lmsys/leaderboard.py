"""`lmsys leaderboard FOLDER -o SITE`: one page of many result files of one workload, each verified first.

The anchor is a row that every file has measured too. The workload is the exact set of the anchor's cases that occurs in
most files; a row's time is the sum over these cases, and its speed is the anchor's time over that. A file counts as its
fastest own row, one that is not among the tables of lmsys; a file without own rows counts as its fastest row besides
the anchor. The page is ordered by speed; a second column ranks files of the same machine by time. A row that was
disturbed in a case counts only where a file has no others of its kind. A file whose row or anchor was disturbed, since
the machine was busy or slowed, says so and comes behind those that were not.

A file is refused, with the reason, where `lmsys verify` finds something wrong or not proved, where it has no seal,
where no timed call of it could be judged again, and where it lacks the anchor in the workload, or another row that was
timed beside it. Exit codes: 0 a file is ranked, 1 none is, 2 bad usage. Change what is refused in `_verified` and
`_place`, the columns in HEADS and `_standings`, the page in reports/templates/leaderboard.html.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from lmsys import commands, values
from lmsys.bench import Benchmark, fields, record
from lmsys.reports import load, page, words
from lmsys.verify import FOLDERS, NO_SEAL, benchmarks_in, verify

HEADS = ("rank", "on its machine", "row", "speed", "time, ms", "machine", "run", "file")  # of the page's columns
# Of a file's rows, by row, then by case: True if the machine was disturbed meanwhile, and the seconds.
Times = dict[str, dict[str, tuple[bool, float]]]
Place = tuple[bool, float, float, str, str]  # False if the row or the anchor was disturbed; speed, seconds, row, file


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments`, by default those of the command line. Returns its exit code."""
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
        values.hold((given.folder.is_dir(), f"{given.folder}: is no folder of result files"))
        benchmarks = benchmarks_in(*given.benchmarks or FOLDERS)
        rows, refused, workload = ranked(sorted(given.folder.glob("*.json*")), benchmarks, given.anchor)
        html = page.render(
            "leaderboard.html", heads=HEADS, rows=rows, refused=refused, workload=sorted(workload), anchor=given.anchor
        )
        page.fill(given.output, {"index.html": html})
    except (OSError, ValueError) as error:
        print(f"lmsys leaderboard: error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*map("  ".join, rows), *(f"refused: {file}: {reason}" for file, reason in refused.items())]))
    return int(not rows)


def ranked(
    paths: Sequence[Path], benchmarks: Mapping[str, Benchmark], anchor: str
) -> tuple[list[tuple[str, ...]], dict[str, str], frozenset[str]]:
    """(the lines of the table, fastest first; by refused file the reason; the cases of the workload).

    anchor  the row that speeds are relative to, which every file must have
    """
    times, machines, refused = dict[str, Times](), dict[str, fields.Record](), dict[str, str]()
    for path in paths:
        try:
            times[path.name], machines[path.name] = _verified(path, benchmarks, anchor)
        except ValueError as error:
            refused[path.name] = str(error)
    counts = Counter(frozenset(rows[anchor]) for rows in times.values() if anchor in rows)
    # Of sets that occur equally often, the one whose names come last in the alphabet.
    workload = max(counts, key=lambda cases: (counts[cases], sorted(cases)), default=frozenset())
    ours = {name for benchmark in benchmarks.values() for rows in benchmark.tables.values() for name in rows}
    places = list[Place]()
    for file, rows in times.items():
        try:
            places.append(_place(file, rows, workload, anchor, ours))
        except ValueError as error:
            refused[file] = str(error)
    return list(_standings(sorted(places, reverse=True), machines)), refused, workload


def _verified(path: Path, benchmarks: Mapping[str, Benchmark], anchor: str) -> tuple[Times, fields.Record]:
    """(the times of a file, its machine). ValueError with the first thing that is wrong with it.

    Only times that were taken beside the anchor's count: a file of --resume may have others. Rows of an earlier state
    of the code (--against) are left out.
    """
    recomputed, faults = verify(path, benchmarks)
    # `verify` only says that a file has no seal; here such a file is refused.
    wrong = faults or [sentence for sentence in recomputed.left_out if sentence == NO_SEAL]
    values.hold(
        (not wrong, "".join(wrong[:1]) + f", and {len(wrong) - 1} more" * (len(wrong) > 1)),
        (recomputed.calls, "no timed call could be judged again"),
    )
    content = record.load(path)
    timed = [x for x in content["records"] if x["outcome"] == "ok" and x.get("time_s") and not x.get("against")]
    beside = {x.get("comparison") for x in timed if x["impl"] == anchor}
    # The id of a record is the name of its case, "-", and the name of its row.
    rows = fields.grouped(
        (x["impl"], (x["id"].removesuffix(f"-{x['impl']}"), (bool(x.get("disturbed")), x["time_s"])))
        for x in timed
        if x.get("comparison") in beside
    )
    return {row: dict(cases) for row, cases in rows.items()}, content["machine"]


def _place(file: str, rows: Times, workload: frozenset[str], anchor: str, ours: Collection[str]) -> Place:
    """The place of a file. ValueError where the anchor or all other rows lack a case of the workload.

    ours  rows of the tables of lmsys
    """
    totals = {
        row: (any(cases[name][0] for name in workload), sum(cases[name][1] for name in workload))
        for row, cases in rows.items()
        if workload <= cases.keys()
    }
    values.hold(
        (
            workload and anchor in totals,
            f"it lacks the anchor {anchor!r} in {', '.join(sorted(workload)) or 'any case'}",
        ),
        (len(totals) > 1, f"no row besides the anchor {anchor!r} has all cases of the workload"),
    )
    others = [row for row in totals if row != anchor]
    row = min([row for row in others if row not in ours] or others, key=lambda name: totals[name])
    (anchor_disturbed, anchor_s), (disturbed, row_s) = totals[anchor], totals[row]
    return not (anchor_disturbed or disturbed), anchor_s / row_s, row_s, row, file


def _standings(places: Sequence[Place], machines: Mapping[str, fields.Record]) -> Iterator[tuple[str, ...]]:
    """Yields the lines of the table, with a text for each of HEADS. `places` are the undisturbed
    ones, then the others, each with the largest speed first."""
    for rank, (calm, speed, time_s, row, file) in enumerate(places, start=1):
        here = sorted(
            (not is_calm, s)
            for is_calm, _, s, _, other in places
            if load.hardware_of(machines[other]) == load.hardware_of(machines[file])
        )
        yield (
            str(rank),
            str(here.index((not calm, time_s)) + 1),
            row + ", disturbed" * (not calm),
            f"{speed:.2f}",
            words.number(1e3 * time_s),
            load.title_of(machines[file]),
            load.run_told(machines[file]),
            file,
        )


if __name__ == "__main__":
    sys.exit(main())
