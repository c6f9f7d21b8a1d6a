"""Declarations of a benchmark: the axes that it varies, grids of their values, and the fields of its records.

The runner reads values of axes from the command line by `given_axes` and `filled`; every bad value is a ValueError that
says what would be right. A benchmark declares each field of its records once, by `columns`. A result file holds these
declarations, from which `lmsys report` makes columns. To add a metric, add a `Field` to a benchmark's `fields` and its
value to the benchmark's `metrics`. A field that every record has goes into COMMON. A field that several benchmarks
share is a constant above COMMON, such as TIME, which each of them names in its `fields`. If the values of a field are
lists or objects, it also needs an entry in `lmsys.bench.validate.SHAPES`. Imports no torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from operator import itemgetter
from typing import Any

from lmsys.values import choice, hold
from lmsys.values import grouped as grouped  # other modules call it as `fields.grouped`

Parse = Callable[[str], Any]
OPTION = "lmsys_option_of_axis"  # prefix of the names under which pytest keeps the values of axes' options


@dataclass(frozen=True)
class Axis:
    """A quantity that a benchmark varies.

    name     its key in a grid, and what `--axis name=a,b` calls it
    parse    one value's text -> the value; ValueError says what would be right
    default  the values where neither a grid nor the command line names others
    option   an option of its own on the command line, such as --length. Axes of one name, each with an option, are one
             axis: the values of these options add up
    help, metavar  those of `option`, as argparse takes them
    single   True: the option takes one value, not a list, and the grid holds this value instead of a tuple
    split    a list's text -> the texts of its values; to be given only if values have commas in them
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
        """The tuple of values (if `single` the value) that the command line's text stands for.

        ValueError with the option and the value at fault.
        """
        parts = [text] if self.single else [part.strip() for part in self.split(text)]
        values = []
        for part in parts:
            try:
                values.append(self.parse(part))
            except ValueError as error:
                raise ValueError(f"{self.flag} {part!r}: {error}") from None
        return values[0] if self.single else tuple(values)


class Grid(dict[str, Any]):
    """A section of a sweep: a name, which begins the ids of its cases, and the values of each axis.

    given  the names of the axes whose values are those of the command line
    """

    def __init__(self, name: str, given: frozenset[str] = frozenset(), **values: Any):
        super().__init__(values)
        self.name, self.given = name, given

    def but(self, name: str = "", **values: Any) -> "Grid":
        """A copy with other values, or another name."""
        return Grid(name or self.name, self.given, **(self | values))

    def product(self, *axes: str) -> Iterator[tuple[Any, ...]]:
        """Every combination of the values of these axes, the last one fastest."""
        return product(*(self[axis] for axis in axes))


@dataclass(frozen=True)
class Sweep:
    """The grids of each benchmark, by its name, and for how many seconds each row of a comparison is sampled.

    sustained  True: the rate that the machine sustains is measured, too, which takes seconds
    took_s     seconds of each group in one run of this sweep, on any machine, for estimates of the time left
    """

    seconds_per_row: float = 0.2
    grids: Mapping[str, tuple[Grid, ...]] = field(default_factory=dict)
    sustained: bool = False
    took_s: Mapping[str, float] = field(default_factory=dict)


def given_axes(axes: Sequence[Axis], texts: Mapping[str, str]) -> dict[str, Any]:
    """{axis name: values}, parsed from `texts`, {option (`--length`) or axis name: text}.

    Two options of one axis name add up. The first axis of a name parses the text that `--axis name=` gives.
    """
    given: dict[str, Any] = {}
    readers = {axis.name: axis for axis in reversed(axes)} | {axis.option: axis for axis in axes if axis.option}
    for key in filter(texts.__contains__, readers):
        axis = readers[key]
        hold(
            (
                not (axis.single and axis.name in given),
                f"{axis.flag} and --axis {axis.name}= give one value twice: give it once",
            )
        )
        values = axis.values(texts[key])
        given[axis.name] = given[axis.name] + values if axis.name in given else values
    return given


def filled(grid: Grid, axes: Iterable[Axis], given: Mapping[str, Any]) -> Grid:
    """A copy of the grid with a value for each axis: from `given` (the command line), else its own, else a default."""
    return Grid(grid.name, frozenset(given), **{**{axis.name: axis.default for axis in axes}, **grid, **given})


# Functions for `Axis.parse`: each turns a text into a value, and raises ValueError for a text that it does not take.
def one_of(*known: str) -> Parse:
    return lambda text: choice(text, known)


def yes_no(text: str) -> bool:
    return choice(text.lower(), ("yes", "no", "true", "false")) in ("yes", "true")


def positive(text: str) -> int:
    hold((text.isdecimal() and int(text) > 0, "must be a positive whole number"))
    return int(text)


