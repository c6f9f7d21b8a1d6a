"""One vocabulary of the head and loss put to the test: ours, eager and compiled, checked, sampled, checked again.

The reference is eager in float64, the budget what eager loses in the precision that is tested, judged as the model's
gate does. Both are made at the full shape, in blocks of tokens: only the rows themselves need room for all logits.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import trial
from benchmarks.model_cells import DTYPES
from benchmarks.model_gate import LOSS_SCALE, ROUNDING, arithmetic, autocast, ratio_of
from benchmarks.sections import LossSection
from benchmarks.session import Result, Settings
from benchmarks.trial import ending, fail_the_good, sample, verdict
from lmsys.attention.compiled import why_no_compiler
from lmsys.bench.record import Record, summarize, trim
from lmsys.measure import memory
from lmsys.measure.clock import synchronize
from lmsys.measure.compare import Step, attempt, release_memory
from lmsys.model.loss import linear_cross_entropy

BLOCK_LOGITS = {"cuda": 2**26, "cpu": 2**22}  # of the reference, held at once
LABELS = {
    "chunked": "in chunks",
    "eager": "all logits, eager",
    "compiled": "all logits, torch.compile",
}
PEERS = ("compiled",)
OUTPUTS = ("loss", "gradient of hidden", "gradient of weight")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Cell:
    """One test: a shape and precision, and who answers."""

    section: str
    tokens: int
    d_model: int
    vocab_size: int
    precision: str
    row: str
    device: str

    @property
    def group(self) -> str:
        """What one trial runs, and samples together."""
        return f"{self.section}-N{self.tokens}M{self.d_model}V{self.vocab_size}-{self.precision}"

    @property
    def id(self) -> str:
        return f"{self.group}-{self.row}"


def cells_of(section: LossSection, axes: dict[str, Any], device: str) -> Iterator[Cell]:
    """The section's cells; of the command line's axes of a model, the precisions are this one's too."""
    one = replace(section, precisions=axes.get("precisions", section.precisions))
    for values in product(one.tokens, one.d_models, one.vocab_sizes, one.precisions, one.rows):
        yield Cell(section.name, *values, device)


@dataclass
class Contender(trial.Contender):
    """A row, and what has been found out about it."""

    call: Loss


@dataclass
class Found(trial.Found):
    """peak_bytes: above what was live before, less the gradients of hidden and weight, which every row has to make."""

    peak_bytes: int | None = None


