"""Trainings whose code expects whole gradients and optimizer states, which a sharding strategy does not have.

Such code is clipping, gradient scaling, schedules, param groups, and checkpoints of optimizers. `tests/parallel` runs
each function here with a strategy on two ranks, by `on_two`, and with "alone" or "exact" on one process, and compares
the results. Ranks import this file. A new training is a function from the name of a strategy to what can be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from lmsys.parallel import STRATEGIES
from lmsys.parallel.collectives import TreeSums
from lmsys.parallel.group import device
from lmsys.parallel.peers import TorchFSDP2
from lmsys.parallel.sharded_optimizer import ShardedOptimizer
from lmsys.parallel.wrapper import whole
from lmsys.training.optimizer import AdamW, clip_grad_norm
from lmsys.training.reproducible import exact_norm
from tests.support.modules import deferred
from tests.support.ranks import (
    Net,
    Recipe,
    Trained,
    answer_of,
    by_hand,
    error_of,
    group_of,
    on_first,
    on_some,
    stand_in,
)

RECIPE, MAX_NORM = Recipe(width=5), 0.05  # the model, and the norm to which gradients are clipped
State = dict[str, Tensor]  # weights by name


def batch(step: int, rank: int) -> Tensor:
    """(4, width): four examples, equal in every training."""
    return torch.randn(4, RECIPE.width, generator=torch.Generator().manual_seed(10 * step + rank))


@dataclass
class Run(Trained):
    """A model and its optimizer, and the ranks whose batches it trains on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ranks: Sequence[int]

    def backward(self, step: int, weights: Sequence[float] = (1, 1, 1, 1)) -> None:
        """A backward of the ranks' mean loss, each times its weight, and the synchronization of gradients."""
        like = next(self.model.parameters())
        losses = [weights[rank] * self.model(batch(step, rank).to(like)) for rank in self.ranks]
        torch.stack(losses).mean().backward()
        self.finish()

    def step(self, step: int) -> None:
        self.backward(step)
        self.apply()


def made(
    strategy: str, cls: Any = torch.optim.SGD, net: nn.Module | None = None, seed: int = 0, group: Any = None,
    **options: Any,
) -> Run:  # fmt: skip
    """A model and its optimizer `cls`, for a strategy on this rank of a group, by default of two ranks.

    "alone" is a plain model on one process that trains on the batches of two ranks; "exact" is that in float64.
    "plain" trains on rank 0's.
    """
    torch.manual_seed(seed)
    net = Net(RECIPE) if net is None else net
    options = {"lr": 0.1, **({} if cls in (torch.optim.SGD, Plain, Empty) else {"eps": 1e-2}), **options}
    if strategy in ("alone", "exact", "plain"):
        net = net.double() if strategy == "exact" else net
        groups = options.pop("groups", None)
        return Run(net, cls(by_hand(net, groups), **options), (0,) if strategy == "plain" else (0, 1))
    with stand_in():
        wrapper = STRATEGIES[strategy].load()(net.to(device()), group or group_of(2))
    return Run(wrapper, wrapper.make_optimizer(cls, **options), (dist.get_rank(),))


# Trainings, each of which returns what can be compared.


def refused_norms(strategy: str) -> list[str]:
    """The errors of norms by torch's functions, which would take a rank's part of the gradients for all of them."""
    run = made(strategy)
    run.backward(0)
    params = [p for p in run.model.module.parameters() if p.grad is not None and p.grad.numel()]
    of = torch.nn.utils
    return [
        error_of(lambda: of.clip_grad_norm_(run.model.parameters(), MAX_NORM)),
        error_of(lambda: of.clip_grad_norm_(params, MAX_NORM)),
        error_of(lambda: of.get_total_norm([p.grad for p in params])),
        error_of(lambda: clip_grad_norm(run.model.parameters(), MAX_NORM)),
        error_of(lambda: params[0].grad.data.norm(2)),
        error_of(lambda: torch.cat([p.grad.flatten() for p in params]).norm()),
    ]


