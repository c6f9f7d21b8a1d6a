"""Finds where the time and the memory of the language model go, in a forward and in a whole step, by implementation.

Calls are first timed as in `bench_model.py`, and then profiled in calls of their own, since a profiler slows the host.
`anatomy_of` makes the fields of a record. The runner calls the methods of `Anatomy`: they override hooks of
`lmsys.bench.Benchmark`, which says when each is called and what it returns; `bench_model.ModelBenchmark` has the other
hooks. To show one more figure, add a `Field` to `Anatomy.fields`, and its value to what `anatomy_of` returns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import axes, bench_model, sweeps
from benchmarks.model.anatomy_layout import ANATOMY as LAYOUT
from benchmarks.model.cases import FIELDS, ModelTest
from benchmarks.model.rig import Rig
from lmsys.attention import ATTENTION
from lmsys.bench import Field, Grid, Record, Settings, Traits, bench, fields
from lmsys.cost.memory import training_memory
from lmsys.measure import compare, memory, profile

NAME_LENGTH = 120  # characters of a kernel's name that a record keeps: the rest of a C++ template says little
TIMELINE_POINTS = 400  # points of a timeline that a record keeps: a plot cannot show more
# What a step holds in memory: names of fields, and how the report explains them. The head's gradient counts as an
# activation, because our loss (`lmsys.model.loss`) computes it in the forward, not in the backward.
HELD_IN_A_STEP = {
    "parameters": "Weights",
    "gradients": "Gradients at the end of a step",
    "optimizer": "The optimizer's state",
    "activations": "What a forward leaves for its backward, and the head's gradient, made there",
}
Phases = dict[str, Callable[[], Any]]  # functions that make up a call, in order, by name


@dataclass(frozen=True)
class AnatomyTest(ModelTest):
    """An inference or a whole step that is profiled.

    traces  the folder for traces and memory snapshots; None: none are written
    """

    traces: Path | None = None


class Anatomy(bench_model.ModelBenchmark):
    """Measures time by kind of kernel and by part of the model, and memory by phase and by allocation."""

    name = "anatomy"
    layout = LAYOUT
    axes = bench_model.ModelBenchmark.axes + axes.named("--traces")
    fields: tuple[Field, ...] = fields.columns(
        FIELDS,
        Field("kernel_s", "s", "kernels", about="Time of all kernels of one call, added up", shown="ms"),
        Field("profiled_s", "s", "profiled", about="Wall time of one call under the profiler, mean of 3", shown="ms"),
        Field("num_launches", label="launches", about="Kernels, copies and fills of one call"),
        [
            Field(f"{kind}_share", label=kind, about=f"Share of {kind} in the time of all kernels", shown="%")
            for kind in profile.KINDS
        ],
        Field(
            "held_bytes",
            "B",
            "held",
            about="Memory held before the call: weights, and in a step the optimizer's state",
            shown="MiB",
        ),
        # The call's peak, less what was in use before the call.
        fields.PEAK.called(about="The most memory in use in the call above what was held before"),
        [Field(f"{name}_bytes", "B", name, about=about, shown="MiB") for name, about in HELD_IN_A_STEP.items()],
        Field("buffers_bytes", "B", "buffers", "detail", shown="MiB"),
        [
            Field(
                f"predicted_{name}_bytes",
                "B",
                f"{name}, predicted",
                about=f"{about}, as the shapes predict it",
                shown="MiB",
            )
            for name, about in HELD_IN_A_STEP.items()
        ],
        fields.details("kernels", "parts", "phases", "timeline", "allocations"),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[AnatomyTest]:
        """The cases of the model that are forwards or whole steps, and are not replayed as CUDA graphs.

        A backward or an optimizer's update is profiled as a part of the whole step. A replayed case has its forward and
        backward in one CUDA graph, so the two cannot be measured apart; and a "graphed" case replays the kernels of the
        "compiled" one.
        """
        for case in super().cases(grid, settings):
            if case.mode in sweeps.ANATOMY_MODES and not case.replayed:
                yield AnatomyTest(**vars(case), traces=grid["traces"])

    def setup(self, cases: Sequence[ModelTest], settings: Settings) -> bench_model.Setup:
        """Makes the base's setup, after registering the names by which profiles know the kernels of attention."""
        for row in tuple(ATTENTION.values()) + tuple(case.entry for case in cases):
            profile.register_kernels(Traits.of(row).kernels, "attention")
        return super().setup(cases, settings)

    def sample(self, turn: Sequence[AnatomyTest], trial: Any) -> None:
        """Times the cases in turns, and then profiles each that was timed."""
        trial.interleave(turn)
        for case in turn:
            measurement = trial.measurements[case.id]
            if measurement.samples:
                record, measurement.failure = compare.attempt(anatomy_of, case, trial.setup)
                measurement.record |= record or {}


