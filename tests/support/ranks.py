"""Trainings of a small model by data parallelism on ranks, and on one process to compare with. Ranks import this file.

Tests draw a `Recipe` and a `Training`, run `train` on ranks, and compare by `worst_ratio`. Other helpers of tests on
ranks are here too: `group_of`, `on_first`, `on_some`, `backward`, `step`, `Trained`, `use`, `stand_in` and `error_of`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmsys.check.question import poison
from lmsys.parallel import STRATEGIES
from lmsys.parallel.copy_engine import CopyEngine
from lmsys.parallel.group import device
from lmsys.parallel.sharded_optimizer import ShardedOptimizer
from lmsys.parallel.zero1 import CopyEngineZero1, Zero1
from lmsys.testing import error_ratio
from tests.support.engines import EnginesOverGloo

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2}),
}
GROUPS: dict[int, Any] = {}  # {world size: process group} of this rank


@dataclass(frozen=True)
class Recipe:
    """A small model with buffers.

    tied    the first and the last layer share their weight
    frozen  a weight needs no gradient
    unused  it has a layer that no rank uses
    rare    it has a layer that only rank 0 uses
    mixed   half of each block's weights are float64
    """

    width: int = 6
    layers: int = 2
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    rare: bool = False
    mixed: bool = False


@dataclass(frozen=True)
class Training:
    """How a recipe is trained.

    options       arguments of the strategy
    optimizer     a key of OPTIMIZERS
    sharded       the optimizer is a ShardedOptimizer over the strategy
    microbatches  in each step
    set_to_none   as in zero_grad
    recorded      ZeRO-1 behaves as in a CUDA graph: forwards gather parameters, and steps do not
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    world_size: int = 2
    optimizer: str = "sgd"
    sharded: bool = False
    steps: int = 3
    microbatches: int = 1
    set_to_none: bool = True
    recorded: bool = False


