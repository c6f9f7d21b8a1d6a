"""Ways in which users treat a module: operations on a wrapped module on ranks, and on a plain one on one process.

`tests/parallel` runs programs of OPERATIONS by `play` and compares what is seen with `play_alone`, single operations of
ONE_BY_ONE by `do`, and checkpoints between strategies by `save_checkpoint` and `load_checkpoint`. Ranks import this
file. A new operation is a method of `Player` and its name in OPERATIONS, or a function in ONE_BY_ONE.
"""

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from lmsys.parallel import STRATEGIES
from lmsys.parallel.collectives import Pending
from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.group import device
from lmsys.parallel.sharded_optimizer import FlatBuffer, flat_share, whole_state
from lmsys.parallel.zero1 import Zero1
from tests.support.ranks import Net, Recipe, Trained, backward, error_of, on_first, on_some, stand_in, step, use

WIDTH = 5
RECIPE = Recipe(width=WIDTH, tied=True, frozen=True)  # with two weights that are one, and one that is not trained
LR = 0.05


@dataclass
class Player(Trained):
    """A model, wrapped by a strategy or plain, on which a program of operations is done.

    ranks  the ranks whose batches it trains on: its own, or for a plain model all
    saved  the state dict that `save` has written

    `play` sets `batch` (ranks, micro-batches, examples, WIDTH) before each operation.
    """

    model: nn.Module
    ranks: Sequence[int]
    dtype: torch.dtype
    seen: list[dict[str, Tensor]] = field(default_factory=list)
    saved: bytes = b""

    def __post_init__(self) -> None:
        self.new_optimizer()
        self.save()

    def play(self, program: Sequence[str]) -> list[dict[str, Tensor]]:
        """Does these OPERATIONS in turn, each with a batch of its own; returns `seen`."""
        for number, name in enumerate(program):
            batch = torch.randn(2, 2, 3, WIDTH, generator=torch.Generator().manual_seed(number))
            self.batch = batch.to(device(), self.dtype)
            getattr(self, name)()
        self.state()
        return self.seen

    def loss(self, micro: int) -> Tensor:
        """The mean loss of `ranks` on this micro-batch."""
        return torch.stack([self.model(self.batch[rank, micro]) for rank in self.ranks]).mean()

    def backward(self) -> None:
        """The backward of the first micro-batch, and the synchronization of gradients."""
        self.loss(0).backward()
        self.finish()

    def step(self) -> None:
        self.backward()
        self.apply()

    def late_step(self) -> None:
        """A step with a forward between its gradients and the optimizer, which outdates what that forward gathered."""
        self.backward()
        if isinstance(self.model, Fsdp):
            self.model.finish_gradient_synchronization()  # there is nothing to do: gradients stay as they are
        self.look()
        self.apply()

    def accumulate(self) -> None:
        """A step with the gradients of both micro-batches, which are synchronized once."""
        if self.is_plain:
            self.loss(1).backward()
        else:
            with self.model.no_sync():
                self.loss(1).backward()
        self.step()

    def gradients(self) -> None:
        """Appends to `seen` the gradients that this rank has at the module's parameters, with fsdp after `unshard`."""
        self.backward()
        if isinstance(self.model, Fsdp):
            parts = {name: p.grad for name, p in self.net.named_parameters() if p.requires_grad}
            assert all(x is not None and x.dim() == 1 for x in parts.values())
            self.model.unshard()
        if isinstance(self.model, Zero1):
            own = [p for p, owner in self.model.owners.items() if owner == self.model.rank]
            assert {id(p) for p in own} == {id(p) for p in self.net.parameters() if p.grad is not None}
        self.see(**{f"gradient of {n}": p.grad for n, p in self.net.named_parameters() if p.grad is not None})
        self.apply()

    def evaluate(self) -> None:
        """Appends the result of the model in evaluation to `seen`."""
        self.model.eval()
        with torch.no_grad():
            self.see(evaluated=self.model(self.batch[0, 0]))
        self.model.train()

    def look(self) -> None:
        """A forward without a backward."""
        self.see(forward=self.model(self.batch[0, 0]))

    def read(self) -> None:
        """Appends to `seen` the module's parameters, by named_parameters() and by state_dict()."""
        if isinstance(self.model, Fsdp):
            self.model.unshard()
        self.see(**dict(self.net.named_parameters()))
        self.see(**self.net.state_dict())

    def step_after_unshard(self) -> None:
        """A step after `unshard`: parameters that were whole before the step are sharded again after it."""
        if isinstance(self.model, Fsdp):
            self.model.unshard()
        self.backward()
        if isinstance(self.model, Fsdp):
            self.model.unshard()
        self.apply()
        if isinstance(self.model, Fsdp):
            assert "was read that fsdp has divided" in error_of(lambda: self.net.first.weight.sum())
        self.state()

    def state(self) -> None:
        self.see(**self.whole())

    def save(self) -> None:
        file = io.BytesIO()
        torch.save(self.whole(), file)
        self.saved = file.getvalue()

    def load(self) -> None:
        result = self.model.load_state_dict(torch.load(io.BytesIO(self.saved)))
        assert not result.missing_keys and not result.unexpected_keys

    def new_optimizer(self) -> None:
        self.optimizer = self.optimizer_by(torch.optim.SGD, lr=LR, momentum=0.9)

    def zero(self) -> None:
        """Computes gradients, and drops them."""
        self.backward()
        self.model.zero_grad()

    def stay(self) -> None:
        """Calls that must return the model itself, and leave its parameters as they are."""
        assert self.model.to(self.dtype) is self.model and self.model.train() is self.model
        assert "Linear" in repr(self.model)
        assert len(list(self.net.parameters())) == len(list(Net(RECIPE).parameters()))


