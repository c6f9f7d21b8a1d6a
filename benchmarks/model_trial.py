"""One size, context, batch and precision of the language model put to the test: every row, eager and compiled."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import trial
from benchmarks.model_cells import AUTO, DTYPES, LLAMA, Cell
from benchmarks.model_gate import Contender, arithmetic, gate
from benchmarks.model_workbench import Workbench, cold_samples
from benchmarks.sections import MODES
from benchmarks.session import Result, Settings
from benchmarks.trial import ending, fail_the_good, sample
from lmsys.attention import ATTENTION
from lmsys.attention.compiled import why_no_compiler
from lmsys.bench.record import Record, summarize, trim
from lmsys.cost.memory import training_memory
from lmsys.cost.operations import FLOPS_OF_STEP, model_flops, model_parameters
from lmsys.measure.clock import synchronize
from lmsys.measure.compare import Failure, attempt, release_memory

PEAK_FLOPS_PER_S = {"H100": 989e12, "H200": 989e12}  # dense bfloat16 and float16, of the SXM modules' data sheets
KEEP_SCORES = ("naive", "naive_compiled", "vectorized", "sdpa_math")  # of all queries and keys, for the backward
Contenders = dict[tuple[str, str, bool], Contender]  # by Cell.row


@dataclass
class Found(trial.Found):
    """held_bytes: weights, gradients and optimizer state before what is timed."""

    held_bytes: int | None = None
    peak_bytes: int | None = None


def model_trial(cells: list[Cell], settings: Settings) -> Iterator[Result]:
    """A result for each cell of a group.

    In this order: the gate, on a model of a few blocks; then, mode by mode on the whole model, each row alone, which
    decides what is out of memory, the samples, a memory run; last, whether the model still gives finite numbers. What
    fails outside a row's own calls fails every cell that was still good.
    """
    contenders = {cell.row: contender_of(cell) for cell in cells}
    found = {cell.id: Found(failure=_no_graph(cell)) for cell in cells}
    with arithmetic(cells[0].precision):
        _, failure = attempt(lambda: _measure(cells, contenders, settings, found))
    fail_the_good(contenders.values(), failure)
    release_memory()
    for cell in cells:
        yield _result(cell, contenders[cell.row], found[cell.id], settings)


def contender_of(cell: Cell) -> Contender:
    """What the cell's row is to be checked as; `unsupported`, with the reason, where it cannot run."""
    contender = Contender(cell.entry.name, cell.compile != "eager", cell.grad)
    if reason := why_not(cell):
        contender.failed("unsupported", reason)
    elif cell.entry == AUTO:
        contender.attention = ATTENTION.pick(AUTO.name, cell.case).name
    return contender


def why_not(cell: Cell) -> str | None:
    """The reason why the cell's row cannot run it at all, if there is one."""
    if cell.precision == "tf32" and cell.device == "cpu":
        return "TF32 is an arithmetic of CUDA devices"
    if cell.compile != "eager" and (reason := why_no_compiler(cell.device)):
        return reason
    if cell.entry not in (AUTO, LLAMA) and cell.entry.name not in list(ATTENTION):
        return "a model takes rows of the table: give the kernel a row there, or an entry point"
    return None if cell.entry == AUTO else cell.entry.why_not(cell.case)


def _no_graph(cell: Cell) -> Failure | None:
    """Why what the row can do otherwise is not done as a graph."""
    if cell.compile != "graphed" or (cell.mode == "step" and cell.device == "cuda"):
        return None
    if cell.device != "cuda":
        return "unsupported", "CUDA graphs are of CUDA devices"
    return "unsupported", "forward and backward are one graph: there is nothing but whole steps to time"


def _measure(cells: list[Cell], contenders: Contenders, settings: Settings, found: dict[str, Found]) -> None:
    first = cells[0]
    right = [one for one in contenders.values() if one.outcome == "ok"]
    if right:
        _gate(right, first, first.batch, settings.seed)
    release_memory()
    able = {row: one for row, one in contenders.items() if one.outcome == "ok" and not one.interpreted}
    timed = [cell for cell in cells if cell.row in able and not found[cell.id].failure] if settings.timed else []
    if first.warmup is not None:
        for cell in timed:
            one, start = found[cell.id], (able[cell.row], settings.seed, settings.memory_limit_bytes)
            one.samples, one.failure = attempt(lambda cell=cell, start=start: cold_samples(cell, *start))
    elif timed:
        bench, failure = attempt(lambda: Workbench(first, able, settings.seed))
        for cell in timed:
            found[cell.id].failure = failure
        if bench is not None:
            _time(timed, bench, able, settings, found)


