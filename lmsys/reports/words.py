"""Writes numbers, units, labels and facts of timing as a report shows them, and gives each row a colour and a marker.

A record, also called a case, is one row (an implementation) as it was measured with one value for each axis (a quantity
that the benchmark varies). A field of it is stored in an SI unit and shown in the unit that its declaration names:
`unit_of` has the factor between them, by which `scaled` multiplies. `styles_of` gives a row the same look in every
plot. The other modules of `lmsys.reports` call these functions with values, declarations (`lmsys.bench.fields.Field`)
and records. Words for the values of a single benchmark go into its layout, those for all benchmarks into the constants
below.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from lmsys.bench.fields import PREFIXES, RATIOS, Field, Record

NAMES = re.compile(r"\{(\w+)\}")  # a name in braces, for `filled`
# Fields that are computed from the timed samples; all rates are, too (see `is_clocked`).
CLOCKED = "time_s mean_s speedup mfu matmul_ceiling_fraction sustained_ceiling_fraction".split()
# {outcome of a case: its word in tables and plots}; "ok" has none.
OUTCOMES = {"oom": "OOM", "unsupported": "n/a", "wrong": "wrong", "error": "error"}
# The same outcomes in full words, for footnotes and texts.
MEANINGS = {"oom": "out of memory", "unsupported": "not supported", "wrong": "wrong result", "error": "error"}
FILES = {  # {field: its word in the names of the report's files}; other fields have their own name there
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
# {clock of samples: how captions name it}. The first two are `lmsys.measure.clock.CudaClock`, with `ahead` and without.
# The third is that of ranks on GPUs: `lmsys.bench.ranks.times` says when a call begins there. The last is for CPUs.
CLOCKS = {
    "cuda_event": "CUDA events, cache cleared before each call",
    "cuda_event_in_a_loop": "CUDA events, calls following one another as in a loop: where the host launches slower "
    "than the GPU works, that is the time",
    "cuda_event_steps": "CUDA events, one call after another",
    "perf_counter": "wall clock",
}
# {field: {value: words}}, in the order in which tables and legends list the values; layouts add to these.
VALUES: Mapping[str, Mapping[Any, str]] = {
    "causal": {True: "causal", False: "not causal"},
    "deterministic": {True: "deterministic"},
    "direction": {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"},
    # The words of these fields are the values themselves: they are here for their order.
    "precision": {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16"},
    "compile": {"eager": "eager", "compiled": "compiled", "graphed": "graphed", "fused": "fused"},
}
# Colours of rows whose table gives them none. tests/reports/test_colors.py checks that any two can be told apart, also
# by readers who do not see red, green or blue.
PALETTE = (
    "#99bbff #cc6611 #445511 #7700ee #ddaa00 #ff88aa #111188 #552222 #994477"
    " #442255 #9977ff #aaaa55 #4455aa #bb77bb #008855"
).split()
MARKERS = "osD^vPX*<>hpd8H"  # of matplotlib; a row's place in its table chooses its marker


def number(value: float) -> str:
    """Three significant digits, or all digits before the point, never an exponent: 0.0123, 1.23, 12.3, 12,345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:,.{max(0, decimals)}f}"


def exact(value: object) -> str:
    """A number with its digits, at most ten significant ones: 0.05, 500, 16,384. Any other value as text."""
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def inside_a_sentence(text: str) -> str:
    """The text with a small first letter, unless it begins with an abbreviation."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def filled(text: str, values: Mapping[str, Any]) -> str:
    """The text with the value of each name in braces; a name without a value stays as it is, with its braces."""
    return NAMES.sub(lambda match: str(values.get(match[1], match[0])), text)


def unit_of(field: Field) -> tuple[str, float]:
    """(the unit that readers see, the factor by which a stored value is multiplied for it)."""
    if field.shown in RATIOS:
        return RATIOS[field.shown]
    shown = field.shown or field.unit
    return shown, 1 / PREFIXES[shown.removesuffix(field.unit)]


def scaled(field: Field, value: Any) -> float:
    """A stored value in the unit that readers see; NaN for none."""
    return math.nan if value is None else value * unit_of(field)[1]


def label_of(field: Field) -> str:
    """The label of a field, by default its name without the unit."""
    return field.label or re.sub(r"_(s|bytes|per_s|mhz|ratio)$", "", field.name).replace("_", " ")


def head_of(field: Field) -> str:
    """The head of a field's column: its label and unit."""
    return ", ".join(filter(None, [label_of(field), unit_of(field)[0]]))


