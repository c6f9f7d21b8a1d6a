"""`python -m lmsys.check mine.py:f`: is it right? Of the first failure: where, what, and which mistake.

A row of a table by its name, or path.py:attribute: attention, a strategy, an optimizer, a loss, a norm. Attention is
asked for more than one tile, odd lengths, Q != K, grouped heads, a scale, memory that is transposed, unaligned or
expanded, three dtypes, forward and backward, each held to a float64 oracle as the suite does. A strategy trains on two
processes, beside one process.
Exit codes: 0 right, 1 wrong or failed, 2 a target or option that is none.
"""

import argparse
import json
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; without a GPU it can only interpret

from lmsys.check.cases import DTYPES
from lmsys.check.kinds import KINDS, LIMIT_S, SCHEMA, WRONG, check, find
from lmsys.check.question import Options
from lmsys.processes import ProcessError, in_own_process

USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    found = argparse.ArgumentParser(prog="python -m lmsys.check", description=__doc__.split("\n\n")[0])
    found.add_argument("target", help="a name of a table, or path.py:attribute")
    found.add_argument("--kind", choices=KINDS, help="what it is; default: told by its class or its parameters")
    found.add_argument("--head-dim", type=int, default=64, help="of attention; default: 64")
    found.add_argument("--dtype", default=",".join(DTYPES), help="those to ask, a comma list; default: %(default)s")
    found.add_argument("--forward", action="store_true", help="no gradients")
    found.add_argument("--seed", type=int, default=0, help="of the inputs")
    found.add_argument("--json", action="store_true", help="a JSON object in a line for each case: docs/check.md")
    given = found.parse_args(arguments)
    try:
        kind, entry = find(given.target, given.kind)
        dtypes = tuple(given.dtype.split(","))
        if unknown := [name for name in dtypes if name not in DTYPES]:
            raise ValueError(f"--dtype {unknown[0]!r} must be one of {', '.join(DTYPES)}")
        options = Options(given.head_dim, not given.forward, dtypes, given.seed)
        return int(in_own_process(check, entry, options, kind.name, given.json, timeout_s=LIMIT_S))
    except ValueError as error:
        print(f"python -m lmsys.check: error: {error}", file=sys.stderr)
        return USAGE
    except Exception as error:
        reason = str(error) if isinstance(error, ProcessError) else f"it raises {type(error).__name__}: {error}"
        told = {"schema": SCHEMA, "name": given.target.rpartition(":")[2], "verdict": "wrong", "reason": reason}
        print(json.dumps(told) if given.json else f"wrong\n\n{given.target}: {reason}")
        return WRONG


if __name__ == "__main__":
    sys.exit(main())
