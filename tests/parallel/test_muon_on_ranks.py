"""Muon on ranks that each own some of the matrices: steps have the bits of ranks that each do all the work.

A rank steps the matrices that it owns, and has their optimizer state. `TreeSums` adds gradients of ranks in one order
under every strategy, so that bits can be compared.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.data_parallel.passes import TorchMuon
from lmsys.config import model_config
from lmsys.cost.operations import newton_schulz_flops
from lmsys.model import TransformerLM
from lmsys.parallel import STRATEGIES, collectives
from lmsys.parallel.buckets import plan_segments
from lmsys.parallel.group import WorkerGroup, device
from lmsys.parallel.sharded_optimizer import ShardedOptimizer
from lmsys.parallel.structure import grouped
from lmsys.parallel.wrapper import whole
from lmsys.testing import ratio_of
from lmsys.training.muon import Muon, matrix_groups
from tests.support import ranks as on_ranks
from tests.support.ranks import Net, Recipe, on_first, on_some, step

flags = st.booleans()
recipes = st.builds(
    Recipe, width=st.integers(1, 9), layers=st.integers(1, 4), tied=flags, frozen=flags, unused=flags, mixed=flags
)
REPLICATED = "none", "naive", "flat", "overlapped", "bucketed"
OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.8}


def _owned(strategy: str, wrapper: Any, net: Net, group: Any, **options: Any) -> Any:
    """The optimizer in which each rank steps the parameters that it owns."""
    if strategy not in REPLICATED:
        return wrapper.make_optimizer(Muon, groups=matrix_groups(net), **options)
    return ShardedOptimizer(grouped(net, matrix_groups(net)), Muon, collectives.unwrapped(group), **options)


@on_some
def _steps(group: Any, recipe: Recipe, strategy: str, owned: bool, batched: bool, seed: int) -> Any:
    """On a rank: (before, after, held, owners, gathers).

    before, after  the model's state before and after three steps
    held           the numbers of the parameters whose optimizer state this rank has
    owners         for each parameter, the rank that owns it
    gathers        all-gathers of a step
    """
    tree, rank, world_size = collectives.TreeSums(group), dist.get_rank(), dist.get_world_size(group)
    torch.manual_seed(seed)
    net = Net(recipe).to(device())
    wrapper = STRATEGIES[strategy].load()(net, tree)
    options = OPTIONS | {"batched": batched}
    if owned:
        optimizer = _owned(strategy, wrapper, net, tree, **options)
    else:
        optimizer = wrapper.make_optimizer(Muon, groups=matrix_groups(net), **options)
    before = on_ranks.copies(wrapper.full_state_dict())
    gathers: list[int] = []

    def counting(real: Any) -> Any:
        return lambda out, x, *rest: gathers.append(x.numel()) or real(out, x, *rest)

    data = torch.randn(3, world_size, 4, recipe.width, generator=torch.Generator().manual_seed(seed)).to(device())
    with on_ranks.use((collectives, "all_gather", counting)):
        for x in data:
            step(wrapper, optimizer, x[rank if strategy != "none" else 0])
        after = on_ranks.copies(wrapper.full_state_dict())
    params = [p for params_of in optimizer.param_groups for p in params_of["params"]]
    held = {number for number, p in enumerate(params) if optimizer.state.get(p)}
    owners = getattr(optimizer, "owners", dict.fromkeys(params, rank))
    return before, after, held, [owners[p] for p in params], len(gathers) / len(data)


@settings(max_examples=24)
@given(
    recipe=recipes,
    strategy=st.sampled_from([*REPLICATED, "zero1", "fsdp"]),
    world_size=st.sampled_from([1, 2, 4]),
    batched=flags,
    seed=st.integers(0, 99),
)
def test_owners_step_as_ranks_that_do_all_the_work(
    ranks: WorkerGroup, recipe: Recipe, strategy: str, world_size: int, batched: bool, seed: int
) -> None:
    """Bits are equal if each matrix is orthogonalized by itself. A batch of other matrices may round otherwise."""
    plain = "none" if strategy == "none" else "naive"
    replicated = ranks.run(_steps, world_size, recipe, plain, False, batched, seed)[:world_size]
    owned = ranks.run(_steps, world_size, recipe, strategy, True, batched, seed)[:world_size]
    for rank, (reference, result) in enumerate(zip(replicated, owned, strict=True)):
        (before, expected, *_), (start, state, held, owners, gathers) = reference, result
        assert all(torch.equal(before[name], x) for name, x in start.items())
        if strategy != "fsdp":  # where every rank has a part of each parameter's state
            assert all(owners[number] == rank for number in held) and owners == owned[0][3]
        assert gathers <= 6 or strategy == "fsdp"  # two groups of parameters, of two dtypes each; zero1: its buckets
        for name, x in expected.items():
            same = torch.equal(state[name], x)
            assert same if not batched else same or _ratio(state[name], x, before[name]) <= 1
    if strategy != "fsdp":
        assert set.union(*(held for _, _, held, *_ in owned)) == replicated[0][2]


def _ratio(state: Tensor, expected: Tensor, before: Tensor) -> float:
    """The error of the change since `before`, over what bfloat16's rounding allows."""
    moved, reference = state.double() - before, expected.double() - before
    return ratio_of(moved, reference, reference, torch.bfloat16, mean=False)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_the_whole_state_has_the_names_and_numbers_of_one_process(ranks: WorkerGroup, strategy: str) -> None:
    """It also loads under another strategy. Before the first step it is zero."""
    expected, _ = ranks.run(_whole_states, "naive")[0]
    for first, last in ranks.run(_whole_states, strategy)[:2]:
        for state in (first, last):
            assert state.keys() == expected.keys()
            for name, tensors in expected.items():
                assert state[name].keys() == tensors.keys()
                assert all(torch.equal(state[name][key], x) for key, x in tensors.items()), name


