"""A checkout of an assignment: finds it, and imports its tests/adapters.py; `adapter(name)` gives an adapter.

__main__.py calls `root_of` and `path_of`. All else runs in processes that ask adapters: the workers of __main__.py, and
the benchmarks of its --measure.
"""

import importlib.metadata
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmsys.check import laptop
from lmsys.registry import folders_of, load_target, message_of, place_of

ADAPTERS = Path("tests", "adapters.py")


def root_of(path: Path) -> Path:
    """The checkout's root: the folder of the one tests/adapters.py in `path` or at most two levels below it.

    ValueError where there is none, or more than one.
    """
    depths = (sorted(path.resolve().glob(f"{'*/' * depth}{ADAPTERS}")) for depth in range(3))
    files = next((files for files in depths if files), [])
    if len(files) != 1:
        raise ValueError(
            f"{str(path)!r} must be a checkout with one {ADAPTERS}:"
            f" {'; '.join(str(file.parents[1]) for file in files) or 'there is none'}"
        )
    return files[0].parents[1]


def path_of(root: Path) -> list[str]:
    """The folders for sys.path, as the course's tests need them.

    The root, of which `tests` is a package; projects in it, such as cs336-basics; and projects beside it, such as the
    checkout of another assignment. The folder tests itself is left out.
    """
    beside = sorted({file.parent for file in root.parent.glob("*/pyproject.toml")} - {root})
    folders = [root] + folders_of(root / ADAPTERS) + beside
    return [str(folder) for folder in dict.fromkeys(folders) if folder != (root / ADAPTERS).parent]


class Missing(types.ModuleType):
    """Stands for a module that a checkout imports, may never use, and that is not installed.

    While the adapters load, any name can be imported from it, called, and derived from. Later use is a
    ModuleNotFoundError with the module's name.
    """

    __path__: list[str] = []  # as of a package, so that modules in it can be asked for
    loading = True  # of the class, for all: the adapters load now

    def __getattr__(self, name: str) -> Any:
        """The module itself for any name, as in `from module import name`."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        if not Missing.loading:
            raise ModuleNotFoundError(f"No module named {self.__name__!r}", name=self.__name__)
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        """The base that Python takes in place of this one in `class X(module.name)`; making an X calls this module."""
        return (type("Base", (), {"__new__": lambda *args, **kwargs: self()}),)


def load() -> Any:
    """The module tests.adapters. The process must work in the checkout, with sys.path as `path_of` says.

    An import that fails is tried again: the folder of the module joins sys.path if it lies deeper in the checkout; else
    a `Missing` stands for the module.
    ValueError, with the line, where tests.adapters does not load.
    """
    importlib.metadata.version = laptop.version  # packages of the course read their version, installed or not
    Missing.loading = True
    try:
        while True:
            try:
                return importlib.import_module("tests.adapters")
            except ModuleNotFoundError as error:
                if error.name is None or error.name in sys.modules or error.name.startswith("tests"):
                    raise
                _make_importable(error.name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{ADAPTERS} does not load: {type(error).__name__}: {message_of(error)}{place_of(error)}; here it is Python"
            f" {sys.version.split()[0]} and torch {laptop.version('torch')}: does the checkout ask for others?"
        ) from error
    finally:
        Missing.loading = False


def _make_importable(module: str) -> None:
    """Puts the folder of a module on the path, of this process and those that it starts, or marks it as missing."""
    folders = [  # those that hold a file of this name, or a package: the parent of a package's own folder
        str(file.parents[file.stem == "__init__"])
        for name in (f"{module}.py", f"{module}/__init__.py")
        for file in Path.cwd().glob(f"[!.]*/**/{name}")
    ]
    if folders and folders[0] not in sys.path:
        sys.path.append(folders[0])
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), folders[0]])
    else:
        sys.modules[module] = Missing(module)


def adapter(name: str) -> Any:
    """The adapter of this name, in a process where `load` can be called. ValueError where there is none."""
    load()
    return load_target(f"tests.adapters:{name}")


def written() -> Mapping[str, bool]:
    """{name of an adapter: True where it does more than the course's template, which raises NotImplementedError}."""
    return {
        name: getattr(getattr(x, "__code__", None), "co_names", ()) != ("NotImplementedError",)  # all that it names
        for name, x in vars(load()).items()
    }
