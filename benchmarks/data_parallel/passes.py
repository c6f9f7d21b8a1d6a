"""Checks that a strategy's timed training steps end at the right weights. Runs on the ranks.

A *row* is a strategy with its options. A *pass* is one series of steps, untimed ones first. All rows of a comparison
take a pass from the same weights on the same batches. After a pass, `rank.py` gives the weights to `keep`, which keeps
*slices*: a few rows of each matrix, and whole vectors. `bench_data_parallel.py` then calls `judge_pass` on the ranks,
which compares how far three runs move the slices from the weights of the beginning:

- the timed steps of the row;
- *plain steps*: the model unwrapped on every rank, with naive attention, its own gradients, torch's all-reduce of each,
  and torch's AdamW, in the case's precision. If the case has Muon, torch's Muon steps the matrices. If the row computes
  or communicates in a narrower dtype (`case.narrow`), parameters or gradients are rounded to that dtype;
- *exact steps*: plain steps in float64, except that forward and backward are in float32 if the case's precision is
  narrower than fp32. If the case has Muon, our Muon steps the matrices here, since torch's has no float64.

The budget of a parameter, the error that is allowed, comes from the error of plain steps against exact ones
(`lmsys.testing.ratio_of`). In a single parameter that error may be tiny by chance. So it counts as at least (error of
all parameters / movement of all parameters) × the parameter's own movement.

The constants below set the optimizers, the untimed steps and the size of slices. A new option of a training that
changes the right weights must be followed in `_take_steps`, and be part of the key `what` in `_plain`.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch

from benchmarks.data_parallel.cases import Narrow, ParallelCase
from benchmarks.models import ROUNDING, Batch, build, matmuls
from lmsys import draws, testing
from lmsys.bench.ranks import on_part, release, subgroup
from lmsys.config import ModelConfig
from lmsys.cost.operations import model_parameters
from lmsys.model import Loss
from lmsys.parallel import collectives, group, structure
from lmsys.training import prepare, reproducible

# Settings of AdamW in plain steps and in `rank.py`. With eps far above a gradient's size AdamW moves in proportion to
# the gradient: a gradient that is halved shows, and where one is near zero no rounding turns the step around. At this
# rate hundreds of steps train, and do not diverge.
ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-2}
# More settings of Muon: the first two are the defaults of torch's AdamW, and matrices have AdamW's learning rate, too.
MUON: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 1e-2, "adjust_lr_fn": "match_rms_adamw"}
# {device type: untimed steps}, which `rank.py` takes first. The first plans buckets, the second runs with them.
WARM_STEPS = {"cpu": 2, "cuda": 3}
# MAX_LINES rows of each matrix are kept. If all slices would have more than MAX_NUMBERS numbers, fewer are kept, but at
# least one. One row says little: with one row of each parameter, right steps of a model of size xl were called wrong.
MAX_LINES, MAX_NUMBERS = 16, 2**22
# Plain steps split a batch so that naive attention has at most MAX_SCORES scores in all blocks together.
MAX_SCORES = 2**28
Slices = dict[str, torch.Tensor]  # {name of a parameter: some of its rows, or the whole vector}, on the host


@dataclass(frozen=True)
class Pass:
    """The seeds and the number of steps of a pass, which all rows of a comparison share.

    seed   seed of the weights
    draw   seed of the batches, together with `seed`
    key    seed of the choice of slices
    steps  number of timed steps
    """

    seed: int
    draw: int
    key: int
    steps: int


_ENDS: dict[tuple[str, Pass], Slices] = {}  # {(case id, pass): slices that this rank kept after the case's steps}
# {(pass, world size, settings of plain or exact steps): (slices before, slices after)}, of each world size's last pass
_RIGHT: dict[tuple[Pass, int, object], tuple[Slices, Slices]] = {}


class Batches:
    """A rank's batches, which come one after another in the same memory; after the last comes the first again.

    all  every batch of the pass
    now  the present batch: its tensors stay, and `advance` overwrites them, so that a CUDA graph can read them
    """

    def __init__(self, config: ModelConfig, batch: int, asked: Pass):
        number = WARM_STEPS[group.device().type] + asked.steps
        length = config.context_length + 1
        numbers = draws.whole_numbers(
            draws.key(asked.draw, f"{asked.seed} rank {torch.distributed.get_rank()}"),
            first=0,
            count=number * batch * length,
            below=config.vocab_size,
            device=group.device(),
        )
        self.all = [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in numbers.view(number, batch, length)]
        self.now = Batch(self.all[0].tokens.clone(), self.all[0].targets.clone())
        self._coming = cycle(self.all)

    def advance(self, _: int = 0) -> None:
        """Copies the next batch into `now`. The argument is not used: `Step.redraw` passes a seed."""
        batch = next(self._coming)
        self.now.tokens.copy_(batch.tokens)
        self.now.targets.copy_(batch.targets)


def keep(case: ParallelCase, asked: Pass, state: Mapping[str, torch.Tensor]) -> str:
    """Keeps slices of the weights at which the case's steps ended, until they are judged or a pass has another `draw`.

    Returns the sha256 of the slices: two cases have one sha256 if and only if all bits of their kept slices are equal.
    """
    for stale in [known for known in _ENDS if known[1].draw != asked.draw]:
        del _ENDS[stale]
    _ENDS[case.id, asked] = slices = _slices_of(state, asked.key)
    return reproducible.weights_sha256(slices)


@on_part
def holds(case: ParallelCase, asked: Pass) -> bool:
    """True if this rank still has the slices that it kept after the pass; a rank that was started again has none."""
    return (case.id, asked) in _ENDS


@on_part
def judge_pass(case: ParallelCase, asked: Pass) -> dict[str, float] | None:
    """{parameter: its error over its budget} of the slices that this rank kept after the case's steps.

    1 or less is right. None if memory is too small for plain steps. RuntimeError if plain steps lead to NaN or inf, or
    far from exact steps.
    """
    end = _ENDS.pop((case.id, asked))
    release()
    if not _have_room(case):
        return None
    with matmuls("fp32"):
        # Exact steps are in float64 throughout for fp32, else forward and backward are in float32.
        computing = None if case.precision == "fp32" else ("compute_dtype", torch.float32)
        start, exact = _plain(case, asked, torch.float64, precision="fp32", narrow=computing)
    with matmuls(case.precision):
        _, plain = _plain(case, asked, torch.float32, precision=case.precision, narrow=case.narrow)
    # The dtype that `ratio_of` rounds plain results to, for the budget.
    dtype = ROUNDING[case.precision] if case.narrow is None else case.narrow[1]
    moved, right, ordinary = (
        {name: slices[name].double() - first.double() for name, first in start.items()}
        for slices in (end, exact, plain)
    )
    # The error of plain steps in all parameters together, as a share of how far exact steps move these.
    off = torch.nn.utils.get_total_norm([ordinary[name] - right[name] for name in right]).item()
    share = off / torch.nn.utils.get_total_norm(right.values()).item()
    if share > 0.5:  # plain steps end nearer to exact ones unless one of the two is broken
        raise RuntimeError(
            f"the bench failed, not the row: plain steps in {case.precision} end {share:.2g} of their way from where"
            " exact ones end, so no budget can be had of them"
        )
    return {
        name: testing.ratio_of(moved[name], right[name], _with_usual_error(right[name], ordinary[name], share), dtype)
        for name in start
    }


def _with_usual_error(right: torch.Tensor, ordinary: torch.Tensor, share: float) -> torch.Tensor:
    """`ordinary`, moved away from `right` until their distance is at least `share` of the length of `right`.

    If the two are equal, no direction is known: then every number errs by `share` of itself.
    """
    error = ordinary - right
    size = error.norm().item()
    return right + error * max(1.0, share * right.norm().item() / size) if size else right * (1 + share)


def _slices_of(state: Mapping[str, torch.Tensor], key: int) -> Slices:
    """Copies, on the host, of rows of each matrix and of whole vectors, by name of the parameter.

    The key chooses the rows: equally many of each matrix, or all rows if a matrix has fewer.
    """
    named = {name.removeprefix("module."): x.detach() for name, x in state.items() if x.is_floating_point()}
    count = max(1, min(MAX_LINES, MAX_NUMBERS // sum(x[:1].numel() for x in named.values())))
    slices = {}
    for name, x in named.items():
        chosen = random.Random(f"{key} {name}").sample(range(len(x)), min(count, len(x)))
        slices[name] = (x[sorted(chosen)] if x.dim() > 1 else x).cpu().clone()
    return slices


def _plain(
    case: ParallelCase, asked: Pass, dtype: torch.dtype, precision: str, narrow: Narrow
) -> tuple[Slices, Slices]:
    """(slices at the beginning, the same slices after plain steps), computed once for all cases.

    dtype      of the weights and of AdamW
    precision  of forward and backward: "fp32", or that of autocast
    narrow     ("compute_dtype", dtype): forward and backward use parameters rounded to it. ("comm_dtype", dtype): the
               all-reduce sends gradients rounded to it. None: neither
    """
    what = asked, case.world_size, (dtype, precision, narrow, case.config, case.batch, case.residual, case.optimizer)
    if what not in _RIGHT:
        start, end = _take_steps(case, asked, dtype, precision, narrow)
        if bad := [name for name, x in end.items() if not x.isfinite().all()]:
            raise RuntimeError(
                f"the bench failed, not the row: plain steps in {precision} on weights in {dtype} lead to NaN or inf in"
                f" {len(bad)} of {len(end)} parameters, as in {bad[0]}"
            )
        # Results of other world sizes stay, since they stay on ranks that take no part in this pass. Plain steps
        # communicate, so later either all ranks of a world size must have its results, or none.
        for known in [known for known in _RIGHT if known[1] == case.world_size and known[0] != asked]:
            del _RIGHT[known]
        _RIGHT[what] = start, end
    return _RIGHT[what]


def _have_room(case: ParallelCase) -> bool:
    """True if exact steps fit into the memory of every rank.

    They hold float64 numbers, of 8 bytes: four of each parameter (weight, gradient and AdamW's two moments) and a
    quarter of these for the rest, and three tensors of attention's scores.
    """
    if group.device().type == "cpu":
        return True
    total = torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction()
    needed = 8 * (1.25 * 4 * model_parameters(case.config) + 3 * MAX_SCORES)
    return all(collectives.gather_objects(total >= needed, subgroup(case.world_size)))


def _take_steps(
    case: ParallelCase, asked: Pass, dtype: torch.dtype, precision: str, narrow: Narrow
) -> tuple[Slices, Slices]:
    """(slices before, slices after) plain steps on all batches of the pass. Arguments as in `_plain`."""
    config = replace(case.config, attention="naive", residual=case.residual)
    module = Loss(build(config, str(group.device()), asked.seed)).to(dtype)
    params = dict(module.named_parameters())
    rounded = narrow[1] if narrow and narrow[0] == "compute_dtype" else dtype
    optimizer = _optimizer(case, module, dtype)
    start = _slices_of(params, asked.key)
    at_once = max(1, MAX_SCORES // (config.num_layers * config.num_heads * config.context_length**2))  # sequences
    for batch in Batches(config, case.batch, asked).all:
        for inputs in zip(batch.tokens.split(at_once), batch.targets.split(at_once), strict=True):
            with prepare.autocast(precision, group.device().type):
                loss = torch.func.functional_call(module, {name: p.to(rounded) for name, p in params.items()}, inputs)
            (loss * (len(inputs[0]) / case.batch)).backward()
        _average(params.values(), case.world_size, narrow)
        optimizer.step()
        optimizer.zero_grad()
    return start, _slices_of(params, asked.key)


class TorchMuon(torch.optim.Optimizer):
    """torch's Muon for the param groups with `use_muon`, and torch's AdamW, on a GPU the fused one, for the others.

    Matrices may be DTensors, as under FSDP2: torch's Muon then multiplies DTensors, which gather what they need. Do
    not load a state dict into it: that would not reach the two optimizers that step.
    """

    def __init__(self, params: Any, adjust_lr_fn: str, betas: tuple[float, float], eps: float = 1e-8, **of_both: float):
        super().__init__(params, of_both)
        matrices, others = (
            [options for options in self.param_groups if options["use_muon"] is chosen] for chosen in (True, False)
        )
        self._steppers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, adjust_lr_fn=adjust_lr_fn, **of_both),
            torch.optim.AdamW(others, betas=betas, eps=eps, fused=group.device().type == "cuda", **of_both),
        ]
        for stepper in self._steppers:
            stepper.state = self.state  # one state, which `optimizer.state` shows whole

    def step(self, closure: Any = None) -> None:
        for stepper in self._steppers:
            stepper.step()


def _optimizer(case: ParallelCase, module: torch.nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    """The optimizer of plain steps, or of exact ones where `dtype` is float64."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(module.parameters(), **ADAMW)
    from lmsys.training import muon  # here, as an earlier state of the code under --against may not have it

    groups = structure.grouped(module, muon.matrix_groups(module))
    exact = dtype == torch.float64
    return muon.Muon(groups, ns_dtype=dtype, **ADAMW | MUON) if exact else TorchMuon(groups, **ADAMW | MUON)


def _average(params: Iterable[torch.Tensor], world_size: int, narrow: Narrow) -> None:
    """Makes each gradient the mean over ranks; if `narrow` is of the option `comm_dtype`, it is sent in that dtype."""
    for p in params if world_size > 1 else ():
        sent = p.grad.to(narrow[1] if narrow and narrow[0] == "comm_dtype" else p.dtype).contiguous()
        torch.distributed.all_reduce(sent, group=subgroup(world_size))
        p.grad = (sent / world_size).to(p.dtype)
