"""Numbers, units and how cases were timed, in words; and the look of rows, one in every plot of a report."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmsys.bench.fields import Field, Record

PREFIXES = {
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
RATIOS = {"%": ("%", 100.0), "x": ("×", 1.0), "×": ("×", 1.0)}  # as fields without a unit are shown
NAMES = re.compile(r"\{(\w+)\}")
UNITS_IN_NAMES = re.compile(r"_(s|bytes|per_s|mhz|ratio)$")
CLOCKED = (
    "time_s mean_s speedup mfu matmul_ceiling_fraction sustained_ceiling_fraction".split()
)  # come from samples, as all rates do
OUTCOMES = {"oom": "OOM", "unsupported": "n/a", "wrong": "wrong", "error": "error"}  # as tables and plots show them
MEANINGS = {"oom": "out of memory", "unsupported": "not supported", "wrong": "wrong result", "error": "error"}
FILES = {  # how names of files call a field; others by their own names
    "time_s": "time",
    "mean_s": "spread",
    "flops_per_s": "tflops",
    "tokens_per_s": "tokens",
    "peak_bytes": "peak",
    "saved_bytes": "saved",
    "total_bytes": "memory",
    "error_ratio": "error",
    "compile_s": "compile",
    "mask_s": "mask",
    "matmul_ceiling_fraction": "fraction",
    "sustained_ceiling_fraction": "sustained",
}
CLOCKS = {
    "cuda_event": "CUDA events, cache cleared before each call",
    "cuda_event_in_a_loop": "CUDA events, calls following one another as in a loop: where the host launches slower "
    "than the GPU works, that is the time",
    "cuda_event_steps": "CUDA events, one call after another",
    "perf_counter": "wall clock",
}
VALUES: Mapping[
    str, Mapping[Any, str]
] = {  # how values of fields are read, by field, in reading order; layouts have more
    "causal": {True: "causal", False: "not causal"},
    "deterministic": {True: "deterministic"},
    "direction": {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"},
    "precision": {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16"},
    "compile": {"eager": "eager", "compiled": "compiled", "graphed": "graphed", "fused": "fused"},
}
PALETTE = (  # of rows whose table gives them no colour; tests hold that everybody can tell them apart
    "#99bbff #cc6611 #445511 #7700ee #ddaa00 #ff88aa #111188 #552222 #994477"
    " #442255 #9977ff #aaaa55 #4455aa #bb77bb #008855"
).split()
MARKERS = "osD^vPX*<>hpd8H"


def number(value: float) -> str:
    """Three significant digits, never an exponent: 0.0123, 1.23, 12.3, 12,345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:,.{max(0, digits)}f}"


def exact(value: object) -> str:
    """A number with all its digits: 0.05, 500, 16,384. Anything else as it is."""
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def inside_a_sentence(text: str) -> str:
    """With a small first letter, unless it begins with an abbreviation."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def filled(text: str, values: Mapping[str, Any]) -> str:
    """The text with what stands for each name in braces; braces around anything else stay as they are."""
    return NAMES.sub(lambda match: str(values.get(match[1], match[0])), text)


def unit_of(field: Field) -> tuple[str, float]:
    """The unit that readers see, and what the stored value is multiplied by.

    The one place where units are converted. A unit that nobody knows is left as it is stored.
    """
    if field.shown in RATIOS:
        return RATIOS[field.shown]
    prefix = field.shown.removesuffix(field.unit)
    known = field.unit and field.shown.endswith(field.unit) and prefix in PREFIXES
    return (field.shown, 1 / PREFIXES[prefix]) if known else (field.unit, 1.0)


def scaled(field: Field, value: Any) -> float:
    """A stored value in the unit that readers see; NaN for none."""
    return math.nan if value is None else value * unit_of(field)[1]


def label_of(field: Field) -> str:
    return field.label or UNITS_IN_NAMES.sub("", field.name).replace("_", " ")


def head_of(field: Field) -> str:
    """The head of a field's column: its label and unit."""
    return ", ".join(filter(None, [label_of(field), unit_of(field)[0]]))


def is_clocked(field: Field) -> bool:
    """True where a field follows from the samples, so that it compares only with what was sampled beside it."""
    return field.name in CLOCKED or field.unit.endswith("/s")


def span(texts: Sequence[str]) -> str:
    """Joins the first and the last where they differ."""
    return " to ".join(dict.fromkeys([texts[0], texts[-1]]))


def spread_of(case: Record) -> float | None:
    """The distance from p20 to p80 as a share of the median; None where one of them is not known."""
    low, high, median = map(case.get, ("p20_s", "p80_s", "time_s"))
    return (high - low) / median if median and low is not None and high is not None else None


def timing(cases: Sequence[Record]) -> str:
    """How the timed cases were timed, and how far their samples spread."""
    timed = [case for case in cases if case.get("time_s") is not None]
    known = {
        name: sorted({case[name] for case in timed if case.get(name)})
        for name in ("clock", "rounds", "sm_clock_mhz", "power_w")
    }
    facts = [CLOCKS.get(clock, clock) for clock in known["clock"]]
    facts += [f"at least {fewest} rounds" for fewest in known["rounds"][:1]]
    for name, label, unit in (("sm_clock_mhz", "SM clock", "MHz"), ("power_w", "power", "W")):
        if known[name]:
            facts.append(f"{label} {span([exact(round(value)) for value in known[name]])} {unit}")
    spreads = [spread for spread in map(spread_of, timed) if spread is not None]
    if spreads:
        facts.append(f"p20 to p80 within {number(100 * max(spreads))} % of the median")
    return f"{sentence(', '.join(facts))}. " if facts else ""


@dataclass(frozen=True)
class Style:
    """The look of one value of a field: dashed and hatched is what is not ours.

    label  its name in legends and tables, as one types it; where cases say their own, in the field `said_by`, that
    """

    label: str
    color: str
    dashed: bool = False
    marker: str = "o"
    said_by: str = ""

    def line(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "color": self.color,
            "marker": self.marker,
            "linestyle": (0, (4, 1.6)) if self.dashed else "-",
        }


def styles_of(
    cases: Iterable[Record], name: str, row: str, label: str, table: Mapping[str, Record]
) -> dict[Any, Style]:
    """A style for each value of the field `name`, in reading order: that of the table, with peers last.

    The field `row` says which row of the table it is: several values of one row are lighter shades of its colour.
    """
    first = {case[name]: case for case in cases}
    rows = {value: str(case[row]) for value, case in first.items()}
    places = list(table) + sorted(set(rows.values()) - table.keys())
    peers = {value: bool(table.get(rows[value], case).get("peer")) for value, case in first.items()}
    styles: dict[Any, Style] = {}
    variants: Counter[str] = Counter()
    for value in sorted(first, key=lambda value: (peers[value], places.index(rows[value]), _natural(value))):
        known, place = table.get(rows[value], {}), places.index(rows[value])
        color = lighter(known.get("color") or PALETTE[place % len(PALETTE)], min(0.22 * variants[rows[value]], 0.7))
        variants[rows[value]] += 1
        styles[value] = Style(str(value), color, peers[value], MARKERS[place % len(MARKERS)], label)
    return styles


def lighter(color: str, share: float) -> str:
    """The colour mixed with as much white."""
    return "#" + bytes(round(channel + share * (255 - channel)) for channel in bytes.fromhex(color[1:])).hex()


def _natural(value: Any) -> list[tuple[int, Any]]:
    """Numbers inside of a name in their own order: 25MiB before 100MiB."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(value))]
