"""`python -m lmsys.check mine.py:f`: is this attention right? Of the first failure: where, what, and which mistake.

A row of the table by its name, or path.py:function. It is asked for more than one tile, odd lengths, Q != K, grouped
heads, a scale, transposed memory, three dtypes, forward and backward, each held to a float64 oracle as the suite does.
Exit codes: 0 right, 1 wrong or failed, 2 a target or option that is none.
"""

import argparse
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; without a GPU it can only interpret

from lmsys.attention import ATTENTION
from lmsys.check.verdict import WRONG, check
from lmsys.processes import ProcessError, in_own_process

USAGE = 2
LIMIT_S = 600.0


def main(arguments: list[str] | None = None) -> int:
    found = argparse.ArgumentParser(prog="python -m lmsys.check", description=__doc__.split("\n\n")[0])
    found.add_argument("row", help="a name of the table, or path.py:function")
    found.add_argument("--head-dim", type=int, default=64, help="default: 64")
    found.add_argument("--forward", action="store_true", help="no gradients")
    found.add_argument("--seed", type=int, default=0, help="of the inputs")
    given = found.parse_args(arguments)
    try:
        (entry,) = ATTENTION.select([given.row])
        return int(in_own_process(check, entry, given.head_dim, not given.forward, given.seed, timeout_s=LIMIT_S))
    except ProcessError as error:
        print(f"wrong\n\n{given.row}: {error}")
        return WRONG
    except ValueError as error:
        print(f"python -m lmsys.check: error: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
