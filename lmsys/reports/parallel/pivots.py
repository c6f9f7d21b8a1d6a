"""Tables of data parallelism: a step by strategy, by batch, its memory, and ours against torch's."""

import math
from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.load import GIB, Machine, file_name
from lmsys.reports.parallel.cases import COMPILES, PARTS, Slice, blocks
from lmsys.reports.tables import Footnotes, Table, number

# (ours, what it is measured against): the best-sized buckets of ours, as torch DDP is tuned by its caps
PAIRS = (
    ("bucketed", "torch_ddp_tuned"),
    ("bucketed", "torch_ddp"),
    ("bucketed", "naive"),
    ("copy_engine", "torch_ddp_tuned"),
    ("zero1", "torch_zero1"),
    ("copy_engine_zero1", "torch_zero1"),
    ("fsdp", "torch_fsdp2"),
)
STEP = {  # column: field, factor
    "tokens/s": ("tokens_per_s", 1.0),
    "scaling, %": ("scaling_efficiency", 100.0),
    "exposed, ms": ("exposed_s", 1e3),
    "predicted, ms": ("predicted_exposed_s", 1e3),
    "communication, ms": ("communication_s", 1e3),
    "of the step, %": ("communication_fraction", 100.0),
    "overlapped, %": ("overlap_fraction", 100.0),
    "less than naive, %": ("improvement", 100.0),
}


def steps(part: Slice) -> Table:
    """Rows: batches, ranks and strategies; columns: time, rate and what communication costs."""
    notes, rows = Footnotes(), []
    for case in part.frame.itertuples(index=False):
        time = tables.cell(case, case.mean_s * 1e3, notes)
        spread = f" ± {number(case.std_s * 1e3)}" if case.std_s == case.std_s else ""
        values = [getattr(case, field) * factor for field, factor in STEP.values()]
        rows.append([f"{case.batch}", f"{case.world_size}", case.row, time + spread, *map(_text, values)])
    return Table(
        name=f"{part.stem}-step",
        title=f"Step by strategy · {part.heading}",
        caption=part.caption(
            "A training step, the slowest rank's time, mean ± standard deviation. Scaling: tokens/s over those of as "
            "many ranks alone. Exposed: the median less that of the same step without synchronization (of sharded "
            "strategies less that of no synchronization). Predicted: n o + s / (n w) of the fitted latency and "
            "bandwidth. Communication: how long anything communicates, on the rank that waits least; overlapped: of "
            "that, while something computes. Less than naive: the time gained on it, as a share of its communication.",
            clocked=True,
        ),
        columns=["batch", "ranks", "strategy", "step, ms", *STEP],
        rows=rows,
        frame=part.frame[["batch", "world_size", "impl", "outcome", "mean_s", "std_s", "time_s", *_fields()]],
        notes=notes.notes(),
        keys=3,
    )


def _fields() -> list[str]:
    return [field for field, _ in STEP.values()] + ["unsynchronized_s", "bucket_mb", "num_buckets", "rounds"]


def _text(value: float) -> str:
    return "" if pd.isna(value) else number(value)


def by_batch(part: Slice) -> Table | None:
    """Rows: batches; columns: strategies and bucket sizes: median step times."""
    frame = part.frame[part.frame["world_size"] == part.frame["world_size"].max()]
    if frame["batch"].nunique() < 2:
        return None
    cases, notes = tables.by_key(frame, ["batch", "impl"]), Footnotes()
    impls = dict(zip(frame["impl"], frame["row"], strict=True))
    rows = []
    for batch in sorted(set(frame["batch"])):
        found = [cases.get((batch, impl)) for impl in impls]
        rows.append([f"{batch}", *(tables.cell(c, c.time_s * 1e3 if c else math.nan, notes) for c in found)])
    return Table(
        name=f"{part.stem}-by-batch",
        title=f"Step by batch, ms · {part.heading}",
        caption=part.caption(f"Median time of a step on {frame['world_size'].max()} ranks.", clocked=True),
        columns=["batch", *impls.values()],
        rows=rows,
        frame=frame[["batch", "impl", "outcome", "time_s", "mean_s", "std_s", "communication_s"]],
        notes=[*notes.notes(), *tables.legend(rows)],
    )


