"""Makes the temporary folder of --against: a process that imports from it gets today's code with earlier rows.

A *row* is an implementation under test. --against names an earlier state of the code: a git reference or a folder. In
the temporary folder the files of ROWS are the earlier state's, except JUDGES. All other files of lmsys are today's,
among them the harness (`lmsys/bench`) and the oracle, which judges results. So both states are measured by one clock
and judged by one error budget, and the earlier state may be any whose rows can still be imported.

`lmsys.bench.options` makes a `Checkout`, and `lmsys.bench.paired` runs a worker process from its folder. A new package
with rows in it belongs in ROWS; a file of it that judges results also belongs in JUDGES. If earlier rows need a name
that today's registry lacks, add it to earlier.py. Imports no torch.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from lmsys.files import commit_of, git, unpack_commit
from lmsys.values import hold

PACKAGE = Path(__file__).parents[1]  # the folder of today's lmsys
# Folders and files of this package that are taken from the earlier state: the code of rows.
ROWS = "attention", "kernels", "model", "parallel", "tokenizer", "training", "autograd.py", "config.py"
# Files inside these folders that are taken from today's code anyway: the oracle, and code that benchmarks call.
JUDGES = "attention/contract.py", "attention/naive.py", "parallel/group.py", "training/prepare.py"


class Checkout:
    """The folder that a worker of the earlier state imports from.

    text            the earlier state as --against names it
    root            the root of today's repository
    tree            the path of the folder that is made: the package, with links to earlier and to today's files
    name            a short name of the earlier state, as in the row `flash_triton@1a2b3c4d5e`
    commit          the whole hash of the earlier state; "" if --against names a folder
    working_folder  the folder inside of `tree` that corresponds to the working directory of this process
    """

    def __init__(self, text: str, temporary: Path):
        """Makes the folder in `temporary`. ValueError unless the text is either a git reference or a folder.

        text       names the earlier state
        temporary  an empty folder, which the caller removes; a commit's files are unpacked there, too
        """
        self.text = text
        self.root = Path(git(Path.cwd(), "rev-parse", "--show-toplevel") or Path.cwd())  # without git the folder itself
        named = Path(text).expanduser()
        self.commit = commit_of(self.root, text)
        is_folder, begin = named.is_dir(), f"--against {text!r}"
        hold(
            (
                not (self.commit and is_folder),
                f"{begin} is a folder and a git reference: name one by ./{text} or its commit",
            ),
            (self.commit or is_folder, f"{begin}: neither a folder nor a git reference of {self.root}"),
        )
        self.name = self.commit[:10] or "".join(letter if letter.isalnum() else "-" for letter in named.resolve().name)
        earlier = named.resolve()
        if self.commit:
            earlier = temporary / "earlier"
            unpack_commit(self.root, self.commit, earlier)
        self.tree = temporary / "tree"
        _mirror(earlier, self.tree)
        others = [path for path in sorted(PACKAGE.iterdir()) if path.name not in (*ROWS, "__pycache__")]
        for path in (*others, *(PACKAGE / name for name in JUDGES)):
            self.use_today(path)
        # Today's registry, with the names added that rows of earlier states use. Where lmsys lies outside of the
        # repository, as an installed package does, this path is no link but the package's own file: it is not changed.
        registry = self._mapped(PACKAGE / "registry.py")
        if registry.is_symlink():
            source = registry.read_text() + (PACKAGE / "bench" / "earlier.py").read_text()
            registry.unlink()
            registry.write_text(source)
        self.working_folder = self._mapped(Path.cwd())
        hold((self.working_folder.is_dir(), f"{begin}: it has no folder {Path.cwd().relative_to(self.root)}"))

    def path(self, today: Sequence[str]) -> list[str]:
        """`sys.path` for the worker: folders of the repository are those of the checkout, others stay as they are."""
        return [str(self._mapped(Path(folder))) for folder in today]

    def use_today(self, path: Path) -> None:
        """Puts a link to today's `path`, a file or a folder, in its place in the checkout.

        Folders above it that are links become folders of links. A path outside of the repository is passed over.
        """
        if not path.is_relative_to(self.root):
            return
        place = self.tree
        for part in path.relative_to(self.root).parts[:-1]:
            place = place / part
            if place.is_symlink():
                earlier = place.resolve()
                place.unlink()
                _mirror(earlier, place)
            place.mkdir(exist_ok=True)
        place = place / path.name
        place.unlink(missing_ok=True)
        place.symlink_to(path)

    def target(self, target: str) -> str:
        """The place in the checkout of a row's target, `path:name`; `module:name` stays as it is."""
        path, colon, attribute = target.rpartition(":")
        return f"{self._mapped(Path(path))}{colon}{attribute}" if Path(path).is_absolute() else target

    def _mapped(self, path: Path) -> Path:
        """The place in the checkout of a path in the repository. Paths elsewhere, or of installed packages, stay."""
        path = Path.cwd() / path
        is_installed = any(path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))
        is_ours = path.is_relative_to(self.root) and not is_installed
        return self.tree / path.relative_to(self.root) if is_ours else path


def _mirror(earlier: Path, folder: Path) -> None:
    """Makes `folder`, with links to all that is in the folder `earlier`; it is empty where `earlier` is a file."""
    folder.mkdir()
    for path in earlier.iterdir() if earlier.is_dir() else ():
        (folder / path.name).symlink_to(path)
