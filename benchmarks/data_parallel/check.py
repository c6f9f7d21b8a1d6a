"""Checks before timing that a strategy trains as one process does on the batch of all ranks.

`bench_data_parallel.py` calls both checks: `gate` on the ranks, and `judge_by_trials` in its own process.
`bench_steps.py` calls `gate` alone. A *row* is a strategy with its options.

`gate` compares how far three steps of SGD with momentum move each parameter. The reference is one process in float64 on
the whole batch. The budget, the error that is allowed, comes from the error of the same steps in float32
(`lmsys.testing.ratio_of`). The model has the widths of the case and few blocks. A row that communicates or computes in
a narrower dtype is first checked without that dtype, and then with it. In the second check the float32 steps of the
budget also round gradients, or parameters, to that dtype.

`judge_by_trials` runs small trainings of `lmsys check` on the ranks. A row that passed the gate runs the extreme ones:
smaller batches and unused parameters on one rank, gradients from 1e-20 to 1e+10. The row is wrong if it ends with wrong
weights. If it raises an exception, or its ranks call different collectives, its user sees that, so its times stand. A
row that failed at the gate runs all small trainings, to find the name of its mistake.

The constants below set the size of the gate's training. A new small training goes into `lmsys.extremes.strategy`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any

import torch

from benchmarks.data_parallel.cases import NARROW, Narrow, ParallelCase
from benchmarks.data_parallel.rank import blocks_of, compiler_of, execution, model_of
from benchmarks.models import NUM_BLOCKS, Batch, build, matmuls
from lmsys import processes, testing
from lmsys.bench import Candidate, fields, ranks
from lmsys.check import strategy, trained
from lmsys.config import ModelConfig
from lmsys.cost.operations import model_parameters
from lmsys.extremes.strategy import Trial, trials
from lmsys.model import Loss
from lmsys.parallel.group import WorkerError, device
from lmsys.training.prepare import prepare

STEPS = 3  # of the gate's training
# The optimizer of the gate's training. By the momentum a wrong gradient of one step also shows in the next ones.
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
BATCH, CONTEXT, VOCABULARY = 2, 64, 10_000  # sequences of a rank; their length and vocabulary, at most
State = dict[str, torch.Tensor]  # {name of a parameter: its value}


@ranks.on_part
def gate(case: ParallelCase, seed: int) -> dict[str, float]:
    """{parameter: its error over its budget, on the worst rank}; every rank returns the same numbers."""
    wide = {name: value for name, value in case.options.items() if name not in NARROW}
    asked = [(wide, None)] + ([(case.options, case.narrow)] if case.narrow else [])
    with compiler_of(case), matmuls("fp32"):
        by_dtypes = [_ratios(case, options, seed, narrow) for options, narrow in asked]
    if model_parameters(case.config) > 2**30:
        _alone.cache_clear()  # the timed model may need all memory: results of plain steps are not kept meanwhile
    return fields.largest(by_dtypes)


def _ratios(case: ParallelCase, options: dict[str, object], seed: int, narrow: Narrow) -> dict[str, float]:
    """The ratios of `gate`, for the strategy with these options.

    narrow  the option and the dtype by which the float32 steps of the budget round gradients, or parameters; None:
            they round neither
    """
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
    # `_alone` is cached, so its last arguments, narrow, dtype and steps, are always given by position.
    start, exact, plain = alone(None, torch.float32, 0), alone(None, torch.float64), alone(narrow, torch.float32)
    state, dtype = _trained(case, config, options, seed), narrow[1] if narrow else torch.float32
    ratios = {}
    for name, first in start.items():
        moved = [x[name].double() - first.double() for x in (state, exact, plain)]
        ratios[name] = (
            testing.ratio_of(moved[0], moved[1], moved[2].to(torch.float32), dtype) if moved[1].any() else 0.0
        )
    worst = torch.tensor(list(ratios.values()), dtype=torch.float64, device=device())
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX, group=ranks.subgroup(case.world_size))
    return dict(zip(ratios, worst.tolist(), strict=True))


def _batches(config: ModelConfig, world_size: int, seed: int) -> Iterator[Batch]:
    """Yields the global batch of each step. A batch has the sequences of rank 0 first, then those of rank 1, ..."""
    return (Batch.draw(config, BATCH * world_size, str(device()), seed + step) for step in range(STEPS))


def _of_rank(data: Batch, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets) of a rank in a global batch."""
    return data.tokens.split(BATCH)[rank], data.targets.split(BATCH)[rank]


