"""Trainings with code that expects whole gradients, optimizers and optimizer states: on two ranks, and on one process.

Such code is clipping, gradient scaling, schedules, param groups, and checkpoints of optimizers. `tests/parallel` runs
each function here with a strategy on ranks, by `on_two`, and with "alone" or "exact" on one process, and compares the
results. Ranks import this file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from lmsys.parallel import STRATEGIES
from lmsys.parallel.group import device
from lmsys.parallel.peers import TorchFSDP2
from lmsys.training.optimizer import AdamW, clip_grad_norm
from tests.support.ranks import Net, Recipe, error_of, group_of, on_first, stand_in

RECIPE, MAX_NORM = Recipe(width=5), 0.05
State = dict[str, Tensor]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, RECIPE.width, generator=torch.Generator().manual_seed(10 * step + rank))


@dataclass
class Trained:
    """A model and its optimizer, and the ranks whose batches it trains on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ranks: Sequence[int]

    @property
    def is_plain(self) -> bool:
        return isinstance(self.model, Net)

    def backward(self, step: int, scale: Callable[[Tensor], Tensor] = lambda loss: loss, factor: float = 1) -> None:
        like = next(self.model.parameters())
        losses = [self.model(batch(step, rank).to(like)) for rank in self.ranks]
        scale(torch.stack(losses).mean() * factor).backward()
        if not self.is_plain:
            self.model.finish_gradient_synchronization()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, step: int) -> None:
        self.backward(step)
        self.update()

    def whole(self) -> State:
        state = self.model.state_dict() if self.is_plain else self.model.full_state_dict()
        return {name: x.detach().cpu().clone() for name, x in state.items()}


def made(strategy: str, cls: Any = torch.optim.SGD, recipe: Recipe = RECIPE, seed: int = 0, **options: Any) -> Trained:
    """A model and its optimizer `cls`, for a strategy on this rank.

    "alone" is a plain model on one process that trains on the batches of all ranks; "exact" is that in float64.
    """
    torch.manual_seed(seed)
    net, options = Net(recipe), {"lr": 0.1, **({} if cls in (torch.optim.SGD, Plain) else {"eps": 1e-2}), **options}
    if strategy in ("alone", "exact"):
        net = net.double() if strategy == "exact" else net
        groups = options.pop("groups", None)
        return Trained(net, cls(by_hand(net, groups), **options), (0, 1))
    with stand_in():
        wrapper = STRATEGIES[strategy].load()(net.to(device()), group_of(2))
    return Trained(wrapper, wrapper.make_optimizer(cls, **options), (dist.get_rank(),))


def by_hand(net: nn.Module, groups: Any) -> Any:
    """The net's parameters, or with `groups` a param group for each of them."""
    if groups is None:
        return net.parameters()
    return [{"params": [p], **groups(name, p)} for name, p in net.named_parameters()]


# Trainings, each of which returns what can be compared.


def clipped(strategy: str) -> tuple[Tensor, State]:
    it, norms = made(strategy), []
    for step in range(3):
        it.backward(step)
        of = it.model.parameters() if it.is_plain else it.model
        norms.append(clip_grad_norm(of, MAX_NORM).cpu())
        it.update()
    return torch.stack(norms), it.whole()


def scaled(strategy: str) -> tuple[list[float], State]:
    """Three steps under GradScaler; in the second one block's gradients are infinite. (scales, weights)."""
    it, scales = made(strategy, AdamW), []
    scaler = torch.amp.GradScaler(next(it.model.parameters()).device.type, init_scale=1024.0)
    for step in range(3):
        weight = it.model.last.weight if it.is_plain else it.model.module.last.weight
        hook = weight.register_hook(lambda grad, step=step: grad * (torch.inf if step == 1 else 1))
        it.backward(step, scaler.scale)
        hook.remove()
        scaler.step(it.optimizer)
        scaler.update()
        it.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, it.whole()


def refused_norms(strategy: str) -> list[str]:
    it = made(strategy)
    it.backward(0)
    params = [p for p in it.model.module.parameters() if p.grad is not None and p.grad.numel()]
    of = torch.nn.utils
    return [
        error_of(lambda: of.clip_grad_norm_(it.model.parameters(), MAX_NORM)),
        error_of(lambda: of.clip_grad_norm_(params, MAX_NORM)),
        error_of(lambda: of.get_total_norm([p.grad for p in params])),
        error_of(lambda: clip_grad_norm(it.model.parameters(), MAX_NORM)),
        error_of(lambda: params[0].grad.data.norm(2)),
        error_of(lambda: torch.cat([p.grad.flatten() for p in params]).norm()),
    ]


@on_first(2)
def on_two(_: Any, function: Callable[..., Any], *args: Any) -> Any:
    """On a rank of two: the function's result, or its error as a text."""
    results: list[Any] = []
    error = error_of(lambda: results.append(function(*args)))
    return results[0] if results else error


