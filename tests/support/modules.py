"""Ways in which users treat a module that a strategy has wrapped, on ranks.

`tests/parallel` runs programs of OPERATIONS (tests/support/players.py) by `play`, and single operations of ONE_BY_ONE
by `do`. Ranks import this file. A new single operation is a function in ONE_BY_ONE.
"""

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmsys.parallel import STRATEGIES
from lmsys.parallel.collectives import Pending
from lmsys.parallel.group import device
from lmsys.parallel.sharded_optimizer import FlatBuffer, flat_share, whole_state
from tests.support import players
from tests.support.graphs import Call, Graph
from tests.support.ranks import Net, Recipe, answer_of, backward, error_of, on_first, step, use

WIDTH = 5
RECIPE = Recipe(width=WIDTH, tied=True, frozen=True)  # with two weights that are one, and one that is not trained
LR = 0.05
# A module with two weights that are one, and with some that are not trained.
GRAPH = Graph(((Call("call", 0), Call("call", 1)),), ("half", "mlp"), tied=True, optimizer="momentum")


@on_first(2)
def play(_: Any, strategy: str, program: Sequence[str]) -> list[dict[str, Tensor]] | str:
    """Does these OPERATIONS on one of two ranks: what the player has seen, or the error as a text."""
    with deferred():
        return players.play(strategy, GRAPH, program)


def deferred() -> Any:
    """A context in which parameters that ZeRO-1 gathers arrive only when they are waited for."""

    def late(gather: Any) -> Any:
        """Replaces FlatBuffer.gather: gathers into a copy, and fills the buffer when it is waited for."""

        def gather_late(self: FlatBuffer, group: Any) -> Pending:
            elsewhere = replace(self, flat=self.flat.clone())
            gather(elsewhere, group).wait()
            return Pending(then=lambda: self.flat.copy_(elsewhere.flat))

        return gather_late

    return use((FlatBuffer, "gather", late))


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


def _other_data(wrapper: nn.Module, _: Any) -> str:
    wrapper.module.last.weight.data = torch.ones(WIDTH, WIDTH, device=device())
    return _stepped(wrapper, wrapper.make_optimizer(torch.optim.SGD, lr=LR))


def _lbfgs(wrapper: nn.Module, _: Any) -> str:
    def loss() -> Tensor:
        backward(wrapper, _ones())
        return torch.ones(())

    wrapper.make_optimizer(torch.optim.LBFGS, max_iter=2).step(loss)
    return _sum_of_parameters(wrapper, _)


def _forward_without_finish(wrapper: nn.Module, _: Any) -> str:
    with wrapper.no_sync():
        wrapper(_ones()).backward()
    wrapper(_ones()).backward()
    return f"a forward went on: {wrapper(_ones())}"


def _forward_after_finish(wrapper: nn.Module, rank: int) -> str:
    assert error_of(_forward_without_finish, wrapper, rank) != "nothing raised"
    wrapper.finish_gradient_synchronization()
    return f"its gradients were synchronized: {bool(wrapper(_ones()).isfinite())}"


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
    "another .data of one parameter": _other_data,
    "LBFGS": _lbfgs,
    "a forward without finish": _forward_without_finish,
    "a forward after finish": _forward_after_finish,
}


@on_first(2)
def do(group: Any, strategy: str, operation: str) -> str:
    """Does an operation of ONE_BY_ONE on one of two ranks, just after a step: its text, or its error as a text."""
    torch.manual_seed(dist.get_rank())
    with deferred():
        wrapper = STRATEGIES[strategy].load()(Net(RECIPE).to(device()), group)
        optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=LR, momentum=0.9)
        for _ in range(3):
            step(wrapper, optimizer, torch.randn(3, WIDTH, device=device()))
        return answer_of(ONE_BY_ONE[operation], wrapper, dist.get_rank())


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
