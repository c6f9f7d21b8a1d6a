"""Runs attention rows in processes of their own, and times, checks and judges them from outside, as untrusted code.

A *row* is an implementation under test. A *foreign row* is one of which nothing is believed, such as a row from a
user's file. With --own-process our rows run in this way too, since all rows of a comparison must be measured alike. The
*judge* is the process of the benchmark. It never imports the code of a user's file: it draws inputs, copies them into
memory that it shares with the row's process, and says "call". The row's process has the function, this memory and the
loop `serve`; it has no seed, draw, oracle or expected result. It answers in JSON how long the call took. Then the judge
tells it to copy the results into other shared memory, which the judge has laid out in the shape and dtype that it
wants. The judge draws at random which calls are checked, and tells no other process.

`ApartClock.read` checks the times that the row's process states: against the judge's own clock, and against the waits
for `null`, a row of ours that does nothing, in a process of its own. Between questions the row's process is stopped,
with all that it has started in its process group: it works only while it is asked.

benchmarks/bench_attention.py calls `Foreign.of`, which makes a foreign row of any entry of a table. The row's `load`
returns a `Process`, which checks call with q, k and v like any other row; `Process.step` is what is timed. A new
question to the row's process is a method of `_Row`, and a call of `Process.ask` with its name.

The parts of this file, in their order:

- layouts of tensors in memory that processes share, for both sides (`layout_of`, `_placed`);
- in the row's process, `serve`, and `_Row`, whose methods are the questions that the judge may ask;
- in the judge, `Block`, a piece of shared memory; `Process`, which starts a row's process and asks it; `_Remote`, a
  call that autograd can differentiate;
- the clock, `ApartClock`, with its readings, `Seen`;
- `Foreign`, the entry, `process_of`, the processes that run, and `null`, a row of ours for comparison.
"""

import ctypes
import faulthandler
import fcntl
import gc
import inspect
import itertools
import json
import math
import mmap
import os
import pickle
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import connection, reduction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmsys import deterministic, processes, traits
from lmsys.attention import contract, pattern
from lmsys.bench import Entry, Record, Settings, Step, findings, plain, watch
from lmsys.measure import clock, compare, memory
from lmsys.measure.step import Failed, nothing
from lmsys.registry import load_target
from lmsys.strict_json import parse_json
from lmsys.values import shortened

