"""A checkout of an assignment of CS336: finds it, and imports its tests/adapters.py; `adapter(name)` gives an adapter.

A checkout is a student's copy of the assignment. An adapter is a function of its tests/adapters.py, by which the
course's tests call the student's code. __main__.py calls `root_of` and `path_of`. All other functions here run in the
processes that call adapters: the workers of __main__.py, and the benchmarks of its --measure. To treat a package that
is not installed in another way, change `_make_importable` and `Missing`.
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
    """The checkout's root: the folder that holds tests/adapters.py. It is `path`, or lies one or two levels below it.

    The level nearest to `path` counts. ValueError where there is no such folder, or more than one on that level.
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

    They are the root, of which `tests` is a package; projects in it, such as cs336-basics; and projects beside it, such
    as the checkout of another assignment. The folder tests itself is left out.
    """
    beside = sorted({file.parent for file in root.parent.glob("*/pyproject.toml")} - {root})
    folders = [root] + folders_of(root / ADAPTERS) + beside
    return [str(folder) for folder in dict.fromkeys(folders) if folder != (root / ADAPTERS).parent]


class Missing(types.ModuleType):
    """Stands for a module that is not installed, but that a checkout imports, perhaps without ever using it.

    While the adapters load, any name can be imported from it, called, and used as a base class. A call later raises
    ModuleNotFoundError with the module's name.
    """

    __path__: list[str] = []  # as a package has it, so that `import package.module` looks for the module inside
    loading = True  # of the class, and so of all instances: True while the adapters load

    def __getattr__(self, name: str) -> Any:
        """This object itself for any name, as in `from module import name`."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        if not Missing.loading:
            raise ModuleNotFoundError(f"No module named {self.__name__!r}", name=self.__name__)
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        """The base class that Python uses for this object in `class X(module.name)`: X() then calls this object."""
        return (type("Base", (), {"__new__": lambda *args, **kwargs: self()}),)


def load() -> Any:
    """The module tests.adapters. The working folder must be the checkout's root, and sys.path as `path_of` says.

    If tests.adapters imports a module that is not found, but lies deeper in the checkout, the module's folder is added
    to sys.path. Any other module that is not found is replaced by a `Missing`. Then tests.adapters is imported again.

    ValueError, with the line, where tests.adapters does not load.
    """
    # The course's packages ask for their own version. Where they are not installed, this function returns "0".
    importlib.metadata.version = laptop.version
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
    """Prepares another import of a module that was not found.

    If the module lies in the checkout, its folder is added to the path of this process, and of those that it starts. If
    it does not, or if that folder is on the path already, a `Missing` takes the module's place.
    """
    folders = [  # that hold the module's file, or its package
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
    """{name in tests.adapters: False for an adapter that is still to be written, else True}.

    The names are all those of the module, also imported ones. In the course's template an adapter only raises
    NotImplementedError: a function that does no more counts as not written.
    """
    return {
        # co_names: the global names and attributes that a function's code uses.
        name: getattr(getattr(x, "__code__", None), "co_names", ()) != ("NotImplementedError",)
        for name, x in vars(load()).items()
    }
