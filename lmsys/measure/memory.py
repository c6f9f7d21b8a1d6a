"""Measures the memory of a call: its peak, what a forward keeps for its backward, each phase, each allocation.

Benchmarks call these functions in their `inspect` hooks, while nothing else runs on the device. Processes of the bench
that run rows call `cap_gpu_memory` if there is a memory limit; those that run rows on a CPU, except ranks, call
`cap_host_memory`. On CUDA, torch's caching allocator gives the figures. On a CPU they come from the allocator's events,
which torch's profiler records. If memory is freed that was allocated before the recording began, they do not show it.
"""

import bisect
import gc
import itertools
import os
import pickle
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from lmsys.measure import clock, host
from lmsys.values import hold, one_of

LINE = "line: "  # begins the names of the ranges that `_Lines` adds to a profiler's events
TORCH = os.path.dirname(torch.__file__) + os.sep  # torch's own folder


@dataclass(frozen=True)
class AllocatorEvent:
    """`bytes` that were allocated, or freed if negative, at `time_ns` since 1970, and by which line if known."""

    time_ns: int
    bytes: int
    address: int
    where: str = ""  # file:line, relative to the working directory
    function: str = ""  # the line's function, and the node of autograd's graph in a backward


def cap_gpu_memory(limit_bytes: int) -> None:
    """Makes the allocator give at most `limit_bytes` of the current GPU. ValueError for more than the GPU has."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    limit, most = (f"{size / 2**30:.4g}GiB" for size in (limit_bytes, total))
    hold((limit_bytes <= total, f"--memory-limit {limit} is more than the {most} of this GPU"))
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)


def cap_host_memory() -> None:
    """Makes allocations fail, as on a GPU, that need more memory than is available now: else the machine may hang."""
    available = int(host.available_bytes())
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)  # the most that the limit may be raised to; negative: no bound
    resource.setrlimit(resource.RLIMIT_DATA, (available if hard < 0 else min(available, hard), hard))


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most bytes that were live during `call`, its result included, above those that were live before it."""
    return phases({"call": call}, device)["call"]["peak_bytes"]


