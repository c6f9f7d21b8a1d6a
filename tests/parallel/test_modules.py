"""Strategies used as people use a module: single operations end as expected, and programs equal a plain module's.

A single operation, such as "copy.deepcopy", yields a text or an error (tests/support/modules.py). A new one also has
its expected text in EXPECTED, and in OTHERWISE if a strategy has another. A program is a list of operations that train
a module or read it (tests/support/players.py).
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lmsys.parallel import structure
from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.group import WorkerGroup
from lmsys.parallel.part import Absent
from lmsys.testing import error_ratio
from tests.support.modules import GRAPH, ONE_BY_ONE, divided, do, play
from tests.support.players import OPERATIONS, play_alone
from tests.support.ranks import Net, Recipe
from tests.support.variants import by_default_all_but

recipes = st.builds(Recipe, width=st.integers(1, 9), tied=st.booleans(), frozen=st.booleans(), mixed=st.booleans())
REPLICATED = ("naive", "flat", "overlapped", "bucketed")
STRATEGIES = (*REPLICATED, "zero1", "fsdp")
BY_COPY_ENGINES = ("copy_engine", "copy_engine_zero1")
WHOLE = "the same on all ranks"
NO_COPY = "TypeError: a {} cannot be copied or saved as a whole, as it holds a process group and hooks: copy or save"
READ = "RuntimeError: a parameter of shape (5, 5) was read that fsdp has divided among ranks: full_state_dict() gives"
CHANGED = "after the module was wrapped: no gradient of it would be synchronized; wrap the module as it is now"
ADDED = "the parameter last.more was added"
EXPECTED = {  # {operation: how its text begins on all strategies that OTHERWISE does not name}
    "read the module's parameters": WHOLE,
    "state_dict()": WHOLE,
    "module.state_dict()": WHOLE,
    "load_state_dict()": "loaded: True",
    "load_state_dict() of another module": "RuntimeError",
    "copy.deepcopy": NO_COPY,
    "copy.deepcopy of the module": "as the original: True",
    "torch.save of the wrapper": NO_COPY,
    "torch.save of full_state_dict()": "a plain module loads it",
    ".to() where it is": "itself",
    ".to() of another dtype": "ValueError: ",
    "an optimizer over parameters()": WHOLE,
    "an optimizer over module.parameters()": WHOLE,
    "zero_grad()": "gradients left: 0",
    "a forward hook": "called 1 times",
    "a parameter replaced on one rank": f"ValueError: on rank 1 the parameter last.weight was replaced, {CHANGED}",
    "a parameter added on all ranks": f"ValueError: on rank 0 {ADDED}; on rank 1 {ADDED}, {CHANGED}",
    "a parameter removed on one rank": f"ValueError: on rank 0 the parameter layers.1.down.bias was removed, {CHANGED}",
    "module.to() of another dtype": WHOLE,
    "another .data of one parameter": WHOLE,
    "LBFGS": WHOLE,
    "a forward without finish": "RuntimeError: a backward was not followed by finish_gradient_synchronization()",
    "a forward after finish": "its gradients were synchronized: True",
}
OTHERWISE = {  # {(strategy, operation): how its text begins there}
    ("zero1", "an optimizer over parameters()"): "ValueError: this SGD holds parameters whose gradients ZeRO-1 has",
    ("zero1", "an optimizer over module.parameters()"): "ValueError: this SGD holds parameters whose gradients ZeRO-1",
    ("zero1", "module.to() of another dtype"): "ValueError: a parameter was moved, cast or given another .data after",
    ("zero1", "another .data of one parameter"): "ValueError: a parameter was moved, cast or given another .data after",
    ("zero1", "LBFGS"): "ValueError: LBFGS looks at all gradients at once",
    ("fsdp", "read the module's parameters"): READ,
    ("fsdp", "state_dict()"): "RuntimeError: fsdp has no state dict of one rank alone: on all ranks, full_state_dict()",
    ("fsdp", "module.state_dict()"): READ,
    ("fsdp", "copy.deepcopy of the module"): READ,
    (
        "fsdp",
        "an optimizer over module.parameters()",
    ): "ValueError: this optimizer holds the module's parameters, which",
    ("fsdp", "module.to() of another dtype"): READ,
    ("fsdp", "another .data of one parameter"): READ,
    ("fsdp", "LBFGS"): "ValueError: LBFGS looks at all gradients at once",
}


@pytest.mark.parametrize("operation", ONE_BY_ONE)
# By default `bucketed` stands in for the strategies named here.
@pytest.mark.parametrize("strategy", by_default_all_but(STRATEGIES, "naive", "flat", "overlapped"))
def test_an_operation_just_after_a_step(ranks: WorkerGroup, strategy: str, operation: str) -> None:
    first, second = ranks.run(do, strategy, operation)[:2]
    expected = OTHERWISE.get((strategy, operation), EXPECTED[operation])
    name = {"zero1": "Zero1"}.get(strategy, strategy.capitalize())
    assert first == second
    assert first.startswith(expected.format(name)), first


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ONE_BY_ONE)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_operation_just_after_a_step_on_gpus(gpu_ranks: WorkerGroup, strategy: str, operation: str) -> None:
    test_an_operation_just_after_a_step(gpu_ranks, strategy, operation)


@settings(max_examples=30)
@given(
    strategy=st.sampled_from([*STRATEGIES, *BY_COPY_ENGINES]),
    program=st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=12),
)
def test_any_program_is_as_on_a_plain_module(ranks: WorkerGroup, strategy: str, program: list[str]) -> None:
    is_as_on_a_plain_module(ranks, strategy, program)


def is_as_on_a_plain_module(ranks: WorkerGroup, strategy: str, program: list[str]) -> None:
    """AssertionError unless a strategy's values, after each operation, equal those of one process but for rounding."""
    exact, plain = (play_alone(GRAPH, program, dtype) for dtype in (torch.float64, torch.float32))
    for seen in ranks.run(play, strategy, program)[:2]:
        assert not isinstance(seen, str), seen
        for values, right, rounded in zip(seen, exact, plain, strict=True):
            assert values.keys() <= right.keys()
            for name, x in values.items():
                assert error_ratio(x, right[name].double(), rounded[name].float()) <= 1, name


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", (*STRATEGIES, *BY_COPY_ENGINES))
@pytest.mark.parametrize("program", [[*OPERATIONS], [*reversed(OPERATIONS)], ["late_look", "step", "read"]])
def test_a_program_is_as_on_a_plain_module_on_gpus(gpu_ranks: WorkerGroup, strategy: str, program: list[str]) -> None:
    is_as_on_a_plain_module(gpu_ranks, strategy, program)