def anatomy_of(case: AnatomyTest, setup: bench_model.Setup) -> Record:
    """The fields of a case's record that timing does not give: those of kernels, parts, memory and allocations."""
    rig = setup.rig
    rig.clear()  # frees what the rows before have left, so that memory is this row's alone
    phases = phases_of(case, rig)

    def call() -> None:
        rig.base.zero_grad(set_to_none=True)
        for name, phase in phases.items():
            with profile.part(name):
                phase()

    taken = profile.profile_call(call, case.device, trace=case.traces / f"{case.id}.json" if case.traces else None)
    record = memory_of(case, rig, phases) | {
        "profiled_s": taken.profiled_s,
        "kernel_s": taken.kernel_s,
        "num_launches": sum(kernel.count for kernel in taken.kernels),
        **{f"{kind}_share": taken.shares[kind] for kind in profile.KINDS},
        # Kernels are in the order of their time, the longest first.
        "kernels": [asdict(kernel) | {"name": shortened(kernel.name)} for kernel in taken.kernels[:15]],
        "parts": list(map(asdict, taken.parts)),
    }
    rig.base.zero_grad(set_to_none=True)
    record["allocations"] = list(map(asdict, profile.largest_allocations(call, case.device, top=10)))
    if case.traces and case.device == "cuda":
        rig.base.zero_grad(set_to_none=True)
        memory.write_snapshot(case.traces / f"{case.id}.pickle", call)
    return record


def phases_of(case: AnatomyTest, rig: Rig) -> Phases:
    """The parts of a call, in order: the forward, and if the call is a step, also the backward and the update."""
    losses: list[Any] = []
    if case.mode == "forward":
        return {"forward": lambda: rig.forward(case)}
    return {
        "forward": lambda: losses.append(rig.scaler.scale(rig.forward(case))),
        "backward": lambda: losses.pop().backward(),
        "optimizer": lambda: rig.update(case),
    }


def shortened(name: str) -> str:
    """The name of a kernel, cut off after NAME_LENGTH characters."""
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def memory_of(case: AnatomyTest, rig: Rig, phases: Phases) -> Record:
    """The fields of a record about memory, in bytes.

    `held_bytes` is the memory that is held before the call. `peak_bytes`, `phases` and `timeline` count only memory in
    use above that: the most of it, by phase, and over time. A step also has the fields of HELD_IN_A_STEP, as measured,
    and for models of our own also as predicted from shapes.
    """
    rig.base.zero_grad(set_to_none=True)
    # Empties the cache: the GPU's allocator may hand out a cached block that is too large, and counts all of it.
    compare.release_memory()
    model, optimizer = rig.model(case), rig.optimizers.get(case.peer)  # peers have one of their own
    held_bytes = sum(memory.breakdown(model, optimizer).values())
    by_phase = memory.phases(phases, case.device)
    record: Record = {
        "held_bytes": held_bytes,
        "peak_bytes": max(phase["peak_bytes"] for phase in by_phase.values()),
        "phases": [{"name": name, **phase} for name, phase in by_phase.items()],
    }
    if case.mode == "step":
        record |= memory.breakdown(model, optimizer) | {"activations_bytes": by_phase["forward"]["live_bytes"]}
    if case.mode == "step" and not case.peer:
        predicted = training_memory(case.computed, case.batch, case.context, case.precision)
        record |= {f"predicted_{name}_bytes": getattr(predicted, name) for name in HELD_IN_A_STEP}
    rig.base.zero_grad(set_to_none=True)
    timeline = memory.timeline(phases, case.device)  # {name of a phase: its points (time_s, bytes)}
    record["timeline"] = []
    for name, points in timeline.items():
        kept = thinned(points, TIMELINE_POINTS // len(timeline))
        record["timeline"].append({"name": name, "points": [(float(f"{at:.7f}"), size) for at, size in kept]})
    return record


def thinned(points: Sequence[tuple[float, int]], keep: int) -> list[tuple[float, int]]:
    """At most `keep` (two or more) of the points (time_s, bytes).

    The points are divided into stretches of about equally many; of each, those with the least and the most bytes stay.
    """
    if len(points) <= keep:
        return list(points)
    stretch, kept = -(-len(points) // (keep // 2)), []
    for start in range(0, len(points), stretch):
        by_bytes = sorted(points[start : start + stretch], key=lambda point: point[1])
        kept += sorted({by_bytes[0], by_bytes[-1]})
    return kept


test_anatomy = bench(Anatomy)
