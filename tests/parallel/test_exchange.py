"""The exchange of gradients and parameters by copy engines (`lmsys.parallel.copy_engine`), on simulated GPUs.

tests/support/streams.py records the work that ranks launch, and runs it in random possible orders. Every mean must be
right in each of them, and a missing signal or wait must show as a wrong number or a hang. `wrong_elements` does this
for the gradients, `wrong_parameters` for the parameters; a new fault is an argument of theirs and a case of the test
that needs it. The last test runs the Triton kernel that adds the copies; without Triton the whole file is skipped.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lmsys.parallel.buckets import ALIGNMENT, Layout
from lmsys.parallel.collectives import Pending
from lmsys.parallel.copy_engine import (
    ARRIVED,
    DONE,
    READY,
    AllGather,
    Exchange,
    inbox_bytes,
    parts_of,
    peers_of,
    segments_of,
)
from lmsys.testing import error_ratio
from tests.support.streams import Gpu, Handle, run

triton = pytest.importorskip("triton", reason="pip install triton==3.6.0 to run the kernel in its interpreter")
mean_triton = pytest.importorskip("lmsys.parallel.mean_triton")

# The barriers of a bucket or a flat buffer, in their order (`lmsys.parallel.copy_engine` has the details):
# READY    all ranks may be written to
# ARRIVED  all copies have come
# DONE     all means have come: after the last bucket of a step

STEPS = 3
TIMEOUT_MS = 1  # a simulated barrier ignores it
tensors = st.lists(st.integers(0, 5 * ALIGNMENT), min_size=1, max_size=3)  # elements of each tensor in a bucket
speeds = st.lists(st.sampled_from([1.0, 0.1, 0.001]), min_size=3, max_size=3)  # of the three queues of a `Gpu`


def gradient(numel: int, step: int, number: int, index: int, rank: int) -> Tensor:
    """Random whole numbers, multiples of 12: their mean over two, three or four ranks is exact."""
    generator = torch.Generator().manual_seed(10000 * step + 100 * number + 10 * index + rank)
    return 12.0 * torch.randint(-99, 99, (numel,), generator=generator).double()


def launch_backward(
    gpu: Gpu, exchange: Exchange, buckets: list[list[int]], places: list[list[Tensor]] | None, step: int, rank: int
) -> tuple[list[Pending], list[Tensor]]:
    """Launches a backward, and the exchange of each bucket behind its gradients: (what to wait for, all gradients).

    places  where gradients are stored, by bucket; None: each in memory of its own
    """
    pending, made = [], list[Tensor]()
    for number, numels in enumerate(buckets):
        gradients = places[number] if places else [torch.full((n,), torch.nan, dtype=torch.float64) for n in numels]
        for index, into in enumerate(gradients):
            values = gradient(into.numel(), step, number, index, rank)
            gpu.launch(into.numel(), lambda part, into=into, values=values: into[part].copy_(values[part]))
        pending.append(exchange.send(number, gradients))
        made += gradients
    return pending, made


def launch_comparison(
    gpu: Gpu, parts: list[Any], views: list[Tensor], number: int, step: int, ranks: range, wrong: list[int]
) -> None:
    """Launches a comparison of a bucket's `parts` (see `parts_of`) with the right means; adds wrong ones to `wrong`."""
    for index, part, _ in parts:
        out, numel = views[index][part], views[index].numel()
        mean = sum(gradient(numel, step, number, index, peer)[part] for peer in ranks) / len(ranks)
        gpu.launch(out.numel(), lambda at, out=out, mean=mean: wrong.append(int((out[at] != mean[at]).sum())))


