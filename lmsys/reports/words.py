"""Numbers, units and how cases were timed, in words."""

import math
import re
from collections.abc import Mapping, Sequence
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
    "precision": {name: name for name in ("fp32", "tf32", "bf16", "fp16")},
    "compile": {name: name for name in ("eager", "compiled", "graphed", "fused")},
}


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
    if field.shown in ("%", "x", "×"):
        return ("%", 100.0) if field.shown == "%" else ("×", 1.0)
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
    unit, _ = unit_of(field)
    return f"{label_of(field)}, {unit}" if unit else label_of(field)


def is_clocked(field: Field) -> bool:
    """True where a field follows from the samples, so that it compares only with what was sampled beside it."""
    return field.name in CLOCKED or field.unit.endswith("/s")


def span(texts: Sequence[str]) -> str:
    """Joins the first and the last where they differ."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def spread_of(case: Record) -> float | None:
    """The distance from p20 to p80 as a share of the median; None where one of them is not known."""
    low, high, median = (case.get(name) for name in ("p20_s", "p80_s", "time_s"))
    return (high - low) / median if median and low is not None and high is not None else None


def timing(cases: Sequence[Record]) -> str:
    """How the timed cases were timed, and how far their samples spread."""
    timed = [case for case in cases if case.get("time_s") is not None]
    facts = [CLOCKS.get(clock, clock) for clock in sorted({case["clock"] for case in timed if case.get("clock")})]
    rounds = [case["rounds"] for case in timed if case.get("rounds")]
    facts += [f"at least {min(rounds)} rounds"] if rounds else []
    for name, label, unit in (("sm_clock_mhz", "SM clock", "MHz"), ("power_w", "power", "W")):
        known = sorted(round(case[name]) for case in timed if case.get(name))
        facts += [f"{label} {span(list(map(exact, known)))} {unit}"] if known else []
    spreads = [spread for spread in map(spread_of, timed) if spread is not None]
    facts += [f"p20 to p80 within {number(100 * max(spreads))} % of the median"] if spreads else []
    return f"{sentence(', '.join(facts))}. " if facts else ""
