"""The exchange of buckets by copies: in every order that streams and ranks may run in, over steps. And its addition."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streams import Gpu, Handle, run
from torch import Tensor

from lmsys.parallel.buckets import ALIGNMENT
from lmsys.parallel.exchange import READ, READY, REDUCED, Exchange, segments_of
from lmsys.testing import error_ratio

triton = pytest.importorskip("triton", reason="pip install triton==3.6.0 to run the kernel in its interpreter")
mean_triton = pytest.importorskip("lmsys.parallel.mean_triton")

STEPS = 3
lengths = st.lists(st.integers(1, 5).map(lambda n: n * ALIGNMENT), min_size=1, max_size=4)
speeds = st.lists(st.sampled_from([1.0, 0.1, 0.001]), min_size=3, max_size=3)


def gradient(length: int, step: int, number: int, rank: int) -> Tensor:
    """Whole numbers, whose means are exact."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return 12.0 * torch.randint(-99, 99, (length,), generator=generator).double()


def wrong_elements(
    buckets: list[int], queues: list[Any], speeds: list[Any], seed: int, without: int | None = None, fault: str = ""
) -> int:
    """Of all steps' means on all ranks. After each step the buckets are overwritten, as by clipping in place.

    queues, speeds  of each rank
    """
    ranks = range(len(queues))
    gpus = [Gpu(*one) for one in zip(queues, speeds, strict=True)]
    flats = [[torch.full((length,), torch.nan, dtype=torch.float64) for length in buckets] for _ in ranks]
    signals: list[Any] = [set() for _ in buckets]
    wrong: list[int] = []
    for rank, gpu in enumerate(gpus):
        handles = [
            Handle(gpu, rank, [flats[peer][number] for peer in ranks], signals[number], without)
            for number in range(len(buckets))
        ]
        exchange = Exchange(flats[rank], handles, gpu.mean, gpu.copy, gpu)
        exchange._inward.forgets_events = fault == "scratch"
        for step in range(STEPS):
            pending = []
            for number, flat in enumerate(exchange.flats):
                new = gradient(len(flat), step, number, rank)
                gpu.launch(len(flat), lambda part, flat=flat, new=new: flat[part].copy_(new[part]))
                pending.append(exchange.send(number))
            if fault != "never waited for":
                for one in pending:
                    one.wait()
            exchange._added = []
            for number, flat in enumerate(exchange.flats):
                mean = sum(gradient(len(flat), step, number, peer) for peer in ranks) / len(ranks)
                gpu.launch(
                    len(flat), lambda part, flat=flat, mean=mean: wrong.append(int((flat[part] != mean[part]).sum()))
                )
                gpu.launch(len(flat), lambda part, flat=flat: flat[part].fill_(torch.nan))
    run(gpus, seed)
    assert not any(signals), "a signal is left set"
    return sum(wrong)


@given(world_size=st.integers(2, 4), buckets=lengths, seed=st.integers(0, 2**31), data=st.data())
def test_every_bucket_of_every_step_is_the_mean(world_size: int, buckets: list[int], seed: int, data: Any) -> None:
    """Also where a GPU runs several streams in one queue, in the order of launches: which, each may choose itself."""
    queues = [data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3)) for _ in range(world_size)]
    assert wrong_elements(buckets, queues, [data.draw(speeds) for _ in queues], seed) == 0


def seeds_that_tell(**fault: Any) -> int:
    """Of twenty, with one slow stream each."""
    found = 0
    for seed in range(20):
        slow = [[0.001 if (seed + rank) % 3 == stream else 1.0 for stream in range(3)] for rank in range(2)]
        try:
            found += wrong_elements([128, 256, 192, 64], [[0, 1, 2]] * 2, slow, seed, **fault) > 0
        except AssertionError:
            found += 1
    return found


@pytest.mark.parametrize(
    "fault",
    [{"without": READY}, {"without": REDUCED}, {"without": READ}, {"fault": "scratch"}, {"fault": "never waited for"}],
    ids=["READY", "REDUCED", "READ", "scratch", "finish"],
)
def test_each_signal_and_each_wait_is_needed(fault: dict[str, Any]) -> None:
    assert seeds_that_tell() == 0
    assert seeds_that_tell(**fault) > 0


@given(st.integers(0, 1000), st.integers(1, 9))
def test_segments_cover_a_bucket_once_and_are_aligned(length: int, world_size: int) -> None:
    segments = segments_of(length, world_size)
    assert [i for cut in segments for i in range(cut.start, cut.stop)] == list(range(length))
    assert len(segments) == world_size and all(cut.start % ALIGNMENT == 0 or cut.start == length for cut in segments)


interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton compiles here: see the cuda test")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(("world_size", "num"), [(2, 64), (2, 4096 + 64), (3, 1), (4, 3 * 4096), (8, 5000)])
def test_the_kernel_adds_by_rank(device: str, dtype: torch.dtype, world_size: int, num: int) -> None:
    """Every rank's answer is the same, whichever of the parts is its own; nothing else is written."""
    generator = torch.Generator(device).manual_seed(num)
    data = torch.randn(world_size, num, device=device, generator=generator).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact, plain, found = data.double().mean(0), data.to(wide).mean(0).to(dtype), []
    for rank in range(world_size):
        own, others = data[rank].clone(), data[[i for i in range(world_size) if i != rank]].clone()
        parts = [*others]
        parts.insert(rank, own)
        mean_triton.mean_(parts, rank)
        assert torch.equal(others, data[[i for i in range(world_size) if i != rank]])
        assert error_ratio(own, exact, plain) <= 1
        found.append(own)
    assert all(torch.equal(x, found[0]) for x in found)