@given(recipe=recipes, world_sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_optimizer_state_is_divided_among_ranks_and_joined_again(recipe: Recipe, world_sizes: tuple[int, int]) -> None:
    """AdamW's state is divided and joined for one number of ranks, and then for another."""
    module = Net(recipe)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(3, recipe.width)).backward()
    for p in module.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
    optimizer.step()
    divided(optimizer, module, *world_sizes)


def test_looking_for_changes_runs_no_python_for_a_freed_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in every forward, in which all parameters of fsdp are freed."""
    wrapper = Fsdp(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    read: list[str] = []
    plain = Absent.__torch_function__

    def counted(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read.append(func.__name__)
        return plain(func, types, args, kwargs)

    monkeypatch.setattr(Absent, "__torch_function__", classmethod(counted))
    assert next(wrapper.module.parameters()).requires_grad and read  # so a read is counted
    read.clear()
    assert wrapper._structure.is_as_it_was() and not read


def test_a_parameter_that_is_moved_or_added_is_a_change() -> None:
    """Also where the module that gets it held none before."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = structure.Structure(module)
    assert before.is_as_it_was()
    module[1].register_parameter("slope", nn.Parameter(torch.ones(())))
    assert not before.is_as_it_was() and before.change() == "the parameter 1.slope was added"
    before = structure.Structure(module)
    module[1].register_parameter("bias", module[0]._parameters.pop("bias"))
    assert not before.is_as_it_was()
