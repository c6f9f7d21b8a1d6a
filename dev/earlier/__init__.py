"""Compares today's lmsys with that of an earlier commit, as two packages that one process can import.

`--against` of `lmsys bench` compares commits, too, but gives each of them its own processes, and cannot time
strategies. `python -m dev.earlier.kernels REF` says whether the kernels of `flash_triton` have the same machine code as
at a commit. `python -m dev.earlier.steps REF` times training steps of data-parallel strategies beside those of that
commit. Both import the earlier package as `lmsys_earlier`, from a copy that `unpack` makes. A new comparison is a file
here.
"""

import re
import sys
from pathlib import Path

from lmsys.files import commit_of, git, unpack_commit
from lmsys.values import hold

NAME = "lmsys_earlier"  # the name under which the earlier package is imported
SOURCES = {".py", ".cu", ".cuh"}  # kinds of files in which the package's name is replaced


def unpack(ref: str, folder: Path) -> str:
    """Puts the package at a git reference into `folder`, as `lmsys_earlier`. Returns the whole hash of the commit.

    ValueError if `ref` is no commit of this repository. Operators of torch get another namespace by the new name, so
    that both packages can register theirs in one process.
    """
    root = Path(git(Path(__file__).parent, "rev-parse", "--show-toplevel") or ".")
    commit = commit_of(root, ref)
    hold((commit, f"{ref!r} is no commit of {root}"))
    unpack_commit(root, commit, folder, "lmsys")
    (folder / "lmsys").rename(folder / NAME)
    for path in (folder / NAME).rglob("*"):
        if path.suffix in SOURCES:
            path.write_text(re.sub(r"\blmsys\b", NAME, path.read_text()))
    return commit


def importable(folder: Path) -> None:
    """Makes `lmsys_earlier` importable in this process, from the folder that `unpack` was given."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
