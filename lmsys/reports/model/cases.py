"""Model records as the report sees them: typed, cut into slices, and put into words."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.attention.cases import BASELINES, OURS, PEERS
from lmsys.reports.load import GIB, InputError, Machine, file_name
from lmsys.reports.metrics import Metric, span, timing

WARM_UP = "warmup"  # its cases differ in steps of warm-up, which no other table shows
FITS = "fits"  # asks for memory: its peaks are read before its times
SECTIONS = {  # in page order
    "default": "Everyday sizes",
    "peers": "Beside Hugging Face Llama",
    "sizes": "Sizes by context",
    "warmup": "Warm-up study",
    "fits": "What fits a card",
    "smoke": "Smoke test",
}
MODES = {
    "forward": "Forward (inference)",
    "train_forward": "Forward (training)",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "step": "Whole step",
}
PHASES = ("train_forward", "backward", "optimizer")  # what a whole step consists of
AXES = ("precision", "compile", "impl")  # what may stand side by side in one cell
ROW = ["context", "batch"]
SETTING = ["section", "vocab_size", "memory_limit_bytes"]
# Reading order; what is not listed comes after, by name.
ORDER = {
    "section": list(SECTIONS),
    "mode": list(MODES),
    "precision": ["fp32", "tf32", "bf16", "fp16"],
    "compile": ["eager", "compiled", "graphed"],
    "impl": [*OURS, *PEERS, "auto", "llama"],
    "size": ["tiny", "small", "medium", "large", "xl", "2.7b", "10b"],
}
TEXT = ["id", "impl", "label", "size", "precision", "mode", "compile", "outcome", "reason", "comparison", "clock"]
SHAPE = ["batch", "context", "vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_parameters"]
NUMBERS = (
    "time_s mean_s std_s p20_s p80_s rounds sm_clock_mhz compile_s held_bytes peak_bytes tokens_per_s"
    " flops_per_s matmul_ceiling_fraction mfu warmup_steps memory_limit_bytes predicted_bytes"
).split()

TIME = Metric("time", "time_s", "Median time", "Time", "ms", 1e3, True)
SPREAD = Metric(
    "spread",
    "mean_s",
    "Mean ± standard deviation of the time after that many steps of warm-up",
    "Time, mean ± std",
    "ms",
    1e3,
    True,
)
TOKENS = Metric("tokens", "tokens_per_s", "Rate: tokens of the batch over median time", "Rate", "tokens/s", 1.0, True)
MFU = Metric(
    "mfu",
    "mfu",
    "Model FLOP utilisation: the arithmetic of the formula over median time, as a share of the peak that the device's "
    "maker states",
    "MFU",
    "%",
    100.0,
    True,
)
FRACTION = Metric(
    "fraction",
    "matmul_ceiling_fraction",
    "The arithmetic of the formula over median time, as a share of the large matmul measured in this run",
    "Share of measured matmul",
    "%",
    100.0,
    True,
)
PEAK = Metric("peak", "peak_bytes", "Peak memory above what was live before", "Peak memory", "GiB", 2**-30)
TOTAL = Metric(
    "memory",
    "total_bytes",
    "Memory in all: weights, gradients and optimizer state live before, and the peak above them",
    "Memory in all",
    "GiB",
    2**-30,
)
FIRST = Metric("compile", "compile_s", "First call (compiles and tunes)", "First call", "s")
SPEEDUP = Metric("speedup", "speedup", "Speedup", "Speedup", "×", 1.0, True)


@dataclass(frozen=True)
class Slice:
    """The cases of one section, vocabulary and memory limit on one machine; of one mode, when cut by `of_mode`.

    `labels` are the names of the attention rows as they are read.
    """

    machine: Machine
    section: str
    frame: pd.DataFrame
    stem: str
    heading: str
    labels: dict[str, str]

    def modes(self) -> list[str]:
        return ordered("mode", self.frame["mode"])

    def of_mode(self, mode: str) -> "Slice":
        rows = self.frame[self.frame["mode"] == mode].reset_index(drop=True)
        heading = ", ".join(filter(None, [MODES.get(mode, mode), self.heading]))
        return replace(self, frame=rows, stem=f"{self.stem}-{file_name(mode)}", heading=heading)

    def word(self, axis: str, value: str) -> str:
        """A value of an axis as it is read."""
        return self.labels[value] if axis == "impl" else value

    def words(self, frame: pd.DataFrame, axis: str) -> str:
        names = labels_of(frame) if axis == "impl" else {}
        return " / ".join(names.get(value, value) for value in ordered(axis, frame[axis]))

    def constants(self, frame: pd.DataFrame) -> dict[str, str]:
        """The axes that have one value among these cases, with it."""
        return {axis: frame[axis].iloc[0] for axis in AXES if frame[axis].nunique() == 1}

    def caption(self, metric: Metric, frame: pd.DataFrame, what: str = "") -> str:
        """What is shown and every variable that is held constant."""
        what = what or (metric.title + (f", {metric.unit}" if metric.unit else ""))
        held = f"{self.heading or section_title(self.section)}; "
        held += f"batch {span(frame['batch'])}, context {span(frame['context'])}, size {' / '.join(sizes(frame))}, "
        held += f"vocabulary {span(frame['vocab_size'])}, {self.words(frame, 'precision')}, "
        held += f"{self.words(frame, 'compile')}, attention {self.words(frame, 'impl')}"
        clock = timing(frame) if metric.clocked else ""
        return f"{what}. {held}. {clock}{self.machine.about(frame)}"


def labels_of(frame: pd.DataFrame) -> dict[str, str]:
    """Attention rows as they are read. "auto: X" names what was taken, which may differ from case to case."""
    found: dict[str, str] = {}
    for impl, rows in frame.groupby("impl", sort=False):
        first, *others = dict.fromkeys(rows["label"])
        found[str(impl)] = " or ".join([first, *(label.removeprefix(f"{impl}: ") for label in others)])
    return found


def section_title(section: str) -> str:
    return SECTIONS.get(section, section)


def ordered(field: str, values: Iterable[str]) -> list[str]:
    """The different values in reading order."""
    return sorted(set(values), key=_place(field))


def _place(field: str) -> Callable[[str], tuple[int, str]]:
    known = ORDER[field]
    return lambda value: (known.index(value) if value in known else len(known), value)


def sizes(frame: pd.DataFrame) -> list[str]:
    """The model sizes, from the smallest."""
    return list(dict.fromkeys(frame.sort_values(["num_parameters", "size"])["size"]))


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The records with every column there, in reading order; InputError for one that is no case of a model."""
    frame = frame.reindex(columns=["run", "benchmark", "section", "peer", *TEXT, "samples_s", *SHAPE, *NUMBERS])
    frame["peer"] = [peer is True for peer in frame["peer"]]
    for field in [*SHAPE, *NUMBERS]:
        frame[field] = pd.to_numeric(frame[field], errors="coerce").astype(float)
    required = ["section", "size", "precision", "mode", "compile", *SHAPE]
    frame["warmup_steps"] = frame["warmup_steps"].where(frame["section"] == WARM_UP, 0)
    for case in frame[frame[[*required, "warmup_steps"]].isna().any(axis=1)].itertuples():
        field = next(field for field in [*required, "warmup_steps"] if pd.isna(getattr(case, field)))
        raise InputError(f"record {case.id!r}: a model record needs a valid {field!r}")
    frame[[*SHAPE, "warmup_steps"]] = frame[[*SHAPE, "warmup_steps"]].astype(int)
    frame["total_bytes"] = frame["held_bytes"] + frame["peak_bytes"]
    frame["memory_limit_bytes"] = frame["memory_limit_bytes"].fillna(0)
    frame["label"] = frame["label"].where(frame["label"].notna(), frame["impl"])
    places = pd.DataFrame({field: frame[field].map(_place(field)) for field in ["section", "mode", *AXES]})
    rest = frame[["num_parameters", "size", *ROW, "warmup_steps", "id"]]
    order = places.join(rest).sort_values([*places.columns, *rest.columns], kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def slices(machine: Machine) -> Iterator[Slice]:
    """The typed records cut by SETTING, in page order."""
    frame = machine.frame
    for section in ordered("section", frame["section"]):
        own = frame[frame["section"] == section]
        for (_, vocabulary, limit), rows in own.groupby(SETTING, sort=True):
            several = own["vocab_size"].nunique() > 1
            stem = [machine.slug, "model", section, *([f"V{vocabulary}"] if several else [])]
            heading = [f"vocabulary {vocabulary:,}"] if several else []
            if limit:
                stem.append(f"{limit / GIB:g}gib")
                heading.append(f"memory limit {limit / GIB:g} GiB")
            rows = rows.reset_index(drop=True)
            yield Slice(machine, section, rows, file_name("-".join(stem)), ", ".join(heading), labels_of(rows))


def groups(frame: pd.DataFrame, free: Iterable[str]) -> list[pd.DataFrame]:
    """The cases cut by all axes but the `free` ones."""
    fixed = [axis for axis in AXES if axis not in free]
    return [rows for _, rows in frame.groupby(fixed, sort=False)]


def side_by_side(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Every cut in which one axis varies alone, with that axis; then the cases that have nothing beside them."""
    found = [(axis, rows) for axis in AXES for rows in groups(frame, [axis]) if rows[axis].nunique() > 1]
    seen = [index for _, rows in found for index in rows.index]
    alone = frame.drop(index=list(set(seen)))
    return found + [("compile", rows) for rows in groups(alone, ["compile"])]


def base_of(frame: pd.DataFrame, axis: str, baseline: str | None) -> str:
    """What the others of an axis are compared with: eager, the first precision, a named attention row; "" if none."""
    timed = ordered(axis, frame[axis][frame["time_s"].notna()])
    if axis == "impl":
        wanted = [baseline] if baseline else [*BASELINES, *frame["impl"][frame["peer"]]]
        return next((impl for impl in wanted if impl in timed), "")
    first = ORDER[axis][0]
    return first if first in timed else ""


def with_speedups(frame: pd.DataFrame, axis: str, base: str) -> pd.DataFrame:
    """The cases of one cut with `speedup` over the base, whether it is `paired`, and a `remark`.

    Paired: the median of per-round ratios of cases sampled together. The others have the ratio of medians, and
    a remark that says so where some are paired.
    """
    same = ["mode", "size", *ROW]
    bases = tables.by_key(frame[frame[axis] == base], same)
    ratios = tables.paired_speedups(frame, same, base, axis)
    mixed = any(ratio == ratio for ratio, value in zip(ratios, frame[axis], strict=True) if value != base)
    found = []
    for case, ratio in zip(frame.itertuples(), ratios, strict=True):
        against = bases.get(tuple(getattr(case, field) for field in same))
        remark, paired = "", ratio == ratio
        if pd.notna(case.time_s) and not paired:
            ended = "not run" if against is None else tables.MEANINGS.get(against.outcome, "not timed")
            ratio = math.nan if against is None else against.time_s / case.time_s
            apart = "ratio of medians: not sampled together" if mixed else ""
            remark = apart if ratio == ratio else f"no time of the baseline here: {ended}"
        found.append((ratio, paired, remark))
    return frame.assign(**dict(zip(("speedup", "paired", "remark"), zip(*found, strict=True), strict=True)))