def wrong_elements(
    buckets: list[list[int]], queues: list[Any], speeds: list[Any], seed: int, in_place: bool = False,
    whole: bool = True, without: int | None = None, fault: str = "",
) -> int:  # fmt: skip
    """The number of wrong elements in the means of all steps, on all ranks.

    Each rank launches STEPS times: the backward that makes gradients, their exchange, a comparison of every mean with
    the right one, and NaN over all gradients and means, as if they were clipped in place. Nothing runs before `run`.

    buckets   the tensors of each bucket, by their numbers of elements
    queues    for each rank the list `queues` of its `Gpu`: the queue that each of its streams puts its work into
    speeds    for each rank the list `speeds` of its `Gpu`: how often `run` takes work from each of its queues
    in_place  gradients are stored where their means will be, as after `zero_grad(set_to_none=False)`
    whole     True: every rank gets the means of whole buckets (all-reduce); False: of its segments (reduce-scatter)
    without   a barrier (READY, ARRIVED or DONE) that is left out, as a fault
    fault     "inbox": copies do not wait until their half of the inbox is free; "never waited for": nobody waits for
              the end of the exchange
    """
    ranks, dtype = range(len(queues)), torch.float64
    gpus = [Gpu(*arguments) for arguments in zip(queues, speeds, strict=True)]
    layouts = [Layout.of([torch.empty(n) for n in numels]) for numels in buckets]
    segments = [segments_of(x.length, len(ranks)) for x in layouts]
    means = [[torch.full((x.length,), torch.nan, dtype=dtype) for x in layouts] for _ in ranks]
    size = inbox_bytes(layouts, [dtype.itemsize] * len(layouts), len(ranks))
    inboxes = [torch.zeros(size, dtype=torch.uint8) for _ in ranks]
    signals: set[Any] = set()
    wrong: list[int] = []
    for rank, gpu in enumerate(gpus):
        handles = [Handle(gpu, rank, [means[peer][n] for peer in ranks], set()) for n in range(len(buckets))]
        outs = means[rank] if whole else [x[cut[rank]] for x, cut in zip(means[rank], segments, strict=True)]
        exchange = Exchange(
            layouts, outs, inbox=inboxes[rank], inboxes=Handle(gpu, rank, inboxes, signals, without),
            handles=handles if whole else [], mean=gpu.mean, timeout_ms=TIMEOUT_MS, copy=gpu.copy, cuda=gpu,
        )  # fmt: skip
        exchange._inward.forgets_events = fault == "inbox"
        views = [layout.views(flat) for layout, flat in zip(layouts, means[rank], strict=True)]
        for step in range(STEPS):
            pending, gradients = launch_backward(gpu, exchange, buckets, views if in_place else None, step, rank)
            if fault != "never waited for":
                for sent in pending:
                    sent.wait()
            else:
                exchange._begin()  # the rank forgets the buckets in flight, and goes on
            for number, (layout, cut) in enumerate(zip(layouts, segments, strict=True)):
                parts = parts_of(layout, slice(0, layout.length) if whole else cut[rank])
                launch_comparison(gpu, parts, views[number], number, step, ranks, wrong)
            # What a user may do to gradients after the step.
            for x in (*gradients, *(out for outs in views for out in outs)):
                gpu.launch(x.numel(), lambda part, x=x: x[part].fill_(torch.nan))
    run(gpus, seed)
    assert not signals, "a signal is left set"
    return sum(wrong)


@given(
    world_size=st.integers(2, 4),
    buckets=st.lists(tensors, min_size=1, max_size=4),
    in_place=st.booleans(),
    whole=st.booleans(),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_every_bucket_of_every_step_is_the_mean(
    world_size: int, buckets: list[list[int]], in_place: bool, whole: bool, seed: int, data: Any
) -> None:
    """This holds however a GPU divides its streams among queues. Streams of one queue run in the order of launches."""
    queues = [data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3)) for _ in range(world_size)]
    assert wrong_elements(buckets, queues, [data.draw(speeds) for _ in queues], seed, in_place, whole) == 0


