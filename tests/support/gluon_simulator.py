"""Simulates the Gluon kernels of `flash_gluon` on a CPU: their Python source runs with stand-ins for Gluon's functions.

Tests call `with simulated():`, in which the row runs on CPU tensors. A kernel that calls another function of Gluon
needs a stand-in in `gl`, `mbarrier`, `tma` or `kernels`.

Each partition (warp group) of each CTA is a thread. The simulation does everything asynchronous as late as the rules of
the hardware allow, and fills memory that a copy will write with NaN as early as they allow. So a missing wait or
release shows as NaN, a wrong sum, an error, or a deadlock, which is reported once all threads wait for one another:
- a bulk load fills its target with NaN when it is issued, and with data a while later;
- a matmul reads its operands when it is waited for, and they must not have changed since it was issued;
- a bulk store reads its source when it is waited for, and writes at the end of the kernel;
- an addition to dq, and zeros for it, land when a semaphore is released by the same partition, or by one that has met
  it at a named barrier;
- shared memory that was written by ordinary stores and not fenced cannot be an operand;
- memory from torch.empty begins as NaN;
- in the deterministic mode a CTA may only add to a tile of dq that it has acquired, and only the first CTA may store.
Layouts, registers, and differences between the 128 threads of a partition are not simulated.
"""

import ast
import ctypes
import itertools
import math
import os
import random
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lmsys.attention import AttentionCase, Pattern
from lmsys.testing import Inputs, Oracle
from tests.support.attention_rows import assert_within_budget

SOURCES = Path(__file__).parents[2] / "lmsys" / "attention" / "flash_gluon"
# Delays after which a load lands, one of which is drawn for each; None: it lands once it is waited for.
LANDINGS_S: tuple[float | None, ...] = (0.0, 0.002, 0.02)

here = threading.local()  # the state of the partition that runs in this thread: `_enter` sets and explains it


class Deadlock(AssertionError):
    """All threads wait, or another partition has failed."""


