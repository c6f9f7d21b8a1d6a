"""The language model opened up: where the time and the memory of a forward and of a whole step go, row by row.

Gate and clock are those of the model's benchmark. What is profiled is not what is timed: a profiler slows the host.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import trial
from benchmarks.model_cells import Cell, cells_of
from benchmarks.model_gate import Contender, arithmetic, gate
from benchmarks.model_trial import contender_of, facts_of
from benchmarks.model_workbench import Workbench
from benchmarks.sections import ModelSection
from benchmarks.session import Result, Settings
from benchmarks.sweeps import ANATOMY_MODES
from benchmarks.trial import ending, fail_the_good, sample
from lmsys.attention import ATTENTION
from lmsys.bench.record import Record, summarize, trim
from lmsys.cost.memory import training_memory
from lmsys.measure import memory
from lmsys.measure.compare import attempt, release_memory
from lmsys.measure.profile import KINDS, largest_allocations, part, profile_call, register_kernels
from lmsys.registry import Entry

NUM_KERNELS = 15  # a record names the longest
NUM_ALLOCATIONS = 10
NAME_LENGTH = 120  # of a kernel: the rest of a C++ template says little
TIMELINE_POINTS = 400  # more than a plot can show
Phases = dict[str, Callable[[], Any]]


@dataclass
class Found(trial.Found):
    """anatomy: the fields of the record that profile and allocator gave."""

    anatomy: Record = field(default_factory=dict)


def anatomy_cells(section: ModelSection, axes: Record, rows: list[Entry] | None, device: str) -> Iterator[Cell]:
    """The section's cells that can be opened: a backward's or an optimizer's part is in the whole step, a graph's are
    those of what it replays."""
    cells = cells_of(section, axes, rows, device)
    return (cell for cell in cells if cell.mode in ANATOMY_MODES and cell.compile != "graphed")


def anatomy_trial(cells: list[Cell], settings: Settings, traces: Path | None) -> Iterator[Result]:
    """A result for each cell of a group; `traces` is the folder that keeps traces and memory snapshots."""
    for row in (*ATTENTION.values(), *(cell.entry for cell in cells)):
        register_kernels(row.trait("kernels", ""), "attention")
    contenders = {cell.row: contender_of(cell) for cell in cells}
    found = {cell.id: Found() for cell in cells}
    with arithmetic(cells[0].precision):
        _, failure = attempt(lambda: _measure(cells, contenders, settings, found, traces))
    fail_the_good(contenders.values(), failure)
    release_memory()
    for cell in cells:
        yield _result(cell, contenders[cell.row], found[cell.id], settings)


def _measure(
    cells: list[Cell],
    contenders: dict[tuple[str, str, bool], Contender],
    settings: Settings,
    found: dict[str, Found],
    traces: Path | None,
) -> None:
    first = cells[0]
    right = [one for one in contenders.values() if one.outcome == "ok"]
    if right:
        gate(right, first.config, first.batch, first.precision, first.device, settings.seed)
    release_memory()
    able = {row: one for row, one in contenders.items() if one.outcome == "ok" and not one.interpreted}
    if not able or not settings.timed:
        return
    bench, failure = attempt(lambda: Workbench(first, able, settings.seed))
    for cell in cells:
        found[cell.id].failure = failure
    for mode in ANATOMY_MODES if bench is not None else ():
        of_mode = [cell for cell in cells if cell.mode == mode and cell.row in able]
        sample({cell.id: bench.step_of(cell) for cell in of_mode}, settings, found, settings.loop_clock)
        for cell in (cell for cell in of_mode if not found[cell.id].failure):
            bench.clear()  # of the memory none is another row's
            opened, found[cell.id].failure = attempt(lambda cell=cell: _open(cell, bench, traces))
            found[cell.id].anatomy = opened or {}
        bench.clear()


def _open(cell: Cell, bench: Workbench, traces: Path | None) -> Record:
    """What the record says of one cell beside its time."""
    phases = _phases(cell, bench)

    def call() -> None:
        bench.base.zero_grad(set_to_none=True)
        for name, phase in phases.items():
            with part(name):
                phase()

    found = _time_of(call, cell.device, traces / f"{cell.id}.json" if traces else None)
    found |= _memory_of(cell, bench, phases)
    bench.base.zero_grad(set_to_none=True)
    found["allocations"] = [asdict(one) for one in largest_allocations(call, cell.device, top=NUM_ALLOCATIONS)]
    if traces and cell.device == "cuda":
        bench.base.zero_grad(set_to_none=True)
        memory.write_snapshot(traces / f"{cell.id}.pickle", call, cell.device)
    return found


def _phases(cell: Cell, bench: Workbench) -> Phases:
    """What a call consists of, in order: an inference is a forward."""
    update, made = bench.step_of(replace(cell, mode="optimizer")), []

    def inference() -> None:
        bench.forward(cell)

    def forward() -> None:
        made.append(bench.scaler.scale(bench.forward(cell)))

    def backward() -> None:
        made.pop().backward()

    def optimizer() -> None:
        update.run(None)

    if cell.mode == "forward":
        return {"forward": inference}
    return {"forward": forward, "backward": backward, "optimizer": optimizer}


def _time_of(call: Callable[[], Any], device: str, trace: Path | None) -> Record:
    profile = profile_call(call, device, trace=trace)
    kernels = [asdict(replace(one, name=_shortened(one.name))) for one in profile.kernels[:NUM_KERNELS]]
    return {
        "profiled_s": profile.profiled_s,
        "kernel_s": profile.kernel_s,
        "num_launches": sum(kernel.count for kernel in profile.kernels),
        **{f"{kind}_share": profile.shares[kind] for kind in KINDS},
        "kernels": kernels,
        "parts": [asdict(one) for one in profile.parts],
    }


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def _memory_of(cell: Cell, bench: Workbench, phases: Phases) -> Record:
    """Bytes: held before the call, above that phase by phase and event by event, of a step measured and predicted."""
    bench.base.zero_grad(set_to_none=True)
    release_memory()  # a GPU's allocator hands out a cached block that is a little too large whole, and counts it so
    model, optimizer = bench.models[cell.row], bench.optimizers.get(cell.peer)
    held = sum(memory.breakdown(model, optimizer).values())
    by_phase = memory.phases(phases, cell.device)
    found: Record = {
        "held_bytes": held,
        "peak_bytes": max(phase["peak_bytes"] for phase in by_phase.values()),
        "phases": [{"name": name, **phase} for name, phase in by_phase.items()],
    }
    if cell.mode == "step":
        found |= memory.breakdown(model, optimizer) | {"activations_bytes": by_phase["forward"]["live_bytes"]}
    if cell.mode == "step" and not cell.peer:
        predicted = training_memory(cell.config, cell.batch, cell.context, cell.precision)
        found |= {f"predicted_{name}_bytes": size for name, size in asdict(predicted).items()}
    bench.base.zero_grad(set_to_none=True)
    timeline = memory.timeline(phases, cell.device)
    keep = TIMELINE_POINTS // len(timeline)
    found["timeline"] = [
        {"name": name, "points": [(float(f"{at:.7f}"), size) for at, size in thinned(points, keep)]}
        for name, points in timeline.items()
    ]
    return found


def thinned(points: Sequence[tuple[float, int]], keep: int) -> list[tuple[float, int]]:
    """At most `keep` (two or more) of the points (time_s, bytes): of each stretch the least and the most bytes."""
    if len(points) <= keep:
        return list(points)
    stretch, kept = math.ceil(len(points) / (keep // 2)), []
    for start in range(0, len(points), stretch):
        by_bytes = sorted(points[start : start + stretch], key=lambda point: point[1])
        kept += sorted({by_bytes[0], by_bytes[-1]})
    return kept


def _result(cell: Cell, contender: Contender, found: Found, settings: Settings) -> Result:
    outcome, reason, samples = ending(contender, found)
    record = facts_of(cell, contender, settings)
    record |= {"benchmark": "anatomy", "peer": False, "outcome": outcome, "reason": reason}
    if samples:
        record |= summarize(samples) | {"samples_s": trim(samples), "sm_clock_mhz": found.sm_clock_mhz} | found.anatomy
    return Result(record, samples)