def wrong_parameters(
    lengths: list[int], queues: list[Any], speeds: list[Any], seed: int, ahead: int,
    without: int | None = None, no_wait: int | None = None, too_early: int | None = None,
) -> int:  # fmt: skip
    """The number of wrong parameters in all steps.

    In a step a rank updates its segment of each flat buffer, sends it to the other ranks, and reads the whole buffer:
    every element must be the number of the step, from 1 on.

    lengths    elements of a segment in each flat buffer
    queues     as in `wrong_elements`; `speeds` too
    ahead      how many buffers are sent before an earlier one is waited for
    without    a barrier that is left out, as a fault
    no_wait    a rank that, as a fault, neither waits for what it sends nor reads
    too_early  the first buffer that is sent, as a fault, without waiting for its update
    """
    ranks = range(len(queues))
    gpus = [Gpu(*arguments) for arguments in zip(queues, speeds, strict=True)]
    flats = [[torch.zeros(n * len(ranks), dtype=torch.float64) for n in lengths] for _ in ranks]
    signals: set[Any] = set()
    wrong: list[int] = []
    for rank, gpu in enumerate(gpus):
        handles = [
            Handle(gpu, rank, [flats[peer][number] for peer in ranks], signals, without)
            for number in range(len(lengths))
        ]
        all_gather = AllGather(flats[rank], handles, TIMEOUT_MS, gpu.copy, gpu)
        for step in range(STEPS):
            sent: list[Pending] = []
            for number, flat in enumerate(flats[rank]):
                for later in range(len(sent), min(number + 1 + ahead, len(lengths))):  # not yet sent
                    n = lengths[later]
                    own = flats[rank][later][rank * n : (rank + 1) * n]
                    gpu.launch(n, lambda part, own=own, step=step: own[part].fill_(step + 1))
                    all_gather._stream.forgets_streams = too_early is not None and later >= too_early
                    sent.append(all_gather.send(later))
                if rank == no_wait:
                    continue
                sent[number].wait()
                gpu.launch(
                    flat.numel(),
                    lambda part, flat=flat, step=step: wrong.append(int((flat[part] != step + 1).sum())),
                )
    run(gpus, seed)
    assert not signals, "a signal is left set"
    return sum(wrong)


@given(
    world_size=st.integers(2, 4),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    ahead=st.integers(0, 3),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_parameters_of_every_step_come_to_all_ranks(
    world_size: int, lengths: list[int], ahead: int, seed: int, data: Any
) -> None:
    queues = [data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=2)) for _ in range(world_size)]
    assert wrong_parameters(lengths, queues, [data.draw(speeds) for _ in queues], seed, ahead) == 0


def wrong_by_seeds(**fault: Any) -> int:
    """The number of wrong parameters, with a fault, in forty orders of the same work.

    All buffers are sent before any is read. If they were sent one at a time, a buffer's signal ARRIVED would imply that
    the buffer before it has been read, and a missing READY would not show.
    """
    wrong = 0
    for seed in range(40):
        # The last four bits of the seed say which of the two ranks' two streams each are slow.
        slow = [[0.001 if (seed >> (2 * rank + stream)) & 1 else 1.0 for stream in range(2)] for rank in range(2)]
        wrong += wrong_parameters([5, 3, 4], [[0, 1]] * 2, slow, seed, ahead=2, **fault)
    return wrong


def seeds_that_tell(**fault: Any) -> int:
    """How many of twenty seeds show the fault, by a wrong mean or a signal left set. Each rank has one slow stream."""
    count = 0
    for seed in range(20):
        # Digit `rank` of the seed, in base 3, is the number of the rank's slow stream.
        slow = [[0.001 if seed // 3**rank % 3 == stream else 1.0 for stream in range(3)] for rank in range(2)]
        try:
            count += wrong_elements([[70, 58], [256], [64, 1, 127], [64]], [[0, 1, 2]] * 2, slow, seed, **fault) > 0
        except AssertionError:
            count += 1
    return count


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (seeds_that_tell, {}),
        (seeds_that_tell, {"without": DONE}),
        (seeds_that_tell, {"without": READY}),
        (seeds_that_tell, {"without": ARRIVED}),
        (seeds_that_tell, {"fault": "never waited for"}),
        (seeds_that_tell, {"fault": "inbox"}),
        (wrong_by_seeds, {}),
        (wrong_by_seeds, {"no_wait": 0}),  # updated while sent
        (wrong_by_seeds, {"without": READY}),
        (wrong_by_seeds, {"without": ARRIVED}),
        (wrong_by_seeds, {"too_early": 1}),  # later ones sent before updated
        (wrong_by_seeds, {"too_early": 0}),
    ],
)
def test_each_signal_and_each_wait_is_needed(wrong: Callable[..., int], fault: dict[str, Any]) -> None:
    """Without a fault nothing is wrong."""
    assert (wrong(**fault) > 0) == bool(fault)


