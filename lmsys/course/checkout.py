"""A checkout of an assignment: where it is, what its tests/adapters.py defines, and how that is imported."""

from pathlib import Path
from typing import Any

from lmsys.registry import folders_of, load_target, place_of

ADAPTERS = Path("tests", "adapters.py")
STUB = ("NotImplementedError",)  # all that an adapter names which the course has left to write


def root_of(path: Path) -> Path:
    """The folder of the only tests/adapters.py in a folder or at most two below it. ValueError: there is not one."""
    depths = (sorted(path.resolve().glob(f"{'*/' * depth}{ADAPTERS}")) for depth in range(3))
    files = next((files for files in depths if files), [])
    if len(files) != 1:
        raise ValueError(
            f"{str(path)!r} must be a checkout with one {ADAPTERS}:"
            f" {'; '.join(str(file.parents[1]) for file in files) or 'there is none'}"
        )
    return files[0].parents[1]


def path_of(root: Path) -> list[str]:
    """Where the course's tests import from: the root and the packages in it."""
    return [str(folder) for folder in (root, *folders_of(root / ADAPTERS)) if folder != (root / ADAPTERS).parent]


def adapter(name: str) -> Any:
    """The adapter, in a process whose path begins as `path_of` says. ValueError where the file has none."""
    return load_target(f"tests.adapters:{name}")


def written() -> dict[str, bool]:
    """By the name of each adapter, in such a process, whether it is more than what the course has left to write.

    ValueError, with the line, where the file does not load.
    """
    try:
        defined = adapter("__dict__").items()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{ADAPTERS} does not load: {type(error).__name__}: {error}{place_of(error)}") from error
    return {name: getattr(getattr(x, "__code__", None), "co_names", ()) != STUB for name, x in defined}