def memory(part: Slice) -> Table | None:
    """Rows: batches, ranks and strategies; columns: peaks at three points of a step, and what is held by kind."""
    frame = part.frame[part.frame["peak_bytes"].notna()]
    if frame.empty:
        return None
    peaks = ["init_bytes", "before_step_peak_bytes", "after_step_peak_bytes"]
    rows = []
    for case in frame.itertuples(index=False):
        sizes = [getattr(case, field) / GIB for field in [*peaks, *PARTS]]
        predicted = sum(getattr(case, f"predicted_{kind}_bytes") for kind in ("parameters", "gradients", "optimizer"))
        share = 100 * case.optimizer_fraction
        shown = [*sizes[:3], *sizes[3:], share, predicted / GIB]
        rows.append([f"{case.batch}", f"{case.world_size}", case.row, *map(_text, shown)])
    return Table(
        name=f"{part.stem}-memory",
        title=f"Memory of a rank, GiB · {part.heading}",
        caption=part.caption(
            "What the rank with most holds after the model, strategy and optimizer are made; its peak before the "
            "optimizer's step, which is that of forward and backward; and its peak during the step. By kind: as it is "
            "after the step, activations as they are after the forward. State: of that of one process alone. "
            f"Predicted: parameters, gradients and optimizer state of that stage of ZeRO.{part.unrecorded}"
        ),
        columns=[
            *("batch", "ranks", "strategy", "after init", "before step", "after step"),
            *(*PARTS.values(), "state, % of whole", "predicted without activations"),
        ],
        rows=rows,
        frame=frame[["batch", "world_size", "impl", *peaks, "peak_bytes", *PARTS, "optimizer_fraction"]],
        keys=3,
    )


def against_peers(machine: Machine, section: str) -> Table | None:
    """Rows: sizes and batches; columns: how much faster ours is than the peer beside it; last, the geometric mean."""
    frame = machine.frame[(machine.frame["section"] == section) & (machine.frame["world_size"] > 1)]
    frame = frame[~(frame["sharded_optimizer"] == True) & (frame["comm_dtype"] != "bfloat16")]  # noqa: E712
    keys = ["size", "batch", "context", "precision", "compile", "world_size", "memory_limit_bytes"]
    found: dict[tuple[Any, ...], list[float]] = {}
    for setting, own in frame.groupby(keys, sort=False):
        ratios = [_ratio(own, ours, theirs) for ours, theirs in PAIRS]
        if any(ratio == ratio for ratio in ratios):
            found[setting if isinstance(setting, tuple) else (setting,)] = ratios
    if not found:
        return None
    columns = [f"{ours} / {theirs}" for ours, theirs in PAIRS]
    rows = [
        [f"{s} b{b} s{c}, {p}, {w} ranks{blocks(how)}", *map(_text, ratios)]
        for (s, b, c, p, how, w, _), ratios in found.items()
    ]
    for how, world in sorted({setting[4:6] for setting in found}, key=lambda one: (COMPILES.index(one[0]), one[1])):
        chosen = [ratios for setting, ratios in found.items() if setting[4:6] == (how, world)]
        means = [tables.geometric_mean(column) for column in zip(*chosen, strict=True)]
        words = [f"{_text(mean)} ({n})" if n else "" for mean, n in means]
        rows.append([f"geometric mean, {world} ranks{blocks(how)}", *words])
    return Table(
        name=file_name(f"{machine.slug}-data-parallel-{section}-peers"),
        title=f"Speed of ours, × of the row beside it · {section}",
        caption="The median of ratios of steps taken in turns, of the size of buckets that is fastest; above 1 ours is "
        f"faster. {machine.about(frame)}",
        columns=["training", *columns],
        rows=rows,
        frame=pd.DataFrame([[*key, *ratios] for key, ratios in found.items()], columns=[*keys, *columns]),
    )


def _ratio(own: pd.DataFrame, ours: str, theirs: str) -> float:
    """Theirs over ours, of the fastest row of each."""
    first, second = (own[(own["strategy"] == name) & own["time_s"].notna()] for name in (ours, theirs))
    if first.empty or second.empty:
        return math.nan
    a, b = (rows.loc[rows["time_s"].idxmin()] for rows in (first, second))
    if a["comparison"] != b["comparison"] or not isinstance(a["samples_s"], list):
        return math.nan
    ratios = pd.Series([y / x for x, y in zip(a["samples_s"], b["samples_s"], strict=False) if x > 0])
    return float(ratios.median())