def decayed(name: str, p: nn.Parameter) -> dict[str, Any]:
    """The options of a parameter's group: no decay for biases, another learning rate for the last layer."""
    return ({"weight_decay": 0.0} if p.dim() < 2 else {}) | ({"lr": 0.03} if name.startswith("last") else {})


def in_groups(strategy: str) -> State:
    """Three steps with param groups and a schedule, which changes their options."""
    it = made(strategy, AdamW, weight_decay=0.5, groups=decayed, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.LambdaLR(it.optimizer, lambda step: 0.5**step)
    for step in range(3):
        it.step(step)
        schedule.step()
    return it.whole()


def by_a_tensor_of_rates(strategy: str) -> State:
    """torch's AdamW with a tensor as the learning rate; our AdamW refuses one."""
    it = made(strategy, torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False)
    for step in range(3):
        it.step(step)
        for group in it.optimizer.param_groups:
            group["lr"].mul_(0.5)
    error = error_of(lambda: made(strategy, AdamW, lr=torch.tensor(0.1)))
    assert error.startswith("ValueError: lr=tensor"), error
    return it.whole()


def with_batches_run_out(strategy: str) -> State:
    """Rank 1 has no batch in the last two steps: its loss is multiplied by 0 there."""
    it = made(strategy, AdamW)
    for step in range(4):
        factors = [0.0 if rank == 1 and step > 1 else 1.0 for rank in it.ranks]
        like = next(it.model.parameters())
        losses = [f * it.model(batch(step, rank).to(like)) for f, rank in zip(factors, it.ranks, strict=True)]
        torch.stack(losses).mean().backward()
        if not it.is_plain:
            it.model.finish_gradient_synchronization()
        it.update()
    return it.whole()


def with_a_late_group(strategy: str) -> State:
    """An optimizer of the last layer, which gets the other parameters as a group after two steps."""
    it = made(strategy)
    net = it.model if it.is_plain else it.model.module
    last = [net.last.weight]
    others = [p for p in net.parameters() if p is not net.last.weight]
    if it.is_plain or strategy == "naive":
        it.optimizer = torch.optim.SGD(last, lr=0.1, momentum=0.9)
    else:
        it.optimizer = it.model.make_optimizer(torch.optim.SGD, params=last, lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            it.optimizer.add_param_group({"params": others, "lr": 0.05})
        it.backward(step)
        it.optimizer.step()
        it.model.zero_grad()
    return it.whole()


class Few(nn.Module):
    """A module with one parameter, so that one of two ranks owns none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight) * self.weight).square().mean()


def scaled_with_few_parameters(strategy: str) -> tuple[list[float], State]:
    """Three steps of `Few` under GradScaler; rank 1 has an inf in the second. (scales, weights)."""
    net, ranks, scales = Few(), (0, 1), list[float]()
    net = net.double() if strategy == "exact" else net
    model: Any = net
    if strategy not in ("alone", "exact"):
        ranks = (dist.get_rank(),)
        model = STRATEGIES[strategy].load()(net.to(device()), group_of(2))
    make = getattr(model, "make_optimizer", lambda cls, **options: cls(model.parameters(), **options))
    it = Trained(model, make(torch.optim.SGD, lr=0.1, momentum=0.9), ranks)
    scaler = torch.amp.GradScaler(device().type, init_scale=16.0)
    for step in range(3):
        xs = [torch.full((3,), step + rank + 1.0, device=device()) for rank in ranks]
        factors = [torch.inf if step == rank == 1 else 1.0 for rank in ranks]
        scaler.scale(torch.stack([model(x) * f for x, f in zip(xs, factors, strict=True)]).mean()).backward()
        if model is not net:
            model.finish_gradient_synchronization()
        scaler.step(it.optimizer)
        scaler.update()
        it.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    whole = net.state_dict() if model is net else model.full_state_dict()
    return scales, {name: x.detach().cpu().clone() for name, x in whole.items()}


class Plain(torch.optim.Optimizer):
    """An unusual optimizer: `step` takes a factor, not a closure; it counts steps in its group and in extra state."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p -= factor * group["lr"] / group["count"] * p.grad
        self.state["steps"] = {"seen": self.state["steps"].get("seen", 0) + 1}


def by_a_plain_optimizer(strategy: str) -> tuple[State, int, int]:
    """Two steps of `Plain`, then a step of a second one that has loaded its state. (weights, both counts)."""
    it = made(strategy, Plain)
    for step in range(2):
        it.backward(step)
        it.optimizer.step(factor=0.5)
        it.optimizer.zero_grad()
    make = Plain if it.is_plain else it.model.make_optimizer
    other = Plain(it.model.parameters(), lr=0.1) if it.is_plain else make(Plain, lr=0.1)
    other.load_state_dict(it.optimizer.state_dict())
    it.optimizer = other
    it.step(2)
    return it.whole(), other.param_groups[0]["count"], other.state["steps"]["seen"]


def with_state_replaced(strategy: str) -> State:
    """Four steps: the optimizer's state is replaced by an empty one, then cleared, then replaced by the first one."""
    it = made(strategy, torch.optim.AdamW)
    it.step(0)
    kept = it.optimizer.state
    it.optimizer.state = type(kept)(dict)
    it.step(1)
    it.optimizer.state.clear()
    it.step(2)
    it.optimizer.state = kept
    it.step(3)
    return it.whole()


def with_averages(strategy: str) -> list[State]:
    """Weights are swapped with their running average and back, on the module itself, by copies and by `.data`."""
    it = made(strategy, torch.optim.SGD, momentum=0.9)
    show, hide = (getattr(it.model, name, lambda: None) for name in ("unshard", "reshard"))
    net, seen = it.model if it.is_plain else it.model.module, []
    show()
    average = [p.detach().clone() for p in net.parameters()]
    hide()
    for step in range(3):
        it.step(step)
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
        seen.append(it.whole())
        show()
        for x, p in zip(own, net.parameters(), strict=True):
            p.data.copy_(x)
        hide()
    return [*seen, it.whole()]


def refused_states(strategy: str) -> list[str]:
    """The errors of loading optimizer states that do not fit: other groups, missing parameters, rank 0's on all ranks.

    For fsdp also of torch's own state dicts, and of groups that are made of its flat parts.
    """
    it = made(strategy, AdamW)
    it.step(0)
    sent = [it.optimizer.state_dict()]
    dist.broadcast_object_list(sent, group=group_of(2), group_src=0)
    other = made(strategy, AdamW)
    other.backward(1)
    share = error_of(other.optimizer.load_state_dict, sent[0])
    if strategy == "fsdp":
        share = error_of(other.update)
    whole = it.model.full_optimizer_state_dict(it.optimizer)
    grouped = made(strategy, AdamW, groups=decayed)
    errors = [error_of(grouped.model.load_optimizer_state_dict, grouped.optimizer, whole)]
    del whole["param_groups"][0]["params"][0]
    errors.append(error_of(it.model.load_optimizer_state_dict, it.optimizer, whole))
    errors.append(share)
    if strategy == "fsdp":
        errors.append(error_of(get_optimizer_state_dict, it.model, it.optimizer))
        params = list(it.model.parameters())
        parts = [{"params": [p for p in params if p.dim() > 1]}, {"params": params, "weight_decay": 0.0}]
        it.optimizer = torch.optim.AdamW(parts)
        errors.append(error_of(it.step, 1))
        errors.append(error_of(lambda: it.model.make_optimizer(AdamW, groups=decayed)))
    return errors


def refused_modules(strategy: str) -> list[str]:
    """The errors of wrapping modules that a strategy does not support; the last is none."""
    meta = nn.Linear(2, 2, device="meta")
    ignoring = nn.Linear(2, 2)
    ignoring._ddp_params_and_buffers_to_ignore = ["bias"]
    modules = [nn.Sequential(nn.BatchNorm1d(2)), nn.Embedding(2, 2, sparse=True), meta, ignoring]
    wrap = STRATEGIES[strategy].load()
    errors = [error_of(wrap, module.to(device()) if module is not meta else meta, group_of(2)) for module in modules]
    modules[0].eval()  # a batch norm in evaluation is supported
    return [*errors, error_of(wrap, modules[0], group_of(2))]


# Checkpoints of weights and the optimizer's state, between strategies and FSDP2.


def three_steps(strategy: str, groups: Any) -> State:
    it = made(strategy, torch.optim.AdamW, groups=groups)
    for step in range(3):
        it.step(step)
    return it.whole()


def save(strategy: str, folder: str, groups: Any) -> State:
    """Trains two steps, saves a checkpoint, and returns the weights."""
    it = made(strategy, torch.optim.AdamW, groups=groups)
    for step in range(2):
        it.step(step)
    dcp.save(_state_of(it), checkpoint_id=folder, process_group=group_of(2))
    return it.whole()


def load(strategy: str, folder: str, groups: Any) -> tuple[State, State]:
    """Loads the checkpoint into another model: (its weights, its weights after a third step)."""
    it = made(strategy, torch.optim.AdamW, seed=1, groups=groups, lr=0.7)
    state = _state_of(it)
    dcp.load(state, checkpoint_id=folder, process_group=group_of(2))
    if strategy == "torch_fsdp2":
        set_state_dict(
            it.model.module, it.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    else:
        it.model.load_state_dict(state["model"])
        it.model.load_optimizer_state_dict(it.optimizer, state["optimizer"])
    loaded = it.whole()
    it.step(2)
    return loaded, it.whole()


def _state_of(it: Trained) -> dict[str, Any]:
    if isinstance(it.model, TorchFSDP2):
        model, optimizer = get_state_dict(it.model.module, it.optimizer)
        return {"model": model, "optimizer": optimizer}
    return {
        "model": it.model.sharded_state_dict(),
        "optimizer": it.model.full_optimizer_state_dict(it.optimizer),
    }
