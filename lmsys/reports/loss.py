"""The chapter on the head and loss: time and peak memory by vocabulary, ours beside all logits at once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from lmsys.reports import bars, tables
from lmsys.reports.load import GIB, InputError, Machine, file_name
from lmsys.reports.metrics import Metric, timing
from lmsys.reports.page import Block, Chapter
from lmsys.reports.plots import Plot, assign_looks
from lmsys.reports.tables import Footnotes, Table, number

SECTIONS = {"default": "Everyday sizes", "vocabularies": "By vocabulary", "smoke": "Smoke test"}  # in page order
IMPLS = ["chunked", "compiled", "eager"]  # in reading order
BASELINES = ("compiled", "eager")  # what a user would have otherwise: the first that was timed
SETTING = ["section", "precision", "tokens", "d_model", "memory_limit_bytes"]
SHAPE = ["tokens", "d_model", "vocab_size"]
NUMBERS = (
    "time_s mean_s std_s p20_s p80_s rounds sm_clock_mhz compile_s error_ratio peak_bytes flops_per_s"
    " matmul_ceiling_fraction memory_limit_bytes"
).split()
TEXT = "section impl label precision outcome reason comparison clock".split()

TIME = Metric("time", "time_s", "Median time of forward and backward", "Time", "ms", 1e3, True)
PEAK = Metric(
    "peak",
    "peak_bytes",
    "Peak memory of forward and backward above what was live before, less the gradients of hidden states and weight, "
    "which every row has to make",
    "Peak memory",
    "GiB",
    1 / GIB,
)


@dataclass(frozen=True)
class Slice:
    """The cases of one setting on one machine, and the implementation that the others' speed is relative to."""

    machine: Machine
    frame: pd.DataFrame
    stem: str
    heading: str
    base: str

    def caption(self, *metrics: Metric) -> str:
        """What is shown and every variable that is held constant."""
        said = "; ".join(f"{metric.title}, {metric.unit}" for metric in metrics)
        clock = timing(self.frame) if any(metric.clocked for metric in metrics) else ""
        return f"{said}. {self.heading}. {clock}{self.machine.about(self.frame)}"


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """`machine` holds records of the head and loss only."""
    machine = replace(machine, frame=_typed(machine.frame))
    blocks = []
    for part in _slices(machine, baseline):
        plots = [plot for plot in (_bars(part, TIME), _bars(part, PEAK)) if plot]
        blocks.append(Block(part.heading, [_table(part), *plots]))
    return [Chapter("Head and loss", blocks)]


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The records with every column there, in reading order; InputError for one that is no case of a loss."""
    frame = frame.reindex(columns=["run", "id", *TEXT, "peer", "samples_s", *SHAPE, *NUMBERS])
    for field in [*SHAPE, *NUMBERS]:
        frame[field] = pd.to_numeric(frame[field], errors="coerce").astype(float)
    required = ["section", "precision", *SHAPE]
    for case in frame[frame[required].isna().any(axis=1)].itertuples():
        field = next(field for field in required if pd.isna(getattr(case, field)))
        raise InputError(f"record {case.id!r}: a loss record needs a valid {field!r}")
    frame[SHAPE] = frame[SHAPE].astype(int)
    frame["memory_limit_bytes"] = frame["memory_limit_bytes"].fillna(0)
    frame["label"] = frame["label"].where(frame["label"].notna(), frame["impl"])
    for impl in BASELINES:
        peaks = frame[frame["impl"] == impl].drop_duplicates([*SETTING, "vocab_size"])
        theirs = frame[[*SETTING, "vocab_size"]].merge(peaks, how="left", on=[*SETTING, "vocab_size"])["peak_bytes"]
        frame[f"peak_of_{impl}"] = frame["peak_bytes"] / theirs.to_numpy()
    frame["place"] = frame["impl"].map(lambda impl: IMPLS.index(impl) if impl in IMPLS else len(IMPLS))
    frame["section_place"] = frame["section"].map(lambda name: [*SECTIONS, name].index(name))
    order = ["section_place", *SETTING, "vocab_size", "place", "impl", "id"]
    return frame.sort_values(order, kind="stable").reset_index(drop=True)


def _slices(machine: Machine, baseline: str | None) -> Iterator[Slice]:
    for (section, precision, tokens, d_model, limit), own in machine.frame.groupby(SETTING, sort=False):
        stem = [machine.slug, "loss", section, precision, f"N{tokens}", f"M{d_model}"]
        heading = [SECTIONS.get(section, section), precision, f"{tokens:,} tokens", f"d_model {d_model:,}"]
        if limit:
            stem.append(f"{limit / GIB:g}gib")
            heading.append(f"memory limit {limit / GIB:g} GiB")
        timed = set(own["impl"][own["time_s"].notna()])
        base = next((impl for impl in ([baseline] if baseline else BASELINES) if impl in timed), "")
        own = own.assign(speedup=tables.paired_speedups(own, ["vocab_size"], base))
        yield Slice(machine, own, file_name("-".join(stem)), ", ".join(heading), base)


def _table(part: Slice) -> Table:
    """Rows: vocabularies by implementations; columns: time, speed, rate, peak memory and its share of the others'."""
    notes, rows = Footnotes(), []
    for case in part.frame.itertuples(index=False):
        shown = [case.speedup, 100 * case.matmul_ceiling_fraction, case.peak_bytes / GIB]
        shares = [100 * getattr(case, f"peak_of_{impl}") for impl in BASELINES]
        texts = ["" if pd.isna(value) else number(value) for value in [*shown, *shares]]
        rows.append([f"{case.vocab_size:,}", case.label, tables.cell(case, case.time_s * 1e3, notes), *texts])
    speed = f"speed, × of {part.base}" if part.base else "speed"
    shares = [f"peak, % of {impl}'s" for impl in BASELINES]
    fields = ["vocab_size", "impl", "outcome", *NUMBERS[:-1], "speedup", *(f"peak_of_{impl}" for impl in BASELINES)]
    return Table(
        name=part.stem,
        title=f"Time, speed and peak memory · {part.heading}",
        caption=part.caption(TIME, PEAK)
        + " Speed: the median of per-round ratios of rows sampled side by side. Share of matmul: 6 operations for each "
        "token, feature and class over median time, of the large matmul measured in this run.",
        columns=["vocabulary", "implementation", "time, ms", speed, "share of matmul, %", "peak, GiB", *shares],
        rows=rows,
        frame=part.frame[fields],
        notes=notes.notes(),
        keys=2,
    )


def _bars(part: Slice, metric: Metric) -> Plot | None:
    """A metric by vocabulary, a bar for each implementation."""
    frame = part.frame
    cases = tables.by_key(frame, ["impl", "vocab_size"])
    tiers = sorted(set(frame["vocab_size"]))
    lines = {impl: [cases.get((impl, size)) for size in tiers] for impl in dict.fromkeys(frame["impl"])}
    named = {case.impl: (case.label, bool(case.peer)) for case in frame.itertuples()}
    return bars.bars(
        name=f"{part.stem}-{metric.stem}",
        title=f"{metric.short} by vocabulary · {part.heading}",
        caption=part.caption(metric),
        tiers=[f"{size:,}" for size in tiers],
        values={impl: [_value(case, metric) for case in line] for impl, line in lines.items()},
        words={impl: [_word(case) for case in line] for impl, line in lines.items()},
        style=assign_looks(named, IMPLS),
        unit=metric.unit,
    )


def _value(case: Any, metric: Metric) -> float:
    return math.nan if case is None else float(getattr(case, metric.field)) * metric.scale


def _word(case: Any) -> str:
    return "" if case is None else tables.WORDS.get(case.outcome, "")