OPERATIONS = (
    "step late_step step_after_unshard accumulate gradients evaluate look read state save load new_optimizer zero stay"
).split()


@on_first(2)
def play(group: Any, strategy: str, program: Sequence[str]) -> list[dict[str, Tensor]] | str:
    """Does these OPERATIONS on one of two ranks: what the player has seen, or the error as a text."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    seen: list[dict[str, Tensor]] = []
    with deferred(), stand_in():
        error = error_of(lambda: seen.extend(_player(strategy, group, rank).play(program)))
    return seen if error == "nothing raised" else error


def deferred() -> Any:
    """A context in which parameters that ZeRO-1 gathers arrive only when they are waited for."""

    def late(gather: Any) -> Any:
        """Replaces FlatBuffer.gather: gathers into a copy, and fills the buffer when it is waited for."""

        def gather_late(self: FlatBuffer, rank: int, group: Any) -> Pending:
            elsewhere = replace(self, flat=self.flat.clone())
            gather(elsewhere, rank, group).wait()
            return Pending(then=lambda: self.flat.copy_(elsewhere.flat))

        return gather_late

    return use((FlatBuffer, "gather", late))


def _player(strategy: str, group: Any, rank: int) -> Player:
    return Player(STRATEGIES[strategy].load()(Net(RECIPE).to(device()), group), [rank], torch.float32)


def play_alone(program: Sequence[str], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Does these OPERATIONS on a plain module, with the batches of both ranks: what the player has seen."""
    torch.manual_seed(0)
    return Player(Net(RECIPE).to(dtype), [0, 1], dtype).play(program)


def _ones() -> Tensor:
    return torch.ones(1, WIDTH, device=device())


# Single operations, done after a step, of a wrapper and its rank. Each returns a text that is equal on both ranks.


def _sum_of_parameters(wrapper: nn.Module, _: Any) -> str:
    return _compare_ranks(wrapper, torch.stack([p.detach().sum() for p in wrapper.module.parameters()]))


def _state_dict(wrapper: nn.Module, _: Any) -> str:
    return _compare_ranks(wrapper, torch.cat([x.flatten() for x in wrapper.state_dict().values()]))


def _state_of_module(wrapper: nn.Module, _: Any) -> str:
    return _compare_ranks(wrapper, torch.cat([x.flatten() for x in wrapper.module.state_dict().values()]))