@dataclass
class Inputs:
    """hidden (N, M) and weight (V, M), both leaves, and targets (N); gradients are those of the loss times `scale`."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    precision: str
    scale: float

    @classmethod
    def draw(cls, cell: Cell, seed: int) -> "Inputs":
        shapes = (cell.tokens, cell.d_model), (cell.vocab_size, cell.d_model)
        hidden, weight = (torch.empty(shape, device=cell.device, requires_grad=True) for shape in shapes)
        targets = torch.empty(cell.tokens, dtype=torch.int64, device=cell.device)
        scale = LOSS_SCALE if cell.precision == "fp16" else 1.0
        return cls(hidden, weight, targets, cell.precision, scale).redraw_(seed)

    def redraw_(self, seed: int) -> "Inputs":
        """New values in the same memory; the logits are about standard normal."""
        generator = torch.Generator(self.hidden.device).manual_seed(seed)
        self.hidden.data.normal_(generator=generator)
        self.weight.data.normal_(std=self.weight.shape[1] ** -0.5, generator=generator)
        self.targets.random_(len(self.weight), generator=generator)
        return self

    def run(self, call: Loss) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and the gradients of hidden and weight."""
        with autocast(self.precision, self.hidden.device.type):
            loss = call(self.hidden, self.weight, self.targets)
        d_hidden, d_weight = torch.autograd.grad(loss * self.scale, (self.hidden, self.weight))
        return loss.detach(), d_hidden, d_weight

    def in_blocks(self, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
        """What `run` gives for the eager row, from one block of tokens after another; in float64 where `exact`."""
        dtype, precision = (torch.float64, "fp32") if exact else (torch.float32, self.precision)
        weight = self.weight.detach().to(dtype).requires_grad_()
        total, d_hidden, d_weight = weight.new_zeros(()), [], torch.zeros_like(weight)
        size = max(1, BLOCK_LOGITS[self.hidden.device.type] // len(self.weight))
        for hidden, targets in zip(self.hidden.detach().split(size), self.targets.split(size), strict=True):
            share = len(targets) / len(self.targets)
            leaf = hidden.to(dtype).requires_grad_()
            loss, *gradients = Inputs(leaf, weight, targets, precision, self.scale * share).run(unchunked)
            total += loss * share
            d_hidden.append(gradients[0])
            d_weight += gradients[1]
        return total, torch.cat(d_hidden), d_weight


def unchunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The head and the loss as they are usually written: the logits of all tokens, in float32 or wider."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


def loss_trial(cells: list[Cell], settings: Settings) -> Iterator[Result]:
    """A result for each cell of a group.

    In this order: each row's first call, with nothing live but the inputs, which decides what is out of memory; the
    gate; the samples; a memory run; the gate again, on inputs redrawn in place. What fails outside a row's own calls
    fails every cell that was still good.
    """
    found = {cell.id: Found() for cell in cells}
    with arithmetic(cells[0].precision):
        contenders = {cell.id: contender_of(cell) for cell in cells}
        _, failure = attempt(lambda: _measure(cells, contenders, settings, found))
    fail_the_good(contenders.values(), failure)
    release_memory()
    for cell in cells:
        yield _result(cell, contenders[cell.id], found[cell.id], settings)


def contender_of(cell: Cell) -> Contender:
    """What the cell's row is to be checked as; `unsupported`, with the reason, where it cannot run."""
    contender = Contender(linear_cross_entropy if cell.row == "chunked" else unchunked)
    if cell.precision == "tf32" and cell.device == "cpu":
        contender.failed("unsupported", "TF32 is an arithmetic of CUDA devices")
    elif cell.row == "compiled" and (reason := why_no_compiler(cell.device)):
        contender.failed("unsupported", reason)
    elif cell.row == "compiled":
        contender.call = torch.compile(unchunked, dynamic=False, fullgraph=True)
    return contender


def _measure(cells: list[Cell], contenders: dict[str, Contender], settings: Settings, found: dict[str, Found]) -> None:
    able = [one for one in contenders.values() if one.outcome == "ok"]
    inputs = Inputs.draw(cells[0], settings.seed)
    _gate(able, inputs)
    release_memory()
    timed = {name: one for name, one in contenders.items() if one.outcome == "ok"} if settings.timed else {}
    steps = {name: Step(lambda _, one=one: inputs.run(one.call)) for name, one in timed.items()}
    sample(steps, settings, found, settings.clock)
    for name, one in timed.items():
        found[name].peak_bytes, _ = attempt(lambda one=one: _peak_bytes(one, inputs))
    _gate([*timed.values()], inputs.redraw_(settings.seed + 1))
    for one in timed.values():
        if one.outcome != "ok":
            one.reason = f"right before it was timed, not after, on inputs redrawn in place: {one.reason}"


def _peak_bytes(contender: Contender, inputs: Inputs) -> int:
    peak = memory.peak_bytes(lambda: inputs.run(contender.call), inputs.hidden.device.type)
    return peak - inputs.hidden.nbytes - inputs.weight.nbytes


def _gate(contenders: list[Contender], inputs: Inputs) -> None:
    """Fails each contender that cannot run or is wrong. Answers wait on the host, so that a row's call is alone."""
    answers = []
    for one in contenders:
        answer, failure = attempt(lambda one=one: _answer(one, inputs))
        if failure:
            one.failed(*failure)
        else:
            answers.append((one, answer))
    if not answers:
        return
    reference, plain = inputs.in_blocks(exact=True), inputs.in_blocks(exact=False)
    for one, answer in answers:
        triples = zip(answer, reference, plain, strict=True)
        dtype = ROUNDING[inputs.precision]
        ratios = [ratio_of(x.to(exact.device), exact, low, dtype) for x, exact, low in triples]
        one.error_ratio, wrong = verdict(dict(zip(OUTPUTS, ratios, strict=True)), inputs.precision)
        if wrong:
            one.failed(*wrong)


def _answer(contender: Contender, inputs: Inputs) -> list[Tensor]:
    start = time.perf_counter()
    outputs = inputs.run(contender.call)
    synchronize(inputs.hidden.device.type)
    if contender.compile_s is None:
        contender.compile_s = time.perf_counter() - start
    return [x.cpu() for x in outputs]


def _result(cell: Cell, contender: Contender, found: Found, settings: Settings) -> Result:
    outcome, reason, samples = ending(contender, found)
    record: Record = {
        "id": cell.id,
        "benchmark": "loss",
        "section": cell.section,
        "impl": cell.row,
        "label": LABELS[cell.row],
        "peer": cell.row in PEERS,
        "tokens": cell.tokens,
        "d_model": cell.d_model,
        "vocab_size": cell.vocab_size,
        "precision": cell.precision,
        "dtype": DTYPES[cell.precision],
        "direction": "fwdbwd",
        "device": cell.device,
        "outcome": outcome,
        "reason": reason,
        "comparison": f"{cell.group} {settings.run}",
        "clock": settings.clock.name,
        "compile_s": contender.compile_s,
        "error_ratio": contender.error_ratio,
        "memory_limit_bytes": settings.memory_limit_bytes,
    }
    if samples:
        record |= summarize(samples) | {"samples_s": trim(samples), "sm_clock_mhz": found.sm_clock_mhz}
        record |= {"peak_bytes": found.peak_bytes}
    return Result(record | _rates(cell, record.get("time_s"), settings.machine), samples)


def _rates(cell: Cell, time_s: float | None, machine: Record) -> Record:
    """The operations of three matmuls, and with a time the rates and their share of what this machine reaches."""
    flops = 6 * cell.tokens * cell.d_model * cell.vocab_size
    if not time_s:
        return {"flops": flops}
    reached = machine["ceilings"]["matmul_flops_per_s"].get(DTYPES[cell.precision])
    speed = flops / time_s
    return {
        "flops": flops,
        "flops_per_s": speed,
        "tokens_per_s": cell.tokens / time_s,
        "matmul_ceiling_fraction": speed / reached if reached and cell.precision != "tf32" else None,
    }