def _gate(contenders: list[Contender], cell: Cell, batch: int, seed: int) -> None:
    """On half the batch, and half again, where it is not the rows but the gate's own reference that has no room."""
    try:
        return gate(contenders, cell.config, batch, cell.precision, cell.device, seed)
    except (torch.OutOfMemoryError, MemoryError):
        if batch == 1:
            raise
    release_memory()  # only here is the traceback gone, which held the reference's tensors
    _gate(contenders, cell, batch // 2, seed)


def _time(
    cells: list[Cell], bench: Workbench, contenders: Contenders, settings: Settings, found: dict[str, Found]
) -> None:
    compiled: set[tuple[str, str, bool]] = set()
    for mode in MODES:
        bench.clear()
        of_mode = [cell for cell in cells if cell.mode == mode]
        for cell in of_mode:
            seconds, found[cell.id].failure = attempt(lambda cell=cell: _first_call(cell, bench))
            if cell.compile == "graphed" and not found[cell.id].failure:
                wrong, found[cell.id].failure = attempt(lambda cell=cell: bench.graph_fault(cell))
                found[cell.id].failure = found[cell.id].failure or wrong
            bench.clear()  # each is alone, and nothing of one that failed stays
            if not found[cell.id].failure and cell.row not in compiled:
                compiled.add(cell.row)
                contenders[cell.row].compile_s = seconds + (contenders[cell.row].compile_s or 0)
        _sample([cell for cell in of_mode if not found[cell.id].failure], bench, settings, found)
    for cell in {cell.row: cell for cell in cells if found[cell.id].samples}.values():
        contenders[cell.row].check_after(lambda cell=cell: bench.forward(cell))


def _first_call(cell: Cell, bench: Workbench) -> float:
    """Seconds: blocks are not compiled again, but where the gate's shape was smaller; what is compiled whole is."""
    step, start = bench.step_of(cell), time.perf_counter()
    step.run(step.prepare())
    synchronize(cell.device)
    return time.perf_counter() - start


def _sample(cells: list[Cell], bench: Workbench, settings: Settings, found: dict[str, Found]) -> None:
    sample({cell.id: bench.step_of(cell) for cell in cells}, settings, found, settings.loop_clock)
    for cell in cells:
        measured, _ = attempt(lambda cell=cell: bench.memory_of(cell))
        found[cell.id].held_bytes, found[cell.id].peak_bytes = measured or (None, None)


def _result(cell: Cell, contender: Contender, found: Found, settings: Settings) -> Result:
    outcome, reason, samples = ending(contender, found)
    record = facts_of(cell, contender, settings) | {
        "benchmark": "model",
        "peer": cell.peer,
        "warmup_steps": cell.warmup,
        "outcome": outcome,
        "reason": reason,
        "compile_s": contender.compile_s,
        "predicted_bytes": _predicted(cell, contender),
    }
    if samples:
        record |= summarize(samples) | {"samples_s": trim(samples), "sm_clock_mhz": found.sm_clock_mhz}
        record |= {"held_bytes": found.held_bytes, "peak_bytes": found.peak_bytes, "loss": contender.loss}
    return Result(record | _rates(cell, record.get("time_s"), settings.machine), samples)


def facts_of(cell: Cell, contender: Contender, settings: Settings) -> Record:
    """What was run, and how: all of a record but what became of it."""
    config = cell.config
    return {
        "id": cell.id,
        "section": cell.section,
        "impl": cell.entry.name,
        "label": label_of(cell, contender),
        "size": cell.size,
        **{name: getattr(config, name) for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")},
        "num_parameters": model_parameters(config),
        "batch": cell.batch,
        "context": cell.context,
        "precision": cell.precision,
        "mode": cell.mode,
        "compile": cell.compile,
        "attention": contender.attention,
        "dtype": DTYPES[cell.precision],
        "direction": cell.mode,
        "device": cell.device,
        "comparison": f"{cell.comparison} {settings.run}",
        "clock": settings.loop_clock.name,
        "error_ratio": contender.error_ratio,
        "memory_limit_bytes": settings.memory_limit_bytes,
    }


def label_of(cell: Cell, contender: Contender) -> str:
    if cell.entry == AUTO and contender.attention != AUTO.name:
        return f"auto: {ATTENTION[contender.attention].label}"
    return cell.entry.label or cell.entry.name


def _predicted(cell: Cell, contender: Contender) -> int | None:
    """Bytes held and on top of that of what `training_memory` speaks of: an eager step of ours that keeps no scores."""
    if cell.peer or (cell.mode, cell.compile) != ("step", "eager") or contender.attention in KEEP_SCORES:
        return None
    return training_memory(cell.config, cell.batch, cell.context, cell.precision).peak


def _rates(cell: Cell, time_s: float | None, machine: dict[str, Any]) -> Record:
    """Work, and with a time the rates and their share of what this machine reaches, and of what its maker promises."""
    tokens = cell.batch * cell.context
    rates: Record = {"tokens": tokens, "flops": None}
    if cell.mode in FLOPS_OF_STEP:
        rates["flops"] = model_flops(cell.config, tokens=tokens, context=cell.context, mode=cell.mode)
    if time_s:
        rates["tokens_per_s"] = tokens / time_s
    if time_s and rates["flops"]:
        rates["flops_per_s"] = speed = rates["flops"] / time_s
        reached = machine["ceilings"]["matmul_flops_per_s"].get(DTYPES[cell.precision])
        promised = [peak for name, peak in PEAK_FLOPS_PER_S.items() if name in (machine["gpu"] or "")]
        rates["matmul_ceiling_fraction"] = speed / reached if reached and cell.precision != "tf32" else None
        rates["mfu"] = speed / promised[0] if promised and cell.precision in ("bf16", "fp16") else None
    return rates