def _compare_ranks(wrapper: nn.Module, x: Tensor) -> str:
    """A text that says if x has equal values on both ranks."""
    others = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(others, x, group=wrapper.group)
    return "the same on all ranks" if torch.equal(*others) else "ranks differ"


def _load_state_dict(wrapper: nn.Module, _: Any) -> str:
    state = {name: torch.full_like(x, 2.0) for name, x in wrapper.full_state_dict().items()}
    wrapper.load_state_dict(state)
    return f"loaded: {all((x == 2).all() for x in wrapper.full_state_dict().values())}"


def _load_other_module(wrapper: nn.Module, _: Any) -> str:
    state = wrapper.full_state_dict()
    del state["first.weight"]
    return str(wrapper.load_state_dict(state | {"what": torch.ones(1)}))


def _deepcopy(wrapper: nn.Module, _: Any) -> str:
    return type(copy.deepcopy(wrapper)).__name__


def _deepcopy_module(wrapper: nn.Module, _: Any) -> str:
    copied = copy.deepcopy(wrapper.module)
    with torch.no_grad():
        return f"as the original: {bool(copied(_ones()) == wrapper(_ones()))}"


def _save_wrapper(wrapper: nn.Module, _: Any) -> str:
    torch.save(wrapper, io.BytesIO())
    return "saved"


def _save_state(wrapper: nn.Module, _: Any) -> str:
    file = io.BytesIO()
    torch.save(wrapper.full_state_dict(), file)
    file.seek(0)
    Net(RECIPE).load_state_dict(torch.load(file))
    return "a plain module loads it"


def _to_same(wrapper: nn.Module, _: Any) -> str:
    return "itself" if wrapper.to(torch.float32) is wrapper else "another"


def _to_other(wrapper: nn.Module, _: Any) -> str:
    return str(wrapper.to(torch.float64))


def _step_over_wrapper(wrapper: nn.Module, _: Any) -> str:
    return _stepped(wrapper, torch.optim.SGD(wrapper.parameters(), lr=LR))


def _step_over_module(wrapper: nn.Module, _: Any) -> str:
    return _stepped(wrapper, torch.optim.SGD(wrapper.module.parameters(), lr=LR))


