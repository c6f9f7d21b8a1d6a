"""Records of whole trainings as the report sees them: typed, cut into slices, and put into words."""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from lmsys.reports.attention.cases import OURS, PEERS
from lmsys.reports.load import GIB, InputError, Machine, file_name
from lmsys.reports.metrics import Metric, timing
from lmsys.reports.parallel.cases import ORDER

SECTIONS = {  # in page order
    "default": "Everyday sizes",
    "matrix": "Matrix of attention rows and strategies",
    "smoke": "Smoke test",
}
ATTENTION_ORDER = ["auto", *OURS, *PEERS]
SHAPE = ["context", "batch", "num_ranks", "train_tokens", "val_tokens", "epochs", "num_parameters"]
SETTING = [
    *("section", "size", "context", "batch", "precision", "compile", "num_ranks", "train_tokens", "epochs"),
    "memory_limit_bytes",
]
NUMBERS = (
    "time_s mean_s std_s p20_s p80_s rounds sm_clock_mhz tokens_per_s flops_per_s first_step_s peak_bytes loss"
    " valid_loss curve_difference curve_budget norm_difference error_ratio world_size bucket_mb num_nodes"
    " memory_limit_bytes"
).split()
TEXT = (
    "section impl attention attention_label strategy row label size corpus precision compile outcome reason comparison"
    " clock backend"
).split()
CURVES = ["curve_steps", "curve_losses", "curve_differences"]
SINGLE, BASE = "none", "naive"  # the strategies that speeds are relative to

RATE = Metric("rate", "tokens_per_s", "Tokens of an epoch over its median time", "Throughput", "tokens/s", 1.0, True)
TIME = Metric("time", "mean_s", "Time of an epoch, of the slowest rank", "Time of an epoch", "s", 1.0, True)
PEAK = Metric("memory", "peak_bytes", "Peak memory of a step, of the rank with most", "Peak memory", "GiB", 1 / GIB)
SPEED = Metric(
    "speedup",
    "speedup",
    f"Median time of an epoch by the strategy {BASE} over that of the row",
    "Speed-up",
    "×",
    1,
    True,
)


@dataclass(frozen=True)
class Slice:
    """The cells of one model, batch and text on one machine; `speedup` over BASE and `efficiency` are its columns."""

    machine: Machine
    section: str
    frame: pd.DataFrame
    stem: str
    heading: str

    @property
    def strategies(self) -> list[str]:
        """The rows in reading order; their names, since labels are too long for an axis."""
        ordered = self.frame.sort_values(["place", "bucket_mb", "row"], kind="stable")
        return list(dict.fromkeys(ordered["row"]))

    def caption(self, text: str, clocked: bool = False) -> str:
        """What is shown and every variable that is held constant."""
        first = self.frame.iloc[0]
        nodes = self.frame["num_nodes"].max()
        across = f" on {int(nodes)} nodes" if nodes > 1 else ""
        held = (
            f"{self.heading}; {first.num_parameters / 1e6:,.1f} M parameters, {first.epochs} epochs of"
            f" {first.train_tokens:,} tokens of {first.corpus}; {'/'.join(sorted(set(self.frame['backend'])))}{across}."
            f" One process ({SINGLE}) accumulates the batches of all ranks; cells run one after another"
        )
        return f"{text} {held}. {timing(self.frame) if clocked else ''}{self.machine.about(self.frame)}"


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The records with every column there, in reading order; InputError for one that is no case of a training."""
    columns = ["run", "id", *TEXT, *CURVES, "samples_s", "attention_peer", "strategy_peer", *SHAPE, *NUMBERS]
    frame = frame.reindex(columns=list(dict.fromkeys(columns)))
    for field in [*SHAPE, *NUMBERS]:
        frame[field] = pd.to_numeric(frame[field], errors="coerce").astype(float)
    required = ["section", "size", "attention", "strategy", "row", "precision", "compile", *SHAPE]
    for case in frame[frame[required].isna().any(axis=1)].itertuples():
        field = next(field for field in required if pd.isna(getattr(case, field)))
        raise InputError(f"record {case.id!r}: a training record needs a valid {field!r}")
    frame[SHAPE] = frame[SHAPE].astype(int)
    for field in ("attention_peer", "strategy_peer"):
        frame[field] = [peer is True for peer in frame[field]]
    frame["memory_limit_bytes"] = frame["memory_limit_bytes"].fillna(0)
    frame["attention_label"] = frame["attention_label"].where(frame["attention_label"].notna(), frame["attention"])
    frame["label"] = frame["label"].where(frame["label"].notna(), frame["strategy"])
    frame.loc[frame["strategy"] == SINGLE, "label"] = "one process"
    frame["section_place"] = [[*SECTIONS, name].index(name) for name in frame["section"]]
    frame["attention_place"] = [[*ATTENTION_ORDER, name].index(name) for name in frame["attention"]]
    frame["place"] = [[*ORDER, name].index(name) for name in frame["strategy"]]
    order = ["section_place", "section", "num_parameters", *SETTING[2:], "attention_place", "attention", "place"]
    return frame.sort_values([*order, "bucket_mb", "row", "id"], kind="stable").reset_index(drop=True)


def slices(machine: Machine) -> Iterator[Slice]:
    """The typed records cut by SETTING, in page order."""
    for setting, rows in machine.frame.groupby(SETTING, sort=False):
        section, size, context, batch, precision, compiled, ranks, tokens, epochs, limit = setting
        stem = [machine.slug, "training", section, size, f"S{context}B{batch}", precision]
        heading = [size, f"context {context:,}", f"batch {batch} of each of {ranks} ranks", precision]
        if compiled != "eager":
            stem.append(compiled)
            heading.append(f"blocks {compiled}")
        stem += [f"W{ranks}", f"T{tokens}x{epochs}"]
        if limit:
            stem.append(f"{limit / GIB:g}gib")
            heading.append(f"memory limit {limit / GIB:g} GiB")
        name = file_name("-".join(map(str, stem)))
        yield Slice(machine, section, _compared(rows.reset_index(drop=True)), name, ", ".join(heading))


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    """With what a row's speed is relative to: the BASE of the same attention row and run, and one rank alone."""
    keys = ["attention", "comparison"]
    for strategy, column in ((BASE, "base_s"), (SINGLE, "single_s")):
        base = frame[frame["strategy"] == strategy].drop_duplicates(keys)[[*keys, "time_s"]]
        frame = frame.merge(base.rename(columns={"time_s": column}), how="left", on=keys)
    frame["speedup"] = frame["base_s"] / frame["time_s"]
    return frame.assign(efficiency=frame["single_s"] / frame["time_s"] / frame["world_size"])