class Machine:
    """The state that all threads of a kernel share: one lock, and the threads that wait for conditions.

    Every change happens in `change`, which wakes the threads whose condition has become true.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failure: BaseException | None = None
        self.late: list[tuple[Any, ...]] = []  # bulk stores, which land when the kernel ends
        self.busy = 0  # threads that do not wait, and loads in flight; at 0 nothing changes any more: a deadlock
        # (condition, lock that the waiting thread holds twice, what it waits for)
        self.waiting: list[tuple[Callable[[], bool], threading.Lock, str]] = []

    def await_(self, condition: Callable[[], bool], what: str) -> None:
        """Returns once the condition is true. Deadlock if another partition fails, or nothing can change any more.

        what  the name of the condition, for the message of a deadlock
        """
        while True:
            with self.lock:
                if self.failure is not None:
                    raise Deadlock("another partition failed") from self.failure
                if condition():
                    return
                woken = threading.Lock()
                woken.acquire()
                self.waiting.append((condition, woken, f"{what} in {threading.current_thread().name}"))
                self.rests()
            woken.acquire()

    @contextmanager
    def change(self) -> Iterator[None]:
        """A context for changes that threads may wait for."""
        with self.lock:
            yield
            self._wake()

    def works(self, number: int = 1) -> None:
        """Counts `number` more threads or loads as busy."""
        with self.lock:
            self.busy += number

    def rests(self) -> None:
        """Counts one thread or load less as busy. If it was the last one, and threads wait, that is a deadlock."""
        with self.lock:
            self.busy -= 1
            if self.busy == 0 and self.waiting and self.failure is None:
                self.failure = Deadlock(f"waits for ever: {'; '.join(what for *_, what in self.waiting)}")
                self._wake()

    def _wake(self) -> None:
        for waiter in [*self.waiting]:
            condition, woken, _ = waiter
            if self.failure is not None or condition():
                self.waiting.remove(waiter)
                self.busy += 1
                woken.release()


class Barrier:
    """An mbarrier: its phase ends once all arrivals have come and all expected bytes have landed.

    count    arrivals that end a phase
    pending  arrivals that the current phase still needs
    bytes    bytes that are expected and have not landed
    phase    number of the current phase
    waiting  threads that wait for the phase to end
    """

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = self.waiting = 0
        self.late: list[Callable[[], None]] = []  # loads that land once a thread waits

    def arrive(self, count: int = 1, expect: int = 0) -> None:
        with here.machine.change():
            self.bytes += expect
            self.pending -= count
            assert self.pending >= 0, "more arrivals than the barrier was made for"
            self._turn()

    def landed(self, size: int) -> None:
        self.bytes -= size
        assert self.bytes >= 0, "more bytes than were expected"
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@dataclass
class Shared:
    """A view of shared memory.

    unfenced  views that were written by ordinary stores and not fenced; one list for all views of an allocation
    together  the view is one contiguous stretch of the hardware's memory
    """

    data: Tensor
    unfenced: list[Tensor]
    together: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def _view(self, data: Tensor, together: bool = True) -> "Shared":
        return Shared(data, self.unfenced, together and self.together)

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < self.data.shape[0]
        return self._view(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        """A part of the view. The hardware stores tiles as panels of columns, 128 bytes wide, so it may lie apart."""
        one_panel = self.data.shape[-1] * self.data.element_size() <= 128
        return self._view(self.data.narrow(dim, start, length), dim == 0 and one_panel)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return self._view(self.data.permute(order))

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Shared":
        assert self.together, "a slice of several panels read as if it were a tile"
        assert self.data.nbytes == math.prod(shape) * dtype.itemsize, "Triton 3.8 refuses another size"
        return self._view(self.data.flatten().view(dtype).view([int(n) for n in shape]))

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)
        self.unfenced.append(self.data)
        here.stored.append(self)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def operand(self) -> Tensor:
        """A float32 copy, as an operand of a matmul or the source of a bulk store. AssertionError if not fenced."""
        for other in self.unfenced:
            assert not _overlap(self.data, other), "written by ordinary stores and not fenced"
        return self.data.float().clone()


def _span(x: Tensor) -> tuple[int, int]:
    """The first and the last byte of x in its storage."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.storage_offset() * x.element_size(), (x.storage_offset() + last + 1) * x.element_size() - 1


def _overlap(x: Tensor, y: Tensor) -> bool:
    (a, b), (c, d) = _span(x), _span(y)
    return a <= d and c <= b


@dataclass
class Token:
    """An asynchronous matmul that was issued. `run` computes it when it is waited for."""

    a: Any
    b: Shared
    acc: Tensor | None
    result: Tensor | None = None

    def __post_init__(self) -> None:
        self.seen = self._operands()

    def _operands(self) -> tuple[Tensor, Tensor]:
        return self.a.operand() if isinstance(self.a, Shared) else self.a.float(), self.b.operand()

    def run(self) -> None:
        a, b = self._operands()
        for now, before in zip((a, b), self.seen, strict=True):  # unwritten memory is NaN, and NaN is equal here
            assert torch.equal(now.nan_to_num(1e9), before.nan_to_num(1e9)), "an operand changed under a matmul"
        self.result = a @ b if self.acc is None else self.acc + a @ b


class Word(Tensor):
    """A scalar of a kernel. `to` can also turn an address into a pointer, and bits into another type."""

    def to(self, what: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        if isinstance(what, Pointer):
            return Pointer(int(self), what.dtype)
        plain = self.as_subclass(Tensor)
        return (plain.view(what) if bitcast else plain.to(what)).as_subclass(Word)


def word(x: Any, dtype: torch.dtype | None = None) -> Word:
    return torch.tensor(x, dtype=dtype).as_subclass(Word)


@dataclass
class Pointer:
    """A pointer into the memory of this process, `offset` elements after `address`."""

    address: int
    dtype: torch.dtype
    offset: Any = 0

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.address, self.dtype, self.offset + offset)

    def to(self, _: Any) -> Word:
        return word(self.address)

    def window(self, length: int) -> Tensor:
        size = torch.empty(0, dtype=self.dtype).element_size()
        return torch.frombuffer((ctypes.c_char * (length * size)).from_address(self.address), dtype=self.dtype)