# A call is late if the judge's wait for the row is longer than that for `null` by more than a margin. The margin is
# MARGIN_S seconds, and two shares by the name of the wait (a field of `Seen`): one of the shorter of both waits, one of
# the time that the row's process states, since behind a call the process frees the last call's memory. On two busy
# cores of a virtual machine, waits for honest calls of 0.5 to 20 ms differed from those for `null` by 0.02 to 0.1 ms in
# the median.
# DOUBT: how far calls may lean to being late, see `leaning`. MOST_LATE: the share of calls that may be late. It is less
# than 0.29: if a larger share of calls is wrong, the Hodges-Lehmann estimate of a change (changes.py) may be anything.
MARGIN_S, DOUBT, MOST_LATE = 1e-4, 3.0, 0.25
MARGIN_SHARES = {"answer_s": (0.25, 0.1), "copy_s": (1.0, 0.0)}
# On a GPU, how long the device idles before a call's inputs arrive, so that the row's process can launch the call's
# kernels before the device could run them.
LEAD_S = 5e-3
MOST_BYTES, MOST_S = 2**16, 600.0  # limits of an answer: its size, and how long the judge waits for it
# Environment variables of a row's process. Without them glibc gives freed memory back to the system, and each call gets
# it anew by hundreds of page faults. The bench's own process needs no such variables: its heap is larger, and seldom
# ends in free memory, which alone is given back.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
# The ways to call a row, by the direction that is timed. One more, "forward", comes before "backward" and is not timed.
WAYS = {"fwd": "inference", "bwd": "backward", "fwdbwd": "both"}
# READS: {way: the groups of shared tensors that have new values for such a call}. RESULTS: {way: the group of the
# call's results}. A group is a set of tensors that share a `Block`, such as "inputs": q, k and v.
READS = {"inference": ["inputs"], "forward": ["inputs"], "backward": ["upstream"], "both": ["inputs", "upstream"]}
RESULTS = {"inference": "results", "forward": "results", "backward": "gradients", "both": "gradients"}


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The layout of a block of memory for such tensors: (dtype, shape, strides, first byte, bytes) of each.

    Strides and alignment are those of the given tensors.
    """
    sizes = [end - begin for begin, end in map(plain.memory_of, tensors.values())]
    # 64 bytes are added to each size for the offset `x.data_ptr() % 64`, which keeps the alignment.
    begins = itertools.accumulate((64 * math.ceil(size / 64) + 64 for size in sizes), initial=0)
    return {
        name: (x.dtype, tuple(x.shape), x.stride(), begin + x.data_ptr() % 64, size)
        for (name, x), size, begin in zip(tensors.items(), sizes, begins, strict=False)
    }


def _placed(block: Tensor, layout: Mapping[str, Any], copied: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """By name, (its memory as one dimension, the tensor) of each tensor in `block`, a piece of memory.

    copied  True: the tensors lie in copies of that memory
    """

    def placed(dtype: torch.dtype, shape: Any, strides: Any, begin: int, size: int) -> tuple[Tensor, Tensor]:
        memory = block[begin - begin % 64 : begin + size]
        flat = (memory.clone() if copied else memory)[begin % 64 :].view(dtype)
        return flat, flat.as_strided(shape, strides)

    return {name: placed(*where) for name, where in layout.items()}


def _mapped(file: Any) -> Tensor:
    """The memory of a file that is shared, as bytes."""
    return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


# In the row's process.


def serve(number: int, trace: int) -> None:
    """Answers the judge's questions until it hangs up: the main function of a row's process.

    number, trace  file descriptors: of the connection to the judge, and of the file for traces of crashes
    """
    faulthandler.enable(file=trace)
    faulthandler.register(signal.SIGUSR1, file=trace)
    os.set_inheritable(number, False)
    line = connection.Connection(number)
    with findings.interpreted_kernels() as launched:
        row = _Row(line, launched)
        while request := processes.read(line):
            name, args = pickle.loads(request)
            answer, failure = compare.attempt(getattr(row, name), *args)
            line.send_bytes(json.dumps({"failure": failure} if failure else answer or {}).encode())


class _Row:
    """A row in its process. The public methods are the judge's questions; what they return is the answer."""

    def __init__(self, line: connection.Connection, launched: list[Any]):
        self._line, self._launched = line, launched
        self._options: dict[str, Any] = {}  # keywords of all calls
        self._kept: Any = None  # the results of the last call
        self._arrive: Callable[..., Any] = nothing  # on a GPU: has the next call wait until its inputs have arrived
        # Tensors by (owner, group), as `_placed` returns them: those that are shared, and those that calls read. The
        # owner is the target of the row that they are for: the process of `null` is called with those of each row.
        self._shared: dict[Any, Any] = {}
        self._own: dict[Any, Any] = {}

    def load(self, entry: Entry, device: str, limit_bytes: int | None) -> Record:
        """Loads the row's code. Returns its traits and the names of its parameters, or why it is missing here."""
        if device == "cpu":
            memory.cap_host_memory()
        elif limit_bytes:
            memory.cap_gpu_memory(limit_bytes)
        self._device = device
        self._clock: Any = clock.clock_of(device, ahead=False)
        if missing := entry.why_not(None):
            return {"missing": missing}
        self._call = contract.adapt(entry.load())
        gc.freeze()
        return {
            "traits": traits.AttentionTraits.of(entry).changed,
            "parameters": list(inspect.signature(self._call).parameters),
        }

    def place(self, key: tuple[str, str], layout: dict[str, Any], handle: Any) -> None:
        """Takes a group of tensors that is shared from now on.

        key     (the owner's target, the name of the group)
        handle  (function, arguments): a call that opens a GPU's memory; None: the descriptor of a file is sent next
        """
        block = handle[0](*handle[1]) if handle else _mapped(os.fdopen(reduction.recv_handle(self._line), "r+b"))
        # A GPU reads inputs where they arrive. On a CPU they are copied first, as inputs of our own rows are drawn:
        # into memory of the process, by threads that are then awake.
        self._shared[key], self._own[key] = _placed(block, layout), _placed(block, layout, self._device == "cpu")
        self._own[key[0], "leaves" if key[1] == "inputs" else "others"] = {
            name: (flat, x.detach().requires_grad_()) for name, (flat, x) in self._own[key].items()
        }

    def tell(self, options: dict[str, Any], arrived: bytes | None, mode: list[bool]) -> None:
        """Takes the keywords of all calls that follow. Frees memory.

        arrived  for timed calls on a GPU: the handle of `_arrived`, for which all later calls wait; else None
        mode     torch's deterministic mode in the judge, in which the calls are made
        """
        if mode != deterministic.mode():  # setting it may load torch's compiler
            deterministic.set_mode(mode)
        self._options, self._kept = options, None
        compare.release_memory()
        if arrived is not None:
            event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", torch.cuda.current_device()), arrived)
            self._arrive = partial(torch.cuda.current_stream().wait_event, event)

    def read(self, owner: str, way: str) -> None:
        """Takes the new inputs of the next call. On a CPU it copies them; a GPU reads them where they arrive."""
        for key in [(owner, group) for group in READS[way]] if self._device == "cpu" else ():
            for name, (flat, _) in self._own[key].items():
                flat.copy_(self._shared[key][name][0])

    def call(self, owner: str, way: str, more_s: float = 0.0) -> Record:
        """Makes a call and says how long it took, with `more_s` seconds of busy waiting after it, which count too."""
        mark, self._kept = self._clock.sample(lambda call: call(), partial(self._way, owner, way), self._arrive)
        took_s = self._clock.read([mark], trusted=True)[0].run_s + more_s
        until = time.perf_counter() + more_s
        while time.perf_counter() < until:
            pass
        return {"took_s": took_s, "interpreted": bool(self._launched)}

    def _way(self, owner: str, way: str) -> Callable[[], Any]:
        """A way of calling the row, as a function without arguments."""
        leaves, inputs, upstream = (
            [x for _, x in self._own.get((owner, group), {}).values()] for group in ("leaves", "inputs", "upstream")
        )
        forward = partial(self._call, *leaves, **self._options)
        return {
            "inference": torch.no_grad()(partial(self._call, *inputs, **self._options)),
            "forward": forward,
            "backward": partial(torch.autograd.grad, self._kept, leaves, upstream),
            "both": lambda: torch.autograd.grad(forward(), leaves, upstream),
        }[way]

    def copy(self, owner: str, way: str) -> None:
        """Copies the results of the last call to where the judge wants them."""
        own, shared = self._own[owner, "inputs"], self._shared[owner, "inputs"]
        results = self._kept if isinstance(self._kept, tuple) else (self._kept,)
        for (name, (_, place)), x in zip(self._shared[owner, RESULTS[way]].items(), results, strict=True):
            plain.check_plain(name, x, place, [x for _, x in own.values()])
            place.copy_(x.detach())
        clock.synchronize(self._device)
        if not all(torch.equal(x, shared[name][1]) for name, (_, x) in own.items()):
            raise Failed("wrong", "the row changes its inputs")

    def bytes(self, owner: str, way: str) -> Record:
        """The peak memory of a call, and what a forward saves for its backward."""
        forward = self._way(owner, "forward")
        self._kept = forward() if way == "backward" else None
        peak = compare.attempt(memory.peak_bytes, self._way(owner, way), self._device)[0]
        return {"peak_bytes": peak, "saved_bytes": compare.attempt(memory.saved_bytes, forward)[0]}


