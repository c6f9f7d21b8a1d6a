"""`lmsys pick RESULT.json -o rows.py` writes a Python module that names the fastest attention row for each shape.

A row is an implementation in the table `lmsys.attention.ATTENTION`, such as flash_triton. A model imports the module
(MODULE below is its text) and passes the row's name to `attention` as `impl`. For each shape, dtype and mask of the
result file, the module names the row with the smallest median time: for inference (the forward), and for training (the
forward and the backward).

The module leaves out rows that were not right or not timed, rows of an earlier commit (ROW@COMMIT), records that lack
an axis, and cases with a window, documents or another option. A row that was timed while the machine was disturbed
(busy or slowed) counts only if all rows of its case were. Rows that `attention` does not know here, such as those of a
user's file, are left out as well, and the command prints their names. Exit codes: 0 the module is written, 2 the file
has no such case, or bad usage. A new option of attention that changes which row is fastest belongs in OPTIONS, so that
its cases are left out, or in CASE and in MODULE.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lmsys import attention, commands, files, values
from lmsys.bench import fields, record

Timed = tuple[bool, float, str]  # (True if the machine was disturbed, seconds, row): the least tuple is the fastest
# The fields of a record that say which case it is, in the order in which `row_for` of MODULE has them.
CASE = "dtype", "causal", "batch", "heads", "kv_heads", "queries", "keys", "head_dim"
OPTIONS = "window", "offset", "documents", "key_lengths", "softcap", "deterministic"  # cases with one are left out
MEASURED = "gpu", "name", "torch", "triton", "commit", "date"  # the facts of the machine that MODULE names
# (True for training, directions whose times are added up). Training has two entries: forward and backward timed in one
# call, and timed one by one. If a case has both, the later entry counts, unless all its rows were disturbed and one of
# the earlier entry's rows was not.
USES = (False, ("fwd",)), (True, ("fwdbwd",)), (True, ("fwd", "bwd"))
# The module that is written, a template of str.format: a brace of the module itself is doubled.
MODULE = '''"""The attention rows that were fastest in a run of lmsys bench; `lmsys pick` has written this file.

    from lmsys.attention import attention
    o = attention(q, k, v, causal=True, impl=row_for(q, k, causal=True, training=True))
"""

MEASURED = {measured!r}
# By training, dtype, causal, batch, query heads, key heads, queries, keys and head dimension.
FASTEST = {{
{lines}
}}


def row_for(q, k, *, causal, training):
    """The row for q (B, H, Q, D) and k (B, Hkv, K, D). ValueError for a case that was not measured."""
    dtype = str(q.dtype).removeprefix("torch.")
    case = training, dtype, causal, *q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3]
    if case not in FASTEST:
        raise ValueError(f"no row was measured for {{case}}: measure it, or take impl='auto'")
    return FASTEST[case]
'''


def main(arguments: Sequence[str] | None = None) -> int:
    parser = commands.parser("pick")
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="of lmsys bench attention")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="ROWS.py", help="the module to write")
    given = parser.parse_args(arguments)
    try:
        content = record.load(given.result)
        strangers = {x["impl"] for x in content["records"] if _can_be_picked(x)} - attention.ATTENTION.keys()
        fastest = fastest_rows(x for x in content["records"] if x["impl"] not in strangers)
        values.hold(
            (given.output.suffix == ".py", f"{given.output}: a module is written, so its name must end in .py"),
            (fastest, f"{given.result}: no row of attention was right there in a case without options"),
        )
        measured = {name: content["machine"].get(name) for name in MEASURED}
        lines = "\n".join(f"    {case!r}: {row!r}," for case, (_, _, row) in fastest.items())
        with files.replacing(given.output) as file:
            file.write(MODULE.format(measured=measured, lines=lines).encode())
    except (OSError, ValueError) as error:
        return commands.refused(parser.prog, error)
    left_out = f"; left out, as impl= knows no such row here: {values.shortly(sorted(strangers))}" if strangers else ""
    if any(x.get("disturbed") for x in content["records"]):
        left_out += (
            "; disturbed rows count only in cases without others, here"
            f" {sum(disturbed for disturbed, _, _ in fastest.values())}"
        )
    print(f"{given.output}: {len(fastest)} cases, {len({row for _, _, row in fastest.values()})} rows{left_out}")
    return 0


def fastest_rows(records: Iterable[fields.Record]) -> dict[tuple[Any, ...], Timed]:
    """{(training, *values of CASE): the fastest row}. If a case was measured twice, its last comparison counts."""
    fastest, plain = dict[tuple[Any, ...], Timed](), filter(_can_be_picked, records)
    for case, measured in fields.grouped((tuple(map(x.__getitem__, CASE)), x) for x in plain).items():
        for training, directions in USES:
            best = min(_times(measured, directions), default=None)
            # A row that was disturbed does not replace one that was not: True is more than False.
            if best and best[0] <= fastest.get((training, *case), best)[0]:
                fastest[training, *case] = best
    return fastest


def _can_be_picked(x: fields.Record) -> bool:
    """True for a row of attention as it is today, in a case without options, of which the record says all."""
    return (
        x["benchmark"] == "attention"
        and "@" not in x["impl"]
        and x.keys() >= {*CASE, "direction"}
        and not any(map(x.get, OPTIONS))
    )


def _times(records: list[fields.Record], directions: tuple[str, ...]) -> list[Timed]:
    """The rows of a case that were right in all of these directions, each with the sum of its times over them.

    In each direction only the last comparison counts: the rows that were last sampled in turns with one another.
    """
    rows: dict[str, dict[str, fields.Record]] = {}  # by row, then by direction
    for direction in directions:
        measured = [x for x in records if x["direction"] == direction]
        for x in measured:
            if x.get("comparison") == measured[-1].get("comparison") and x["outcome"] == "ok" and x.get("time_s"):
                rows.setdefault(x["impl"], {})[direction] = x
    return [
        (any(x.get("disturbed") for x in right.values()), sum(x["time_s"] for x in right.values()), row)
        for row, right in rows.items()
        if len(right) == len(directions)
    ]


if __name__ == "__main__":
    sys.exit(main())
