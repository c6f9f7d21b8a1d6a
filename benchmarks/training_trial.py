"""Trainings of one model on one text put to the test: every attention row by every strategy, one cell after another.

All cells see the same tokens in the same order from the same weights, so all have one curve. The reference is one
process with naive attention that accumulates the batches of all ranks; a cell whose losses leave it, or whose first
gradient has another norm, is wrong as soon as that shows: see `lmsys.testing`. A result is given as each cell ends.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.model_cells import DTYPES
from benchmarks.model_gate import MAX_SCORES
from benchmarks.model_trial import why_not
from benchmarks.ranks import failure_of
from benchmarks.session import NOT_TIMED, Result, Settings
from benchmarks.training_cells import LR_BY_WIDTH, Cell
from benchmarks.training_data import CORPUS, Tokens, tokens_of
from benchmarks.training_workbench import Seen, begin, clear, end, epoch, examine
from benchmarks.trial import Judged, verdict
from lmsys.attention import ATTENTION
from lmsys.bench.record import Record, summarize, trim
from lmsys.cost.operations import model_flops, model_parameters
from lmsys.measure.compare import Failure
from lmsys.parallel import STRATEGIES
from lmsys.testing import CURVE_BUDGET, CURVE_STEPS, curve_ratios

CURVE_POINTS = 100  # of a curve that travels with a record
INTERPRETED = "its kernels are interpreted here, which is too slow to train with"


@dataclass
class Curve:
    """Of each step the loss over the global batch, and the norm of the gradient."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


@dataclass
class Found(Curve, Judged):
    """What has been found out about a cell. samples: seconds of each epoch but the first, of the slowest rank."""

    seen: list[Seen] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    sm_clocks_mhz: list[float] = field(default_factory=list)
    valid_loss: float | None = None

    def failed(self, outcome: str, reason: str) -> None:
        super().failed(outcome, reason)
        self.samples = []


def training_trial(cells: list[Cell], settings: Settings) -> Iterator[Result]:
    """A result for each cell of a group, as soon as there is one."""
    reference, failure = None, None
    for number, cell in enumerate(cells, start=1):
        one = Found()
        if reason := _refusal(cell, settings.seed):
            one.failed("unsupported", reason)
        else:
            if reference is None and failure is None:
                settings.say(f"  the reference: naive attention, one process, {CORPUS}")
                reference, failure = _reference(cell, settings)
            if reference is None:
                assert failure is not None
                one.failed(failure[0], f"the bench failed, not the row: the reference: {failure[1]}")
            else:
                _attempt(cell, one, reference, settings)
        result = _result(cell, one, reference, settings)
        settings.say(f"  [{number}/{len(cells)}] {cell.impl}: {_told(result.record)}")
        yield result


def _refusal(cell: Cell, seed: int) -> str | None:
    """Why this cell cannot run, as far as can be told without running it."""
    try:
        cell.steps, cell.windows  # noqa: B018 - they say what is too small
        reason = why_not(cell.as_model) or cell.strategy.why_not(cell)
        if reason is None:
            cell.config(seed)
        return reason
    except ValueError as error:
        return str(error)


def _tokens(cell: Cell) -> Tokens:
    """An epoch is all of them: as many as its steps take, so that steps and epochs end together."""
    section = cell.section
    return tokens_of(cell.steps * cell.global_batch * cell.context, section.val_tokens, section.vocab_size)


def _run(cell: Cell, settings: Settings, function: Any, *args: Any) -> list[Any]:
    """What the ranks that train return; all ranks of the group are asked."""
    return settings.on_ranks(cell.num_ranks, cell.backend, function, cell, *args)[: cell.world_size]