@on_first(2)
def on_two(_: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function on one of two ranks: its result, or its error as a text."""
    return answer_of(function, *args)


def decayed(name: str, p: nn.Parameter) -> dict[str, Any]:
    """The options of a parameter's group: no decay for biases, another learning rate for the last layer."""
    return ({"weight_decay": 0.0} if p.dim() < 2 else {}) | ({"lr": 0.03} if name.startswith("last") else {})


def in_groups(strategy: str) -> State:
    """Three steps with param groups and a schedule, which changes their options."""
    run = made(strategy, AdamW, weight_decay=0.5, groups=decayed, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.5**step)
    for step in range(3):
        run.step(step)
        schedule.step()
    return run.whole()


def by_a_tensor_of_rates(strategy: str) -> State:
    """torch's AdamW with a tensor as the learning rate; our AdamW refuses one."""
    run = made(strategy, torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False)
    for step in range(3):
        run.step(step)
        for group in run.optimizer.param_groups:
            group["lr"].mul_(0.5)
    error = error_of(lambda: made(strategy, AdamW, lr=torch.tensor(0.1)))
    assert error.startswith("ValueError: lr=tensor"), error
    return run.whole()


def with_batches_run_out(strategy: str) -> State:
    """Rank 1 has no batch in the last two steps: its loss is multiplied by 0 there."""
    run = made(strategy, AdamW)
    for step in range(4):
        run.backward(step, weights=(1, 0 if step > 1 else 1))
        run.apply()
    return run.whole()


def with_a_late_group(strategy: str) -> State:
    """An optimizer of the last layer, which gets the other parameters as a group after two steps.

    With "naive" it is a `ShardedOptimizer`, which shares the new group out to ranks.
    """
    run = made(strategy)
    last = [run.net.last.weight]
    others = [p for p in run.net.parameters() if p is not last[0]]
    if run.is_plain:
        run.optimizer = torch.optim.SGD(last, lr=0.1, momentum=0.9)
    elif strategy == "naive":
        run.optimizer = ShardedOptimizer(last, torch.optim.SGD, group_of(2), lr=0.1, momentum=0.9)
    else:
        run.optimizer = run.model.make_optimizer(torch.optim.SGD, params=last, lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            run.optimizer.add_param_group({"params": others, "lr": 0.05})
        run.backward(step)
        assert run.optimizer.step(lambda: 2.5) == 2.5  # it calls a closure, and returns its loss
        run.model.zero_grad()
    return run.whole()


def with_hooks_that_change_gradients(strategy: str) -> State:
    """Three steps with hooks, added after the module was wrapped, that double each gradient before it is sent."""

    def double(p: Tensor) -> None:
        p.grad.mul_(2)

    run = made(strategy)
    for p in run.net.parameters():
        p.register_post_accumulate_grad_hook(double)
    for step in range(3):
        run.step(step)
    return run.whole()


def with_weights_decayed_by_hand(strategy: str) -> State:
    """Three steps, after each of which all weights are multiplied in place; under ZeRO-1 they are just being sent."""
    run = made(strategy)
    with deferred():
        for step in range(3):
            run.step(step)
            for p in run.net.parameters():
                p.detach().mul_(0.9)
    return run.whole()


def with_gradients_begun_by_hand(strategy: str) -> State:
    """Three steps, before whose backwards each gradient is a tenth of the weight; then one without a backward."""
    run = made(strategy)
    for step in range(4):
        for p in run.net.parameters():
            p.grad = 0.1 * p.detach()
        if step < 3:
            run.backward(step)
        run.finish()
        run.apply()
    return run.whole()


def with_gradients_that_decay(strategy: str) -> State:
    """Three steps, after each of which gradients are made a half of what they were, in place of zeros."""
    run = made(strategy)
    for step in range(3):
        run.backward(step)
        run.optimizer.step()
        for p in run.net.parameters():
            p.grad = None if p.grad is None else 0.5 * p.grad
    return run.whole()


def with_a_step_that_has_no_gradients(strategy: str) -> State:
    """Three steps; before the second one all gradients are dropped, by the module itself."""
    run = made(strategy, torch.optim.AdamW)
    for step in range(3):
        run.backward(step)
        if step == 1:
            run.net.zero_grad()
        run.apply()
    return run.whole()


def with_state_kept(strategy: str, cls: Any, options: dict[str, Any], before: int) -> State:
    """Three steps, before one of which another optimizer loads the state of the first and goes on in its place."""
    run = made(strategy, Plain)
    run.optimizer = run.optimizer_by(cls, lr=0.1, **options)
    for step in range(3):
        if step == before and not run.is_plain:
            state = run.model.full_optimizer_state_dict(run.optimizer)
            run.optimizer = run.optimizer_by(cls, lr=0.1, **options)
            run.model.load_optimizer_state_dict(run.optimizer, state)
        run.step(step)
    return run.whole()


def with_another_strategy(strategy: str) -> State:
    """Three steps of a model with a frozen weight; another strategy goes on before the last one."""

    def begun(name: str) -> Run:
        torch.manual_seed(0)
        return made(name, torch.optim.Adagrad, Net(replace(RECIPE, frozen=True)))

    run = begun(strategy)
    for step in range(3):
        if step == 2 and not run.is_plain:
            weights, state = run.model.full_state_dict(), run.model.full_optimizer_state_dict(run.optimizer)
            run = begun("fsdp" if "zero1" in strategy else "zero1")
            run.model.load_state_dict(weights)
            run.model.load_optimizer_state_dict(run.optimizer, state)
        run.step(step)
    return run.whole()


def left_out_of_some_steps(_: Any) -> list[str]:
    """The errors of NAdam's state where fsdp has left a parameter out of all steps, and of one of two."""
    errors = []
    for used in (False, True):
        run = made("fsdp", torch.optim.NAdam, Net(replace(RECIPE, rare=True)))
        for rare in (used, False):
            run.model(batch(0, 0).to(device()), rare=rare).backward()
            run.finish()
            run.apply()
        errors.append(error_of(run.model.full_optimizer_state_dict, run.optimizer))
    return errors


def used_again(_: Any) -> str:
    """The error of a weight that is used after a step without it, where the optimizer's state holds a plain number."""
    run = made("fsdp", Plain, Net(replace(RECIPE, rare=True)))
    run.optimizer = run.optimizer_by(Counting, lr=0.1, kept="number")
    for rare in (False, True):
        run.model(batch(0, 0).to(device()), rare=rare).backward()
        run.finish()
        error = error_of(run.apply)
    return error


def with_sums_from_the_start(strategy: str) -> State:
    """A step of Adagrad, and its sum for a weight that nobody has used, which it began before the first step."""
    torch.manual_seed(0)
    run = made(strategy, torch.optim.Adagrad, Net(replace(RECIPE, unused=True)), initial_accumulator_value=0.1)
    run.step(0)
    if run.is_plain:
        return {"sum": run.optimizer.state[run.net.unused.weight]["sum"], **run.whole()}
    state = run.model.full_optimizer_state_dict(run.optimizer)["state"]
    return {"sum": state["unused.weight"]["sum"].cpu(), **run.whole()}


def with_states_of_nothing(strategy: str) -> State:
    """Two steps by an optimizer whose states are empty, of a model that has a weight without use, and its state."""
    torch.manual_seed(0)
    run = made(strategy, Empty, Net(replace(RECIPE, unused=True)))
    for step in range(2):
        run.step(step)
    if not run.is_plain:
        run.model.full_optimizer_state_dict(run.optimizer)
    return run.whole()


class Few(nn.Module):
    """A module with one parameter, so that one of two ranks owns none of the dtype whose gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight) * self.weight).square().mean()


def scaled(strategy: str) -> tuple[list[float], State]:
    """Three steps of `Few` under GradScaler; rank 1 has an inf in the second. (scales, weights)."""
    run, scales = made(strategy, net=Few(), momentum=0.9), []
    scaler = torch.amp.GradScaler(run.net.weight.device.type, init_scale=16.0)
    for step in range(3):
        xs = [torch.full((3,), step + rank + 1.0) for rank in run.ranks]
        factors = [torch.inf if step == rank == 1 else 1.0 for rank in run.ranks]
        scaler.scale(torch.stack([run.model(x) * f for x, f in zip(xs, factors, strict=True)]).mean()).backward()
        run.finish()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, run.whole()


class Plain(torch.optim.Optimizer):
    """An unusual optimizer: `step` takes a factor, not a closure, and counts its calls in its group and in `state`."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p -= factor * group["lr"] / group["count"] * p.grad
        self.state["steps"] = {"seen": self.state["steps"].get("seen", 0) + 1}


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls with the number of steps.

    kept  where the number is kept: in the "group", in each parameter's state as a "number", or there as a "tensor" (1,)
    """

    def __init__(self, params: Any, lr: float, kept: str):
        super().__init__(params, {"lr": lr, "kept": kept, "taken": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if group["kept"] == "number":
                    state["taken"] = state.get("taken", 0) + 1
                elif group["kept"] == "tensor":
                    state["step"] = state.get("step", torch.zeros(1)) + 1
                steps = state.get("taken", state.get("step", group["taken"]))
                p -= group["lr"] / float(steps) * p.grad


class Empty(torch.optim.SGD):
    """An optimizer that asks for the state of each parameter that it steps, and writes nothing into it."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            assert not self.state[p].get("momentum_buffer")
        return super().step(closure)


class Lamb(torch.optim.SGD): ...


class ByNorm(Lamb): ...


class AdamP(torch.optim.Adam): ...


class Prodigy(torch.optim.SGD): ...


def by_a_plain_optimizer(strategy: str) -> tuple[State, int, int]:
    """Two steps of `Plain`, then a step of a second one that has loaded its state. (weights, both counts)."""
    run = made(strategy, Plain)
    for step in range(2):
        run.backward(step)
        run.optimizer.step(factor=0.5)
        run.optimizer.zero_grad()
    other = run.optimizer_by(Plain, lr=0.1)
    other.load_state_dict(run.optimizer.state_dict())
    run.optimizer = other
    run.step(2)
    return run.whole(), other.param_groups[0]["count"], other.state["steps"]["seen"]


def with_state_replaced(strategy: str) -> State:
    """Four steps: the optimizer's state is replaced by an empty one, then cleared, then replaced by the first one."""
    run = made(strategy, torch.optim.AdamW)
    run.step(0)
    kept = run.optimizer.state
    run.optimizer.state = type(kept)(dict)
    run.step(1)
    run.optimizer.state.clear()
    run.step(2)
    run.optimizer.state = kept
    run.step(3)
    return run.whole()


def with_averages(strategy: str) -> list[State]:
    """Three steps, after each of which the module's weights are swapped with their running averages, and back.

    Returns the averages after each step, and the final weights. Swaps write to parameters, or replace their `.data`.
    """
    run = made(strategy, torch.optim.SGD, momentum=0.9)
    show, hide = (getattr(run.model, name, lambda: None) for name in ("unshard", "reshard"))
    net, seen = run.net, []
    show()
    average = [p.detach().clone() for p in net.parameters()]
    hide()
    for step in range(3):
        run.step(step)
        show()
        for x, p in zip(average, net.parameters(), strict=True):
            x.lerp_(p.detach(), 0.5)
        own = [p.detach().clone() for p in net.parameters()]
        for n, (x, p) in enumerate(zip(average, net.parameters(), strict=True)):
            if n % 2 or "zero1" in strategy:  # zero1's parameters must stay views of flat buffers
                p.data.copy_(x)
            else:
                p.data = x.clone()
        hide()
        seen.append(run.whole())
        show()
        for x, p in zip(own, net.parameters(), strict=True):
            p.data.copy_(x)
        hide()
    return [*seen, run.whole()]


def refused_states(strategy: str) -> list[str]:
    """The errors of loading optimizer states that do not fit: other groups, missing parameters, rank 0's on all ranks.

    For fsdp also the errors of torch's own optimizer state dict, and of param groups made of its flat parameters.
    """
    run = made(strategy, AdamW)
    run.step(0)
    sent = [run.optimizer.state_dict()]
    dist.broadcast_object_list(sent, group=group_of(2), group_src=0)
    other = made(strategy, AdamW)
    other.backward(1)
    share = error_of(other.optimizer.load_state_dict, sent[0])
    if strategy == "fsdp":
        share = error_of(other.apply)
    whole = run.model.full_optimizer_state_dict(run.optimizer)
    grouped = made(strategy, AdamW, groups=decayed)
    errors = [error_of(grouped.model.load_optimizer_state_dict, grouped.optimizer, whole)]
    del whole["param_groups"][0]["params"][0]
    errors += [error_of(run.model.load_optimizer_state_dict, run.optimizer, whole), share]
    if strategy == "fsdp":
        errors.append(error_of(get_optimizer_state_dict, run.model, run.optimizer))
        params = list(run.model.parameters())
        parts = [{"params": [p for p in params if p.dim() > 1]}, {"params": params, "weight_decay": 0.0}]
        run.optimizer = torch.optim.AdamW(parts)
        errors += [error_of(run.step, 1), error_of(lambda: run.model.make_optimizer(AdamW, groups=decayed))]
        run.optimizer = run.model.make_optimizer(AdamW)
        errors.append(error_of(run.step, 2))
        for step, cls in enumerate((torch.optim.Adafactor, ByNorm, AdamP, Prodigy), start=3):
            run.optimizer = cls(run.model.parameters())
            errors.append(error_of(run.step, step))
    return errors


class Nested(AdamW):
    """It keeps an average of each parameter in a dict of its own, inside of the parameter's state."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p, state in self.state.items():
            state["inner"] = {"average": p.detach().clone()}


def refused_keys(strategy: str) -> list[str]:
    """The errors of whole states: with a key that is no parameter, with tensors in a dict, and of loading the last.

    Behind them, of optimizers on which rank 0 alone has another key, an entry for it or none.
    """
    plain, nested, naive = made(strategy, Plain), made(strategy, Nested), made("naive", Nested)
    for run in (plain, nested, naive):
        run.step(0)
    state = naive.model.full_optimizer_state_dict(naive.optimizer)
    others: list[tuple[Any, Any]] = [("count", 3), (("a", 1), {})]
    of_rank_0 = [made(strategy) for _ in others]
    for run, (key, entry) in zip(of_rank_0, others, strict=True):
        run.step(0)
        if dist.get_rank() == 0:
            run.optimizer.state[key] = entry
    return [
        *(error_of(run.model.full_optimizer_state_dict, run.optimizer) for run in of_rank_0),
        error_of(plain.model.full_optimizer_state_dict, plain.optimizer),
        error_of(nested.model.full_optimizer_state_dict, nested.optimizer),
        error_of(nested.model.load_optimizer_state_dict, nested.optimizer, state),
    ]


class Failing(AdamW):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise MemoryError


def after_a_failed_state(strategy: str) -> tuple[str, float, int, bool]:
    """The error of a whole state before the first step; then the optimizer's rate, states, and if it has gradients."""
    run = made(strategy, Failing)
    error = error_of(run.model.full_optimizer_state_dict, run.optimizer)
    (group,) = run.optimizer.param_groups
    return error, group["lr"], len(run.optimizer.state), any(p.grad is not None for p in group["params"])


def in_tree_sums(_: Any) -> list[Any]:
    """[True if the parts of a checkpoint make the whole weights, the exact norm of two parts]; sums are trees."""
    run = made("fsdp", group=TreeSums(group_of(2)))
    part = torch.full((2,), 1.0 + dist.get_rank())
    state = run.model.sharded_state_dict()
    same = [torch.equal(whole(state[name]), x) for name, x in run.model.full_state_dict().items()]
    return [all(same), exact_norm([part], 4, TreeSums(group_of(2)), divided=True)]


def refused_modules(strategy: str) -> list[str]:
    """The errors of wrapping modules that a strategy does not support; the last module is supported."""
    meta = nn.Linear(2, 2, device="meta")
    ignoring = nn.Linear(2, 2)
    ignoring._ddp_params_and_buffers_to_ignore = ["bias"]
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight.data = tied[0].weight.data
    buffered = nn.Linear(2, 2)
    buffered.register_buffer("kept", buffered.weight.data)
    modules = [nn.Sequential(nn.BatchNorm1d(2)), nn.Embedding(2, 2, sparse=True), meta, ignoring, tied, buffered]
    modules += [nn.Sequential(nn.Embedding(2, 2, max_norm=0.5))]
    wrap = STRATEGIES[strategy].load()
    errors = [error_of(wrap, module.to(device()) if module is not meta else meta, group_of(2)) for module in modules]
    divided = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).to(device())
    STRATEGIES["fsdp"].load()(divided, group_of(2))
    errors.append(error_of(wrap, divided, group_of(2)))
    modules[0].eval()  # a batch norm in evaluation is supported
    return [*errors, error_of(wrap, modules[0], group_of(2))]


class ReadsFirst(nn.Linear):
    """A layer that reads its own weights before it loads others."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"] + self.weight.detach().mean()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Odd(nn.Module):
    """A module that keeps a term of the loss to itself, has a state of its own, and changes what it loads.

    how  a way in which its forward changes its first weight: by "data", or by "copy_"; "": it does not
    """

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.calls, width = how, 0, RECIPE.width
        self.first = ReadsFirst(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.register_load_state_dict_pre_hook(_halve)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        weight = self.layers[0].weight
        if self.how == "data":
            weight.data.clamp_(-0.1, 0.1)
        elif self.how == "copy_":
            with torch.no_grad():
                weight.copy_(weight.clamp(-0.1, 0.1))
        self.kept = self.first(x).square().mean()
        return self.layers[1](torch.tanh(self.layers[0](self.first(x)))).mean()


def _halve(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    state["layers.0.weight"] = state["layers.0.weight"] / 2


def with_a_state_of_its_own(strategy: str) -> State:
    """A step, and another one after the state was loaded, in which the module has a part; with that part's value."""
    torch.manual_seed(0)
    run = made(strategy, net=Odd())
    run.step(0)
    state_dict = run.net.state_dict if run.is_plain else run.model.full_state_dict
    state, run.net.calls = state_dict(), 0
    run.model.load_state_dict(state)
    calls = run.net.calls // len(run.ranks)
    run.step(1)
    weights = {name: x.detach().cpu().clone() for name, x in state_dict().items() if isinstance(x, Tensor)}
    return {"calls": torch.tensor(calls), **weights}


def refused_trainings(strategy: str) -> list[str]:
    """The errors of trainings that would leave ranks different weights, or lose what a forward has written."""

    def by_parts_alone() -> None:
        run = made(strategy, net=Odd())
        with run.model.no_sync():
            run.model(batch(0, 0).to(device())).backward()
        run.optimizer.step()

    def in_the_backward() -> None:
        run = made(strategy, net=nn.Sequential(nn.Linear(RECIPE.width, 1, bias=False)))
        p = next(run.model.parameters())
        other = torch.optim.SGD([p], lr=0.1)

        def step(_: Tensor) -> None:
            other.step()

        p.register_post_accumulate_grad_hook(step)
        run.model(batch(0, dist.get_rank()).to(device())).mean().backward()

    def added_to_means() -> None:
        run = made(strategy, net=Odd())
        run.backward(0)
        run.net.kept.backward()
        run.finish()

    def written(how: str) -> None:
        made(strategy, net=Odd(how)).backward(0)

    return [
        *map(error_of, (by_parts_alone, in_the_backward, added_to_means)),
        *(error_of(written, how) for how in ("data", "copy_")),
    ]


# Checkpoints of weights and the optimizer's state, between strategies, FSDP2 and plain modules, on any number of ranks.


def three_steps(strategy: str, groups: Any, before: int, after: int) -> State:
    """The weights after two steps on the batches of `before` ranks, and one on those of `after`: see `save`, `load`."""
    run = made(strategy, torch.optim.AdamW, groups=groups)
    for step in range(3):
        run.ranks = range(after if step == 2 else before)
        run.step(step)
    return run.whole()


@on_some
def save(group: Any, strategy: str, folder: str, groups: Any) -> State:
    """Trains two steps, saves a checkpoint, and returns the weights."""
    run = made(strategy, torch.optim.AdamW, group=group, groups=groups)
    for step in range(2):
        run.step(step)
    dcp.save(_state_of(run), checkpoint_id=folder, process_group=group)
    return run.whole()


@on_some
def load(group: Any, strategy: str, folder: str, groups: Any) -> tuple[State, State]:
    """Loads that checkpoint into another model: (its weights, its weights after a third step)."""
    run = made(strategy, torch.optim.AdamW, seed=1, group=group, groups=groups, lr=0.7)
    state = _state_of(run)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    if run.is_plain or isinstance(run.model, TorchFSDP2):
        set_state_dict(run.net, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        run.model.load_state_dict(state["model"])
        run.model.load_optimizer_state_dict(run.optimizer, state["optimizer"])
    loaded = run.whole()
    run.step(2)
    return loaded, run.whole()


def _state_of(run: Trained) -> dict[str, Any]:
    if run.is_plain or isinstance(run.model, TorchFSDP2):
        model, optimizer = get_state_dict(run.net, run.optimizer)
        return {"model": model, "optimizer": optimizer}
    return {
        "model": run.model.sharded_state_dict(),
        "optimizer": run.model.full_optimizer_state_dict(run.optimizer),
    }
