"""`lmsys leaderboard FOLDER -o SITE`: one page of many result files of one workload, each verified first.

A *row* is an implementation that a file has measured. The *anchor* is a row that every file must have measured, too.
The *workload* is a set of cases: of the sets in which the files have measured the anchor, the one that occurs in most
files. A row's time is the sum of its times in these cases, and its speed is the anchor's time divided by its own time.

Each file is ranked by one row, its fastest *own* row: a row that is not in the tables of its benchmark. A file without
own rows is ranked by its fastest row besides the anchor. The page is ordered by speed; a second column ranks the files
of the same machine by time. A row is *disturbed* if the machine was busy or slowed down while one of its cases was
timed. A file is ranked by a disturbed row only if all rows that could be taken were disturbed. A file whose row or
anchor was disturbed says so, and comes behind all others.

A file is refused, with the reason, if `lmsys verify` finds something wrong or not proved, if it has no seal (checksums
over its content), if no timed call of it could be judged again, if another file has the same measurements, and if in a
case of the workload it lacks the anchor, or has no other row that was timed beside the anchor. Exit codes: 0 a file is
ranked, 1 none is, 2 bad usage. To change which files are refused, edit `_verified` and `_place`; to change the columns,
HEADS and `_standings`; to change the page, lmsys/reports/templates/leaderboard.html.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lmsys import commands, values
from lmsys.bench import Benchmark, fields, record
from lmsys.reports import load, page, words
from lmsys.verify import FOLDERS, NO_SEAL, benchmarks_in, verify

HEADS = ("rank", "on its machine", "row", "speed", "time, ms", "machine", "run", "file")  # of the page's columns
# The times of a file: {row: {case: (True if the machine was disturbed meanwhile, seconds)}}.
Times = dict[str, dict[str, tuple[bool, float]]]
# (True if neither row nor anchor was disturbed, speed, seconds, row, file): `ranked` sorts by it, the largest first.
Place = tuple[bool, float, float, str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments`, by default those of the command line. Returns its exit code."""
    parser = commands.parser("leaderboard")
    parser.add_argument("folder", type=commands.path, metavar="FOLDER", help="the result files")
    parser.add_argument(
        "-o", "--output", type=commands.path, required=True, metavar="SITE", help="the folder of the page"
    )
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
        manifest = given.output / page.MANIFEST  # of the page, which may be written beside the results
        paths = sorted(path for path in given.folder.glob("*.json*") if path.resolve() != manifest.resolve())
        values.hold((paths, f"{given.folder}: is no folder of result files: it has no *.json and no *.json.gz"))
        rows, refused, workload = ranked(paths, benchmarks_in(*given.benchmarks or FOLDERS), given.anchor)
        html = page.render(
            "leaderboard.html", heads=HEADS, rows=rows, refused=refused, workload=sorted(workload), anchor=given.anchor
        )
        page.fill(given.output, {"index.html": html})
    except (OSError, ValueError) as error:
        return commands.refused(parser.prog, error)
    print("\n".join([*map("  ".join, rows), *(f"refused: {file}: {reason}" for file, reason in refused.items())]))
    return int(not rows)


def ranked(
    paths: Sequence[Path], benchmarks: Mapping[str, Benchmark], anchor: str
) -> tuple[list[tuple[str, ...]], dict[str, str], frozenset[str]]:
    """(the lines of the table, fastest first; by refused file the reason; the cases of the workload).

    anchor  the row that speeds are relative to, which every file must have
    """
    times, machines, refused = dict[str, Times](), dict[str, fields.Record](), dict[str, str]()
    own, firsts = dict[str, set[str]](), dict[frozenset[str], str]()  # `firsts`: by measurements, the first file
    for path in paths:
        try:
            rows, own[path.name], machines[path.name], measured = _verified(path, benchmarks, anchor)
            first = firsts.setdefault(measured, path.name)
            values.hold((first == path.name, f"it has the measurements of {first}, which counts for both"))
            times[path.name] = rows
        except ValueError as error:
            refused[path.name] = str(error).removeprefix(f"{path}: ")  # the page does not name the user's folders
    counts = Counter(frozenset(rows[anchor]) for rows in times.values() if anchor in rows)
    # Of sets that occur equally often it is the one whose names come last in the alphabet: so the choice is repeatable.
    workload = max(counts, key=lambda cases: (counts[cases], sorted(cases)), default=frozenset())
    places = list[Place]()
    for file, rows in times.items():
        try:
            places.append(_place(file, rows, workload, anchor, own[file]))
        except ValueError as error:
            refused[file] = str(error)
    return list(_standings(sorted(places, reverse=True), machines)), refused, workload


def _verified(
    path: Path, benchmarks: Mapping[str, Benchmark], anchor: str
) -> tuple[Times, set[str], fields.Record, frozenset[str]]:
    """(the times of a file, its own rows, its machine, the seals of its timed records).

    ValueError with the first thing that is wrong with it.

    Only times that were taken beside the anchor's count: a file of a resumed run (--resume) may have others. Rows of an
    earlier state of the code, which --against measures, are left out.
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
    own = {
        x["impl"]
        for x in timed
        for kind, table in benchmarks[x["benchmark"]].tables.items()
        if str(x.get(kind, x["impl"])) not in table  # with options of a strategy "impl" is more than the row's name
    }
    seals = frozenset(x["seal"] for x in timed)
    return {row: dict(cases) for row, cases in rows.items()}, own, content["machine"], seals


def _place(file: str, rows: Times, workload: frozenset[str], anchor: str, own: set[str]) -> Place:
    """The place of a file. ValueError where the anchor, or each other row, lacks a case of the workload.

    rows  the file's times
    own   its rows that are in no table of ours
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
    row = min([row for row in others if row in own] or others, key=lambda name: totals[name])
    (anchor_disturbed, anchor_s), (disturbed, row_s) = totals[anchor], totals[row]
    return not (anchor_disturbed or disturbed), anchor_s / row_s, row_s, row, file


def _standings(places: Sequence[Place], machines: Mapping[str, fields.Record]) -> Iterator[tuple[str, ...]]:
    """Yields the lines of the table, with a text for each of HEADS.

    places  the undisturbed ones, then the others; both with the largest speed first
    """
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