class Descriptor:
    """A tensor descriptor: x in blocks of this shape."""

    def __init__(self, x: Tensor, block: list[int]):
        self.x, self.block, self.dtype, self.layout = x, block, x.dtype, None
        nbytes = x.element_size() * torch.Size(block).numel()
        self.block_type = SimpleNamespace(shape=block, nbytes=nbytes)

    def parts(self, coord: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(slices of the tensor, slices of the block): the part of the block at `coord` that is inside the tensor."""
        inside, kept = [], []
        for start, size, length in zip(map(int, coord), self.block, self.x.shape, strict=True):
            assert start >= 0
            stop = max(start, min(start + size, length))
            inside.append(slice(start, stop))
            kept.append(slice(0, stop - start))
        return tuple(inside), tuple(kept)


@dataclass
class Cta:
    """A thread block.

    named     by number of a named barrier: [threads that have arrived, times that it was completed, additions to
              memory that the arrived partitions know of]
    acquired  {semaphore of a tile of dq that this CTA has acquired: number of CTAs that have added to the tile before};
              None outside of the deterministic mode
    """

    machine: Machine
    program: int
    grid: int
    named: dict[int, list[Any]] = field(default_factory=dict)
    acquired: dict[int, int] | None = field(default_factory=dict)


def _scalar(x: Any) -> Any:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _both(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A binary function of torch that also takes numbers: a scalar gets the dtype of the other operand."""

    def apply(x: Any, y: Any) -> Any:
        x, y = _scalar(x), _scalar(y)
        return function(x.to(y.dtype) if x.dim() < y.dim() else x, y.to(x.dtype) if y.dim() <= x.dim() else y)

    return apply


def _expect(barrier: Barrier, size: Any) -> None:
    barrier.arrive(expect=int(size))


def _wait(barrier: Barrier, parity: Any, pred: Any = True) -> None:
    if not bool(pred):
        return
    with here.machine.change():
        barrier.waiting += 1
        late, barrier.late = barrier.late, []
    for land in late:
        land()
    here.machine.await_(lambda: barrier.phase & 1 != int(parity), f"mbarrier at parity {int(parity)}")
    with here.machine.change():
        barrier.waiting -= 1


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _copy_in(desc: Descriptor, coord: list[Any], barrier: Barrier, target: Shared, pred: bool = True) -> None:
    """A bulk load: fills the target with NaN now, and with the block after a delay drawn from LANDINGS_S."""
    assert list(target.shape) == desc.block, (target.shape, desc.block)
    target.data.fill_(float("nan"))
    inside, kept = desc.parts(coord)
    machine = here.machine

    def land() -> None:
        with machine.change():
            block = torch.zeros(desc.block, dtype=desc.dtype)
            block[kept] = desc.x[inside]
            target.data.copy_(block)
            barrier.landed(desc.block_type.nbytes)

    def land_by_itself() -> None:
        land()
        machine.rests()

    delay = random.choice(LANDINGS_S)
    if delay is None:
        with machine.change():
            if not barrier.waiting:
                barrier.late.append(land)
                return
    timer = threading.Timer(delay or 0.0, land_by_itself)
    timer.daemon = True
    machine.works()
    timer.start()


def _copy_out(desc: Descriptor, coord: list[Any], source: Shared) -> None:
    """A bulk store: `_read_stores` reads its source, and `launch` writes it when the kernel has ended."""
    assert list(source.shape) == desc.block
    source.operand()
    here.stores.append((desc, [int(c) for c in coord], source))


def _read_stores(pending: int) -> None:
    """Waits until at most `pending` bulk stores of this partition have not read their source."""
    while len(here.stores) > pending:
        desc, coord, source = here.stores.pop(0)
        source.operand()
        here.writes.append((desc, coord, source.data.clone()))


def _land(writes: list[tuple[Any, ...]]) -> None:
    """Writes the blocks of bulk stores to their tensors."""
    for desc, coord, block in writes:
        inside, kept = desc.parts(coord)
        desc.x[inside] = block[kept]
    writes.clear()


def _fence(cluster: bool = False) -> None:
    for shared in here.stored:
        shared.unfenced[:] = [x for x in shared.unfenced if x is not shared.data]
    here.stored.clear()


def _matmul(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Token:
    assert is_async
    token = Token(a, b, acc if use_acc else None)
    here.matmuls.append(token)
    time.sleep(random.choice((0, 0, 0.001)))  # lets other threads run in between
    return token


def _wait_matmuls(outstanding: int, deps: list[Any]) -> Any:
    while len(here.matmuls) > outstanding:
        here.matmuls.pop(0).run()
    results = [x.result if isinstance(x, Token) else x for x in deps]
    assert all(x is not None for x in results), "a result is used before its matmul was waited for"
    return results[0] if len(results) == 1 else tuple(results)


def _named_barrier(kind: str, number: Any, num_threads: int, come: int = 128) -> None:
    """`come` threads of this partition arrive at a named barrier of `num_threads`; kind "sync" also waits for the rest.

    After a "sync" the partition knows of the additions to dq that the others have made.
    """
    number, cta = int(number), here.cta
    assert 8 <= number < 16
    with cta.machine.change():
        state = cta.named.setdefault(number, [0, 0, []])
        before = state[1]
        state[0] += come
        state[2] = [x for x in state[2] + here.added if not x.landed]
        assert state[0] <= num_threads
        if state[0] == num_threads:
            state[:2] = 0, state[1] + 1
    if kind == "sync":
        cta.machine.await_(lambda: state[1] > before, f"named barrier {number}")
        here.added = list(state[2])


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "mbarrier":
        made = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: made[int(i)])
    data = torch.full([int(n) for n in shape], float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    return Shared(data, [])


def _places(pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    """(offsets of a pointer, the mask in their shape)"""
    offset = _scalar(pointer.offset).as_subclass(Tensor)
    return offset, torch.ones(offset.shape, dtype=torch.bool) if mask is None else mask.expand(offset.shape)


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Tensor:
    offset, inside = _places(pointer, mask)
    loaded = torch.full(offset.shape, other, dtype=pointer.dtype)
    if inside.any():
        assert offset[inside].min() >= 0
        loaded[inside] = pointer.window(int(offset[inside].max()) + 1)[offset[inside]]
    return loaded.as_subclass(Word) if loaded.dim() == 0 else loaded


def _store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    offset, inside = _places(pointer, mask)
    if isinstance(x, Pointer):
        x = x.address
    x = _scalar(x).as_subclass(Tensor).expand(offset.shape)
    with here.machine.change():
        if inside.any():
            assert offset[inside].min() >= 0
            pointer.window(int(offset[inside].max()) + 1)[offset[inside]] = x[inside].to(pointer.dtype)


def _atomic_add(pointer: Pointer, x: Any, mask: Any = None) -> Tensor:
    with here.machine.change():
        before = _load(pointer, mask, 0)
        _store(pointer, before + x, mask)
    return before


@dataclass(eq=False)
class Addition:
    """64 x 64 numbers that a partition has added to dq, or stored there, but that may not have landed yet."""

    pointer: Pointer
    numbers: Tensor
    stores: bool = False
    landed: bool = False


def _exp2_by_fmas(x: Tensor) -> Tensor:
    """2 ** x, computed for all numbers as `exp2_of_eight` computes one of eight."""
    x = x.clamp(min=-127)
    t = x - x.round()
    return torch.where(x > -127, torch.exp2(x.round()), 0) * (1 + t * (0.69336860 + t * (0.24221784 + t * 0.05459282)))


def _add_registers(pointer: Pointer, x: Tensor, stores: bool = False) -> None:
    """Adds x. It lands at once, or when a semaphore is released, or at the latest when the partition ends."""
    time.sleep(random.uniform(0, 0.002))  # so that CTAs add in many orders
    # A tile of dq is two parts of 64 x 64 numbers, one from each consumer partition.
    acquired, tile = here.cta.acquired, int(pointer.offset) // (2 * 4096)
    assert acquired is None or tile in acquired, "added or stored before the tile was acquired"
    # dq's buffer has the order in which the threads' registers hold an accumulator of a matmul.
    numbers = x.reshape(4, 2, 8, 8, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(4096)
    here.added.append(Addition(pointer, numbers, stores))
    if random.random() < 0.5:
        _finish_additions()


def _store_registers(pointer: Pointer, x: Tensor) -> None:
    """Stores x, which lands as an addition does. Only the first CTA at a tile of dq may store there."""
    acquired = here.cta.acquired
    first = acquired is not None and acquired.get(int(pointer.offset) // (2 * 4096), 0) == 0
    assert first, "stored over what others have added"
    _add_registers(pointer, x, stores=True)


def _finish_additions() -> None:
    """Lands all additions and stores to dq that this partition has made or knows of."""
    with here.machine.change():
        for x in here.added:
            if not x.landed:
                start = int(x.pointer.offset)
                tile = x.pointer.window(start + 4096)[start:]
                if x.stores:
                    assert tile.isnan().all(), "stored over what was there"
                    tile.copy_(x.numbers)
                else:
                    tile.add_(x.numbers)
                x.landed = True
        here.added.clear()


def _clear(pointer: Pointer) -> None:
    """Zeros that land when a semaphore is released after a `_thread_barrier`; until then the memory holds NaN."""
    start = int(pointer.offset)
    with here.machine.change():
        pointer.window(start + 4096)[start:].fill_(float("nan"))
    here.cleared.append(pointer)


def _thread_barrier() -> None:
    """All warps of the partition meet, so that a semaphore that is released afterwards also covers their zeros."""
    here.met += here.cleared
    here.cleared.clear()


def _semaphore_release(semaphore: Pointer) -> None:
    """Lands what this partition has added and cleared, then adds 1 to the semaphore."""
    _finish_additions()
    with here.machine.change():
        for x in here.met:
            start = int(x.offset)
            x.window(start + 4096)[start:].zero_()
        here.met.clear()
    before, acquired = _atomic_add(semaphore, 1), here.cta.acquired
    assert acquired is None or before == acquired.pop(int(semaphore.offset), None), "added out of order"


def _semaphore_wait(semaphore: Pointer, expected: Any, first: int) -> None:
    """Waits until the semaphore has the expected value, then lets both consumers add. `first`: see `_let_add`."""
    here.cta.acquired = None  # not the deterministic mode: this CTA releases semaphores that it has not acquired
    _await_value(semaphore, expected)
    _let_add(first)


def _await_value(semaphore: Pointer, expected: Any) -> None:
    assert int(_load(semaphore)) <= int(expected), "the semaphore has passed this value"
    here.machine.await_(lambda: int(_load(semaphore)) == int(expected), f"a semaphore at {int(expected)}")


def _let_add(first: int) -> None:
    """Arrives at the named barriers `first` and `first + 1`, at which the two consumers wait before they add."""
    for number in (first, first + 1):
        _named_barrier("arrive", number, 160, come=32)


def _semaphore_acquire(semaphore: Pointer, expected: Any, first: int) -> None:
    """Like `_semaphore_wait`, in the deterministic mode: from now on this CTA may add to the tile of the semaphore."""
    _await_value(semaphore, expected)
    here.cta.acquired[int(semaphore.offset)] = int(expected)
    _let_add(first)


def _specialize(functions: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    """gl.warp_specialize: runs each function, a partition of this CTA, in a thread, and checks how they end."""
    machine, cta = here.machine, here.cta

    def partition(function: Any, arguments: tuple[Any, ...]) -> None:
        _enter(machine, cta)
        try:
            function(*arguments)
            _read_stores(0)
            _finish_additions()
            with machine.change():
                machine.late += here.writes
            assert not here.matmuls, "a matmul was never waited for"
            assert not here.cleared and not here.met, "zeros were written and never released"
        except BaseException as error:
            with machine.change():
                machine.failure = machine.failure or error
        finally:
            machine.rests()

    threads = [
        threading.Thread(target=partition, args=work, name=f"CTA {cta.program} partition {i}", daemon=True)
        for i, work in enumerate(functions)
    ]
    machine.works(len(threads))
    for thread in threads:
        thread.start()
    machine.rests()
    for thread in threads:
        thread.join()
    machine.works()
    if machine.failure is None:
        assert not any(state[0] for state in cta.named.values()), "threads were left behind at a named barrier"
        assert not cta.acquired, "a semaphore was acquired and never released"


def _enter(machine: Machine, cta: Cta) -> None:
    """Starts the state of a partition in this thread.

    matmuls  issued and not waited for
    stores   bulk stores that have not read their source: (descriptor, coordinates, source)
    writes   bulk stores that have, and write when the kernel ends: (descriptor, coordinates, block)
    stored   views that were written by ordinary stores since the last fence
    added    additions to dq that the partition has made or knows of
    """
    here.machine, here.cta = machine, cta
    here.matmuls, here.stores, here.writes, here.stored, here.added = [], [], [], [], []
    here.cleared, here.met = [], []  # zeros written before, and after, the warps have met at a thread barrier


class _Constant(int):
    @property
    def value(self) -> int:
        return int(self)


def _ranged(*bounds: Any) -> Iterator[Tensor]:
    return (torch.tensor(i) for i in range(*map(int, bounds)))


def _reduced(function: Callable[..., Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda x, axis: function(x, dim=axis)


gl = SimpleNamespace(
    constexpr=lambda x: _Constant(x) if isinstance(x, int) else x,
    bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32, int32=torch.int32, int64=torch.int64,
    pointer_type=lambda dtype: Pointer(0, dtype), thread_barrier=_thread_barrier,
    shared_memory_descriptor=SimpleNamespace(_reinterpret=Shared.reinterpret),
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *a: "tiles"),
    SwizzledSharedLayout=lambda *a: "plain", BlockedLayout=lambda *a: None, SliceLayout=lambda *a: None,
    NVMMADistributedLayout=lambda *a: None, DotOperandLayout=lambda **k: None,
    allocate_shared_memory=_allocate, warp_specialize=_specialize,
    program_id=lambda axis: torch.tensor(here.cta.program), num_programs=lambda axis: here.cta.grid,
    static_range=range, static_assert=lambda holds, why: None, cdiv=lambda x, y: (x + y - 1) // y,
    arange=lambda start, stop, layout=None: torch.arange(start, stop),
    full=lambda shape, x, dtype, layout: torch.full(shape, x.item() if isinstance(x, Tensor) else x, dtype=dtype),
    zeros=lambda shape, dtype, layout=None: torch.zeros([int(n) for n in shape], dtype=dtype),
    where=lambda c, x, y: torch.where(torch.as_tensor(c), x, y),
    zeros_like=torch.zeros_like, join=lambda x, y: torch.stack((x, y), -1),
    maximum=_both(torch.maximum), minimum=_both(torch.minimum),
    max=_reduced(torch.amax), min=_reduced(torch.amin), sum=_reduced(torch.sum),
    exp2=torch.exp2, log2=torch.log2, reshape=lambda x, shape: x.reshape([int(n) for n in shape]),
    convert_layout=lambda x, layout, assert_trivial=False: x, multiple_of=lambda x, _: x,
    load=_load, store=_store, atomic_add=_atomic_add,
    extra=SimpleNamespace(cuda=SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)),
)  # fmt: skip
mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: "mbarrier", init=_init, expect=_expect, wait=_wait,
    arrive=lambda barrier, count: barrier.arrive(count),
)  # fmt: skip
tma = SimpleNamespace(store_wait=_read_stores, async_load=_copy_in, async_store=_copy_out)


def _jit(function: Any = None, **_: Any) -> Any:
    return function or (lambda function: function)


def _hide_outside(x: Tensor, others: Tensor, first: Tensor, length: Tensor, hidden: float) -> Tensor:
    distance = (others[None, :] - first[:, None]).long() & 0xFFFFFFFF  # unsigned
    return torch.where(distance < length[:, None], x, hidden)


def kernels(module: str) -> dict[str, Any]:
    """The names that a module of flash_gluon, such as "forward", defines when it runs with the stand-ins."""
    stand_ins = {
        "gluon": SimpleNamespace(jit=_jit, constexpr_function=_jit), "gl": gl, "mbarrier": mbarrier, "tma": tma,
        "fence_async_shared": _fence, "warpgroup_mma": _matmul, "warpgroup_mma_wait": _wait_matmuls,
        "triton": SimpleNamespace(jit=_jit, language=gl), "tl": gl, "range": _ranged, "namedtuple": namedtuple,
    }  # fmt: skip
    _run_source("hopper", stand_ins)
    stand_ins |= {  # for functions in inline assembly
        "named_barrier": _named_barrier,
        "semaphore_release": _semaphore_release,
        "semaphore_acquire": _semaphore_acquire,
        "semaphore_wait": _semaphore_wait,
        "clear": _clear,
        "gdc_wait": lambda: None,  # here kernels run one after another
        "gdc_launch_dependents": lambda: None,
        "add_registers": _add_registers,
        "store_registers": _store_registers,
        "exp2_of_eight": _exp2_by_fmas,
        "narrow": lambda x, dtype: x.to(dtype),
        "scale_rows": lambda x, factor: x * factor[:, None],
        "widen": lambda x, dtype: x.float(),
    }
    after = {"intervals": {"hide_outside": _hide_outside}}  # this one is in assembly, too
    before = {"forward": ("intervals",), "backward": ("intervals", "dq", "backward_steps")}
    for name in (*before.get(module, ()), module):
        _run_source(name, stand_ins)
        stand_ins |= after.get(name, {})
    return stand_ins


class _Values(ast.NodeTransformer):
    """Turns x += y into x = x + y: a kernel makes a new value, but a tensor would be changed in place."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        assert isinstance(node.target, ast.Name)
        read = ast.Name(node.target.id, ast.Load())
        return ast.copy_location(ast.Assign([node.target], ast.BinOp(read, node.op, node.value)), node)


def _run_source(module: str, names: dict[str, Any]) -> None:
    path = SOURCES / f"{module}.py"
    exec(_compiled(path.read_text(), str(path)), names)


@cache
def _compiled(text: str, path: str) -> CodeType:
    """The source as code, without its imports."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return compile(ast.fix_missing_locations(_Values().visit(tree)), path, "exec")


def launch(kernel: Callable[..., None], grid: int, at_once: int, *args: Any, **constants: Any) -> None:
    """Runs a kernel: all CTAs of the grid, started in order, `at_once` at a time. Raises what a partition raised."""
    machine, numbers = Machine(), itertools.count()
    args = tuple(word(x) if type(x) in (int, float) else x for x in args)

    def processor() -> None:
        while (program := next(numbers)) < grid and machine.failure is None:
            _enter(machine, Cta(machine, program, grid))
            try:
                kernel(*args, **constants)
            except BaseException as error:
                with machine.change():
                    machine.failure = machine.failure or error
        machine.rests()

    processors = [threading.Thread(target=processor, daemon=True) for _ in range(min(grid, at_once))]
    machine.works(len(processors))
    for thread in processors:
        thread.start()
    for thread in processors:
        thread.join()
    _land(machine.late)
    if machine.failure is not None:
        raise machine.failure


def _unwritten(*args: Any, make: Callable[..., Tensor] = torch.empty, **options: Any) -> Tensor:
    """Replaces torch.empty: memory of floating-point numbers begins as NaN."""
    made = make(*args, **options)
    return made.fill_(float("nan")) if made.is_floating_point() else made


PROCESSORS = 6  # multiprocessors of the simulated GPU


class Kernel:
    """Replaces `lmsys.attention.flash_gluon.launch.Kernel`."""

    def __init__(
        self, function: Any, tensors: list[Tensor], blocks: list[list[int]], others: list[Any], **options: Any
    ):
        self.kernel = kernels(function.fn.__module__.rpartition(".")[2])[function.__name__]
        self.blocks = blocks
        self.pointers = [x.dtype if isinstance(x, Tensor) else None for x in others]
        self.constants = {name: x for name, x in options.items() if name.isupper() or x is None}

    def __call__(self, grid: int, stream: int, tensors: tuple[Tensor, ...], others: tuple[Any, ...]) -> None:
        described = [Descriptor(x.detach(), block) for x, block in zip(tensors, self.blocks, strict=True)]
        args = [Pointer(x, dtype) if dtype else x for x, dtype in zip(others, self.pointers, strict=True)]
        launch(self.kernel, grid, PROCESSORS, *described, *args, **self.constants)


@contextmanager
def plans_taken(launcher: str) -> Iterator[list[Any]]:
    """A context in which no kernel runs: the list has the plans that `launcher`, _Forward or _Backward, is given."""
    from lmsys.attention.flash_gluon import launch as product

    taken: list[Any] = []

    def launch(*arguments: Any) -> Any:
        taken.append(arguments[-1])
        return SimpleNamespace(run=lambda *_: ())

    with simulated(), unmended(), patch.multiple(product, **{"_launches": {}, launcher: launch}):
        yield taken


@contextmanager
def on_one_core() -> Iterator[None]:
    """A context in which all threads run on one core; workers of xdist have different ones.

    The interpreter lock lets only one thread run at a time. On several cores each switch would have to wake a core.
    """
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def simulated() -> Iterator[None]:
    """A context in which `flash_gluon` runs on CPU tensors, on a simulated GPU of PROCESSORS multiprocessors."""
    from lmsys.attention.flash_gluon import launch as product

    with ExitStack() as patches:
        patches.enter_context(on_one_core())
        for owner, name, stand_in in [
            (product, "Kernel", Kernel),
            (product, "raw_stream", lambda device: 0),
            (product, "_kernels", {}),
            (product, "_launches", {}),
            (product, "_counters", {}),
            (torch, "empty", _unwritten),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=PROCESSORS)),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "device_of", lambda x: nullcontext()),
        ]:
            patches.enter_context(patch.object(owner, name, stand_in))
        yield
        assert not any(counter.any() for counter in product._counters.values()), "a counter was not left at zero"


def gluon() -> Any:
    """The module that launches the kernels. Without Triton it cannot be imported, so no file of tests imports it."""
    from lmsys.attention.flash_gluon import launch

    return launch


def unmended() -> Any:
    """A context in which no kernel of flash_triton computes tiles with NaN again."""
    return patch.multiple(gluon().flash_triton, mend_forward=lambda *_: None, mend_backward=lambda *_: None)


def assert_right(
    case: AttentionCase,
    inputs: Inputs,
    pattern: Pattern | None = None,
    forward: Any = None,
    backward: Any = None,
    fixed_orders: Sequence[bool] = (),
) -> None:
    """AssertionError unless simulated kernels give the right o and log-sum-exp, and in some backwards gradients.

    Where Triton is not interpreted, kernels of flash_triton cannot read a CPU's memory, so that no tile is mended.

    forward, backward  plans; None: those that ship
    fixed_orders       for each backward: True if additions to dq have a fixed order (deterministic)
    """
    oracle, scale, x = Oracle(case, inputs, pattern=pattern), case.head_dim**-0.5, inputs
    with simulated(), nullcontext() if gluon().flash_triton.INTERPRETED else unmended():
        o, lse = gluon()._forward(x.q, x.k, x.v, case.causal, scale, forward, pattern)
        assert_within_budget(oracle.error_ratios({"o": o, "lse": lse}, rms=True))
        for fixed in fixed_orders:
            grads = gluon()._backward(x.q, x.k, x.v, o, lse, x.do, case.causal, scale, fixed, backward, pattern)
            assert_within_budget(oracle.error_ratios(dict(zip(("dq", "dk", "dv"), grads, strict=True)), rms=True))
