"""The checks of a strategy: it trains as one process does on the batch of all ranks. They run on the ranks.

The reference is three steps of SGD with momentum in float64 on the whole batch, the budget what the same steps lose in
float32: `lmsys.testing.error_ratio` of how far each parameter has moved, in units of the farthest. Models of few blocks
stand for all, with the widths of the case. A row that communicates or computes in a narrower dtype is first held to
that without it, and then to a budget of the same steps with gradients, or parameters, rounded alike.

Then it is asked the small trainings of `lmsys check`, by the ranks that run already. A row that trains the
language model right is asked the extreme ones: smaller batches and unused parameters on one rank, gradients from 1e-20
to 1e+10. It is wrong where it ends with wrong weights. Where it raises an exception or begins other collectives it does
harm to nobody unseen, so that this is no reason against its times. A row that is wrong is asked all of them, for the
name of its mistake.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.data_parallel.cases import NARROW, Narrow, ParallelCase
from benchmarks.data_parallel.rank import blocks_of, compiler_of, execution, model_of
from benchmarks.models import NUM_BLOCKS, Batch, build, matmuls
from lmsys import processes, testing
from lmsys.bench import Candidate, ranks
from lmsys.check import strategy, trained
from lmsys.config import ModelConfig
from lmsys.cost.operations import model_parameters
from lmsys.extremes.strategy import Trial, trials
from lmsys.model import Loss
from lmsys.parallel.group import WorkerError, device
from lmsys.training.prepare import prepare

STEPS = 3
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
BATCH, CONTEXT, VOCABULARY = 2, 64, 10_000
State = dict[str, Tensor]


@ranks.on_part
def gate(case: ParallelCase, seed: int) -> dict[str, float]:
    """Errors over their budgets, by parameter, on the rank where they are worst; on every rank the same."""
    wide = {name: value for name, value in case.options.items() if name not in NARROW}
    asked = [(wide, None)] + ([(case.options, case.narrow)] if case.narrow else [])
    with compiler_of(case), matmuls("fp32"):
        by_dtypes = [_ratios(case, options, seed, narrow) for options, narrow in asked]
    if model_parameters(case.config) > 2**30:
        _alone.cache_clear()  # a model that takes all the memory there is, is next: plain steps are not kept beside it
    return {name: max(ratios[name] for ratios in by_dtypes) for name in by_dtypes[0]}


def _ratios(case: ParallelCase, options: dict[str, object], seed: int, narrow: Narrow) -> dict[str, float]:
    layers, context = min(case.config.num_layers, NUM_BLOCKS), min(case.context, CONTEXT)
    config = replace(
        case.config,
        num_layers=layers,
        context_length=context,
        vocab_size=min(case.config.vocab_size, VOCABULARY),
        attention="naive",
    )
    alone = partial(_alone, config, case.world_size, seed)
    config = replace(config, checkpoint_blocks=blocks_of(case, layers), residual=case.residual)
    start, exact, plain = alone(None, torch.float32, 0), alone(None, torch.float64), alone(narrow, torch.float32)
    state, dtype = _trained(case, config, options, seed), narrow[1] if narrow else torch.float32
    ratios = {}
    for name, first in start.items():
        moved = [x[name].double() - first.double() for x in (state, exact, plain)]
        ratios[name] = (
            testing.ratio_of(moved[0], moved[1], moved[2].to(torch.float32), dtype) if moved[1].any() else 0.0
        )
    worst = torch.tensor(list(ratios.values()), dtype=torch.float64, device=device())
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=ranks.subgroup(case.world_size))
    return dict(zip(ratios, worst.tolist(), strict=True))


def _batches(config: ModelConfig, world_size: int, seed: int) -> Iterator[Batch]:
    """The examples of every step, those of all ranks, rank by rank."""
    return (Batch.draw(config, BATCH * world_size, str(device()), seed + step) for step in range(STEPS))


def _of_rank(data: Batch, rank: int) -> tuple[Tensor, Tensor]:
    return data.tokens.split(BATCH)[rank], data.targets.split(BATCH)[rank]


def _trained(case: ParallelCase, config: ModelConfig, options: dict[str, object], seed: int) -> State:
    rank = dist.get_rank()
    model = model_of(case, config, seed + rank)
    prepared = prepare(model, execution(case, options=options, precision="fp32"), torch.optim.SGD, **SGD)
    (strategy, optimizer, _), gradients = prepared, prepared.gradients(case.replayed)
    for data in _batches(config, case.world_size, seed):
        gradients(*_of_rank(data, rank))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = {name.removeprefix("module."): x.detach().clone() for name, x in strategy.full_state_dict().items()}
    if case.whole_model is None:
        return state
    theirs = {name.removeprefix("model."): x for name, x in state.items()}
    return {f"model.{name}": x for name, x in model.as_ours(theirs).items()}


@lru_cache(maxsize=4)
def _alone(
    config: ModelConfig, world_size: int, seed: int, narrow: Narrow, dtype: torch.dtype, steps: int = STEPS
) -> State:
    """The parameters after so many steps of one process, with what is narrow rounded."""
    module = Loss(build(config, str(device()), seed)).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), **SGD)
    for data in islice(_batches(config, world_size, seed), steps):
        if narrow is None:
            module(data.tokens, data.targets).backward()
        else:
            _rounded_backward(module, data, world_size, *narrow)
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach().clone() for name, x in module.named_parameters()}


def _rounded_backward(module: nn.Module, data: Batch, world_size: int, kind: str, dtype: torch.dtype) -> None:
    """Gradients as ranks make and add them up one after another: of rounded parameters, or themselves rounded."""
    named = dict(module.named_parameters())
    total: list[Tensor] = []
    for rank in range(world_size):
        used = {name: p.to(dtype) if kind == "compute_dtype" else p for name, p in named.items()}
        loss = torch.func.functional_call(module, used, _of_rank(data, rank))
        grads = [
            g.to(dtype if kind == "comm_dtype" else torch.float32)
            for g in torch.autograd.grad(loss, list(used.values()))
        ]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else list(grads)
    for p, grad in zip(named.values(), total, strict=True):
        p.grad = (grad / world_size).to(p.dtype)


Ask = Callable[..., Sequence[Any]]  # of `lmsys.bench.ranks.Ranks`
_NUMBERS = count(2**31)  # numbers of trainings, beyond those that `lmsys check` uses
_ASKED: set[Any] = set()  # right rows, with their options and ranks


@ranks.on_part
def small_training(case: ParallelCase, trial: Trial, number: int) -> trained.Result:
    """On a rank: the result of the trial."""
    return trained.train(case.entry, trial, number, _options(case), ranks.subgroup(case.world_size))


def judge_by_trials(candidate: Candidate, ask_ranks: Ask, seed: int) -> None:
    """Asks a right row what training has beyond the gate's model, once, and names the mistake of a wrong one.

    Under torchrun nothing is asked: a rank that another one waits for there cannot be started again.
    """
    case, right = candidate.case, candidate.outcome == "ok"
    key = case.entry.target, repr(_options(case)), case.world_size, case.backend
    if ranks.joined() is not None or (right and key in _ASKED) or candidate.outcome not in ("ok", "wrong"):
        return
    if right:
        _ASKED.add(key)
    row, ask = case.entry.load(), partial(_ask, case, ask_ranks)
    for trial in trials(case.world_size, seed):
        if trained.why_not(case.entry, trial, row) is not None or (right and not trial.extreme):
            continue
        results = ask(trial)
        failure = strategy.blamed(results)
        if failure is not None and failure.kind == processes.DIED:
            return
        wrong = None if right and failure is not None else strategy.fault(ask, trial, results)
        if wrong is None:
            continue
        if right:
            candidate.failed("wrong", f"{trial.about}: {wrong.mistake or wrong.text.strip().splitlines()[0]}")
        elif wrong.mistake:
            candidate.reason = f"{candidate.reason}: {wrong.mistake}"
        return


def _ask(case: ParallelCase, ask_ranks: Ask, trial: Trial) -> Sequence[trained.Result]:
    """The results by rank; where ranks have ended without any, that they died."""
    try:
        return ask_ranks(case, small_training, trial, next(_NUMBERS))
    except WorkerError as error:
        return [trained.Result(failure=trained.Failure(error.rank, processes.DIED, str(error), ""))]


def _options(case: ParallelCase) -> dict[str, Any]:
    """The case's options but for narrow dtypes, and but for a size of buckets that has to be measured."""
    return {name: value for name, value in case.options.items() if name not in NARROW and value != "auto"}