def _reference(cell: Cell, settings: Settings) -> tuple[Curve | None, Failure | None]:
    """The curve of the plain process, as far as it is compared: in micro-batches whose scores fit."""
    plain = replace(cell, attention=ATTENTION["naive"], strategy=STRATEGIES["none"], bucket_mb=None, compile="eager")
    fitting = max(1, MAX_SCORES // (plain.model.num_heads * cell.context**2))
    plain = replace(plain, micro=max(size for size in _divisors(cell.batch) if size <= fitting))
    curve, left = Curve(), min(CURVE_STEPS, cell.section.epochs * cell.steps)
    try:
        _run(plain, settings, begin, _tokens(cell), settings.seed)
        while left:
            (found,) = _run(plain, settings, epoch, min(left, cell.steps))
            curve.losses += found.losses
            curve.norms += found.norms
            left -= len(found.losses)
        _run(plain, settings, clear)
    except Exception as error:
        return None, failure_of(error)
    return curve, None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _attempt(cell: Cell, one: Found, reference: Curve, settings: Settings) -> None:
    try:
        _train(cell, one, reference, settings)
    except Exception as error:
        one.failed(*failure_of(error))


def _train(cell: Cell, one: Found, reference: Curve, settings: Settings) -> None:
    """The first look, the epochs, each held to the reference before the next, and the model at the end."""
    tokens, seed = _tokens(cell), settings.seed
    one.seen = _run(cell, settings, examine, tokens, seed)
    first = one.seen[0]
    if first.refused is not None or first.interpreted:
        one.failed("unsupported", first.refused or INTERPRETED)
        return
    _run(cell, settings, begin, tokens, seed)
    for number in range(cell.section.epochs):
        if not settings.timed and len(one.losses) >= CURVE_STEPS:
            break
        found = _run(cell, settings, epoch, cell.steps)
        one.losses += found[0].losses
        one.norms += found[0].norms
        if number:
            one.samples.append(max(each.seconds for each in found))
            one.sm_clocks_mhz += [each.sm_clock_mhz for each in found if each.sm_clock_mhz is not None]
        one.error_ratio, wrong = verdict(_ratios(cell, one, reference), DTYPES[cell.precision])
        if wrong is None and not math.isfinite(math.fsum(one.losses)):
            wrong = "wrong", "a loss is not finite"
        if wrong:
            one.failed(*wrong)
            _run(cell, settings, clear)
            return
    ended = _run(cell, settings, end)
    one.valid_loss = ended[0].valid_loss
    if len({each.model for each in ended}) > 1:
        one.failed("wrong", "after the last epoch ranks have different parameters")


def _ratios(cell: Cell, one: Curve, reference: Curve) -> dict[str, float]:
    return curve_ratios(one.losses, reference.losses, one.norms[0], reference.norms[0], DTYPES[cell.precision])


def _told(record: Record) -> str:
    """Of a result, in a line."""
    if record["outcome"] != "ok":
        return f"{record['outcome']}: {record['reason']}"
    if "time_s" not in record:
        return str(record["reason"])
    return (
        f"{record['tokens_per_s']:,.0f} tokens/s, {record['mean_s']:.3g} s an epoch, loss {record['valid_loss']:.4f},"
        f" at most {record['curve_difference']:.1e} from the reference"
    )


def _result(cell: Cell, one: Found, reference: Curve | None, settings: Settings) -> Result:
    config, section = cell.as_model.config, cell.section
    samples = one.samples if settings.timed and one.outcome == "ok" else None
    if one.outcome == "ok" and samples is None:
        one.reason = NOT_TIMED
    record: Record = {
        "id": cell.id,
        "benchmark": "training",
        "section": section.name,
        "impl": cell.impl,
        "attention": cell.attention.name,
        "attention_label": cell.attention.label or cell.attention.name,
        "strategy": cell.strategy.name,
        "row": cell.row,
        "label": cell.strategy.label or cell.strategy.name,
        "peer": cell.attention.peer or cell.strategy.peer,
        "attention_peer": cell.attention.peer,
        "strategy_peer": cell.strategy.peer,
        "size": cell.size,
        **{name: getattr(config, name) for name in ("d_model", "d_ff", "num_layers", "num_heads")},
        "vocab_size": section.vocab_size,
        "num_parameters": model_parameters(replace(config, vocab_size=section.vocab_size)),
        "corpus": CORPUS,
        "context": cell.context,
        "batch": cell.batch,
        "global_batch": cell.global_batch,
        "precision": cell.precision,
        "compile": cell.compile,
        "num_ranks": cell.num_ranks,
        "world_size": cell.world_size,
        "num_nodes": settings.ranks.num_nodes,
        "backend": cell.backend,
        "bucket_mb": cell.bucket_mb,
        "dtype": DTYPES[cell.precision],
        "direction": "step",
        "device": cell.device,
        "lr": LR_BY_WIDTH / config.d_model,
        "epochs": section.epochs,
        "train_tokens": section.train_tokens,
        "val_tokens": section.val_tokens,
        "outcome": one.outcome,
        "reason": one.reason,
        "comparison": f"{cell.group} {settings.run}",
        "clock": "perf_counter",
        "error_ratio": one.error_ratio,
        "memory_limit_bytes": settings.memory_limit_bytes,
    }
    if one.losses and reference is not None:
        record |= _curve(one, reference) | {"curve_budget": CURVE_BUDGET[record["dtype"]]}
    if samples:
        record |= summarize(samples) | {"samples_s": trim(samples)} | _costs(cell, one, record, samples)
    return Result(record, samples)


def _curve(one: Found, reference: Curve) -> Record:
    """At most CURVE_POINTS losses, each with its difference to the reference's as far as that goes; the largest one."""
    apart = [a - b for a, b in zip(one.losses[:CURVE_STEPS], reference.losses, strict=False)]
    every = -(-len(one.losses) // CURVE_POINTS)
    places = sorted({*range(0, len(one.losses), every), len(one.losses) - 1})
    largest = max(map(abs, apart))
    return {
        "steps": len(one.losses),
        "curve_steps": [place + 1 for place in places],
        "curve_losses": [_finite(one.losses[place]) for place in places],
        "curve_differences": [_finite(apart[place]) for place in places if place < len(apart)],
        "curve_difference": _finite(largest),
        "norm_difference": _finite(abs(one.norms[0] / reference.norms[0] - 1)),
        "loss": _finite(one.losses[-1]),
        "valid_loss": None if one.valid_loss is None else _finite(one.valid_loss),
    }


def _finite(value: float) -> float | None:
    """With six digits; JSON knows no other numbers."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _costs(cell: Cell, one: Found, record: Record, samples: list[float]) -> Record:
    tokens, time_s = cell.steps * cell.global_batch * cell.context, statistics.median(samples)
    flops = model_flops(cell.model, tokens=tokens, context=cell.context, mode="step")
    return {
        "steps_per_epoch": cell.steps,
        "tokens": tokens,
        "tokens_per_s": tokens / time_s,
        "flops": flops,
        "flops_per_s": flops / time_s,
        "first_step_s": max(seen.first_step_s for seen in one.seen),
        "peak_bytes": max(seen.peak_bytes for seen in one.seen),
        "rank_peak_bytes": [seen.peak_bytes for seen in one.seen],
        "sm_clock_mhz": statistics.median(one.sm_clocks_mhz) if one.sm_clocks_mhz else None,
    }
