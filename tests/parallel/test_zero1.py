"""When ZeRO-1 gathers updated parameters: right after a step, or a few buffers at a time in a recorded forward.

A recorded forward is one that a CUDA graph captures; `recording` (tests/support/ranks.py) pretends this on CPUs. The
AHEAD next flat buffers are gathered while a block runs.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lmsys.parallel.collectives import Pending
from lmsys.parallel.group import WorkerGroup
from lmsys.parallel.overlapped import Collectives
from lmsys.parallel.part import appear, leave
from lmsys.parallel.sharded_optimizer import FlatBuffer
from lmsys.parallel.zero1 import AHEAD, Zero1, segment_mb
from tests.support.modules import deferred
from tests.support.ranks import backward, on_first, recording, step, use

NUM_BLOCKS = 5
orders = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)  # the blocks that a forward runs
bucket_mbs = st.sampled_from([1e-5, 1e-4, 2e-4, 1.0])


class SomeBlocks(nn.Module):
    """A module that runs the blocks that `order` names, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(NUM_BLOCKS))
        self.order = list(range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return x.sum()


@dataclass
class Fetched:
    """The gathers that a rank saw.

    events       of a step and the next forward, in order: ("begun" or "waited", flat buffer) and ("ran", block)
    needed       for each block: the flat buffers that hold its parameters
    num_buffers  number of flat buffers
    state        parameters right after that forward
    """

    events: list[tuple[str, int]]
    needed: list[set[int]]
    num_buffers: int
    state: list[Tensor]


def gathers_in(events: list[tuple[str, int]]) -> Any:
    """A context in which ("begun", flat buffer) and ("waited", flat buffer) of gathers are appended to `events`."""

    def noting(gather: Any) -> Any:
        def gathers(self: Collectives, number: int, buffer: FlatBuffer) -> Pending:
            events.append(("begun", number))
            pending = gather(self, number, buffer)
            return Pending(then=lambda: (pending.wait(), events.append(("waited", number))))

        return gathers

    return use((Collectives, "gather", noting))


@on_first(2)
def _fetched(group: Any, recorded: bool, order: list[int], bucket_mb: float) -> Fetched | None:
    """Trains a step that changes all blocks, then runs the blocks in `order`. `recorded`: in recorded forwards."""
    events: list[tuple[str, int]] = []
    torch.manual_seed(0)
    module = SomeBlocks()
    for number, block in enumerate(module.blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(("ran", number)))
    wrapper = Zero1(module, group, bucket_mb)
    optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=0.1)
    with gathers_in(events), recording(recorded):
        backward(wrapper, torch.ones(2, 4))
        events.clear()
        optimizer.step()
        module.order = order
        wrapper(torch.ones(2, 4))
    state = [p.detach().clone() for p in module.parameters()]
    members = [set(buffer.owners) for buffer in wrapper.flat_buffers]
    own = [set(block.parameters()) for block in module.blocks]
    needed = [{number for number, held in enumerate(members) if held & of_block} for of_block in own]
    return Fetched(events, needed, len(wrapper.flat_buffers), state)


@on_first(2)
def _bucket_mb(group: Any, bucket_mb: float | str) -> float | None:
    """On a rank: the size in MiB that ZeRO-1 uses for this setting."""
    return Zero1(SomeBlocks(), group, bucket_mb).bucket_mb


def test_buckets_of_auto_have_one_size_until_segments_would_be_small(ranks: WorkerGroup) -> None:
    assert [segment_mb(count) for count in (1, 2, 4, 8, 16, 64)] == [256, 128, 64, 32, 32, 32]
    assert [ranks.run(_bucket_mb, value)[:2] for value in ("auto", 3.5)] == [[128, 128], [3.5, 3.5]]


@settings(max_examples=25)
@given(order=orders, bucket_mb=bucket_mbs)
def test_a_recorded_forward_begins_a_few_buffers_ahead_and_waits_for_all(
    ranks: WorkerGroup, order: list[int], bucket_mb: float
) -> None:
    """It does so whichever blocks it runs, in any order."""
    by_rank = ranks.run(_fetched, True, order, bucket_mb)[:2]
    for fetched in by_rank:
        begun, waited = [], set()
        for what, number in fetched.events:
            if what == "begun":
                begun.append(number)
            elif what == "waited":
                waited.add(number)
            else:
                assert fetched.needed[number] <= waited
                assert len(begun) == min(max(waited) + 1 + AHEAD, fetched.num_buffers)
        assert begun == sorted(waited) == list(range(fetched.num_buffers))
        assert [number for what, number in fetched.events if what == "ran"] == order
    assert all(torch.equal(x, y) for x, y in zip(*(fetched.state for fetched in by_rank), strict=True))


@settings(max_examples=10)
@given(order=orders, bucket_mb=bucket_mbs)
def test_without_recording_a_step_begins_all_buffers_and_a_forward_none(
    ranks: WorkerGroup, order: list[int], bucket_mb: float
) -> None:
    """A forward then needs no other rank, and may run on one rank alone."""
    for fetched in ranks.run(_fetched, False, order, bucket_mb)[:2]:
        assert fetched.events[: fetched.num_buffers] == [("begun", number) for number in range(fetched.num_buffers)]
        waited, rest = set(), fetched.events[fetched.num_buffers :]
        for what, number in rest:
            assert what == "waited" or (what == "ran" and fetched.needed[number] <= waited)
            waited |= {number} if what == "waited" else set()


@on_first(2)
def _read_after_two_steps(group: Any) -> list[Tensor]:
    """This rank's parameters, read after two steps, in reverse order. Rank 0 runs none of the blocks, rank 1 all."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = SomeBlocks()
    module.order = module.order if rank else []
    with deferred():
        wrapper = Zero1(module, group, 1e-4)
        optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(2):
            step(wrapper, optimizer, torch.ones(2, 4))
        return [p.detach().clone() for p in reversed([*module.parameters()])]  # blocks first


def test_a_rank_reads_the_new_parameters_of_a_block_that_only_others_run(ranks: WorkerGroup) -> None:
    first, second = ranks.run(_read_after_two_steps)[:2]
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_a_read_calls_the_latest_function_of_a_parameter_without_values() -> None:
    """`leave` marks a parameter as without values. It is called twice here, as after two steps in a row."""
    p, called = nn.Parameter(torch.ones(2)), []
    leave([p], lambda _: called.append("first"))
    leave([p], lambda p: (called.append("last"), appear([p])))
    assert p.sum() == 2 and called == ["last"]


@on_first(2)
def _after_a_recording_that_failed(group: Any, order: list[int], bucket_mb: float) -> list[int] | None:
    """The flat buffers that a plain forward gathers after a recorded forward that failed; [] unless it gathers all."""
    module = SomeBlocks()
    wrapper = Zero1(module, group, bucket_mb)
    events: list[tuple[str, int]] = []
    module.order = [*order, NUM_BLOCKS]  # the last index is out of range
    with recording(True), pytest.raises(IndexError):
        wrapper(torch.ones(2, 4))
    module.order = order
    with gathers_in(events), recording(False):
        wrapper(torch.ones(2, 4))
    begun = [number for what, number in events if what == "begun"]
    return begun if len(wrapper.flat_buffers) == len(begun) else []


@settings(max_examples=10)
@given(order=orders, bucket_mb=bucket_mbs)
def test_after_a_recording_that_failed_all_buffers_are_gathered(
    ranks: WorkerGroup, order: list[int], bucket_mb: float
) -> None:
    for begun in ranks.run(_after_a_recording_that_failed, order, bucket_mb)[:2]:
        assert begun and begun == list(range(len(begun)))
