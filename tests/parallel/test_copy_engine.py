"""Buckets of strategies over copy engines stay where they are in memory, and weights have the bits of those with NCCL.

Copy engines copy memory between GPUs without a kernel. On CPUs the stand-in of tests/support/engines.py takes their
place, which sends buckets over gloo.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmsys.parallel import STRATEGIES as TABLE
from lmsys.parallel.copy_engine import CopyEngine, CopyEngines, check_gpus
from lmsys.parallel.group import WorkerGroup, device
from lmsys.training.gradients import GraphedGradients, backward_of
from tests.support import ranks as on_ranks
from tests.support.engines import EnginesOverGloo
from tests.support.ranks import Net, Recipe, Training, backward, group_of, on_first, stand_in, train, worst_ratio


@on_first(2)
def _places(group: Any, comm_dtype: torch.dtype | None) -> Any:
    """(by_step, number of buckets, dtypes of buckets, dtypes of gradients), on a rank.

    by_step  for each of four steps: (True if gradients are views of buckets, the addresses of the buckets)
    """
    by_step = []
    with stand_in():
        wrapper = CopyEngine(Net(Recipe(width=8)), group, 1e-4, comm_dtype)
        for to_none in (True, True, False, True):
            backward(wrapper, torch.randn(3, 8))
            flats = wrapper.transport._exchange.flats
            bases = {id(p.grad._base) for p in wrapper.trainable}
            by_step.append((bases == {id(flat) for flat in flats}, [flat.data_ptr() for flat in flats]))
            dtypes = {flat.dtype for flat in flats}, {p.grad.dtype for p in wrapper.trainable}
            wrapper.zero_grad(set_to_none=to_none)
    return by_step, len(wrapper.buckets), *dtypes


@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16])
def test_buckets_keep_their_memory_and_gradients_are_views_of_them(
    ranks: WorkerGroup, comm_dtype: torch.dtype | None
) -> None:
    """Gradients are views from the second step on, since the first step decides how buckets are planned.

    If gradients are sent in another dtype, they keep their own memory and dtype.
    """
    by_step, num_buckets, sent, dtypes = ranks.run(_places, comm_dtype)[0]
    assert [views for views, _ in by_step] == [False, *[comm_dtype is None] * 3]
    assert len({tuple(places) for _, places in by_step}) == 1 and len(set(by_step[0][1])) == num_buckets > 3
    assert sent == {comm_dtype or torch.float32} and dtypes == {torch.float32}


@on_first(2)
def _kept_graphs(group: Any, strategy: str, comm_dtype: torch.dtype | None) -> list[bool]:
    """On a rank: for each bucket, after steps with create_graph=True, True if it is part of autograd's graph."""
    in_graph, options = [], {"comm_dtype": comm_dtype} if strategy == "copy_engine" else {}
    with stand_in():
        wrapper = TABLE[strategy].load()(Net(Recipe(width=8)), group, 1e-4, **options)
        for _ in range(2):
            wrapper(torch.randn(3, 8)).backward(create_graph=True)
            wrapper.finish_gradient_synchronization()
            in_graph += [x.requires_grad for x in wrapper.transport._exchange.flats]
            wrapper.zero_grad()
    return in_graph


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("strategy", "comm_dtype"), [("copy_engine", None), ("copy_engine", torch.bfloat16), ("copy_engine_zero1", None)]
)
def test_buckets_do_not_keep_autograds_graph(ranks: WorkerGroup, strategy: str, comm_dtype: torch.dtype | None) -> None:
    """A backward with create_graph=True makes a graph, which would grow from step to step."""
    in_graph = ranks.run(_kept_graphs, strategy, comm_dtype)[0]
    assert in_graph and not any(in_graph)


@on_first(2)
def _refused(group: Any) -> str:
    """On a rank: the error of making a strategy where there are no copy engines."""
    return on_ranks.error_of(CopyEngine, Net(Recipe()), group)


