"""Attention records as the report sees them: typed, cut into slices, and put into words."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from reports import tables
from reports.load import GIB, InputError, Machine, file_name
from reports.plots import Look, assign_looks

SECTIONS = {  # in page order
    "default": "Everyday shapes",
    "tokens16k": "16,384 tokens, by length",
    "leaderboard": "Leaderboard workload",
    "flash": "FlashAttention against naive, head dimension by length",
    "eager_compiled": "Eager against compiled, head dimension by length",
    "by_length": "By sequence length",
    "tiers": "Rectangular tiers, Q:K",
    "smoke": "Smoke test",
}
# Reading order, and with it the colour; a row that is not listed comes after these.
OURS = "naive naive_compiled vectorized flash_torch flash_triton_torch_bwd flash_triton flash_gluon flash_cuda".split()
PEERS = "sdpa_math sdpa_efficient sdpa_flash sdpa_cudnn flex flash_attn_2 flash_attn_4".split()
BASELINES = ("sdpa_flash", "naive")  # without --baseline: the first that was timed beside the others

SHAPE = ["batch", "heads", "kv_heads", "queries", "keys", "head_dim"]
SETTING = ["section", "dtype", "causal", "direction", "memory_limit_bytes"]
TEXT = ["id", "impl", "label", "outcome", "reason", "comparison", "clock", "mode", "samples_s", "peer"]
NUMBERS = "time_s p20_s p80_s rounds sm_clock_mhz compile_s peak_bytes saved_bytes error_ratio flops bytes flops_per_s"
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"}
CLOCKS = {"cuda_event": "CUDA events, cache cleared before each call", "perf_counter": "wall clock"}


@dataclass(frozen=True)
class Metric:
    """A column of the records as tables and plots show it."""

    stem: str
    field: str
    title: str
    short: str
    unit: str = ""
    scale: float = 1.0
    clocked: bool = False

    @property
    def head(self) -> str:
        return f"{self.short}, {self.unit}" if self.unit else self.short


TIME = Metric("time", "time_s", "Median time", "Time", "ms", 1e3, True)
RATE = Metric("tflops", "flops_per_s", "Achieved rate", "Rate", "TFLOP/s", 1e-12, True)
PEAK = Metric("peak", "peak_bytes", "Peak memory above what was live before", "Peak memory", "MiB", 2**-20)
SAVED = Metric("saved", "saved_bytes", "Memory saved for backward", "Saved for backward", "MiB", 2**-20)
ERROR = Metric("error", "error_ratio", "Worst error as a share of its budget (right: at most 1)", "Error ratio")
COMPILE = Metric("compile", "compile_s", "First call, with compilation and tuning", "First call", "s")
SPEEDUP = Metric("speedup", "speedup", "Speedup", "Speedup", "×", 1.0, True)
ROOFLINE = Metric(
    "roofline", "flops_per_s", "Achieved rate against arithmetic intensity", "Roofline", "TFLOP/s", 1e-12, True
)


@dataclass(frozen=True)
class Slice:
    """The cases of one section, dtype, mask and direction on one machine, with a `speedup` column."""

    machine: Machine
    section: str
    frame: pd.DataFrame
    stem: str
    heading: str
    baseline: str
    looks: dict[str, Look]

    def impls(self) -> list[str]:
        return [impl for impl in self.looks if impl in set(self.frame["impl"])]

    def caption(self, metric: Metric, frame: pd.DataFrame) -> str:
        """What is shown and every variable that is held constant."""
        what = f"{metric.title}, {metric.unit}" if metric.unit else metric.title
        if metric is SPEEDUP:
            what = f"Time of {self.looks[self.baseline].label} divided by time, median of rounds sampled side by side"
        clock = _clock(frame) if metric.clocked else ""
        return f"{what}. {self.heading}; {held(frame)}. {clock}{self.machine.about(frame)}"


def looks(frame: pd.DataFrame) -> dict[str, Look]:
    """How each implementation is drawn, in the order of columns and legends: ours, the user's own, peers."""
    labels = {row.impl: (row.label, row.peer) for row in frame.itertuples()}
    found = assign_looks(labels, OURS + PEERS)
    return {impl: found[impl] for peer in (False, True) for impl in found if found[impl].dashed is peer}


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The records with every column there, integers as integers; InputError for one that is no attention case."""
    numbers = NUMBERS.split()
    frame = frame.reindex(columns=["run", "benchmark", *TEXT, *SHAPE, *SETTING, *numbers])
    for field in [*SHAPE, *numbers, "memory_limit_bytes"]:
        frame[field] = pd.to_numeric(frame[field], errors="coerce")
    required = [*SHAPE, "section", "dtype", "causal", "direction"]
    for case in frame[frame[required].isna().any(axis=1)].itertuples():
        field = next(field for field in required if pd.isna(getattr(case, field)))
        raise InputError(f"record {case.id!r}: an attention record needs a valid {field!r}")
    frame[SHAPE] = frame[SHAPE].astype(int)
    frame["causal"] = frame["causal"].astype(bool)
    frame["peer"] = [peer is True for peer in frame["peer"]]
    frame["memory_limit_bytes"] = frame["memory_limit_bytes"].fillna(0)
    frame["label"] = frame["label"].where(frame["label"].notna(), frame["impl"])
    return frame.sort_values(["head_dim", "heads", "queries", "keys", "batch", "id"], kind="stable", ignore_index=True)


def slices(machine: Machine, looks: dict[str, Look], baseline: str | None) -> Iterator[Slice]:
    """The typed records cut by SETTING, in page order, each with speedups over the baseline that it can have."""
    order = [*SECTIONS, *sorted(set(machine.frame["section"]) - SECTIONS.keys())]
    directions = list(DIRECTIONS)

    def place(setting: tuple[Any, ...]) -> tuple[Any, ...]:
        section, dtype, causal, direction, limit = setting
        return order.index(section), dtype, not causal, directions.index(direction), limit

    for direction in set(machine.frame["direction"]) - DIRECTIONS.keys():
        raise InputError(f"direction {direction!r} is none of {', '.join(directions)}")
    groups = dict(iter(machine.frame.groupby(SETTING, sort=False)))
    for setting in sorted(groups, key=place):
        frame = groups[setting].reset_index(drop=True)
        section, dtype, causal, direction, limit = setting
        timed = set(frame["impl"][frame["time_s"].notna()])
        preferred = [baseline] if baseline else [*BASELINES, *looks]
        base = next((impl for impl in preferred if impl in timed), "")
        frame["speedup"] = tables.paired_speedups(frame, SHAPE, base)
        mask = "causal" if causal else "full"
        stem = file_name(
            f"{machine.slug}-{section}-{dtype}-{mask}-{direction}{f'-{limit / GIB:g}gib' if limit else ''}"
        )
        heading = f"{DIRECTIONS[direction].capitalize()}, {dtype}, {'causal' if causal else 'not causal'}"
        heading += f", memory limit {limit / GIB:g} GiB" if limit else ""
        yield Slice(machine, section, frame, stem, heading, base, looks)


def columns(frame: pd.DataFrame) -> dict[str, str]:
    """The axes that vary among these cases, with their column heads; the length when none does."""
    heads = frame[["heads", "kv_heads"]].drop_duplicates()
    lengths = frame[["queries", "keys"]].drop_duplicates()
    found = {"B": "B"} if frame["batch"].nunique() > 1 else {}
    if len(heads) > 1:
        found["H"] = "H" if (heads["heads"] == heads["kv_heads"]).all() else "H:Hkv"
    if len(lengths) > 1:
        found["S"] = "S" if (lengths["queries"] == lengths["keys"]).all() else "Q×K"
    if frame["head_dim"].nunique() > 1:
        found["D"] = "D"
    return found or {"S": "S"}


def axis(name: str, shape: tuple[int, ...]) -> str:
    """One axis of a shape (in the order of SHAPE) as its column shows it."""
    batch, heads, kv_heads, queries, keys, head_dim = shape
    if name == "H":
        return f"{heads}" if heads == kv_heads else f"{heads}:{kv_heads}"
    if name == "S":
        return f"{queries:,}" if queries == keys else f"{queries:,}×{keys:,}"
    return f"{batch if name == 'B' else head_dim:,}"


def held(frame: pd.DataFrame) -> str:
    """The axes that are constant among these cases, and the range of the others."""
    grouped = "" if (frame["heads"] == frame["kv_heads"]).all() else f" (key/value {_span(frame['kv_heads'])})"
    square = (frame["queries"] == frame["keys"]).all()
    length = f"S {_span(frame['queries'])}" if square else f"Q {_span(frame['queries'])}, K {_span(frame['keys'])}"
    tokens = frame["batch"] * frame["queries"]
    product = f", B·S {_span(tokens)}" if frame["batch"].nunique() > 1 and tokens.nunique() == 1 else ""
    batch, heads, dim = _span(frame["batch"]), _span(frame["heads"]), _span(frame["head_dim"])
    return f"batch {batch}, heads {heads}{grouped}, {length}{product}, D {dim}"


def _span(values: pd.Series) -> str:
    low, high = round(values.min()), round(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _clock(frame: pd.DataFrame) -> str:
    """How the timed cases were timed, and how far their samples spread."""
    timed = frame[frame["time_s"].notna()]
    if timed.empty:
        return ""
    named = [CLOCKS.get(clock, clock) for clock in sorted(set(timed["clock"].dropna()))]
    facts = [*named, *sorted(set(timed["mode"].dropna()))]
    rounds = timed["rounds"].dropna()
    if len(rounds):
        facts.append(f"at least {int(rounds.min())} rounds")
    if timed["sm_clock_mhz"].notna().any():
        facts.append(f"SM clock {_span(timed['sm_clock_mhz'])} MHz")
    spread = ((timed["p80_s"] - timed["p20_s"]) / timed["time_s"]).max()
    if spread == spread:
        facts.append(f"p20 to p80 within {tables.number(100 * spread)} % of the median")
    text = ", ".join(facts)
    return f"{text[0].upper()}{text[1:]}. " if text else ""