def _trained(case: ParallelCase, config: ModelConfig, options: dict[str, object], seed: int) -> State:
    """The parameters after STEPS steps under the strategy, by the names of our model."""
    rank = torch.distributed.get_rank()
    model = model_of(case, config, seed + rank)
    prepared = prepare(model, execution(case, options=options, precision="fp32"), torch.optim.SGD, **SGD)
    (strategy, optimizer, _), gradients = prepared, prepared.gradients(graph=case.replayed)
    for data in _batches(config, case.world_size, seed):
        gradients(*_of_rank(data, rank))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = {name.removeprefix("module."): x.detach().clone() for name, x in strategy.full_state_dict().items()}
    if case.whole_model is None:
        return state
    # Names in `state` begin with "model.", since a loss holds the model; names that `as_ours` takes and returns do not.
    theirs = {name.removeprefix("model."): x for name, x in state.items()}
    return {f"model.{name}": x for name, x in model.as_ours(theirs).items()}


@lru_cache(maxsize=4)
def _alone(
    config: ModelConfig, world_size: int, seed: int, narrow: Narrow, dtype: torch.dtype, steps: int = STEPS
) -> State:
    """The parameters after so many steps of one process in `dtype`, with the rounding of `narrow` (see `_ratios`)."""
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


def _rounded_backward(module: torch.nn.Module, data: Batch, world_size: int, kind: str, dtype: torch.dtype) -> None:
    """Sets gradients to the mean over ranks, computed rank by rank.

    kind  what is rounded to `dtype`: for "compute_dtype" the parameters, for "comm_dtype" each rank's gradients
    """
    named = dict(module.named_parameters())
    total: list[torch.Tensor] = []
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


_NUMBERS = count(2**31)  # numbers of trainings, larger than those that `lmsys check` uses
_ASKED: set[Any] = set()  # (target, options, world size, backend) of each row that passed the gate and ran the trials


@ranks.on_part
def small_training(case: ParallelCase, trial: Trial, number: int) -> trained.Result:
    """On a rank: the result of the trial. number: identifies this training; it is the same on all ranks."""
    return trained.train(case.entry, trial, number, _options(case), ranks.subgroup(case.world_size))


def judge_by_trials(candidate: Candidate, ask_ranks: Callable[..., Sequence[Any]], seed: int) -> None:
    """Runs the extreme trainings with a row that is right so far, once, and all trainings with one that is wrong.

    Changes the candidate: a wrong training makes it "wrong", and the name of a mistake goes into its reason. Under
    torchrun nothing is run: a rank that hangs cannot be started again there.

    ask_ranks  ask_ranks(case, function, *args): what the function returns on each of the case's ranks
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
        # A row that passed the gate, and raised an exception here, is not wrong: see the module's docstring.
        wrong = None if right and failure is not None else strategy.fault(ask, trial, results)
        if wrong is None:
            continue
        if right:
            candidate.failed("wrong", f"{trial.about}: {wrong.mistake or wrong.text.strip().splitlines()[0]}")
        elif wrong.mistake:
            candidate.reason = f"{candidate.reason}: {wrong.mistake}"
        return


def _ask(case: ParallelCase, ask_ranks: Callable[..., Sequence[Any]], trial: Trial) -> Sequence[trained.Result]:
    """The results by rank; if ranks ended without a result, one result that says that they died."""
    try:
        return ask_ranks(case, small_training, trial, next(_NUMBERS))
    except WorkerError as error:
        return [trained.Result(failure=trained.Failure(error.rank, processes.DIED, str(error), ""))]


def _options(case: ParallelCase) -> dict[str, Any]:
    """The case's options without narrow dtypes, and without a size of buckets that has to be measured ("auto")."""
    return {name: value for name, value in case.options.items() if name not in NARROW and value != "auto"}