class Block(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.up = nn.Linear(recipe.width, recipe.width + 3, dtype=torch.float64 if recipe.mixed else None)
        self.down = nn.Linear(recipe.width + 3, recipe.width)
        self.register_buffer("scale", torch.rand(recipe.width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        up = torch.tanh(self.up(x.to(self.up.weight.dtype)))
        return x + self.scale * self.down(up.to(self.down.weight.dtype))


class Net(nn.Module):
    """The model of a recipe: x (B, width) -> a loss. `rare`: uses the layer that only rank 0 uses."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        width = recipe.width
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(recipe) for _ in range(recipe.layers))
        self.rare = nn.Linear(width, width) if recipe.rare else None
        self.unused = nn.Linear(width, width) if recipe.unused else None
        self.last = nn.Linear(width, width, bias=False)
        if recipe.tied:
            self.last.weight = self.first.weight
        if recipe.frozen:
            self.layers[0].down.weight.requires_grad_(False)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        if rare and self.rare is not None:
            x = x + self.rare(x)
        return (self.last(x) - 1).square().mean()


def group_of(world_size: int) -> Any:
    """The process group of the first `world_size` ranks. All ranks must call it: groups are made at the first call."""
    if not GROUPS:
        for size in range(1, dist.get_world_size() + 1):
            GROUPS[size] = dist.new_group(range(size))
    return GROUPS[world_size]


def on_first(world_size: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of functions for ranks: the first `world_size` call it with (their group, *args); others get None."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any) -> Any:
            group = group_of(world_size)
            return function(group, *args) if dist.get_rank() < world_size else None

        return run

    return decorate


def on_some(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of functions for ranks that are called with (a world size, *args): see `on_first`."""

    @wraps(function)
    def run(world_size: int, *args: Any) -> Any:
        return on_first(world_size)(function)(*args)

    return run


def by_hand(net: nn.Module, groups: Any) -> Any:
    """An optimizer's first argument: the parameters, or with `groups` a param group for each, with groups(name, p)."""
    if groups is None:
        return net.parameters()
    return [{"params": [p], **groups(name, p)} for name, p in net.named_parameters()]


def batches(recipe: Recipe, training: Training, seed: int) -> Tensor:
    """The inputs of a training: (steps, microbatches, ranks, examples, width)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (training.steps, training.microbatches, training.world_size, 4, recipe.width)
    return torch.randn(shape, generator=generator)


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of these tensors on the CPU."""
    return {name: x.detach().cpu().clone() for name, x in state.items()}


def backward(wrapper: Any, *inputs: Any) -> None:
    """A forward, the backward of its sum, and the synchronization of gradients."""
    wrapper(*inputs).sum().backward()
    wrapper.finish_gradient_synchronization()


def step(wrapper: Any, optimizer: torch.optim.Optimizer, *inputs: Any) -> None:
    """A training step: `backward`, and an update after which there are no gradients."""
    backward(wrapper, *inputs)
    optimizer.step()
    optimizer.zero_grad()


class Trained:
    """The common part of a plain model and one that a strategy wraps. A subclass sets `model` and `optimizer`.

    seen  what can be seen from outside, such as state dicts and norms, in order
    """

    model: Any
    optimizer: Any
    seen: list[dict[str, Tensor]]

    @property
    def is_plain(self) -> bool:
        return not hasattr(self.model, "finish_gradient_synchronization")

    @property
    def net(self) -> Any:
        """The module that the strategy wraps."""
        return self.model if self.is_plain else self.model.module

    def optimizer_by(self, cls: Any, groups: Any = None, **options: Any) -> Any:
        """An optimizer of the whole model."""
        if self.is_plain:
            return cls(by_hand(self.model, groups), **options)
        return self.model.make_optimizer(cls, groups=groups, **options)

    def no_sync(self) -> Any:
        """A context in which backwards send no gradients."""
        return nullcontext() if self.is_plain else self.model.no_sync()

    def finish(self) -> None:
        if not self.is_plain:
            self.model.finish_gradient_synchronization()

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        """Copies of the whole state, on the CPU."""
        return on_cpu(self.model.state_dict() if self.is_plain else self.model.full_state_dict())

    def see(self, **values: Tensor) -> None:
        """Appends copies of these values to `seen`; complex numbers as pairs, FSDP2's DTensors as whole tensors."""
        whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in values.items()}
        real = {name: torch.view_as_real(x) if x.is_complex() else x for name, x in whole.items()}
        self.seen.append(on_cpu(real))


def build_optimizer(wrapper: Any, training: Training, group: Any) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[training.optimizer]
    if training.sharded:
        return ShardedOptimizer(wrapper.parameters(), cls, group, **options)
    return wrapper.make_optimizer(cls, **options)


def train(recipe: Recipe, training: Training, seed: int) -> dict[str, Tensor] | None:
    """Trains on this rank: the full state dict afterwards; None on ranks beyond the training's world size."""
    group, rank = group_of(training.world_size), dist.get_rank()
    if rank >= training.world_size:
        return None
    poison(setattr)
    torch.manual_seed(seed + rank)  # ranks begin differently: the broadcast has to make them equal
    with stand_in(), recording(training.recorded):
        wrapper = STRATEGIES[training.strategy].load()(Net(recipe).to(device()), group, **training.options)
        optimizer = build_optimizer(wrapper, training, group)
        data = batches(recipe, training, seed).to(device())
        for step in data:
            for number, micro in enumerate(step):
                last = number == len(step) - 1
                with nullcontext() if last else wrapper.no_sync():
                    (wrapper(micro[rank], rare=rank == 0) / len(step)).backward()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad(set_to_none=training.set_to_none)
        return on_cpu(wrapper.full_state_dict())


def train_alone(recipe: Recipe, training: Training, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Trains on one process, on the batches of all ranks, in `dtype`: the state dict after the training of `train`."""
    torch.manual_seed(seed)
    model = Net(recipe)
    if dtype == torch.float64:
        model = model.double()
    cls, options = OPTIMIZERS[training.optimizer]
    optimizer = cls(model.parameters(), **options)
    for step in batches(recipe, training, seed).to(dtype):
        losses = [model(x, rare=rank == 0) for micro in step for rank, x in enumerate(micro)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return on_cpu(model.state_dict())


def worst_ratio(results: list[Any], recipe: Recipe, training: Training, seed: int) -> float:
    """The largest ratio of an error to its budget, of all tensors and ranks; at most 1 is right.

    results  what `train` has returned on each rank
    """
    exact = train_alone(recipe, training, seed, torch.float64)
    plain = train_alone(recipe, training, seed, torch.float32)
    states = [state for state in results if state is not None]
    assert len(states) == training.world_size and all(state.keys() == exact.keys() for state in states)
    return max(
        error_ratio(state[name], exact[name].double(), plain[name].float()) for state in states for name in exact
    )


@contextmanager
def use(*targets: tuple[Any, str, Callable[[Any], Any]]) -> Iterator[None]:
    """A context in which attributes are changed. Each target is (owner, name, change): the new value is change(old)."""
    with ExitStack() as patches:
        for owner, name, change in targets:
            patches.enter_context(patch.object(owner, name, change(getattr(owner, name))))
        yield


def stand_in() -> Any:
    """A context in which strategies that need copy engines run over gloo, if ranks have no GPUs."""
    strategies = (CopyEngine, CopyEngineZero1) if device().type == "cpu" else ()
    return use(*((strategy, "over", lambda _: EnginesOverGloo) for strategy in strategies))


def recording(recorded: bool) -> Any:
    """A context in which ZeRO-1 believes that its forwards are recorded in a CUDA graph, or that they are not."""
    return use((Zero1, "_is_being_recorded", lambda _: lambda self: recorded))


def error_of(function: Callable[..., Any], *args: Any) -> str:
    """The exception of a call as a text, "nothing raised" if there is none. It lets a rank go on after an error."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def answer_of(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a call, or its exception as a text."""
    results: list[Any] = []
    error = error_of(lambda: results.append(function(*args)))
    return results[0] if results else error


def copies(x: Any) -> Any:
    """A deep copy of x, for instance of a model that a strategy would change."""
    return copy.deepcopy(x)
