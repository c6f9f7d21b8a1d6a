"""One attention shape put to the test: every row and direction checked, sampled side by side, checked again."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import trial
from benchmarks.attention_gate import Contender, Gate, gate
from benchmarks.sections import Axes, Section
from benchmarks.session import Result, Settings
from benchmarks.trial import ending, sample
from lmsys.attention.contract import AttentionCase
from lmsys.cost import operations
from lmsys.measure import memory
from lmsys.measure.compare import Step, attempt, release_memory
from lmsys.measure.record import Record, summarize, trim
from lmsys.registry import Entry
from lmsys.testing import Inputs, make_inputs


@dataclass(frozen=True)
class Cell:
    """One test: a shape, a direction, a row."""

    section: str
    case: AttentionCase
    direction: str
    entry: Entry

    @property
    def group(self) -> str:
        """What one trial runs: all rows and directions of a shape."""
        c = self.case
        heads = f"H{c.heads}" if c.heads == c.kv_heads else f"H{c.heads}kv{c.kv_heads}"
        mask = "causal" if c.causal else "full"
        return f"{self.section}-B{c.batch}{heads}Q{c.queries}K{c.keys}D{c.head_dim}-{c.dtype}-{mask}"

    @property
    def comparison(self) -> str:
        """What is sampled together: all rows of a shape in one direction."""
        return f"{self.group}-{self.direction}"

    @property
    def id(self) -> str:
        return f"{self.comparison}-{self.entry.name}"

    @property
    def grad(self) -> bool:
        return self.direction != "fwd"


def cells_of(section: Section, axes: Axes, entries: list[Entry], named: bool, device: str) -> Iterator[Cell]:
    """The section's cells with the command line's axes; entries that were `named` there run in every section."""
    rows = [entry for entry in entries if named or section.takes(entry.name)]
    section = axes.over(section)
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    for shape in section.shapes():
        for dtype in section.dtypes:
            for causal in section.causal:
                case = AttentionCase(**vars(shape), dtype=dtype, causal=causal, device=device, capability=capability)
                for direction in section.directions:
                    yield from (Cell(section.name, case, direction, entry) for entry in rows)


def attention_trial(cells: list[Cell], settings: Settings) -> Iterator[Result]:
    """A result for each cell of one shape.

    In this order: each row's first call, with nothing live but the inputs, which decides what is out of memory; the
    gate, against one oracle; the samples; a memory run; one more check on inputs redrawn in place. What fails outside
    a row's own calls fails every cell that was still good.
    """
    case = replace(cells[0].case, grad=any(cell.grad for cell in cells))
    contenders = {(cell.entry.name, cell.grad): Contender(cell.entry, replace(case, grad=cell.grad)) for cell in cells}
    found: dict[str, Found] = {cell.id: Found() for cell in cells}
    inputs, failure = attempt(lambda: make_inputs(case, settings.seed))
    if not failure:
        _, failure = attempt(lambda: _measure(cells, case, contenders, inputs, settings, found))
        failure = failure and ("error", f"the bench failed, not the row: {failure[1]}")
    for contender in contenders.values():
        if failure and contender.outcome == "ok":
            contender.failed(*failure)
    for cell in cells:
        yield _result(cell, contenders[cell.entry.name, cell.grad], found[cell.id], settings)


def _measure(
    cells: list[Cell],
    case: AttentionCase,
    contenders: dict[tuple[str, bool], Contender],
    inputs: Inputs,
    settings: Settings,
    found: dict[str, "Found"],
) -> None:
    for contender in contenders.values():
        contender.first_call(inputs)
    gate([one for one in contenders.values() if one.outcome == "ok"], case, inputs.redraw_(settings.seed + 1))
    release_memory()
    if not settings.timed:
        return
    able = [cell for cell in cells if is_timed(contenders[cell.entry.name, cell.grad])]
    for direction in dict.fromkeys(cell.direction for cell in able):
        of_direction = [(cell, contenders[cell.entry.name, cell.grad]) for cell in able if cell.direction == direction]
        steps = {cell.id: step_of(one, direction, inputs) for cell, one in of_direction}
        sample(steps, settings, found, settings.clock)
    for cell in able:
        found[cell.id].memory = _memory_of(contenders[cell.entry.name, cell.grad], cell.direction, inputs)
    again = Gate(inputs.redraw_(settings.seed + 2), case)
    for contender in {id(one): one for one in (contenders[cell.entry.name, cell.grad] for cell in able)}.values():
        if failure := again.check(contender):
            contender.failed(
                failure[0], f"right before it was timed, not after, on inputs redrawn in place: {failure[1]}"
            )


@dataclass
class Found(trial.Found):
    """memory: peak bytes, and bytes saved for the backward."""

    memory: tuple[int | None, int | None] = (None, None)


def is_timed(contender: Contender) -> bool:
    return contender.outcome == "ok" and not contender.interpreted


def step_of(contender: Contender, direction: str, inputs: Inputs) -> Step:
    """fwd: without gradients, as in inference. bwd: the gradients alone, of a forward run untimed just before."""
    call, causal = contender.call, contender.case.causal
    assert call is not None
    q, k, v = inputs.leaves(contender.case.grad)

    def forward(_: Any = None) -> torch.Tensor:
        return call(q, k, v, causal=causal, scale=None)

    def backward(o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o, (q, k, v), inputs.do)

    if direction == "bwd":
        return Step(backward, prepare=forward)
    return Step(torch.no_grad()(forward)) if direction == "fwd" else Step(lambda _: backward(forward()))


def _memory_of(contender: Contender, direction: str, inputs: Inputs) -> tuple[int | None, int | None]:
    """Peak bytes of what is timed, above what was live before it, and the bytes saved from forward to backward."""
    step = step_of(contender, direction, inputs)

    def peak() -> int:
        prepared = step.prepare()
        return memory.peak_bytes(lambda: step.run(prepared), contender.case.device)

    peak_bytes, _ = attempt(peak)
    if direction == "fwd":
        return peak_bytes, None
    return peak_bytes, attempt(lambda: memory.saved_bytes(step_of(contender, "bwd", inputs).prepare))[0]


def _result(cell: Cell, contender: Contender, found: Found, settings: Settings) -> Result:
    outcome, reason, samples = ending(contender, found)
    case = cell.case
    shape = {name: getattr(case, name) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")}
    record: Record = {
        "id": cell.id,
        "benchmark": "attention",
        "section": cell.section,
        "impl": cell.entry.name,
        "label": cell.entry.label or cell.entry.name,
        "peer": cell.entry.peer,
        **shape,
        "dtype": case.dtype,
        "causal": case.causal,
        "direction": cell.direction,
        "device": case.device,
        "outcome": outcome,
        "reason": reason,
        "comparison": f"{cell.comparison} {settings.run}",
        "clock": settings.clock.name,
        "mode": "eager",
        "compile_s": contender.compile_s,
        "error_ratio": contender.error_ratio,
        "memory_limit_bytes": settings.memory_limit_bytes,
    }
    if samples:
        record |= summarize(samples) | {"samples_s": trim(samples), "sm_clock_mhz": found.sm_clock_mhz}
        record["peak_bytes"], record["saved_bytes"] = found.memory
    return Result(record | _rates(cell, shape, record.get("time_s"), settings.ceilings), samples)


def _rates(cell: Cell, shape: dict[str, int], time_s: float | None, ceilings: dict[str, Any]) -> Record:
    """Work, ideal traffic, and with a time the rates and their share of what this machine reaches."""
    case = cell.case
    without_kv = {name: value for name, value in shape.items() if name != "kv_heads"}
    flops = operations.attention_flops(**without_kv, causal=case.causal, direction=cell.direction)
    moved = operations.attention_bytes(**shape, dtype=case.dtype, direction=cell.direction)
    rates: Record = {"flops": flops, "bytes": moved}
    if time_s:
        matmul = ceilings["matmul_flops_per_s"].get(case.dtype)
        rates |= {"flops_per_s": flops / time_s, "bytes_per_s": moved / time_s}
        rates["matmul_fraction"] = flops / time_s / matmul if matmul else None
        rates["copy_fraction"] = moved / time_s / ceilings["copy_bytes_per_s"]
    return rates
