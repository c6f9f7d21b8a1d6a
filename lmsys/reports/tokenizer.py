"""The chapter on tokenizers: how fast each trains and encodes, and in how much memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd

from lmsys.reports import bars, tables
from lmsys.reports.load import InputError, Machine, file_name
from lmsys.reports.metrics import Metric, timing
from lmsys.reports.page import Block, Chapter
from lmsys.reports.plots import Plot, assign_looks
from lmsys.reports.tables import Footnotes, Table, number

SECTIONS = {"corpus": "All of the text", "default": "Everyday sizes", "smoke": "Smoke test"}  # in page order
TASKS = {"train": "training", "encode": "encoding"}  # in page order
IMPLS = ["lmsys", "lmsys_serial", "tiktoken", "huggingface"]  # in reading order
BASELINES = ("huggingface", "tiktoken")  # what a user would have otherwise
MB = 1e6
SETTING = ["section", "vocab_size", "text_bytes", "memory_limit_bytes"]
NUMBERS = "time_s mean_s std_s p20_s p80_s rounds sm_clock_mhz peak_bytes bytes_per_s memory_limit_bytes".split()
TEXT = "section task impl label outcome reason comparison clock".split()

RATE = Metric("rate", "bytes_per_s", "Bytes of text over median time", "Rate", "MB/s", 1 / MB, True)


@dataclass(frozen=True)
class Slice:
    """The cases of one setting on one machine."""

    machine: Machine
    frame: pd.DataFrame
    stem: str
    heading: str

    def caption(self) -> str:
        """What is shown and every variable that is held constant."""
        return f"{RATE.title}, {RATE.unit}. {self.heading}. {timing(self.frame)}{self.machine.about(self.frame)}"


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """`machine` holds records of tokenizers only."""
    machine = replace(machine, frame=_typed(machine.frame, [baseline] if baseline else list(BASELINES)))
    blocks = []
    for part in _slices(machine):
        plot = _bars(part)
        blocks.append(Block(part.heading, [_table(part), *([plot] if plot else [])]))
    return [Chapter("Tokenizers", blocks)]


def _typed(frame: pd.DataFrame, baselines: list[str]) -> pd.DataFrame:
    """The records with every column there, in reading order; InputError for one that is no case of a tokenizer."""
    frame = frame.reindex(
        columns=["run", "id", *TEXT, "peer", "samples_s", "vocab_size", "text_bytes", "processes", *NUMBERS]
    )
    for field in ["vocab_size", "text_bytes", "processes", *NUMBERS]:
        frame[field] = pd.to_numeric(frame[field], errors="coerce").astype(float)
    required = ["section", "task", "vocab_size", "processes"]
    for case in frame[frame[required].isna().any(axis=1)].itertuples():
        field = next(field for field in required if pd.isna(getattr(case, field)))
        raise InputError(f"record {case.id!r}: a tokenizer record needs a valid {field!r}")
    frame["memory_limit_bytes"] = frame["memory_limit_bytes"].fillna(0)
    frame["text_bytes"] = frame["text_bytes"].fillna(0)  # nothing was prepared: every cell failed
    frame["label"] = frame["label"].where(frame["label"].notna(), frame["impl"])
    for base in baselines:
        frame[f"speed of {base}"] = tables.paired_speedups(frame, [*SETTING, "task"], base)
    frame["place"] = frame["impl"].map(lambda impl: IMPLS.index(impl) if impl in IMPLS else len(IMPLS))
    frame["task_place"] = frame["task"].map(lambda task: [*TASKS, task].index(task))
    frame["section_place"] = frame["section"].map(lambda name: [*SECTIONS, name].index(name))
    order = ["section_place", *SETTING, "task_place", "place", "impl", "id"]
    return frame.sort_values(order, kind="stable").reset_index(drop=True)


def _slices(machine: Machine) -> Iterator[Slice]:
    for (section, vocab_size, text_bytes, limit), own in machine.frame.groupby(SETTING, sort=False):
        stem = [machine.slug, "tokenizer", section, f"V{vocab_size:.0f}"]
        heading = [SECTIONS.get(section, section), f"vocabulary {vocab_size:,.0f}", f"{text_bytes / MB:.1f} MB"]
        if limit:
            stem.append(f"{limit / 2**30:g}gib")
            heading.append(f"memory limit {limit / 2**30:g} GiB")
        yield Slice(machine, own, file_name("-".join(stem)), ", ".join(heading))


def _table(part: Slice) -> Table:
    """Rows: tasks by implementations; columns: processes, time, rate, speed and peak memory."""
    notes, rows = Footnotes(), []
    speeds = [column for column in part.frame if column.startswith("speed of ")]
    for case in part.frame.to_dict("records"):
        shown = [case["bytes_per_s"] / MB, *(case[column] for column in speeds), case["peak_bytes"] / MB]
        texts = ["" if pd.isna(value) else number(value) for value in shown]
        time = tables.cell(pd.Series(case), case["time_s"], notes)
        task = TASKS.get(case["task"], case["task"])
        rows.append([task, case["label"], f"{case['processes']:.0f}", time, *texts])
    named = [f"speed, × of {column.removeprefix('speed of ')}" for column in speeds]
    return Table(
        name=part.stem,
        title=f"Time, rate, speed and memory · {part.heading}",
        caption=part.caption()
        + " Processes: of the others, threads. Speed: the median of per-round ratios of rows sampled side by side. "
        "Memory: resident, of a process that does the task once and of those that it starts, added up.",
        columns=["task", "implementation", "processes", "time, s", "rate, MB/s", *named, "peak, MB"],
        rows=rows,
        frame=part.frame[["task", "impl", "processes", "outcome", *NUMBERS[:-1], *speeds]],
        notes=notes.notes(),
        keys=3,
    )


def _bars(part: Slice) -> Plot | None:
    """The rate by task, a bar for each implementation."""
    frame = part.frame
    cases = tables.by_key(frame, ["impl", "task"])
    tasks = list(dict.fromkeys(frame["task"]))
    lines = {impl: [cases.get((impl, task)) for task in tasks] for impl in dict.fromkeys(frame["impl"])}
    named = {case.impl: (case.label, bool(case.peer)) for case in frame.itertuples()}
    return bars.bars(
        name=f"{part.stem}-{RATE.stem}",
        title=f"{RATE.short} by task · {part.heading}",
        caption=part.caption(),
        tiers=[TASKS.get(task, task) for task in tasks],
        values={
            impl: [math.nan if case is None else float(case.bytes_per_s) / MB for case in line]
            for impl, line in lines.items()
        },
        words={
            impl: ["" if case is None else tables.WORDS.get(case.outcome, "") for case in line]
            for impl, line in lines.items()
        },
        style=assign_looks(named, IMPLS),
        unit=RATE.unit,
    )
