"""The timed steps of a pass, checked: they must lead where plain steps lead. Runs on the ranks.

`rank.py` leaves rows of the weights here after a pass (`leave`); `bench_data_parallel.py` asks for `judge_pass`.

All rows of a pass take as many steps, counting the untimed ones before, from the same weights on the same batches,
which are drawn before each step. *Plain steps* are the model unwrapped on every rank, with naive attention, its own
gradients, torch's all-reduce of each, and torch's AdamW. *Exact steps* are plain steps in float64, except that forward
and backward are in float32 where the case's precision is narrower than fp32. What is judged is how far some rows of
each parameter have moved, by `lmsys.testing.ratio_of`: the budget is the error of plain steps in the case's precision,
with gradients or parameters rounded where the row's are. In a single parameter plain steps may end near exact ones by
chance. So no parameter has a smaller budget, as a share of how far it has moved, than all parameters together.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.data_parallel.cases import Narrow, ParallelCase
from benchmarks.models import ROUNDING, Batch, build, matmuls
from lmsys import draws, testing
from lmsys.bench.ranks import on_part, release, subgroup
from lmsys.config import ModelConfig
from lmsys.cost.operations import model_parameters
from lmsys.model import Loss
from lmsys.parallel.group import device
from lmsys.training import prepare, reproducible

# With eps far above a gradient's size AdamW moves in proportion to the gradient: a gradient that is halved shows, and
# where one is near zero no rounding turns the step around. At this rate hundreds of steps train, and do not diverge.
ADAMW: dict[str, object] = {"lr": 1e-3, "eps": 1e-2}
# Untimed steps, by device type. The first plans buckets, the second runs with them.
WARM_STEPS = {"cpu": 2, "cuda": 3}
# ROWS rows of each parameter are judged: fewer, but at least one, where all together would have more than NUMBERS
# numbers. One row says little: by one row of each parameter, right steps of xl were called wrong.
ROWS, NUMBERS = 16, 2**22
# Plain steps take so many sequences at a time that naive attention has at most so many scores in all blocks together.
MAX_SCORES = 2**28
Rows = dict[str, Tensor]  # some rows of each parameter, by its name, on the host


@dataclass(frozen=True)
class Pass:
    """The beginning and the batches that all rows of a pass have in common.

    seed   draws the weights
    draw   draws the batches, together with `seed`
    key    draws the rows of the parameters that are judged
    steps  number of timed steps
    """

    seed: int
    draw: int
    key: int
    steps: int


_LEFT: dict[tuple[str, Pass], Rows] = {}  # by case id and pass: rows of the weights after the case's steps
# By world size: the last pass and, by the settings of plain steps, the rows before and after these.
_RIGHT: dict[int, tuple[Pass, dict[object, tuple[Rows, Rows]]]] = {}


class Batches:
    """A rank's batches, which come one after another in the same memory; after the last comes the first again."""

    def __init__(self, config: ModelConfig, batch: int, asked: Pass):
        number, length = WARM_STEPS[device().type] + asked.steps, config.context_length + 1
        stream = draws.key(asked.draw, f"{asked.seed} rank {dist.get_rank()}")
        numbers = draws.whole_numbers(stream, 0, number * batch * length, config.vocab_size, device())
        self.all = [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in numbers.view(number, batch, length)]
        self.now = Batch(self.all[0].tokens.clone(), self.all[0].targets.clone())
        self._drawn = 0

    def draw(self, _: int = 0) -> None:
        """Makes the next batch the present one."""
        batch = self.all[self._drawn % len(self.all)]
        self.now.tokens.copy_(batch.tokens)
        self.now.targets.copy_(batch.targets)
        self._drawn += 1


def leave(case: ParallelCase, asked: Pass, state: Mapping[str, Tensor]) -> str:
    """Keeps rows of the parameters that the case's steps have led to, until they are judged or others are drawn.

    Returns their sha256: those of two cases are equal if and only if all their bits are.
    """
    for stale in [known for known in _LEFT if known[1].draw != asked.draw]:
        del _LEFT[stale]
    _LEFT[case.id, asked] = rows = _rows_of(state, asked.key)
    return reproducible.weights_sha256(rows)


@on_part
def holds(case: ParallelCase, asked: Pass) -> bool:
    """True if this rank still has the rows that the pass has led to; ranks that were started again have lost them."""
    return (case.id, asked) in _LEFT


@on_part
def judge_pass(case: ParallelCase, asked: Pass) -> dict[str, float] | None:
    """{parameter: its error over its budget} of the rows that the case's steps have led to on this rank.

    None where plain steps find no room. RuntimeError where plain steps lead to NaN or inf, or far from exact steps.
    """
    left = _LEFT.pop((case.id, asked))
    release()
    if not _have_room(case):
        return None
    with matmuls("fp32"):
        computing = None if case.precision == "fp32" else ("compute_dtype", torch.float32)
        start, exact = _plain(case, asked, torch.float64, "fp32", computing)
    with matmuls(case.precision):
        _, plain = _plain(case, asked, torch.float32, case.precision, case.narrow)
    dtype = ROUNDING[case.precision] if case.narrow is None else case.narrow[1]
    moved, right, ordinary = (_moved(start, rows) for rows in (left, exact, plain))
    way, apart = _norm(right.values()), _norm(ordinary[name] - right[name] for name in right)
    if apart > 0.5 * way:  # plain steps end nearer to exact ones unless one of the two is broken
        raise RuntimeError(
            f"the bench failed, not the row: plain steps in {case.precision} end {apart / way:.2g} of their way from"
            f" where exact ones end, so no budget can be had of them"
        )
    return {
        name: testing.ratio_of(moved[name], right[name], ordinary[name], dtype)
        * _luck(right[name], ordinary[name], apart / way)
        for name in start
    }