def peak_resident_bytes(command: Sequence[str], interval_s: float = 0.01) -> int:
    """The most bytes that a command and the processes that it starts were seen to hold in memory at once, on Linux.

    This function looks every `interval_s` seconds, and adds up the resident sets; a page that several processes share
    counts for each. OSError on other systems; RuntimeError when the command fails.
    """
    peak = 0
    # A file, not a pipe: nobody reads before the process ends, and a process that has filled a pipe waits for ever.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            family = host.family_of(process.pid, host.processes_in(Path("/proc")))
            peak = max(peak, sum(map(host.resident_bytes, family)))
            time.sleep(interval_s)
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    hold(
        (process.returncode == 0, f"{shlex.join(command)} ended with {process.returncode}: {last}"), error=RuntimeError
    )
    return peak


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Bytes of the storages that `forward` saves for its backward, inputs included, each storage counted once."""
    kept: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        """Notes a tensor that is saved for the backward."""
        kept.append(x.detach())
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(_new_storages(kept, set()))


def phases(steps: Mapping[str, Callable[[], Any]], device: str) -> dict[str, dict[str, int]]:
    """Runs the steps (forward, backward, optimizer) in order: `{name: {"peak_bytes": ..., "live_bytes": ...}}`.

    peak_bytes is the most bytes that were live during the step, live_bytes the bytes that are live at its end; bytes
    that were live before the first step are subtracted from both. A step's result is dropped, so a step must store by
    itself what the next one needs. After a forward, live_bytes counts the activations: all that the backward needs, and
    the output. On a CPU each step is profiled, and must wait for its collectives: if a collective of gloo is still
    under way when a profile ends, the process crashes when the collective is freed.
    """
    memory: dict[str, dict[str, int]] = {}
    live = 0
    if device != "cuda":
        for name, points in timeline(steps, "cpu").items():
            levels = [live] + [level for _, level in points]
            live = levels[-1]
            memory[name] = {"peak_bytes": max(levels), "live_bytes": live}
        return memory
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for name, step in steps.items():
        torch.cuda.reset_peak_memory_stats()
        step()
        peak, live = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        memory[name] = {"peak_bytes": peak - before, "live_bytes": live - before}
    return memory


def first_steps(
    make: Callable[[], Any], step: Callable[[], Any], device: str
) -> tuple[float, dict[str, dict[str, int]]]:
    """(seconds of a training's first step, the memory of its beginning by phase, as `phases` gives it).

    The first step compiles and tunes. The phases are "make", "first" (the first step) and "step" (the second step).

    make  builds what `step` trains
    """
    took: list[float] = []
    steps = {"make": make, "first": lambda: took.append(clock.seconds_of(step, device)), "step": step}
    memory = phases(steps, device)
    return took[0], memory


def breakdown(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state and buffers now, by name. Of a sharded tensor only this rank's.

    Each storage counts once and whole, under the first of the four names that has a tensor in it.
    """
    groups = {
        "parameters_bytes": module.parameters(),
        "gradients_bytes": (x.grad for x in module.parameters() if x.grad is not None),
        "optimizer_bytes": filter(torch.is_tensor, torch.utils._pytree.tree_leaves(dict(optimizer.state)))
        if optimizer
        else (),
        "buffers_bytes": module.buffers(),
    }
    seen: set[int] = set()
    return {name: sum(_new_storages(tensors, seen)) for name, tensors in groups.items()}


def _new_storages(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[int]:
    """Yields the bytes of each storage that is not in `seen`, and adds it there."""
    for x in tensors:
        storage = (x.to_local() if hasattr(x, "to_local") else x).untyped_storage()
        if storage._cdata not in seen:  # a number that is unique on the meta device too, unlike an address
            seen.add(storage._cdata)
            yield storage.nbytes()


def timeline(steps: Mapping[str, Callable[[], Any]], device: str) -> dict[str, list[tuple[float, int]]]:
    """Runs the steps as `phases` does, and gives by step (time_s, live_bytes) after each event of the allocator.

    time_s is the time since the first event, by the host's clock. live_bytes counts the live bytes, without those that
    were live before the first event. Bytes count as requested; on CUDA the allocator rounds each request up to a
    multiple of 512.
    """
    ends = []

    def run() -> None:
        for step in steps.values():
            step()
            ends.append(time.time_ns())

    events = allocator_events(run, device)
    points: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
    for event, live in zip(events, itertools.accumulate(event.bytes for event in events), strict=True):
        index = min(bisect.bisect_left(ends, event.time_ns), len(ends) - 1)
        points[list(steps)[index]].append(((event.time_ns - events[0].time_ns) / 1e9, live))
    return points


def write_snapshot(path: Path, call: Callable[[], Any]) -> None:
    """Records `call` on CUDA and writes torch's memory snapshot, a pickle for its viewer (pytorch.org/memory_viz)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(_history(call, "all")))


def allocator_events(call: Callable[[], Any], device: str, *, lines: bool = False) -> list[AllocatorEvent]:
    """The allocator's events during `call`, in order, with the lines that asked for memory if `lines`.

    The line is the innermost one of the stack that is not torch's. A backward on CUDA runs in a thread without such a
    line: `where` is then "(backward)". For compiled code no line may be known. ValueError for other devices than "cpu"
    and "cuda".
    """
    one_of("device", device, ("cpu", "cuda"))
    gc.collect()
    if device == "cpu":
        with _Lines() if lines else nullcontext():
            recorded = _profiled(call)  # all are held until the lines are read: an event does not keep its parent alive
        allocations = [e for e in recorded if e.tag.name == "Allocation" and e.extra_fields.device.type == "cpu"]
        return [
            AllocatorEvent(
                event.start_time_ns,
                event.extra_fields.alloc_size,
                event.extra_fields.ptr,
                *(_marked_source(event) if lines else ()),
            )
            for event in sorted(allocations, key=lambda event: event.start_time_ns)
        ]
    trace = _history(call, "alloc" if lines else None)["device_traces"][torch.cuda.current_device()]
    sign = {"alloc": 1, "free_requested": -1}  # once freeing is requested, memory_allocated() does not count it
    return [
        AllocatorEvent(
            entry["time_us"] * 1000,
            sign[entry["action"]] * entry["size"],
            entry["addr"],
            *(_source(entry.get("frames", [])) if lines and entry["action"] == "alloc" else ()),
        )
        for entry in trace
        if entry["action"] in sign
    ]


def _history(call: Callable[[], Any], context: str | None) -> dict[str, Any]:
    """The allocator's snapshot with the history of `call`; frames of C++ too, where torch can read them.

    context  which events get the stack that they came from: "all", "alloc" for allocations, None for none
    """
    record = torch.cuda.memory._record_memory_history
    torch.cuda.synchronize()
    record("all", context=context, stacks="all" if os.uname().machine == "x86_64" else "python", clear_history=True)
    try:
        _ = call()  # alive until the end
        torch.cuda.synchronize()
        return torch.cuda.memory._snapshot()
    finally:
        record(None)  # ends the recording


def _source(frames: list[dict[str, Any]]) -> tuple[str, str]:
    """(where, function) of a snapshot's frames, innermost first."""
    # The nodes of autograd's graph that were at work, by the C++ frames that apply them.
    nodes = [match[1] for frame in frames if (match := re.search(r"(\w+Backward\d*)::apply", frame["name"]))]
    for frame in frames:
        if frame["filename"].endswith(".py") and not _is_internal(frame["filename"]):
            return f"{_relative(frame['filename'])}:{frame['line']}", " ".join([frame["name"]] + nodes[:1])
    return ("(backward)", nodes[0]) if nodes else ("", "")


def _profiled(call: Callable[[], Any]) -> list[Any]:
    """All events of a profiler that also records memory; the result of `call` lives until the end.

    It is autograd's profiler: torch.profiler, which is built on it, imports the compiler, which takes a second or two.
    """
    with profile(use_kineto=True, profile_memory=True) as recorded:
        _ = call()
    events = list(recorded.kineto_results.experimental_event_tree())
    for event in events:  # the list grows while it is walked, until it has the events of all levels
        events.extend(event.children)
    return events


class _Lines(torch.utils._python_dispatch.TorchDispatchMode):
    """A context that puts each operator into a range of the profiler, whose name is the line that called the operator.

    The profiler's own stacks lack such operators as `a @ b`. Within the context torch calls `__torch_dispatch__` in
    place of each operator.
    """

    supports_higher_order_operators = True  # without it torch refuses operators that take functions, as FlexAttention's

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # compiled code stays compiled
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        code = frame.f_code
        with record_function(f"{LINE}{_relative(code.co_filename)}:{frame.f_lineno}\t{code.co_name}"):
            return func(*args, **(kwargs or {}))


def _marked_source(event: Any) -> tuple[str, str]:
    """(where, function) of an allocation inside the ranges of `_Lines`."""
    where = function = ""
    while (event := event.parent) is not None:
        if not where and event.name.startswith(LINE):
            where, function = event.name.removeprefix(LINE).split("\t")
        elif event.name.startswith("autograd::engine::evaluate_function: "):
            return where or "(backward)", f"{function} {event.name.rpartition(' ')[2]}".strip()
    return where, function


def _is_internal(file: str) -> bool:
    """True for code of torch, and of this file."""
    return file.startswith((TORCH, "<eval_with_key>")) or file == __file__


def _relative(file: str) -> str:
    """The path relative to the working directory or site-packages; of other files the name."""
    if Path(file).is_relative_to(Path.cwd()):
        return Path(file).relative_to(Path.cwd()).as_posix()
    return file.rpartition("site-packages" + os.sep)[2] if "site-packages" in file else Path(file).name
