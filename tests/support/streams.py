"""Simulates streams of several GPUs, and symmetric memory between them, with their work in a random possible order.

Tests of copy engines replace torch.cuda by a `Gpu` for each rank. What a rank launches is recorded as steps in queues,
and nothing is done yet. `run` then does the steps one by one: it draws a queue, among those whose next step can be
done, and does that step. A copy takes several steps. A barrier takes the steps of torch's: set a signal for each peer,
then wait for each peer's signal. Faults of streams and barriers are options here, and tests must see them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CHUNKS = 3  # how many steps a copy, an addition or a packing takes


@dataclass
class Queue:
    """The work of one queue of a GPU, done in order.

    steps  (function that returns True if the step can be done, function that does it) for each step
    done   how many steps are done
    speed  the relative chance of being chosen by `run`
    """

    steps: list[tuple[Callable[[], bool], Callable[[], Any]]] = field(default_factory=list)
    done: int = 0
    speed: float = 1.0

    def add(self, do: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.steps.append((ready, do))


@dataclass
class Stream:
    """A CUDA stream. `forgets_events` and `forgets_streams` are faults: it does not wait for events, or for streams."""

    queue: Queue
    forgets_events: bool = False
    forgets_streams: bool = False

    def record_event(self) -> tuple[Queue, int]:
        return self.queue, len(self.queue.steps)

    def wait_event(self, event: tuple[Queue, int]) -> None:
        queue, position = event
        if not self.forgets_events and queue is not self.queue:
            self.queue.add(lambda: None, lambda: queue.done >= position)

    def wait_stream(self, other: "Stream") -> None:
        queue, position = other.record_event()
        if not self.forgets_streams and queue is not self.queue:
            self.queue.add(lambda: None, lambda: queue.done >= position)


class Gpu:
    """A stand-in for torch.cuda on one GPU.

    queues  for each stream, in the order in which streams are made, the index of its queue in `speeds`; several may
            share one. The first stream is the current one, on which the rank computes
    speeds  the speed of each queue, see `Queue`
    """

    def __init__(self, queues: Sequence[int], speeds: Sequence[float]):
        self.queues = [Queue(speed=speed) for speed in speeds]
        self._numbers = iter(queues)
        self.current = self.Stream()

    def Stream(self, priority: int = 0) -> Stream:
        return Stream(self.queues[next(self._numbers)])

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, numel: int, do: Callable[[slice], Any]) -> None:
        """Adds CHUNKS steps to the current stream's queue. Each calls do(part) with a part of `numel` elements."""
        cuts = [numel * i // CHUNKS for i in range(CHUNKS + 1)]
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            self.current.queue.add(lambda part=slice(start, stop): do(part))

    def copy(self, into: Tensor, source: Tensor) -> None:
        assert into.shape == source.shape
        self.launch(into.numel(), lambda part: into[part].copy_(source[part]))

    def mean(self, own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
        """Adds steps that write to `out` the mean over ranks: `own` is this rank's part, `others` (ranks - 1, n)."""
        parts = [*others]
        parts.insert(rank, own)
        self.launch(out.numel(), lambda part: out[part].copy_(torch.stack([x[part] for x in parts]).mean(0)))


class Handle:
    """The handle of a symmetric memory on one rank.

    buffers  the memory of each rank
    signals  the signals that are set, (channel, from rank, to rank): one set that all ranks share
    without  a channel whose barriers do nothing, as a fault; None: there is no fault
    """

    def __init__(
        self, gpu: Gpu, rank: int, buffers: list[Tensor], signals: set[tuple[int, int, int]], without: int | None = None
    ):
        self.gpu, self.rank, self.world_size = gpu, rank, len(buffers)
        self.buffers, self.signals, self.without = buffers, signals, without

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
        return self.buffers[rank].view(dtype)[start : start + shape[0]]

    def barrier(self, channel: int, timeout_ms: int) -> None:
        if channel == self.without:
            return
        queue, signals = self.gpu.current.queue, self.signals
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        for signal in [(channel, self.rank, peer) for peer in peers]:
            queue.add(lambda signal=signal: signals.add(signal), lambda signal=signal: signal not in signals)
        for signal in [(channel, peer, self.rank) for peer in peers]:
            queue.add(lambda signal=signal: signals.remove(signal), lambda signal=signal: signal in signals)


def run(gpus: Sequence[Gpu], seed: int) -> None:
    """Does all steps of all queues, in an order drawn by `seed`. RuntimeError if GPUs wait for each other."""
    chance = random.Random(seed)
    queues = [queue for gpu in gpus for queue in gpu.queues]
    while left := [queue for queue in queues if queue.done < len(queue.steps)]:
        able = [queue for queue in left if queue.steps[queue.done][0]()]
        if not able:
            raise RuntimeError("all wait for each other")
        queue = chance.choices(able, [queue.speed for queue in able])[0]
        queue.steps[queue.done][1]()
        queue.done += 1