ROLES = ("axis", "metric", "outcome", "detail")
PREFIXES = {  # {prefix of a unit: its factor}
    "u": 1e-6,
    "µ": 1e-6,
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
}
# Units in which ratios may be shown: {`Field.shown`: (the unit as readers see it, the factor)}.
RATIOS = {"%": ("%", 100.0), "x": ("×", 1.0), "×": ("×", 1.0)}
Record = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """One field of a record.

    name    its key, with the SI unit in it where it has one: `time_s`, `peak_bytes`
    unit    the unit of the stored number: s, B, FLOP/s, B/s, tokens/s, Hz; empty for ratios and words
    label   the head of its column; the name without its unit when empty
    role    axis: what was asked; metric: a number that is shown; outcome: how the case ended; detail: the rest, such as
            lists that a plot draws
    about   a phrase for captions that says what the number is
    shown   the unit that readers see: the stored unit with a prefix, such as ms, GiB or TFLOP/s, or a key of RATIOS,
            such as %; empty: the stored unit
    of      a function of the finished record that gives the value; it may raise KeyError, TypeError or
            ZeroDivisionError where the record lacks what it needs, and the field is then None
    """

    name: str
    unit: str = ""
    label: str = ""
    role: str = "metric"
    about: str = ""
    shown: str = ""
    of: Callable[[Record], Any] | None = None

    def __post_init__(self) -> None:
        shown = [prefix + self.unit for prefix in PREFIXES if self.unit] + list(RATIOS)
        hold(
            (self.role in ROLES, f"field {self.name!r}: role={self.role!r} must be one of {', '.join(ROLES)}"),
            (
                self.shown in ("", *shown),
                f"field {self.name!r}: shown={self.shown!r} must be one of {', '.join(shown)}",
            ),
        )

    def called(self, **changes: Any) -> "Field":
        """A copy with other attributes, such as `about`."""
        return replace(self, **changes)

    def value(self, record: Record) -> Any:
        """The value that `of` makes of the record; None where the record lacks what it needs."""
        try:
            return self.of(record) if self.of else None
        except (KeyError, TypeError, ZeroDivisionError):
            return None

    def to_json(self) -> Record:
        """The declaration for the result file: all attributes but `of` and empty ones."""
        return {key: value for key, value in asdict(self).items() if key != "of" and value}


class Reads(dict[str, Any]):
    """A copy of a record that notes in `names` each field that is read, also one that the record lacks.

    `Runner.made_up` thus finds fields that a benchmark's functions read and that are declared nowhere.
    """

    def __init__(self, record: Record):
        super().__init__(record)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.names.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.append(name)
        return super().get(name, default)


def columns(*parts: "str | Field | Iterable[Field]") -> tuple[Field, ...]:
    """The fields of a benchmark, in the order of the parts.

        fields = columns("size dtype", TIME, details("losses"))

    A part is a text, whose words name fields of the role "axis"; or a field; or several fields, as `details` returns.
    """
    fields: list[Field] = []
    for part in parts:
        if isinstance(part, str):
            fields += [Field(word, label=word.replace("_", " "), role="axis") for word in part.split()]
        else:
            fields += [part] if isinstance(part, Field) else part
    return tuple(fields)


def details(*names: str) -> tuple[Field, ...]:
    """Fields of these names with the role "detail": records keep them, and they get no column of their own."""
    return tuple(Field(name, role="detail") for name in names)


# Fields that several benchmarks share, as Field(name, unit, label, role, about, shown, of).
TIME = Field("time_s", "s", "Time", about="Median time", shown="ms")
PEAK = Field("peak_bytes", "B", "Peak memory", about="Peak memory above what was live before", shown="MiB")
ERROR = Field("error_ratio", label="Error ratio", about="Worst error as a share of its budget (right: at most 1)")
COMPILE = Field("compile_s", "s", "First call", about="First call (compiles and tunes)", shown="s")
RATE = Field("flops_per_s", "FLOP/s", "Rate", about="Achieved rate", shown="TFLOP/s")
MATMUL_FRACTION = Field(
    "matmul_ceiling_fraction",
    label="Share of measured matmul",
    about="Work over median time, as a share of the large matmul measured in this run",
    shown="%",
)
MFU = Field(
    "mfu",
    label="MFU",
    about="Model FLOP utilisation: the arithmetic of the formula over median time, as a share of the peak that the "
    "device's maker states",
    shown="%",
)
COPY_FRACTION = Field(
    "copy_ceiling_fraction",
    label="Share of measured copy",
    about="Bytes over median time, as a share of the large copy measured in this run",
    shown="%",
)
SUSTAINED_FRACTION = Field(
    "sustained_ceiling_fraction",
    label="Share of sustained matmul",
    role="detail",
    about="Work over median time, as a share of the large matmul that this machine keeps up for seconds",
    shown="%",
)
ENERGY = (  # measured in a pass of its own, with --energy
    Field("energy_j", "J", "Energy", "detail", "Energy of a call, by the device's counter"),
    Field("energy_integral_j", "J", "Power over time", "detail", "The same by the integral of power"),
    Field("energy_per_token_j", "J", "Energy of a token", "detail", "Energy of a call over its tokens", "mJ"),
    Field("energy_power_w", "W", "Power", "detail", "Mean power of calls that follow one another"),
    Field("energy_call_s", "s", "Pace", "detail", "Time from one call to the next meanwhile", "ms"),
    Field(
        "flops_per_j",
        "FLOP/s/W",
        "Work for energy",
        "detail",
        "The arithmetic of the formula over the energy",
        "TFLOP/s/W",
        lambda record: record["flops"] / record["energy_j"],
    ),
    Field("energy_note", role="detail", about="Why the energy was not measured, or is to be doubted"),
)

