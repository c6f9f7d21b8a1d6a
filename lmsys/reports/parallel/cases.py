"""Data-parallel records as the report sees them: typed, cut into slices, and put into words."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from lmsys.reports.load import GIB, InputError, Machine, file_name
from lmsys.reports.metrics import timing

SECTIONS = {  # in page order
    "default": "Everyday sizes",
    "sizes": "Sizes",
    "buckets": "By batch and size of buckets",
    "sharded": "Sharded against unsharded optimizer",
    "narrow": "Communication in lower precision",
    "scaling": "Scaling by number of ranks",
    "smoke": "Smoke test",
}
ORDER = (
    "none naive flat overlapped bucketed copy_engine zero1 copy_engine_zero1 fsdp"
    " torch_ddp torch_ddp_tuned torch_zero1 torch_fsdp2"
).split()  # of strategies, in reading order
SETTING = ["section", "size", "context", "precision", "compile", "memory_limit_bytes"]
COMPILES = ["eager", "compiled", "graphed"]  # in reading order
SHAPE = ["batch", "context", "world_size", "num_parameters"]
PARTS = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations",
}
NUMBERS = (
    "time_s mean_s std_s p20_s p80_s rounds sm_clock_mhz tokens_per_s scaling_efficiency unsynchronized_s exposed_s"
    " communication_s communication_fraction overlap_fraction improvement predicted_exposed_s bucket_mb num_buckets"
    " latency_s bandwidth_bytes_per_s init_bytes before_step_peak_bytes after_step_peak_bytes peak_bytes"
    " optimizer_fraction predicted_parameters_bytes predicted_gradients_bytes predicted_optimizer_bytes error_ratio"
    " memory_limit_bytes num_nodes"
).split() + list(PARTS)
TEXT = (
    "section impl strategy label size precision compile comm_dtype outcome reason comparison clock backend"
    " unsynchronized_by"
).split()


@dataclass(frozen=True)
class Slice:
    """The cases of one section, size, context, precision and way of compiling on one machine."""

    machine: Machine
    section: str
    frame: pd.DataFrame
    stem: str
    heading: str

    @property
    def unrecorded(self) -> str:
        """What a caption says of memory where steps are replayed."""
        graphed = set(self.frame["compile"]) == {"graphed"}
        return " Of a step launched call by call, before one is recorded." if graphed else ""

    def caption(self, text: str, clocked: bool = False) -> str:
        """What is shown and every variable that is held constant."""
        nodes = self.frame["num_nodes"].max()
        across = f" on {int(nodes)} nodes" if nodes > 1 else ""
        held = f"{self.heading}; batch of each rank; {'/'.join(sorted(set(self.frame['backend'])))}{across}"
        return f"{text} {held}. {timing(self.frame) if clocked else ''}{self.machine.about(self.frame)}"


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The records with every column there, in reading order; InputError for one that is no case of a training."""
    columns = ["run", "id", *TEXT, "peer", "samples_s", "timeline", "sharded_optimizer", *SHAPE, *NUMBERS]
    frame = frame.reindex(columns=columns)
    for field in [*SHAPE, *NUMBERS]:
        frame[field] = pd.to_numeric(frame[field], errors="coerce").astype(float)
    required = ["section", "size", "precision", "strategy", *SHAPE]
    for case in frame[frame[required].isna().any(axis=1)].itertuples():
        field = next(field for field in required if pd.isna(getattr(case, field)))
        raise InputError(f"record {case.id!r}: a data-parallel record needs a valid {field!r}")
    frame[SHAPE] = frame[SHAPE].astype(int)
    frame["peer"] = [peer is True for peer in frame["peer"]]
    by_copies = frame["strategy"].isin(["copy_engine", "copy_engine_zero1"])  # older files predict them by NCCL's times
    frame.loc[by_copies, "predicted_exposed_s"] = math.nan
    frame["memory_limit_bytes"] = frame["memory_limit_bytes"].fillna(0)
    frame["compile"] = frame["compile"].where(frame["compile"].notna(), "eager")  # older files do not say
    for case in frame[~frame["compile"].isin(COMPILES)].itertuples():
        raise InputError(f"record {case.id!r}: 'compile' must be one of {', '.join(COMPILES)}; got {case.compile!r}")
    frame["compile_place"] = [COMPILES.index(name) for name in frame["compile"]]
    frame["label"] = frame["label"].where(frame["label"].notna(), frame["impl"])
    frame["row"] = [_row(case) for case in frame.itertuples()]
    frame["place"] = [ORDER.index(name) if name in ORDER else len(ORDER) for name in frame["strategy"]]
    frame["section_place"] = [[*SECTIONS, name].index(name) for name in frame["section"]]
    frame["bucket_place"] = frame["bucket_mb"].fillna(0)
    order = ["section_place", "section", "num_parameters", "precision", "context", "compile_place"]
    order += ["batch", "world_size", "place"]
    return frame.sort_values([*order, "bucket_place", "impl", "id"], kind="stable").reset_index(drop=True)


def _row(case: object) -> str:
    """How a table calls a row: the label, with the size of its buckets and what else is its own."""
    impl, strategy = str(getattr(case, "impl", "")), str(getattr(case, "strategy", ""))
    extra = impl.removeprefix(strategy).strip("-").replace("-", ", ").replace("MiB", " MiB")
    if extra.startswith("auto"):
        extra = extra.replace("auto", f"auto ({getattr(case, 'bucket_mb', 0.0):.0f} MiB)", 1)
    return ", ".join(filter(None, [str(getattr(case, "label", "")), extra]))


def blocks(compiled: str) -> str:
    """What a heading says of the way of compiling: of the usual one, nothing."""
    known = {"eager": "", "graphed": ", as one CUDA graph"}
    return known.get(compiled, f", blocks {compiled}")


def slices(machine: Machine) -> Iterator[Slice]:
    """The typed records cut by SETTING, in page order."""
    for (section, size, context, precision, compiled, limit), rows in machine.frame.groupby(SETTING, sort=False):
        stem = [machine.slug, "data-parallel", section, size, f"S{context}", precision]
        heading = [size, f"context {context:,}", precision]
        if compiled != "eager":
            stem.append(compiled)
            heading[-1] += blocks(compiled)
        if limit:
            stem.append(f"{limit / GIB:g}gib")
            heading.append(f"memory limit {limit / GIB:g} GiB")
        name = file_name("-".join(map(str, stem)))
        yield Slice(machine, section, rows.reset_index(drop=True), name, ", ".join(heading))
