"""Tables of named implementations, by which the project is extended. Imports no torch.

A `Table` has rows. A row is one implementation that can be checked and measured: an `Entry` with its `Traits`. The
tables are `lmsys.attention.table.ATTENTION`, `lmsys.parallel.STRATEGIES`, and those of benchmarks, such as LOSSES in
benchmarks/bench_loss.py. To add a row, add an `Entry` to one of these tables. Users add rows by "path.py:function" on
the command line or by entry points of a package. The bench, `lmsys check`, `attention` and the training loop look rows
up here.

A *trait* is a fact about a row on which other code acts. A trait that rows of every table have is a field of `Traits`
here; a trait of attention rows or of strategies is a field in `lmsys.traits`. A row names its code ("module:attr"),
which is imported only when the row is used. So a machine that lacks a row's packages still lists and runs the others.
For `--against`, which measures rows of an earlier commit, `lmsys.bench.checkout` appends `lmsys/bench/earlier.py` to a
copy of this file: if a name that rows use is dropped here, add it there.
"""

import difflib
import importlib.metadata
import importlib.util
import inspect
import itertools
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self, get_origin, get_type_hints

from lmsys.commands import PIP, with_extra
from lmsys.values import choice, hold, shortly

PROJECT = ("pyproject.toml", "setup.py", ".git")  # a folder that holds one of these is a project's root
ALIKE = 0.85  # difflib's ratio above which an attribute counts as a misspelt trait: "synchronises" has 0.92


def load_target(target: str) -> Any:
    """The object that `module:attr` or `path.py:attr` names; for an autograd Function's `apply` the Function itself.

    A user's file may export `attention = Attention.apply`, as Triton's tutorial does, but callers read the traits and
    the `forward`, which are attributes of the class `Attention`. Raises ValueError when the text is malformed or a file
    does not define the attribute, and whatever the module itself raises on import (ImportError when a package is
    missing).
    """
    module_name, separator, attribute = target.rpartition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"{target=} must read module:attribute or path.py:attribute")
    if module_name.endswith(".py"):
        module = _load_file(module_name)
    else:  # each call of attention comes here: import_module would cost the host half a microsecond more
        module = sys.modules.get(module_name)
        # sys.modules has a module before its import has ended. If another thread is importing it, import_module waits.
        if getattr(getattr(module, "__spec__", None), "_initializing", module is None):
            module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ValueError(f"{target=}: {module_name} defines no {attribute!r}")
    value = getattr(module, attribute)
    is_apply = isinstance(value, types.MethodType) and value.__name__ == "apply" and isinstance(value.__self__, type)
    return value.__self__ if is_apply else value


@cache
def _load_file(path: str) -> Any:
    """The module of a user's file. ValueError, with the line, where there is none or it does not load."""
    file = Path(path).expanduser().resolve()
    hold((file.is_file(), f"{path!r} is not a file (looked for {file})"))
    try:
        return _imported(file)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{path!r} does not load: {type(error).__name__}: {message_of(error)}{place_of(error)}"
        ) from error


def _imported(file: Path) -> Any:
    """The module of a file. A file in a package is imported as a part of it, so that relative imports work.

    If another package of that name was imported, the file is loaded alone, like a file in no package.
    """
    sys.path += [str(folder) for folder in folders_of(file) if str(folder) not in sys.path]
    if packages := list(itertools.takewhile(_is_package, file.parents)):  # the innermost first
        outermost = sys.modules.get(packages[-1].name)
        if outermost is None or str(packages[-1]) in getattr(outermost, "__path__", ()):
            return importlib.import_module(".".join([folder.name for folder in packages[::-1]] + [file.stem]))
    return module_of(f"lmsys_user_{file.stem}_{abs(hash(file))}", file)


def module_of(name: str, file: Path) -> Any:
    """The module that a file makes, imported by this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folders_of(file: Path) -> list[Path]:
    """The folders that the imports of a user's file may need on sys.path.

    They are the file's folder, the folder that holds its outermost package, the roots of the projects that hold it (see
    PROJECT), and the folders of projects directly inside of those roots.
    """
    folders = [file.parent, next(folder for folder in file.parents if not _is_package(folder))]
    for folder in file.parents:
        if any((folder / name).exists() for name in PROJECT):
            folders += [folder, *sorted({path.parent for name in PROJECT for path in folder.glob(f"*/{name}")})]
    return list(dict.fromkeys(folders))


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def message_of(error: BaseException) -> str:
    """The message of a user's exception in characters that can be written anywhere, also where its `str` fails."""
    try:
        message = str(error).strip()
    except Exception:
        message = ""
    return message.encode(errors="backslashreplace").decode() or "no message"