# In the judge.


class Block:
    """Memory that the judge shares with rows' processes, and the tensors in it.

    file, handle  by these another process finds it. file: for memory of the host, else None. handle: for memory of a
                  GPU (function, arguments), a call that opens it, else None
    placed        the tensors, as `_placed` returns them
    """

    def __init__(self, layout: dict[str, Any], device: str):
        self.layout = layout
        self.file: Any = None
        self.handle: Any = None
        size = 64 + max(begin + size for *_, begin, size in layout.values())
        if device == "cuda":
            self._pool = torch.cuda.MemPool()  # a handle opens all of an allocation, in which nothing else may lie
            with torch.cuda.use_mem_pool(self._pool):
                block = torch.empty(size, dtype=torch.uint8, device=device)
            self.handle = torch.multiprocessing.reductions.reduce_tensor(block)
        else:
            self.file = os.fdopen(os.memfd_create("lmsys", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
            self.file.truncate(size)
            # The row's process can then not change the file's size: in a shorter file the judge's reads would crash.
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            block = _mapped(self.file)
        self.placed = _placed(block, layout)

    def fill(self, tensors: Mapping[str, Tensor]) -> "Block":
        """Copies tensors of this layout into the block."""
        for name, x in tensors.items():
            flat, _ = self.placed[name]
            # On a CPU one thread copies: OpenMP's threads would spin for milliseconds after it, on the CPUs that the
            # row needs next.
            if x.is_cuda:
                flat.copy_(x.detach().as_strided(flat.shape, (1,)))
            else:
                ctypes.memmove(flat.data_ptr(), x.data_ptr(), flat.nbytes)
        return self


class Process:
    """A row's process, which the first question starts, and the row as a function whose calls run there.

    heartbeat  of the judge's own process: it has the phrase for what the row does, and the deadline
    windows    {name: seconds}. By the name of a question, such as "read": how long the judge waited for the last answer
               to it. By "took", and by the way of calling, such as "forward": how long the last call took, as the row's
               process states. By "call forward": how long the judge waited for the last call in this way. By "copy
               forward": how long it waited for that call's inputs to be read and for its results to be copied
    """

    heartbeat = watch.Heartbeat()

    def __init__(self, entry: Entry, settings: Settings):
        # The entry goes to the row's process, which must not know all of the settings.
        self.entry = Entry(entry.name, entry.target, extra=entry.extra, install=entry.install)
        self.settings = settings
        self.interpreted = False  # True: a call ran kernels in Triton's interpreter
        self.windows: dict[str, float] = {}
        self.placed: dict[Any, Block] = {}  # by (owner, group)
        self._worker: Any = None

    def start(self) -> "Process":
        """Starts the process, unless it runs, and has it load the row."""
        if self._worker is None:
            ours, theirs = socket.socketpair()
            self._line, self._trace = connection.Connection(ours.detach()), tempfile.TemporaryFile()  # noqa: SIM115
            with theirs:
                self._worker = processes.Worker(
                    environment=KEEPS_MEMORY, open_files=[theirs.fileno(), self._trace.fileno()]
                )
                self._worker.send(serve, theirs.fileno(), self._trace.fileno())
            self.facts = self.ask("load", self.entry, self.settings.device, self.settings.memory_limit_bytes)
            self.__signature__ = inspect.Signature(  # as `contract` reads it
                [inspect.Parameter(x, inspect.Parameter.POSITIONAL_ONLY) for x in "qkv"]
                + [
                    inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY)
                    for x in ("causal", "scale", "pattern", *pattern.OPTIONS)
                    if x in ("causal", "scale", *self.facts.get("parameters", ()))
                ]
            )
        return self

    def ask(self, name: str, *args: Any, file: Any = None, stops: bool = True) -> Record:
        """The answer to a question. Raises `Failed` if none comes, or if it says that the row has failed.

        name   of the method of `_Row` that answers; `args` are its arguments
        file   a file whose descriptor is sent behind the question
        stops  True: the process is stopped afterwards; False: it goes on, since the next question comes at once
        """
        worker, request, begin = self.start()._worker, pickle.dumps((name, args)), time.perf_counter()
        try:
            os.killpg(worker.pid, signal.SIGCONT)
            self._line.send_bytes(request)
            if file is not None:
                reduction.send_handle(self._line, file.fileno(), worker.pid)
            # 0.9: this process still has to say why, before its own deadline is over.
            if not self._line.poll(min(0.9 * (self.heartbeat.now.until - time.monotonic()), MOST_S)):
                worker.signal(signal.SIGUSR1)  # it writes down where it is, within a second
                time.sleep(1.0)
                raise TimeoutError
            text = self._line.recv_bytes(MOST_BYTES)
            self.windows[name] = time.perf_counter() - begin
            if stops:
                os.killpg(worker.pid, signal.SIGSTOP)
                worker.watcher.send_signal(signal.SIGCONT)  # it must run, to notice when this process ends
            answer = dict(parse_json(text.decode()))
        except (OSError, EOFError, ValueError, TypeError, RecursionError) as error:
            how = (
                "no answer within the deadline" if isinstance(error, TimeoutError) else f"its process {worker.ending()}"
            )
            place = watch.place_in(os.pread(self._trace.fileno(), MOST_BYTES, 0).decode(errors="replace"))
            self.close()
            raise Failed("error", f"{how} {self.heartbeat.now.doing}{place and f', at {place}'}") from None
        if "failure" in answer:
            raise Failed(*map(str, answer["failure"]))
        return answer

    def close(self) -> None:
        """Ends the process; the next question starts another one."""
        if self._worker is not None:
            self._worker.close(0.0)
        self._worker, self.placed = None, {}

    def put(self, group: str, tensors: Mapping[str, Tensor], *others: "Process") -> Block:
        """Copies tensors into memory shared with this row's process and those of `others`.

        There they are found by (target of this row, `group`). The block is made, and told to the processes, at the
        first call and whenever the layout changes.
        """
        key, layout, rows = (self.entry.target, group), layout_of(tensors), (self, *others)
        block = self.placed.get(key)
        if block is None or block.layout != layout or any(row.placed.get(key) is not block for row in rows):
            block = Block(layout, self.settings.device)
            for row in rows:
                row.ask("place", key, layout, block.handle, file=block.file)
                row.placed[key] = block
        return block.fill(tensors)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Calls the row outside of all timing. The results are tensors of the judge; their backward asks the row."""
        is_pair = options.get("return_lse") or getattr(options.get("pattern"), "return_lse", False)
        self.ask("tell", options, None, deterministic.mode())
        results = _Remote.apply(self, torch.is_grad_enabled() and q.requires_grad, is_pair, q, k, v)
        return results if is_pair else results[0]

    def results(self, way: str, like: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Calls the row, and returns its results, which have the shapes, dtypes and strides of `like`."""
        block = self.put(RESULTS[way], like)
        clock.synchronize(self.settings.device)
        self.ask("read", self.entry.target, way)
        self.interpreted |= self.ask("call", self.entry.target, way).get("interpreted") is True
        self.ask("copy", self.entry.target, way)
        return tuple(x.clone() for _, x in block.placed.values())

    def step(self, direction: str, tensors: Mapping[str, Tensor], options: dict[str, Any], step: Step) -> Step:
        """The step with calls that run in the row's process. tensors: q, k, v and do, which the step draws."""
        null = process_of(Entry("null", f"{__name__}:null"), self.settings)
        drawn = {"inputs": {x: tensors[x] for x in "qkv"}, "upstream": {"0": tensors["do"]}}
        wanted = {"results": {"o": tensors["do"]}, "gradients": {f"d{x}": tensors[x] for x in "qkv"}}
        blocks = {group: self.put(group, xs, null) for group, xs in (drawn | wanted).items()}
        arrived = _arrived() if self.settings.device == "cuda" else None
        for row in (null, self):
            row.ask("tell", options, arrived and arrived.ipc_handle(), deterministic.mode())
        call = partial(self._timed_call, null, blocks, drawn, arrived)
        parts: dict[str, Any] = {"run": partial(call, WAYS[direction]), "clock": partial(ApartClock, null, self)} | (
            {"prepare": partial(call, "forward"), "like": partial(call, "inference")} if direction == "bwd" else {}
        )
        return replace(step, **parts)

    def _timed_call(
        self,
        null: "Process",
        blocks: Mapping[str, Block],
        drawn: Mapping[str, Mapping[str, Tensor]],
        arrived: Any,
        way: str,
        pair: Any = None,
    ) -> Any:
        """Makes a call of the row, or of `null` in its place, and returns its results. `windows` gets how long it took.

        blocks   by group: the memory that both processes share with this one
        drawn    by group: the tensors that are copied there for a call of the row
        arrived  `_arrived`, for which the row's process waits on a GPU; None on a CPU
        pair     (the process that is called, the clock); None: the row's process and a clock of the CPU
        """
        row, base = pair or (self, clock.CpuClock())
        owner = self.entry.target
        # `null` is busy for as long as the row's last call took, so that both use the CPU alike.
        more_s = self.windows.get(way, 0.0) if row is null else 0.0

        def arrive() -> None:
            for group in READS[way] if row is self else ():
                blocks[group].fill(drawn[group])
            row.ask("read", owner, way, stops=False)

        def call(_: Any) -> Record:
            _, answer = clock.in_turn(
                arrived.record if arrived else nothing, partial(row.ask, "call", owner, way, more_s)
            )
            return answer

        # A process that has been stopped makes its next call more slowly. So one call on the old inputs comes first,
        # whose time does not count. Not for a backward: its forward came right before, and its graph serves one call.
        if way != "backward":
            _settle()
            row.ask("call", owner, way, more_s, stops=False)
        base.wait(LEAD_S)
        mark, answer = base.sample(call, late=arrive)
        took_s, waited_s = answer.get("took_s"), base.read([mark], 0.0, trusted=True)[0].run_s
        if not (isinstance(took_s, float) and 0.0 <= took_s <= waited_s):
            raise Failed("wrong", f"its process says that a call took {took_s!r} s, of {waited_s:.3g} that passed")
        row.ask("copy", owner, way)
        row.windows |= {
            way: took_s,
            "took": took_s,
            "call": waited_s,
            f"call {way}": waited_s,
            f"copy {way}": row.windows["read"] + row.windows["copy"],
        }
        results = [x for _, x in blocks[RESULTS[way]].placed.values()]
        return tuple(results) if len(results) > 1 else results[0]

    def bytes(self, direction: str) -> Record:
        """The peak memory of a call, and what its forward saves for its backward, as the process says."""
        answer = self.ask("bytes", self.entry.target, WAYS[direction])
        return {
            name: answer[name]
            for name in ("peak_bytes", "saved_bytes")[: 1 + (direction != "fwd")]  # "fwd": without "saved_bytes"
            if type(answer.get(name)) is int
        }


@cache
def _arrived() -> Any:
    """The event that the judge records on a GPU once a call's inputs are copied.

    All steps share it: a process that several steps call, as that of `null`, waits for the event that it was told last.
    """
    return torch.cuda.Event(interprocess=True)


def _settle() -> None:
    """Waits until no thread of this process uses a CPU that a row needs: OpenMP's threads spin for milliseconds."""
    for _ in range(20):
        used_s = time.process_time()
        time.sleep(1e-3)
        if time.process_time() - used_s < 3e-4:  # threads of this process used a CPU for less than a third of the time
            break


class _Remote(torch.autograd.Function):
    """A call of a row in its process, with its backward there."""

    @staticmethod
    def forward(ctx: Any, row: Process, grad: bool, is_pair: bool, *inputs: Tensor) -> Any:
        ctx.row, ctx.inputs, (q, _, v) = row, dict(zip("qkv", inputs, strict=True)), inputs
        block = row.put("inputs", ctx.inputs)
        like = {"o": q.new_empty(*q.shape[:-1], v.shape[-1])}
        like |= {"lse": q.new_empty(q.shape[:-1], dtype=torch.float32)} if is_pair else {}
        results = row.results("forward" if grad else "inference", like)
        if not all(torch.equal(x, ctx.inputs[name]) for name, (_, x) in block.placed.items()):
            raise Failed("wrong", "the row changes its inputs")
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        ctx.row.put("upstream", {str(at): x for at, x in enumerate(upstream)})
        # A gradient for each argument of `forward`: None for row, grad and is_pair.
        return *[None] * 3, *ctx.row.results("backward", {f"d{x}": y.new_empty(y.shape) for x, y in ctx.inputs.items()})


@dataclass(frozen=True)
class Seen(clock.Reading):
    """A timed call of a foreign row.

    run_s      how long the call took, as the row's process states
    prepare_s  how long the untimed call before it took, such as the forward of a backward: the judge's wait for that
               call, plus the part of the wait for its inputs and results that is longer than for `null`; 0.0: no call
    answer_s   (how much longer than `run_s` the judge waited for the answer, the same for a call of `null`)
    copy_s     (how long the judge waited for inputs to be read and results to be copied, the same for `null`)
    """

    answer_s: tuple[float, float]
    copy_s: tuple[float, float]

    def late_s(self, name: str) -> float:
        """How much longer this wait was for the row than for `null`; negative: shorter; 0.0 within the margin."""
        of_row, of_null = getattr(self, name)
        of_wait, of_call = MARGIN_SHARES[name]
        most_s = MARGIN_S + of_wait * min(of_row, of_null) + of_call * self.run_s
        return of_row - of_null if abs(of_row - of_null) > most_s else 0.0


def leaning(late_s: Sequence[float]) -> float:
    """How far values lean to the positive side, in standard deviations of the sum if each sign were a fair coin's.

    It is the larger of two sums: of the signs, and of the signs times the ranks of sizes (Wilcoxon 1945). So many small
    negative values do not hide larger positive ones, and one huge value counts as one. It is 0.0 if all are 0.
    """
    values = np.array([x for x in late_s if x])
    if not len(values):
        return 0.0
    signs, sizes = np.sign(values), np.abs(values)
    ranks = np.searchsorted(np.sort(sizes), sizes, "right")  # equal sizes have one rank
    return float(max(signs.sum() / len(values) ** 0.5, signs @ ranks / np.linalg.norm(ranks)))


class ApartClock(clock.CpuClock):
    """The clock of a row in a process of its own: that process states how long calls took, and the judge checks it.

    null, row  the processes of the row `null` and of the row that is timed; each sample calls both, `null` first
    base       the clock of the run
    """

    def __init__(self, null: Process, row: Process, base: Any):
        self._rows, self._base, self.others = (null, row), base, base.others

    def sample(
        self, run: Callable[[Any], Any], prepare: Any = nothing, late: Callable[[], Any] = nothing
    ) -> tuple[Any, Any]:
        for row in self._rows:
            late()  # the row's process sees this only when it is called
            prepare((row, self._base))
            result = run((row, self._base))
        of_null, of_row = (x.windows for x in self._rows)
        answer_s = of_row["call"] - of_row["took"], of_null["call"] - of_null["took"]
        copy_s = of_row["read"] + of_row["copy"], of_null["read"] + of_null["copy"]
        # What the process does while the forward's inputs are read and its results are copied is untimed work as well.
        # The lesser of two waits for `null`, as one may be long by chance.
        prepare_s = (
            of_row["call forward"] + max(0.0, of_row["copy forward"] - min(of_null["copy forward"], copy_s[1]))
            if prepare is not nothing
            else 0.0
        )
        return Seen(of_row["took"], prepare_s, answer_s, copy_s), result

    def read(self, pending: Any, share_s: float | None = None, trusted: bool = False) -> list[Any]:
        """The calls; a late one counts with the wait. ClockError if waits are longer than the process can explain.

        An honest row's calls differ by chance from those of `null`, which come right before: by little on a calm
        machine, by more on a busy one. So most of its calls are within the margin or, on a busy machine, as many are
        late as early, and by as much. A row is refused if MOST_LATE of its calls are late, and its calls lean to being
        late by more than DOUBT. Of few calls even most may be late by chance, and a row could understate these. So
        what the judge has waited is added to each call that is late.
        """
        for name, text in {
            "answer_s": "works outside of its calls",
            "copy_s": "makes its results after its calls",
        }.items():
            late_s = [seen.late_s(name) for seen in pending]
            late = sum(x > 0 for x in late_s)
            if not trusted and late >= MOST_LATE * len(pending) and leaning(late_s) > DOUBT:
                by_s = statistics.median(x for x in late_s if x > 0)
                raise clock.ClockError(
                    f"it {text}: {late} of {len(pending)} took {by_s * 1e6:.0f} us longer than it says", self.others()
                )
        return [
            replace(seen, run_s=seen.run_s + sum(max(0.0, seen.late_s(name)) for name in MARGIN_SHARES if not trusted))
            for seen in pending
        ]


@dataclass(frozen=True)
class Foreign(Entry):
    """A row whose calls are made in a process of its own.

    settings  the settings of the run
    missing   why the row cannot run here, as users read it; empty: it can
    """

    settings: Settings = Settings()
    missing: str = ""
    apart = True

    @classmethod
    def of(cls, settings: Settings, entry: Entry) -> "Foreign":
        """The foreign row of an entry. ValueError if its code cannot be loaded."""
        try:
            facts = process_of(entry, settings).start().facts
            stated = {name: tuple(x) if isinstance(x, list) else x for name, x in facts.get("traits", {}).items()}
        except (AttributeError, Failed, TypeError) as failed:  # its process may say anything
            raise ValueError(f"{entry.target}: {failed}") from None
        checked = (
            traits.AttentionTraits.of(entry)
            if entry.is_ours
            # The trait `mask` names a function that this process would have to import.
            else traits.AttentionTraits.checked(entry.name, stated | {"mask": ""})
        )
        return cls(
            **vars(entry)
            | {"traits": checked, "settings": settings, "missing": shortened(str(facts.get("missing", "")))}
        )

    def load(self) -> Process:
        return process_of(self, self.settings).start()

    def why_not(self, case: Any) -> str | None:
        return (load_target(self.supports)(case) if self.supports else None) or self.missing or None


_processes = dict[tuple[str, str], Process]()  # by (target, device)


def process_of(entry: Entry, settings: Settings) -> Process:
    """The process of a row."""
    return _processes.setdefault((entry.target, settings.device), Process(entry, settings))


def null(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """A row of ours that does next to nothing. In a process of its own it shows what any call costs the judge.

    The terms of 0 give k and v gradients.
    """
    return q + 0 * (k[..., :1, :1].sum() + v[..., :1, :1].sum())