@given(st.integers(1, 9))
def test_ranks_in_step_send_to_each_one_at_a_time(world_size: int) -> None:
    orders = [peers_of(rank, world_size) for rank in range(world_size)]
    assert all(sorted([rank, *order]) == list(range(world_size)) for rank, order in enumerate(orders))
    assert all(len(set(peers)) == world_size for peers in zip(*orders, strict=True))


def test_gradients_are_held_until_the_end() -> None:
    """Otherwise torch would reuse the gradients' memory on the backward's stream while other streams read it."""
    layout, memory = Layout.of([torch.empty(64)]), torch.zeros(64)
    gpu, inbox = Gpu([0, 1, 2], [1.0] * 3), torch.zeros(1024, dtype=torch.uint8)
    handles = [Handle(gpu, 0, [x, x], set()) for x in (inbox, memory)]
    nothing = lambda *_: None  # noqa: E731
    exchange = Exchange(
        [layout], [memory], inbox=inbox, inboxes=handles[0],
        handles=handles[1:], mean=nothing, timeout_ms=TIMEOUT_MS, copy=nothing, cuda=gpu,
    )  # fmt: skip
    gradient = torch.zeros(64)
    storage = StorageWeakRef(gradient.untyped_storage())
    exchange.send(0, [gradient])
    del gradient
    assert not storage.expired()
    exchange.finish()
    assert storage.expired()


@given(tensors, st.integers(1, 9))
def test_segments_and_their_parts_cover_a_bucket_once(numels: list[int], world_size: int) -> None:
    layout = Layout.of([torch.empty(n) for n in numels])
    segments = segments_of(layout.length, world_size)
    assert [i for cut in segments for i in range(cut.start, cut.stop)] == list(range(layout.length))
    assert len(segments) == world_size
    assert all(cut.start % ALIGNMENT == 0 or cut.start == layout.length for cut in segments)
    seen = [[0] * n for n in numels]
    starts = [start for _, _, start in layout.places]  # of the tensors in the flat one
    for cut in segments:
        for index, part, start_in_segment in parts_of(layout, cut):
            assert cut.start + start_in_segment == starts[index] + part.start
            for i in range(part.start, part.stop):
                seen[index][i] += 1
    assert all(count == 1 for counts in seen for count in counts)


interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton compiles here: see the cuda test")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64, torch.complex128])
@pytest.mark.parametrize(("world_size", "num"), [(2, 64), (2, 4096 + 64), (3, 1), (4, 3 * 4096), (8, 5000)])
def test_the_kernel_adds_by_rank(device: str, dtype: torch.dtype, world_size: int, num: int) -> None:
    """Every rank gets equal bits, whichever part is its own, and no other memory is written."""
    generator = torch.Generator(device).manual_seed(num)
    wide, exactly = torch.promote_types(dtype, torch.float32), torch.promote_types(dtype, torch.float64)
    data = torch.randn(world_size, num, device=device, generator=generator, dtype=wide).to(dtype)
    real = torch.view_as_real if dtype.is_complex else Tensor.detach
    exact, plain, means = real(data.to(exactly).mean(0)), real(data.to(wide).mean(0).to(dtype)), []
    for rank in range(world_size):
        own, room = data[rank].clone(), torch.zeros(world_size - 1, num + 64, device=device, dtype=dtype)
        others = room[:, :num]
        others.copy_(data[[i for i in range(world_size) if i != rank]])
        kept, out = room.clone(), own if rank % 2 else torch.empty_like(own)
        mean_triton.mean_(own, others, out, rank)
        assert torch.equal(room, kept) and (out is own or torch.equal(own, data[rank]))
        assert error_ratio(real(out), exact, plain) <= 1
        means.append(out)
    assert all(torch.equal(x, means[0]) for x in means)