@on_first(2)
def _whole_states(group: Any, strategy: str) -> Any:
    """On a rank: [the optimizer's whole state after two steps, the same once loaded into another strategy]."""
    tree, states, held = collectives.TreeSums(group), [], None
    for name in (strategy, "fsdp" if strategy == "zero1" else "zero1"):
        torch.manual_seed(0)
        net = Net(Recipe(width=5, tied=True)).to(device())
        wrapper = STRATEGIES[name].load()(net, tree)
        optimizer = wrapper.make_optimizer(Muon, groups=matrix_groups(net), batched=False, **OPTIONS)
        zeros = wrapper.full_optimizer_state_dict(optimizer)["state"]
        assert not any(state["momentum_buffer"].any() for state in zeros.values() if "momentum_buffer" in state)
        if held is None:
            for x in torch.randn(2, 2, 4, 5, generator=torch.Generator().manual_seed(1)).to(device()):
                step(wrapper, optimizer, x[dist.get_rank()])
        else:
            wrapper.load_optimizer_state_dict(optimizer, held)
        held = wrapper.full_optimizer_state_dict(optimizer)
        states.append({key: {k: v.cpu() for k, v in state.items()} for key, state in held["state"].items()})
    return states


@settings(max_examples=12)
@given(
    recipe=st.builds(Recipe, width=st.integers(2, 9), layers=st.integers(1, 3), tied=flags, frozen=flags, unused=flags),
    strategy=st.sampled_from(["torch_ddp", "torch_fsdp2", "torch_fsdp2_zero2"]),
    seed=st.integers(0, 99),
)
def test_torchs_muon_steps_on_ranks_as_in_one_process(
    ranks: WorkerGroup, recipe: Recipe, strategy: str, seed: int
) -> None:
    """Also DTensors, whose products it divides among ranks, and adds up in bfloat16.

    A DTensor has as many rows as ranks here, or more: torch refuses to step others.
    """
    for moved, exact in ranks.run(_steps_of_torch, recipe, strategy, seed)[:2]:
        assert (moved - exact).norm() <= 4 * torch.finfo(torch.bfloat16).eps * exact.norm()


