"""Buckets that copy engines carry: on CPUs with a stand-in for these that all-reduces, on GPUs as they are."""

from typing import Any

import pytest
import ranks as on_ranks
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Net, Recipe, Training, group_of, train, worst_ratio
from torch import nn

from lmsys.parallel import copy_engine
from lmsys.parallel.bucketed import Bucketed
from lmsys.parallel.collectives import Pending, all_reduce_mean
from lmsys.parallel.copy_engine import CopyEngine, check_copy_engine
from lmsys.parallel.group import WorkerGroup, device
from lmsys.training.graph import GraphedGradients

flags = st.booleans()
recipes = st.builds(Recipe, width=st.integers(1, 9), tied=flags, frozen=flags, unused=flags, rare=flags, mixed=flags)


class StandIn:
    """An `Exchange` over gloo. What it does not own of its gradients it spoils, when they have been sent."""

    def __init__(self, layouts: Any, dtypes: Any, group: Any):
        self.group = group
        self.flats = [torch.empty(layout.length, dtype=dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
        self.views = [layout.views(flat) for layout, flat in zip(layouts, self.flats, strict=True)]

    def send(self, number: int, gradients: Any) -> Pending:
        assert all(x.is_contiguous() for x in gradients)
        for x, view in zip(gradients, self.views[number], strict=True):
            assert x.dtype == view.dtype and x.shape == view.shape
            if x.data_ptr() != view.data_ptr():
                view.copy_(x)
                x.fill_(torch.nan)
        return all_reduce_mean(self.flats[number], self.group)


def stand_in() -> Any:
    unchecked = lambda _: lambda *_: None  # noqa: E731
    return on_ranks.use(
        (copy_engine, "over_symmetric_memory", lambda _: StandIn), (copy_engine, "check_copy_engine", unchecked)
    )


def train_with_it(recipe: Recipe, training: Training, seed: int) -> Any:
    with stand_in():
        return train(recipe, training, seed)


@settings(max_examples=25)
@given(
    recipe=recipes,
    bucket_mb=st.sampled_from([1e-5, 1e-4, 5e-4, 1.0]),
    world_size=st.integers(2, 3),
    microbatches=st.integers(1, 2),
    set_to_none=flags,
    seed=st.integers(0, 99),
)
def test_it_trains_as_one_process_on_the_whole_batch(
    ranks: WorkerGroup,
    recipe: Recipe,
    bucket_mb: float,
    world_size: int,
    microbatches: int,
    set_to_none: bool,
    seed: int,
) -> None:
    training = Training(
        "copy_engine",
        {"bucket_mb": bucket_mb},
        world_size,
        "momentum",
        steps=4,
        microbatches=microbatches,
        set_to_none=set_to_none,
    )
    assert worst_ratio(ranks.run(train_with_it, recipe, training, seed), recipe, training, seed) <= 1


def _places(comm_dtype: torch.dtype | None) -> Any:
    """Of each of four steps: which memory gradients and buckets are in, and whether they are the buckets'."""
    group = group_of(2)
    if dist.get_rank() >= 2:
        return None
    found = []
    with stand_in():
        wrapper = CopyEngine(Net(Recipe(width=8)), group, 1e-4, comm_dtype)
        for to_none in (True, True, False, True):
            wrapper(torch.randn(3, 8)).backward()
            wrapper.finish_gradient_synchronization()
            flats = wrapper._exchange.flats
            bases = {id(p.grad._base) for p in wrapper.trainable}
            found.append((bases == {id(flat) for flat in flats}, [flat.data_ptr() for flat in flats]))
            dtypes = {flat.dtype for flat in flats}, {p.grad.dtype for p in wrapper.trainable}
            wrapper.zero_grad(set_to_none=to_none)
    return found, len(wrapper.buckets), *dtypes


@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16])
def test_buckets_stay_and_gradients_are_their_views(ranks: WorkerGroup, comm_dtype: torch.dtype | None) -> None:
    """After the first step, by which buckets are planned; where another dtype travels gradients keep their own."""
    found, num_buckets, sent, dtypes = ranks.run(_places, comm_dtype)[0]
    assert [views for views, _ in found] == [False, *[comm_dtype is None] * 3]
    assert len({tuple(places) for _, places in found}) == 1 and len(set(found[0][1])) == num_buckets > 3
    assert sent == {comm_dtype or torch.float32} and dtypes == {torch.float32}


def _refused() -> str:
    group = group_of(2)
    return on_ranks.error_of(CopyEngine, Net(Recipe()), group) if dist.get_rank() < 2 else ""


def test_what_it_is_not_for_is_told(ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in ranks.run(_refused)[:2]:
        assert error == "ValueError: copy_engine is for NCCL and parameters on GPUs: elsewhere take bucketed"
    module = "lmsys.parallel.copy_engine"
    monkeypatch.setattr(f"{module}.size_and_rank", lambda group: (2, 0))
    monkeypatch.setattr(f"{module}.is_nccl", lambda group, p: True)
    monkeypatch.setattr(f"{module}.gather_objects", lambda node, group: ["here", "there"])
    with pytest.raises(ValueError, match="copy_engine is for ranks of one node, and these are on here, there"):
        check_copy_engine(nn.Linear(2, 2), None)


def _trained(strategy: type[Bucketed], comm_dtype: torch.dtype | None, graphed: bool) -> dict[str, torch.Tensor]:
    """Parameters after six steps with clipping in place; the first of a graph's are plain."""
    torch.manual_seed(dist.get_rank())
    model = Net(Recipe(width=40, layers=4, tied=True)).to(device())
    wrapper = strategy(model, group_of(2), 5e-3, comm_dtype)
    optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    graph = GraphedGradients(wrapper, model.parameters(), wrapper.finish_gradient_synchronization)
    for step in range(6):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device())
        if graphed and step > 1:
            graph(x)
        else:
            with wrapper.no_sync():
                wrapper(x + 1).backward()
            wrapper(x).backward()
            wrapper.finish_gradient_synchronization()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=graphed or step % 2 == 0)
    if isinstance(wrapper, CopyEngine):
        assert wrapper.outside_bytes > 4 * sum(p.numel() for p in model.parameters()) and len(wrapper.buckets) > 3
    return {name: x.cpu() for name, x in wrapper.full_state_dict().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16])
def test_it_trains_bit_for_bit_as_with_nccl(
    gpu_ranks: WorkerGroup, comm_dtype: torch.dtype | None, graphed: bool
) -> None:
    """Halves of two numbers are exact, and their sum is rounded once, whoever adds."""
    expected = gpu_ranks.run(_trained, Bucketed, comm_dtype, graphed)[:2]
    found = gpu_ranks.run(_trained, CopyEngine, comm_dtype, graphed)[:2]
    for states in (found, expected):
        for name, x in states[0].items():
            assert torch.equal(x, states[1][name]), name
    for name, x in found[0].items():
        assert torch.equal(x, expected[0][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [Recipe(width=8, tied=True, rare=True), Recipe(width=5, unused=True, mixed=True)])
def test_as_one_process_on_gpus(gpu_ranks: WorkerGroup, recipe: Recipe) -> None:
    training = Training("copy_engine", {"bucket_mb": 1e-4}, optimizer="momentum", steps=5, microbatches=2)
    assert worst_ratio(gpu_ranks.run(train, recipe, training, 0), recipe, training, 0) <= 1
