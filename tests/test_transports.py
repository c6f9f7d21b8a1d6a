"""Buckets that stay from step to step: on CPUs with a stand-in that all-reduces them, on GPUs those of `transports`."""

from typing import Any

import pytest
import ranks as on_ranks
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Net, Recipe, Training, group_of, train, worst_ratio
from torch import nn

from lmsys.parallel import bucketed
from lmsys.parallel.bucketed import Bucketed
from lmsys.parallel.collectives import Pending
from lmsys.parallel.group import WorkerGroup, device
from lmsys.parallel.packing import Layout, pack
from lmsys.parallel.transports import TRANSPORTS, check_transport
from lmsys.training.graph import GraphedGradients

flags = st.booleans()
recipes = st.builds(Recipe, width=st.integers(1, 9), tied=flags, frozen=flags, unused=flags, rare=flags, mixed=flags)


class Staying:
    """Sums over gloo, of gradients packed divided by the number of ranks, as `Registered` does over NCCL."""

    def __init__(self, lengths: Any, dtypes: Any, group: Any):
        self.group, self.scale = group, 1 / dist.get_world_size(group)
        self.flats = [torch.empty(n, dtype=dtype) for n, dtype in zip(lengths, dtypes, strict=True)]

    def send(self, number: int) -> Pending:
        return Pending(dist.all_reduce(self.flats[number], group=self.group, async_op=True))


def stand_in() -> Any:
    def keep(_: Any) -> Any:
        return lambda transport, lengths, dtypes, group: Staying(lengths, dtypes, group)

    return on_ranks.use((bucketed, "keep", keep), (bucketed, "check_transport", lambda _: lambda *_: None))


def train_staying(recipe: Recipe, training: Training, seed: int) -> Any:
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
    options = {"bucket_mb": bucket_mb, "transport": "registered"}
    training = Training(
        "bucketed",
        options,
        world_size,
        "momentum",
        steps=4,
        microbatches=microbatches,
        set_to_none=set_to_none,
    )
    assert worst_ratio(ranks.run(train_staying, recipe, training, seed), recipe, training, seed) <= 1


def _places(comm_dtype: torch.dtype | None) -> Any:
    """Of each of four steps: which memory gradients and buckets are in, and whether they are the buckets'."""
    group = group_of(2)
    if dist.get_rank() >= 2:
        return None
    found = []
    with stand_in():
        wrapper = Bucketed(Net(Recipe(width=8)), group, 1e-4, comm_dtype, "registered")
        for to_none in (True, True, False, True):
            wrapper(torch.randn(3, 8)).backward()
            wrapper.finish_gradient_synchronization()
            kept = wrapper._kept
            bases = {id(p.grad._base) for p in wrapper.trainable}
            found.append((bases == {id(flat) for flat in kept.flats}, [flat.data_ptr() for flat in kept.flats]))
            dtypes = {flat.dtype for flat in kept.flats}, {p.grad.dtype for p in wrapper.trainable}
            wrapper.zero_grad(set_to_none=to_none)
    return found, len(wrapper.buckets), *dtypes


@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16])
def test_buckets_stay_and_gradients_are_their_views(ranks: WorkerGroup, comm_dtype: torch.dtype | None) -> None:
    """After the first step, by which buckets are planned; where another dtype travels gradients keep their own."""
    found, num_buckets, sent, dtypes = ranks.run(_places, comm_dtype)[0]
    assert [views for views, _ in found] == [False, *[comm_dtype is None] * 3]
    assert len({tuple(places) for _, places in found}) == 1 and len(set(found[0][1])) == num_buckets > 3
    assert sent == {comm_dtype or torch.float32} and dtypes == {torch.float32}


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_packed_where_they_are_to_stay(scale: float, dtype: torch.dtype) -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (5,), (2, 2))]
    layout, into = Layout.of(params), torch.full((192,), 7, dtype=dtype)
    params[0].grad, params[2].grad = torch.full((3, 4), 6.0), torch.full((2, 2), 8.0)
    flat, views = pack(params, layout, dtype, into, scale)
    assert flat is into and [view.unique().tolist() for view in views] == [[6 * scale], [0], [8 * scale]]
    if dtype == torch.float32:
        for p, view in zip(params, views, strict=True):
            p.grad = view
        again, same = pack(params, layout, dtype, into, scale)
        assert again is into and [x.data_ptr() for x in same] == [x.data_ptr() for x in views]
        assert same[0].unique().tolist() == [6 * scale**2]
        other, _ = pack(params, layout, dtype, torch.zeros_like(into), scale)
        assert other is not into and other[:12].unique().tolist() == [6 * scale**3]


def _refused(transport: str) -> str:
    group = group_of(2)
    return on_ranks.error_of(Bucketed, Net(Recipe()), group, 1, None, transport) if dist.get_rank() < 2 else ""


def test_what_it_is_not_for_is_told(ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"transport='nvlink' must be one of \('nccl', 'registered', 'copy'\)"):
        Bucketed(nn.Linear(2, 2), transport="nvlink")
    for transport in ("registered", "copy"):
        for error in ranks.run(_refused, transport)[:2]:
            assert error.startswith(f"ValueError: {transport=} is for NCCL and parameters on GPUs")
    module = "lmsys.parallel.transports"
    monkeypatch.setattr(f"{module}.size_and_rank", lambda group: (2, 0))
    monkeypatch.setattr(f"{module}.is_nccl", lambda group, p: True)
    monkeypatch.setattr(f"{module}.gather_objects", lambda node, group: ["here", "there"])
    with pytest.raises(ValueError, match="transport='copy' is for ranks of one node, and these are on here, there"):
        check_transport("copy", None, [])


def _trained(options: dict[str, Any], graphed: bool) -> dict[str, torch.Tensor]:
    """Parameters after six steps with clipping in place; the first of a graph's are plain."""
    torch.manual_seed(dist.get_rank())
    model = Net(Recipe(width=40, layers=4, tied=True)).to(device())
    wrapper = Bucketed(model, group_of(2), 5e-3, **options)
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
    assert wrapper._kept is None or len(wrapper._kept.flats) > 3
    return {name: x.cpu() for name, x in wrapper.full_state_dict().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("comm_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_it_trains_bit_for_bit_as_with_nccl(
    gpu_ranks: WorkerGroup, transport: str, comm_dtype: torch.dtype | None, graphed: bool
) -> None:
    """Halves of two numbers are exact, and their sum is rounded once, whoever adds."""
    expected = gpu_ranks.run(_trained, {"comm_dtype": comm_dtype}, graphed)[:2]
    found = gpu_ranks.run(_trained, {"comm_dtype": comm_dtype, "transport": transport}, graphed)[:2]
    for states in (found, expected):
        for name, x in states[0].items():
            assert torch.equal(x, states[1][name]), name
    for name, x in found[0].items():
        assert torch.equal(x, expected[0][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
@pytest.mark.parametrize("recipe", [Recipe(width=8, tied=True, rare=True), Recipe(width=5, unused=True, mixed=True)])
def test_as_one_process_on_gpus(gpu_ranks: WorkerGroup, recipe: Recipe, transport: str) -> None:
    options = {"bucket_mb": 1e-4, "transport": transport}
    training = Training("bucketed", options, optimizer="momentum", steps=5, microbatches=2)
    assert worst_ratio(gpu_ranks.run(train, recipe, training, 0), recipe, training, 0) <= 1