@on_first(2)
def _steps_of_torch(group: Any, recipe: Recipe, strategy: str, seed: int) -> Any:
    """On a rank: how far three steps by given gradients move parameters, under the strategy and in float64 without it.

    Gradients are of full rank: rounding decides how far a step goes in directions that a gradient lacks.
    """
    moved = []
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-2}
    for is_exact in (False, True):
        torch.manual_seed(seed)
        net = Net(recipe).to(device(), torch.float64 if is_exact else None)
        before = [p.detach().clone().double() for p in net.parameters()]
        if not is_exact:
            STRATEGIES[strategy].load()(net, group)
        kind = partial(Muon, ns_dtype=torch.float64) if is_exact else TorchMuon
        optimizer = kind(grouped(net, matrix_groups(net)), adjust_lr_fn="match_rms_adamw", **options)
        for _ in range(3):
            for p in net.parameters():
                grad = torch.randn(p.shape).to(p.device, p.dtype)
                divided = isinstance(p, DTensor)
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if divided else grad
            optimizer.step()
        steps = [whole(p.detach()).double() - x for p, x in zip(net.parameters(), before, strict=True)]
        moved.append(torch.cat([x.flatten() for x in steps]))
    return moved


costs = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=12)


@given(costs, st.integers(1, 8))
def test_matrices_are_shared_out_by_the_cost_of_their_steps(sizes: list[tuple[int, int]], world_size: int) -> None:
    """Matrices go, the most expensive first, to the rank with the least work. So the work of two ranks differs by that
    of one matrix at most."""
    work = [newton_schulz_flops(*size, 5) for size in sizes]
    numels, loads = [rows * columns for rows, columns in sizes], [0] * world_size
    (segmented,) = plan_segments(numels, range(len(sizes)), 2**26, world_size, None, loads, work)
    assert sorted(segmented.indices) == list(range(len(sizes)))
    assert loads == [sum(work[index] for index in owned) for owned in segmented.members]
    assert max(loads) - min(loads) <= max(work)
    assert segmented.length >= max(sum(numels[index] for index in owned) for owned in segmented.members)


@pytest.mark.parametrize(("use_muon", "owners"), [(True, [0, 1, 1]), (False, [0, 1, 0])])
def test_the_optimizers_cost_decides_who_owns_a_matrix(use_muon: bool, owners: list[int]) -> None:
    """These thin matrices have as many elements as the square one, and cost less to orthogonalize."""
    params = [torch.ones(shape, requires_grad=True) for shape in ((32, 32), (1, 1024), (1, 1024))]
    optimizer = _as_rank([{"params": params, "use_muon": use_muon}], 0, 2)
    assert [optimizer.owners[p] for p in params] == owners


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_work_of_a_transformer_comes_out_even(world_size: int) -> None:
    """Embeddings do not count: they have many elements, but are not orthogonalized."""
    model = TransformerLM(model_config("tiny", num_layers=8))
    groups = grouped(model, matrix_groups(model))
    optimizers = [_as_rank(groups, rank, world_size) for rank in range(world_size)]
    loads = []
    for optimizer in optimizers:
        by_muon = [group for group in optimizer._local.param_groups if group["use_muon"]]
        loads.append(sum(newton_schulz_flops(*p.shape, 5) for group in by_muon for p in group["params"]))
    assert max(loads) <= 1.02 * sum(loads) / world_size
    owned = [group["params"] for optimizer in optimizers for group in optimizer._local.param_groups]
    assert sum(map(len, owned)) == len([*model.parameters()])


def _as_rank(groups: list[Any], rank: int, world_size: int) -> ShardedOptimizer:
    """The optimizer that this rank of `world_size` would make."""
    with on_ranks.use((collectives, "size_and_rank", lambda _: lambda group: (world_size, rank))):
        return ShardedOptimizer([dict(group) for group in groups], Muon)


def test_three_replicated_ranks_step_as_one(ranks: WorkerGroup) -> None:
    """Gradients are given here, and equal on all ranks: `TreeSums` could not add them."""
    results = ranks.run(_given_gradients, 3)[:3]
    assert all(torch.equal(x, y) for parameters in results for x, y in zip(*parameters, strict=True))


@on_some
def _given_gradients(group: Any) -> Any:
    """On a rank: [a model's parameters after three steps by owners, those after steps by this rank alone]."""
    ends = []
    for owned in (True, False):
        torch.manual_seed(0)
        net = Net(Recipe(width=7, layers=5)).to(device())
        made = grouped(net, matrix_groups(net))
        make = (lambda params, **options: ShardedOptimizer(params, Muon, group, **options)) if owned else Muon
        optimizer = make(made, batched=False, **OPTIONS)
        for _ in range(3):
            for p in net.parameters():
                p.grad = torch.randn(p.shape).to(p)
            optimizer.step()
        ends.append([p.detach().cpu().clone() for p in net.parameters()])
    return ends