def test_machines_without_copy_engines_are_refused(ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in ranks.run(_refused)[:2]:
        assert error.startswith("ValueError: copy engines need NCCL and parameters on GPUs; elsewhere take bucketed")
    module = "lmsys.parallel.collectives"
    monkeypatch.setattr(f"{module}.is_nccl", lambda group, p: True)
    monkeypatch.setattr(f"{module}.gather_objects", lambda node, group: ["here", "there"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ValueError, match="parameters are on cpu, and the current GPU is cuda:1: set_device, or take"):
        check_gpus(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="copy engines are for ranks of one node, and these are on here, there"):
        check_gpus(nn.Identity(), None)


class _GroupOfTwo(dist.ProcessGroup):
    """A stand-in for a process group, with the name that symmetric memory asks for."""

    group_name = "two"


def test_ranks_that_have_shared_memory_unequally_often_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank would wait for the other for ever. The other rank has done so 5 times."""
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", lambda flat, name: None)
    counts: list[int] = []

    def gather_objects(mine: int, group: Any) -> list[int]:
        counts.append(mine)
        return [mine, 5]

    monkeypatch.setattr("lmsys.parallel.copy_engine.collectives.gather_objects", gather_objects)
    monkeypatch.setattr(CopyEngines, "shared", 3)
    transport = EnginesOverGloo(nn.Identity(), _GroupOfTwo(0, 2))
    for shared in (3, 4):
        with pytest.raises(ValueError, match=f"ranks have shared memory {shared}, 5 times, and must have as"):
            transport.settle([])
        transport._handle(torch.zeros(1))
    assert counts == [3, 4] and CopyEngines.shared == 5


def _trained(strategy: str, options: dict[str, Any], graphed: bool) -> dict[str, torch.Tensor]:
    """Parameters after six steps with clipping in place. `graphed`: all but the first two replay a CUDA graph."""
    torch.manual_seed(dist.get_rank())
    model = Net(Recipe(width=40, layers=4, tied=True)).to(device())
    wrapper = TABLE[strategy].load()(model, group_of(2), 5e-3, **options)
    optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    graph = GraphedGradients(backward_of(wrapper, wrapper.finish_gradient_synchronization), model.parameters())
    for step in range(6):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device())
        if graphed and step > 1:
            graph(x)
        else:
            with wrapper.no_sync():
                wrapper(x + 1).backward()
            backward(wrapper, x)
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)  # in place, as by clipping
        optimizer.step()
        optimizer.zero_grad(set_to_none=graphed or "zero1" in strategy or step % 2 == 0)
    if strategy.startswith("copy_engine"):
        assert wrapper.outside_bytes > 2 * sum(p.numel() for p in model.parameters()) and len(wrapper.buckets) > 3
    return {name: x.cpu() for name, x in wrapper.full_state_dict().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize(
    ("strategy", "options"), [("bucketed", {}), ("bucketed", {"comm_dtype": torch.bfloat16}), ("zero1", {})]
)
def test_weights_have_the_bits_of_those_with_nccl(
    gpu_ranks: WorkerGroup, strategy: str, options: dict[str, Any], graphed: bool
) -> None:
    """Halving is exact, and NCCL and copy engines both round the sum of two halves once."""
    ours = {"bucketed": "copy_engine", "zero1": "copy_engine_zero1"}[strategy]
    expected = gpu_ranks.run(_trained, strategy, options, graphed)[:2]
    trained = gpu_ranks.run(_trained, ours, options, graphed)[:2]
    for states in (trained, expected):
        for name, x in states[0].items():
            assert torch.equal(x, states[1][name]), name
    for name, x in trained[0].items():
        assert torch.equal(x, expected[0][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [Recipe(width=8, tied=True, rare=True), Recipe(width=5, unused=True, mixed=True)])
@pytest.mark.parametrize("strategy", ["copy_engine", "copy_engine_zero1"])
def test_strategies_train_as_one_process_on_gpus(gpu_ranks: WorkerGroup, strategy: str, recipe: Recipe) -> None:
    training = Training(strategy, {"bucket_mb": 1e-4}, optimizer="momentum", steps=5, microbatches=2)
    assert worst_ratio(gpu_ranks.run(train, recipe, training, 0), recipe, training, 0) <= 1
