"""Axes and grids: what a benchmark varies, read off the command line. Every bad value is a ValueError that says what
would be right. Imports no torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from lmsys.values import choice

Parse = Callable[[str], Any]
OPTION = "lmsys_axis"  # begins the names under which pytest keeps axes' own options


@dataclass(frozen=True)
class Axis:
    """A quantity that a benchmark varies.

    name     its key in a grid, and what `--axis name=a,b` calls it
    parse    one value's text -> the value; ValueError says what would be right
    default  the values where neither a grid nor the command line names others
    option   an option of its own on the command line, such as --length; several options may give values to one axis
    single   the option takes one value, not a list, and the grid holds it as it is
    split    a list's text -> the texts of its values, where there are commas inside of one
    """

    name: str
    parse: Parse = str
    default: Any = ()
    option: str = ""
    help: str = ""
    metavar: str | None = None
    single: bool = False
    split: Callable[[str], Iterable[str]] = lambda text: text.split(",")

    @property
    def flag(self) -> str:
        return self.option or f"--axis {self.name}="

    def values(self, text: str) -> Any:
        """The values that the command line's text stands for. ValueError with the option and the value at fault."""
        parts = [text] if self.single else [part.strip() for part in self.split(text)]
        found = []
        for part in parts:
            try:
                found.append(self.parse(part))
            except ValueError as error:
                raise ValueError(f"{self.flag} {part!r}: {error}") from None
        return found[0] if self.single else tuple(found)


class Grid(Mapping[str, Any]):
    """A section of a sweep: a name, which begins its ids, and values for axes. `given`: those of the command line."""

    def __init__(self, name: str, given: frozenset[str] = frozenset(), **values: Any):
        self.name, self.given, self._values = name, given, values

    def __getitem__(self, axis: str) -> Any:
        return self._values[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def but(self, name: str = "", **values: Any) -> "Grid":
        """The same grid with other values, or another name."""
        return Grid(name or self.name, self.given, **(self._values | values))

    def product(self, *axes: str) -> Iterator[tuple[Any, ...]]:
        """Every combination of the values of these axes, the last one fastest."""
        return product(*(self[axis] for axis in axes))


@dataclass(frozen=True)
class Sweep:
    """Named grids for each benchmark, by its name, and for how many seconds each row of a comparison is sampled.

    sustained  whether what the machine sustains is measured, too, which takes seconds
    """

    seconds_per_row: float = 0.2
    grids: Mapping[str, tuple[Grid, ...]] = field(default_factory=dict)
    sustained: bool = False


def add_axis_options(parser: Any, axes: Iterable[Axis]) -> None:
    """Gives each of these axes its own option, shown in `pytest --help`; call it in a conftest's pytest_addoption."""
    group = parser.getgroup("lmsys")
    for axis in axes:
        group.addoption(axis.option, dest=OPTION + axis.option, help=axis.help, metavar=axis.metavar)


def given_axes(axes: Iterable[Axis], texts: Mapping[str, str]) -> dict[str, Any]:
    """Values by axis, of the texts by option (`--length`) or by axis name; two options of one axis add up."""
    found: dict[str, Any] = {}
    for axis in axes:
        for key in (axis.option, axis.name):
            if key and key in texts:
                if axis.single and axis.name in found:
                    raise ValueError(f"{axis.flag} and --axis {axis.name}= give one value twice: give it once")
                values = axis.values(texts[key])
                found[axis.name] = found[axis.name] + values if axis.name in found else values
    return found


def filled(grid: Grid, axes: Iterable[Axis], given: Mapping[str, Any]) -> Grid:
    """The grid with the axes' defaults for what it leaves out, and what the command line gives in place of its own."""
    defaults = {axis.name: axis.default for axis in axes}
    return Grid(grid.name, frozenset(given), **{**defaults, **grid, **given})


def one_of(*known: str) -> Parse:
    return lambda text: choice(text, known)


def yes_no(text: str) -> bool:
    return choice(text.lower(), ("yes", "no", "true", "false")) in ("yes", "true")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("must be a positive whole number")
    return int(text)
