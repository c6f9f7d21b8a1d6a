"""The command `lmsys check TARGET`: says if an implementation is right, or else where and by which mistake it is wrong.

TARGET is the name of a row in a table, or path.py:attribute, such as mine.py:f. A *row* is one implementation:
attention, a strategy, an optimizer, a loss, a norm and so on (KINDS). Attention is checked with more than one tile, odd
lengths, Q != K, grouped heads, a scale, memory that is transposed, unaligned or expanded, in three dtypes, forward and
backward, each against a float64 oracle. A strategy of data parallelism trains on two processes, and is compared with
one process. With --all every row of the tables is checked, and a line says if it is right, wrong or refused, and why.

This file reads the command line. The check itself is in `kinds.py`. A new option is an argument in `main`, a field of
`question.Options`, and a line in docs/check.md.

Exit codes: 0 right, 1 wrong or failed (with --all: at least one row), 2 an unknown target or option.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; without a GPU it can only interpret

from lmsys import commands, processes, registry, values
from lmsys.check import cases, question
from lmsys.check.kinds import KINDS, LIMIT_S, RIGHT, SCHEMA, WRONG, Answer, check_target, verdict_on

# With --all a row that compiles anew for each case, which takes long, is asked until this many cases are right.
MOST_COMPILED = 4


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns its exit code.

    arguments  the words that follow `lmsys check`; None: those of the command line
    """
    parser = commands.parser("check")
    parser.add_argument("target", nargs="?", metavar="TARGET", help="a name of a table, or path.py:attribute")
    parser.add_argument("--all", action="store_true", help="every row of the tables that this machine can run")
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help=f"{', '.join(KINDS)}; default: told from TARGET")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="of attention; default: 64")
    parser.add_argument(
        "--dtype", default=",".join(cases.DTYPES), metavar="DTYPES", help="those to ask; all by default"
    )
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--layout", default="bhsd", choices=("bhsd", "bshd"), help="of attention's tensors")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs")
    parser.add_argument("--json", action="store_true", help="a JSON object in a line for each case: docs/check.md")
    given = parser.parse_args(arguments)
    try:
        values.hold((given.all == (given.target is None), "name one TARGET, or --all of them"))
        options = question.Options(
            head_dim=values.whole("--head-dim", given.head_dim, least=1),
            grad=not given.forward,
            dtypes=tuple(values.choice(name, cases.DTYPES, f"--dtype {name!r}: ") for name in given.dtype.split(",")),
            seed=values.whole("--seed", given.seed, least=-(2**63), most=2**63 - 1),
            layout=given.layout,
        )
        rows = [
            (kind, entry)
            for kind in (KINDS if given.all else ())
            for entry in KINDS[kind].table.values()
            if given.kind in (None, kind)
        ]
        values.hold((rows or not given.all, f"there is no row of --kind {given.kind}: name yours, path.py:attribute"))
        if not given.all:
            return int(
                processes.in_own_process(check_target, given.target, given.kind, options, given.json, timeout_s=LIMIT_S)
            )
    except ValueError as error:
        return commands.refused(parser.prog, error)
    except Exception as error:  # such as a ProcessError where an implementation has ended its process
        reason = _reason(error)
        record = {"schema": SCHEMA, "name": given.target.rpartition(":")[2], "verdict": "wrong", "reason": reason}
        print(json.dumps(record) if given.json else f"wrong\n\n{given.target}: {reason}")
        return WRONG
    return _check_all(options, rows, given.json)


def _check_all(options: question.Options, rows: Sequence[tuple[str, registry.Entry]], as_json: bool) -> int:
    """Prints for each row if it is right, wrong or refused, and why. Returns WRONG if one is wrong, else RIGHT."""
    verdicts = Counter[str]()
    # Warnings and logs of torch would be printed in the middle of a row's line.
    with processes.Worker({"PYTHONWARNINGS": "ignore", "TORCH_LOGS": "-all"}) as worker:
        worker.call(question.poison, setattr)  # new tensors hold NaN, so that results left unwritten show
        for number, (kind, entry) in enumerate(rows, start=1):
            print("" if as_json else f"{number:3} of {len(rows)}, {kind} {entry.name}: ", end="", flush=True)
            try:
                answer = worker.call(  # verdict_on(entry, options, kind, may_raise, most)
                    verdict_on,
                    entry,
                    options,
                    kind,
                    kind == "attention",
                    MOST_COMPILED if registry.Traits.of(entry).compiles else None,
                    timeout_s=LIMIT_S,
                )
            except Exception as error:
                # A row whose package is missing is refused; with any other error it is wrong.
                answer = Answer(
                    right=0, refused=(str(error),), fault="" if isinstance(error, ImportError) else _reason(error)
                )
            verdicts[answer.verdict] += 1
            record = {
                "schema": SCHEMA,
                "name": entry.name,
                "kind": kind,
                "verdict": answer.verdict,
                "reason": str(answer),
            }
            print(json.dumps(record) if as_json else f"{answer.verdict}, {answer}", flush=True)
    if not as_json:
        print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    return WRONG if verdicts["wrong"] else RIGHT


def _reason(error: Exception) -> str:
    """The error in a line; for a `ProcessError` the reason that it carries."""
    return (
        error.failure[1]
        if isinstance(error, processes.ProcessError)
        else f"it raises {type(error).__name__}: {registry.message_of(error)}"
    )


if __name__ == "__main__":
    sys.exit(main())