REPEATABLE = Field(
    "repeatable",
    role="detail",
    about="Whether all tensors had the same bits in several calls on the same inputs",
    of=lambda record: not record["same_bits"]["differ"] if record["same_bits"]["calls"] else None,
)
BATCH_INVARIANT = Field(
    "batch_invariant",
    role="detail",
    about="Whether an element of the batch had the same bits alone; unknown where calls do not repeat",
    of=lambda record: _batch_invariant(**record["same_bits"]),
)


def _batch_invariant(differ: Record, elements: list[int], alone: Record, **_: Any) -> bool | None:
    """The field `batch_invariant` of a record.

    False if a tensor that repeats bit for bit had other bits when an element of the batch was called alone. Otherwise
    True if elements were called alone and all tensors repeat; otherwise None. The arguments are parts of the record's
    `same_bits`: see `lmsys.bench.trial`.
    """
    return not alone if alone or (elements and not differ) else None


# A record replaces an earlier one that agrees with it in all of these fields. So under another memory limit both stay.
IDENTITY = ("benchmark", "section", "id", "memory_limit_bytes")
COMMON = columns(  # the fields of every record, whatever was measured
    details("id", "benchmark"),
    "section impl device",
    Field("label", role="axis", about="How tables and plots call the row"),
    Field("peer", role="axis", about="Whether the row is somebody else's code"),
    Field("memory_limit_bytes", "B", "memory limit", "axis", shown="GiB"),
    Field("outcome", role="outcome"),
    Field("reason", role="outcome"),
    details("comparison", "clock", "samples_s", "crashed"),
    TIME,
    Field("mean_s", "s", "mean", "detail", shown="ms"),
    Field("std_s", "s", "standard deviation", "detail", shown="ms"),
    [Field(name, "s", role="detail", shown="ms") for name in ("p20_s", "p80_s", "min_s")],
    Field("rounds", role="detail"),
    # Conditions on the machine while the case was sampled.
    Field("sm_clock_mhz", "MHz", "SM clock", "detail"),
    Field("memory_clock_mhz", "MHz", "memory clock", "detail"),
    Field("cpu_clock_mhz", "MHz", "CPU clock", "detail"),
    Field("temperature_c", "°C", "temperature", "detail"),
    Field("power_w", "W", "power", "detail"),
    Field("clock_reasons", role="detail", about="Why the device's clock was not higher"),
    Field("other_processes", role="detail", about="Processes besides this run's that had something on the device"),
    Field("others_cpu_share", "", "CPU taken by others", "detail", shown="%"),
    Field("disturbed", role="detail", about="How the machine was not as it should be"),
    Field(
        "clock_share_s", "s", "clock's share", "detail", "What the clock adds to a call, taken off each sample", "µs"
    ),
    Field("prepare_s", "s", "untimed", "detail", "What is prepared for each call, such as a backward's forward", "ms"),
    Field("between_runs", role="detail", about="By --repeat: what its time over its anchor's differs by between runs"),
    Field("against", role="detail", about="Of a row as it was: the state that --against names, and the margin"),
    Field(
        "quick_check",
        role="detail",
        about="What lmsys check says of the row: a row from a file runs its small cases, a row of the table its extreme"
        " ones; none: not asked",
    ),
    Field("alone", role="detail", about="Whether it was timed by itself, not in turns with its comparison"),
    Field(
        "own_process",
        role="detail",
        about="Whether the row's code ran in a process of its own, and was timed and judged by another",
    ),
    details("same_bits", "proof", "seal"),
    REPEATABLE,
    BATCH_INVARIANT,
    ERROR,
    COMPILE,
    Field("flops", "FLOP", "work", "detail"),
    SUSTAINED_FRACTION,
    ENERGY,
)


def declared(*groups: Iterable[Field]) -> dict[str, Field]:
    """The fields by name, in order. If a name is declared twice, the later field counts, at the earlier one's place."""
    return {field.name: field for group in groups for field in group}


def largest(by_name: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{name: the largest of its values}, of mappings with the same names, such as one of each rank."""
    return {name: max(map(itemgetter(name), by_name)) for name in by_name[0]}