def place_of(error: BaseException) -> str:
    """The last line of a user's file in an error's traceback, as " (file, line N: its text)"; "" if there is none.

    The file is named without its folders: the text may stand on a page that others read.
    """
    ours = str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<"  # "<" begins names that are no file's
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours)
        and not {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


@dataclass(frozen=True)
class Traits:
    """Facts about a row on which benchmarks, checks, reports and training act. A subclass adds those of one table.

    color     the color of the row in plots, "#rrggbb"; empty: the report chooses one
    baseline  a priority: speedups are relative to the timed row with the largest number; 0: never to this row
    rivals    names of the rows that the report compares this one with
    compiles  True: its first call runs torch.compile, which takes seconds
    kernels   a regular expression that matches the names of its own device kernels, for profiles
    """

    color: str = ""
    baseline: int = 0
    rivals: tuple[str, ...] = ()
    compiles: bool = False
    kernels: str = ""

    @classmethod
    def of(cls, row: "Entry") -> Self:
        """The traits of a row: what its table states, else attributes of its function or class, else defaults.

        ValueError names the row and a trait that does not exist, or whose value has another type.
        """
        return row.traits if isinstance(row.traits, cls) else _traits_of(cls, row)  # type: ignore[arg-type]

    @classmethod
    def checked(cls, row: str, values: Mapping[str, Any]) -> Self:
        """Traits with these values by name, else defaults, for the row of this name. ValueError as `of`."""
        type_of = get_type_hints(cls)
        for name, value in values.items():
            expected = type_of[choice(name, type_of, begin=f"row {row!r}: trait {name!r} ")]
            hold(
                (
                    isinstance(value, tuple if get_origin(expected) is tuple else expected),
                    f"row {row!r}: trait {name!r} must be of type {inspect.formatannotation(expected)}; got"
                    f" {shortly(value)}",
                ),
                (
                    name != "color" or re.fullmatch(r"(#[0-9a-fA-F]{6})?", str(value)),
                    f"row {row!r}: trait 'color' must be a color such as #2563eb; got {shortly(value)}",
                ),
                (len(str(value)) <= 1000, f"row {row!r}: trait {name!r} has more than 1,000 characters"),
            )
        return cls(**values)

    @property
    def changed(self) -> dict[str, Any]:
        """The traits that differ from their defaults, by name."""
        return {trait.name: value for trait in fields(self) if (value := getattr(self, trait.name)) != trait.default}


@cache
def _traits_of(traits_class: type[Traits], row: "Entry") -> Any:
    """The traits of a row whose `Entry.traits` is no instance of this class.

    `Entry.traits` may be a mapping: it states some traits by name, and attributes of the implementation state others.
    Or it is an instance of another class, such as plain `Traits`: it states all traits, and no attributes are read.
    """
    attributes: dict[str, Any] = {}
    if not isinstance(row.traits, Traits):
        with suppress(ImportError):  # a row that cannot run here has defaults for what its table does not state
            attributes = _attributes(row, asdict(traits_class()))
    return traits_class.checked(row.name, {**attributes, **row.stated})


def _attributes(row: "Entry", defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a row's function or class that are traits or look like misspelt traits, by name.

    A misspelt one has a name much like a trait's, and a value of the trait's type; `Traits.checked` refuses it.
    """
    implementation = row.load()
    attributes = {name: getattr(implementation, name) for name in defaults if hasattr(implementation, name)}
    for name in (name for name in dir(implementation) if not name.startswith("_")):
        near = difflib.get_close_matches(name, defaults, 1, ALIKE)  # at most one, of at least this ratio
        if near and type(inspect.getattr_static(implementation, name, None)) is type(defaults[near[0]]):
            attributes[name] = getattr(implementation, name)
    return attributes


@dataclass(frozen=True)
class Entry:
    """One row of a table.

    name      the name by which users ask for it: `--attention name`, `impl="name"`
    target    `module:attr` or `path.py:attr`, loaded on first use
    label     its name in tables and plots; empty: the name
    peer      True for code that is not ours and is in the table for comparison
    supports  `module:attr` of a function `case -> None | reason why not`; empty: every case
    extra     the optional dependency group (extra) of lmsys that installs the packages that the row needs
    install   the words after "pip install" in the message about a missing package, if no extra installs it
    traits    an instance of the table's class of traits: it states all of them. Or a mapping by name: it states some,
              and attributes of the row's function or class may state others; it is empty for a user's file. Read
              traits by `Traits.of`, which knows both

    The attribute `apart` is True in `lmsys.bench.foreign.Foreign` alone, whose code runs in a process of its own.
    """

    name: str
    target: str
    label: str = ""
    peer: bool = False
    supports: str = ""
    extra: str = ""
    install: str = ""
    traits: Traits | Mapping[str, Any] = field(default_factory=dict, hash=False)  # a mapping cannot be hashed
    apart = False

    @property
    def is_ours(self) -> bool:
        """True for code of lmsys, which may call that of others."""
        return self.target.startswith("lmsys.")

    @property
    def stated(self) -> Mapping[str, Any]:
        """The traits that `traits` states, by name; if it is an instance, those that differ from the defaults."""
        return self.traits.changed if isinstance(self.traits, Traits) else self.traits

    def to_json(self) -> dict[str, Any]:
        """The row as result files have it: name, label, peer, and the traits that its table states."""
        return {"name": self.name, "label": self.label or self.name, "peer": self.peer, **self.stated}

    def load(self) -> Any:
        """The implementation. ImportError names the extra that would install a missing package."""
        try:
            return load_target(self.target)
        except ImportError as error:
            raise ImportError(self._missing(error)) from error

    def why_not(self, case: Any) -> str | None:
        """None when the row can run `case`, else the reason, as users read it.

        A missing package is a reason. A ValueError of `load_target` is raised: the row's code cannot be found.
        """
        try:
            reason = load_target(self.supports)(case) if self.supports else None
            if reason is None:
                load_target(self.target)
        except ImportError as error:
            return self._missing(error)
        return reason

    def _missing(self, error: ImportError) -> str:
        """The message about a missing package, with how to install it."""
        command = with_extra(self.extra) if self.extra else f"{PIP} {self.install}"
        advice = f"; {command} brings it" if self.extra or self.install else ""
        return f"{self.name} needs a package that is not here ({error}){advice}"


class Table(Mapping[str, Entry]):
    """Rows by name, in table order.

    kind    what a row is, for messages, such as "attention"
    group   the entry point group by which other packages add rows; empty: none
    auto    auto(case) gives the names of rows that "auto" tries, the fastest first
    traits  the class of its rows' traits. ValueError for a row that states a trait that does not exist, or a value of
            another type

    ValueError for two rows of one name.
    """

    def __init__(
        self,
        kind: str,
        entries: Iterable[Entry],
        group: str = "",
        auto: Callable[[Any], Iterable[str]] = lambda case: (),
        traits: type[Traits] = Traits,
    ):
        self.kind, self.group, self.auto, self.traits = kind, group, auto, traits
        self._own_rows = dict[str, Entry]()
        for entry in entries:
            hold((entry.name not in self._own_rows, f"two rows of the table {kind!r} are called {entry.name!r}"))
            traits.checked(entry.name, entry.stated)
            self._own_rows[entry.name] = entry

    @cached_property
    def _all_rows(self) -> dict[str, Entry]:
        """All rows, with those that other packages add; these are read once. ValueError where one redefines our own."""
        points = importlib.metadata.entry_points(group=self.group)
        plugins = {point.name: Entry(point.name, point.value) for point in points}
        clash = sorted(plugins.keys() & self._own_rows.keys())
        hold((not clash, f"entry points in {self.group!r} redefine the rows {clash}; give them other names"))
        return self._own_rows | plugins

    def __getitem__(self, name: str) -> Entry:
        if name not in self._all_rows:
            near = difflib.get_close_matches(str(name), self._all_rows, n=3) or sorted(self._all_rows)
            raise ValueError(f"unknown {self.kind} {name!r}; did you mean {', '.join(near)}?")
        return self._all_rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all_rows  # Mapping's own would expect `self[name]` to raise KeyError, not ValueError

    def __iter__(self) -> Iterator[str]:
        return iter(self._all_rows)

    def __len__(self) -> int:
        return len(self._all_rows)

    def select(self, names: Iterable[str], apart: Callable[[Entry], Entry] | None = None) -> list[Entry]:
        """The rows of these names. "path.py:attr" makes a row of the user's code, named by its attribute.

        ValueError for an unknown name, and for two different rows of one name.

        apart  apart(row) gives a row whose code runs in another process; code of users' files is then not loaded here
        """
        # ".py" anywhere marks a file: for a path without ":attr", `load_target` has a better message than `self[name]`.
        from_file = self._from_file if apart is None else self._named_after
        entries = [from_file(name) if ".py" in name else self[name] for name in names]
        selected: dict[str, Entry] = {}
        for entry in entries:
            first = selected.setdefault(entry.name, entry).target
            hold((first == entry.target, f"two rows are called {entry.name!r}: {first} and {entry.target}"))
        return [apart(x) for x in selected.values()] if apart else list(selected.values())

    def _from_file(self, target: str) -> Entry:
        """The row of a user's code. It is loaded at once, so that its errors do not appear in the middle of a run."""
        implementation = load_target(target)
        hold((callable(implementation), f"{target=} must name a function or a class; it is {implementation!r}"))
        entry = self._named_after(target)
        self.traits.of(entry)
        return entry

    def _named_after(self, target: str) -> Entry:
        """The row of a user's code, which is not loaded."""
        name = target.rpartition(":")[2]
        hold(
            (
                name not in self._all_rows,
                f"{target=}: the table has a row {name!r} of its own; give yours another name",
            )
        )
        return Entry(name, target)

    def pick(self, name: str, case: Any) -> Entry:
        """The row `name`, if it can run `case`; for "auto" the first of the table's `auto` that can.

        ValueError with every reason when none can. A named row is never replaced by another.
        """
        reasons = {}
        for entry in map(self.__getitem__, self.auto(case) if name == "auto" else [name]):
            if (reason := entry.why_not(case)) is None:
                return entry
            reasons[entry.name] = reason
        listed = [reason if row == name else f"{row}: {reason}" for row, reason in reasons.items()]
        raise ValueError(f"{self.kind} {name!r} cannot run {case}: " + "; ".join(listed))
