"""Attention records as the report sees them: typed, cut into slices, and put into words."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.attention.shapes import SHAPE, held
from lmsys.reports.load import GIB, InputError, Machine, file_name
from lmsys.reports.metrics import Metric, timing
from lmsys.reports.plots import Look, assign_looks

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
# Without --baseline: the first that was timed beside the others. Never a fast row of ours: no speedup rather than that.
BASELINES = ("sdpa_flash", "naive")

MASKS = {"causal": "causal", "full": "not causal"}  # in file names: as it is read
SETTING = ["section", "dtype", "causal", "direction", "memory_limit_bytes"]
TEXT = ["id", "impl", "label", "outcome", "reason", "comparison", "clock", "mode", "samples_s", "peer"]
NUMBERS = "time_s p20_s p80_s rounds sm_clock_mhz compile_s peak_bytes saved_bytes error_ratio flops bytes flops_per_s"
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"}
# What the memory and the first call of a case are of, by direction.
MEASURED = {
    "fwd": {"peak": "the forward (above what was live before it)", "first": "the forward"},
    "bwd": {
        "peak": "the backward alone (above what was live before it: the inputs and what the forward saved)",
        "first": "forward and backward together",
    },
    "fwdbwd": {
        "peak": "forward and backward (above what was live before them)",
        "first": "forward and backward together",
    },
}


TIME = Metric("time", "time_s", "Median time", "Time", "ms", 1e3, True)
RATE = Metric("tflops", "flops_per_s", "Achieved rate", "Rate", "TFLOP/s", 1e-12, True)
PEAK = Metric("peak", "peak_bytes", "Peak memory of {peak}", "Peak memory", "MiB", 2**-20)
SAVED = Metric(
    "saved",
    "saved_bytes",
    "Memory saved by the forward for the backward (q, k and v included)",
    "Saved for backward",
    "MiB",
    2**-20,
)
ERROR = Metric(
    "error",
    "error_ratio",
    "Worst error as a share of its budget (right: at most 1): the largest of the check in this dtype, the check in "
    "float32 where the row has a float32 form, and the root-mean-square rule where it has none",
    "Error ratio",
)
COMPILE = Metric(
    "compile",
    "compile_s",
    "First call of {first} (compiles and tunes; tuned choices already on disk are not timed again)",
    "First call",
    "s",
)
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
        what = metric.title.format(**MEASURED[frame["direction"].iloc[0]])
        what += f", {metric.unit}" if metric.unit else ""
        if metric is SPEEDUP:
            what = f"Time of {self.base} divided by time, median of rounds sampled side by side"
        clock = timing(frame, "mode") if metric.clocked else ""
        return f"{what}. {self.heading}; {held(frame)}. {clock}{self.machine.about(frame)}"

    @property
    def base(self) -> str:
        """The baseline as it is read."""
        return self.looks[self.baseline].label if self.baseline else ""

    def no_base(self, case: Any) -> str:
        """Why nothing has a speedup beside this case of the baseline (None: not run); "" when it was timed."""
        if case is None:
            return f"{self.base} was not run here"
        if case.outcome == "ok" and pd.notna(case.time_s):
            return ""
        ended = tables.MEANINGS.get(case.outcome, "not timed")
        return f"{self.base} has no time here: {ended}" + (f" ({case.reason})" if isinstance(case.reason, str) else "")

    def compared(self) -> bool:
        """Whether a speedup is more than the baseline beside itself."""
        return len(set(self.frame["impl"][self.frame["speedup"].notna()])) > 1


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
    return frame.sort_values(
        ["head_dim", "heads", "kv_heads", "queries", "keys", "batch", "id"], kind="stable", ignore_index=True
    )


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
        base = next((impl for impl in ([baseline] if baseline else BASELINES) if impl in timed), "")
        frame["speedup"] = tables.paired_speedups(frame, SHAPE, base)
        stem, heading = _named(machine, section, dtype, "causal" if causal else "full", direction, limit)
        yield Slice(machine, section, frame, stem, heading, base, looks)


def _named(machine: Machine, section: str, dtype: str, causal: str, direction: str, limit: float) -> tuple[str, str]:
    """The stem and the heading of a slice; `causal` in words, or "" for both masks together."""
    gib = f"{limit / GIB:g}"
    stem = [machine.slug, section, dtype, *([causal] if causal else []), direction, *([f"{gib}gib"] if limit else [])]
    heading = [DIRECTIONS[direction].capitalize(), dtype, MASKS.get(causal, "causal and not")]
    heading += [f"memory limit {gib} GiB"] if limit else []
    return file_name("-".join(stem)), ", ".join(heading)


def merged(parts: list[Slice]) -> Iterator[Slice]:
    """The slices of a section that differ in nothing but the mask as one, of the implementations that were timed."""
    groups: dict[tuple[Any, ...], list[Slice]] = {}
    for part in parts:
        key = part.frame[["dtype", "direction", "memory_limit_bytes"]].iloc[0]
        groups.setdefault(tuple(key), []).append(part)
    for (dtype, direction, limit), group in groups.items():
        frame = pd.concat([part.frame for part in group], ignore_index=True)
        timed = frame["impl"].isin(frame["impl"][frame["time_s"].notna()])
        if len(group) > 1 and timed.any():
            stem, heading = _named(group[0].machine, group[0].section, dtype, "", direction, limit)
            yield replace(group[0], frame=frame[timed].reset_index(drop=True), stem=stem, heading=heading)


def section_title(section: str) -> str:
    return SECTIONS.get(section, section)