def _luck(right: Tensor, ordinary: Tensor, share: float) -> float:
    """A factor of at most 1 for the error ratio of a parameter in which plain steps are exact by chance.

    It is plain steps' error in this parameter, as a share of how far it has moved, over `share`, the same for all
    parameters together.
    """
    usual = share * right.norm().item()
    return min(1.0, (ordinary - right).norm().item() / usual) if usual else 1.0


def _moved(start: Rows, end: Rows) -> Rows:
    """end - start, in float64."""
    return {name: end[name].double() - first.double() for name, first in start.items()}


def _norm(parts: Iterable[Tensor]) -> float:
    return float(sum(x.square().sum().item() for x in parts) ** 0.5)


def _rows_of(state: Mapping[str, Tensor], key: int) -> Rows:
    """Copies of some rows of each parameter, and of whole vectors."""
    named = {name.removeprefix("module."): x.detach() for name, x in state.items() if x.is_floating_point()}
    count = max(1, min(ROWS, NUMBERS // sum(x[:1].numel() for x in named.values())))
    rows = {}
    for name, x in named.items():
        chosen = random.Random(f"{key} {name}").sample(range(len(x)), min(count, len(x)))
        rows[name] = (x[sorted(chosen)] if x.dim() > 1 else x).cpu().clone()
    return rows


def _plain(case: ParallelCase, asked: Pass, dtype: torch.dtype, precision: str, narrow: Narrow) -> tuple[Rows, Rows]:
    """(rows of the parameters at the beginning, the same rows after plain steps), computed once for all cases."""
    known = _RIGHT.get(case.world_size)
    if known is None or known[0] != asked:
        known = _RIGHT[case.world_size] = asked, {}
    what = dtype, precision, narrow, case.config, case.batch, case.residual
    if what not in known[1]:
        start, end = _take_steps(case, asked, dtype, precision, narrow)
        if bad := [name for name, rows in end.items() if not rows.isfinite().all()]:
            raise RuntimeError(
                f"the bench failed, not the row: plain steps in {precision} on weights in {dtype} lead to NaN or inf in"
                f" {len(bad)} of {len(end)} parameters, as in {bad[0]}"
            )
        known[1][what] = start, end
    return known[1][what]


def _have_room(case: ParallelCase) -> bool:
    """True if weights, gradients and AdamW's two moments fit on every rank in float64, with room for the rest."""
    if device().type == "cpu":
        return True
    total = torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction()
    has_room = torch.tensor(
        float(total >= 8 * (1.25 * 4 * model_parameters(case.config) + 3 * MAX_SCORES)), device=device()
    )
    dist.all_reduce(has_room, dist.ReduceOp.MIN, group=subgroup(case.world_size))
    return bool(has_room.item())


def _take_steps(
    case: ParallelCase, asked: Pass, dtype: torch.dtype, precision: str, narrow: Narrow
) -> tuple[Rows, Rows]:
    """(rows of the parameters before, after) plain steps in `dtype` on all batches of the pass."""
    config, on = replace(case.config, attention="naive", residual=case.residual), device()
    module = Loss(build(config, str(on), asked.seed)).to(dtype)
    params, used = dict(module.named_parameters()), narrow[1] if narrow and narrow[0] == "compute_dtype" else dtype
    optimizer, start = torch.optim.AdamW(params.values(), **ADAMW), _rows_of(params, asked.key)
    at_once = max(1, MAX_SCORES // (config.num_layers * config.num_heads * config.context_length**2))
    for batch in Batches(config, case.batch, asked).all:
        for inputs in zip(batch.tokens.split(at_once), batch.targets.split(at_once), strict=True):
            with prepare.autocast(precision, on.type):
                loss = torch.func.functional_call(module, {name: p.to(used) for name, p in params.items()}, inputs)
            (loss * (len(inputs[0]) / case.batch)).backward()
        _average(params.values(), case.world_size, narrow)
        optimizer.step()
        optimizer.zero_grad()
    return start, _rows_of(params, asked.key)


def _average(params: Iterable[Tensor], world_size: int, narrow: Narrow) -> None:
    """Makes each gradient the mean over ranks. Gradients are sent in the dtype of `narrow` if it is a `comm_dtype`."""
    for p in params if world_size > 1 else ():
        sent = p.grad.to(narrow[1] if narrow and narrow[0] == "comm_dtype" else p.dtype).contiguous()
        dist.all_reduce(sent, group=subgroup(world_size))
        p.grad = (sent / world_size).to(p.dtype)