def is_clocked(field: Field) -> bool:
    """True for a field that is computed from timed samples.

    Rows can be compared by such a field only if they were sampled together: in turns, round by round, in one run.
    """
    return field.name in CLOCKED or field.unit.endswith("/s")


def span(texts: Sequence[str]) -> str:
    """The first and the last text as a range, "2 to 8"; one text where they are equal."""
    return " to ".join(dict.fromkeys([texts[0], texts[-1]]))


def spread_of(case: Record) -> float | None:
    """The distance from p20 to p80 of a case's samples as a share of their median; None if one of them is missing."""
    low, high, median = map(case.get, ("p20_s", "p80_s", "time_s"))
    return (high - low) / median if median and low is not None and high is not None else None


def timing(cases: Sequence[Record]) -> str:
    """A sentence on how these cases were timed, and how far their samples spread; "" if none was timed."""
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
    if spreads := [spread for spread in map(spread_of, timed) if spread is not None]:
        facts.append(f"p20 to p80 within {number(100 * max(spreads))} % of the median")
    return f"{sentence(', '.join(facts))}. " if facts else ""


@dataclass(frozen=True)
class Style:
    """The look of one value of a field. In the field `impl`, for example, each value is a row.

    label    the value's name in legends and tables
    dashed   True for peers, somebody else's rows: their lines are dashed and their bars hatched
    said_by  the name of another field; where cases have a value of it, this takes the place of `label`. "": no field
    """

    label: str
    color: str
    dashed: bool = False
    marker: str = "o"
    said_by: str = ""

    def line(self) -> dict[str, Any]:
        """Keyword arguments of matplotlib's `plot`."""
        return {
            "label": self.label,
            "color": self.color,
            "marker": self.marker,
            "linestyle": (0, (4, 1.6)) if self.dashed else "-",
        }


def styles_of(
    cases: Iterable[Record], name: str, row: str, label: str, table: Mapping[str, Record]
) -> dict[Any, Style]:
    """A style for each value of the field `name`, in reading order: the table's order, peers last.

    row    the field whose value in a case names a row of the table. The value of `name` in this case gets the marker of
           this row, and its colour; a row that states none gets a colour that no row states. If several values have one
           row, those after the first get lighter shades
    label  `Style.said_by` of all styles; their `label` is the value of `name` as text
    table  {name of a row: its traits}
    """
    examples = {case[name]: case for case in cases}  # {value: a case that has it}
    rows = {value: str(case[row]) for value, case in examples.items()}
    places = list(table) + sorted(set(rows.values()) - table.keys())
    stated = {row: traits["color"] for row, traits in table.items() if traits.get("color")}
    free = [color for color in PALETTE if color not in stated.values()] or PALETTE
    colors = dict(zip([row for row in places if row not in stated], cycle(free), strict=False)) | stated
    peers = {value: bool(table.get(rows[value], case).get("peer")) for value, case in examples.items()}
    styles: dict[Any, Style] = {}
    variants: Counter[str] = Counter()
    for value in sorted(examples, key=lambda value: (peers[value], places.index(rows[value]), _natural(value))):
        place = places.index(rows[value])
        color = lighter(colors[rows[value]], min(0.22 * variants[rows[value]], 0.7))
        variants[rows[value]] += 1
        styles[value] = Style(str(value), color, peers[value], MARKERS[place % len(MARKERS)], label)
    return styles


def lighter(color: str, share: float) -> str:
    """The colour, as #rrggbb, mixed with a share of white, from 0 to 1."""
    return "#" + bytes(round(channel + share * (255 - channel)) for channel in bytes.fromhex(color[1:])).hex()


def _natural(value: Any) -> list[tuple[int, Any]]:
    """A key that sorts names by the alphabet, but numbers inside of them by size: 25MiB before 100MiB."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(value))]