def _stepped(wrapper: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Does a training step; a text that says if it changed the last weight, and to equal values on both ranks."""
    before = wrapper.full_state_dict()["last.weight"].clone()
    step(wrapper, optimizer, _ones())
    after = wrapper.full_state_dict()["last.weight"]
    # Both ranks call this, which communicates: on a GPU one alone may have noticed that a parameter was replaced.
    compared = _compare_ranks(wrapper, after)
    return compared if not torch.equal(before, after) else "nothing was trained"


def _zero_grad(wrapper: nn.Module, _: Any) -> str:
    backward(wrapper, _ones())
    wrapper.zero_grad()
    left = sum(float(p.grad.abs().sum()) for p in wrapper.parameters() if p.grad is not None)
    return f"gradients left: {left}"


def _forward_hook(wrapper: nn.Module, _: Any) -> str:
    seen: list[float] = []
    wrapper.module.layers[0].register_forward_hook(lambda block, x, y: seen.append(float(y.sum())))
    wrapper(_ones())
    return f"called {len(seen)} times"


def _replaced_on_one_rank(wrapper: nn.Module, rank: int) -> str:
    if rank == 1:
        wrapper.module.last.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=device()))
    return _two_steps(wrapper)


def _added_on_all_ranks(wrapper: nn.Module, _: Any) -> str:
    wrapper.module.last.more = nn.Parameter(torch.ones(1, device=device()))
    return _two_steps(wrapper)


def _removed_on_one_rank(wrapper: nn.Module, rank: int) -> str:
    if rank == 0:
        wrapper.module.layers[1].down.register_parameter("bias", None)
    return _two_steps(wrapper)


def _two_steps(wrapper: nn.Module) -> str:
    """Two steps. On GPUs a changed module is only refused in the second."""
    optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=LR)
    _stepped(wrapper, optimizer)
    return _stepped(wrapper, optimizer)


def _moved_module(wrapper: nn.Module, _: Any) -> str:
    wrapper.module.double().float()  # the parameters have their dtype, but are other tensors than before
    return _stepped(wrapper, wrapper.make_optimizer(torch.optim.SGD, lr=LR))


Operation = Callable[[nn.Module, Any], str]
ONE_BY_ONE: dict[str, Operation] = {
    "read the module's parameters": _sum_of_parameters,
    "state_dict()": _state_dict,
    "module.state_dict()": _state_of_module,
    "load_state_dict()": _load_state_dict,
    "load_state_dict() of another module": _load_other_module,
    "copy.deepcopy": _deepcopy,
    "copy.deepcopy of the module": _deepcopy_module,
    "torch.save of the wrapper": _save_wrapper,
    "torch.save of full_state_dict()": _save_state,
    ".to() where it is": _to_same,
    ".to() of another dtype": _to_other,
    "an optimizer over parameters()": _step_over_wrapper,
    "an optimizer over module.parameters()": _step_over_module,
    "zero_grad()": _zero_grad,
    "a forward hook": _forward_hook,
    "a parameter replaced on one rank": _replaced_on_one_rank,
    "a parameter added on all ranks": _added_on_all_ranks,
    "a parameter removed on one rank": _removed_on_one_rank,
    "module.to() of another dtype": _moved_module,
}


@on_first(2)
def do(group: Any, strategy: str, operation: str) -> str:
    """Does an operation of ONE_BY_ONE on one of two ranks, just after a step: its text, or its error as a text."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    texts: list[str] = []
    with deferred():
        player = _player(strategy, group, rank)
        player.play(["step", "step"])
        player.step()
        error = error_of(lambda: texts.append(ONE_BY_ONE[operation](player.model, rank)))
    return texts[0] if texts else error


# Checkpoints of torch.distributed.checkpoint, from one strategy to another.


@on_some
def save_checkpoint(group: Any, strategy: str, folder: str) -> dict[str, Tensor]:
    """Saves a model, on a rank, and returns its whole state dict."""
    torch.manual_seed(dist.get_rank())
    state, whole = _state_of(_built(strategy, group), strategy)
    dcp.save(state, checkpoint_id=folder, process_group=group)
    return whole


@on_some
def load_checkpoint(group: Any, strategy: str, folder: str) -> dict[str, Tensor]:
    """Loads that checkpoint into a model with other weights, and returns its whole state dict."""
    torch.manual_seed(100 + dist.get_rank())
    model = _built(strategy, group)
    state, _ = _state_of(model, strategy)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    if strategy in ("plain", "torch_fsdp2"):
        getattr(model, "module", model).load_state_dict(state)
    else:
        model.load_state_dict(state)
    return _state_of(model, strategy)[1]


def _built(strategy: str, group: Any) -> nn.Module:
    """A model in the wrapper of the strategy; with "plain" the model itself."""
    net = Net(Recipe(width=WIDTH)).to(device())
    return net if strategy == "plain" else STRATEGIES[strategy].load()(net, group)


def _state_of(model: nn.Module, strategy: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(the state dict that is saved, perhaps sharded; the whole state dict)"""
    if strategy == "plain":
        state = model.state_dict()
        return state, {name: x.clone() for name, x in state.items()}
    state = model.module.state_dict() if strategy == "torch_fsdp2" else model.sharded_state_dict()
    return state, {name: x.clone() for name, x in model.full_state_dict().items()}


# Optimizer states, divided among ranks.


def divided(optimizer: torch.optim.Optimizer, module: nn.Module, *world_sizes: int) -> list[Any]:
    """The shares of an optimizer's state for the last number of ranks.

    AssertionError unless the state is equal once it was divided and joined for each number of ranks in turn.
    """
    groups, state = [[*module.parameters()]], optimizer.state_dict()
    for world_size in world_sizes:
        shares = [flat_share(state, module, rank, world_size, groups) for rank in range(world_size)]
        assert len({len(share["state"][0]["exp_avg"]) for share in shares}) == 1
        state = whole_state(shares, module, groups)
        counters = [held["step"] for held in state["state"].values()]
        assert len(set(map(id, counters))) == len(counters)  # no two are one tensor: each is incremented in place
    torch.testing.assert_close(state["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    return shares
