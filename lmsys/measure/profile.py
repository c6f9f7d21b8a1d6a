"""Where the time of a call goes: to which kernels, to which kinds of kernels, and to which parts of a model.

Benchmarks of models and of data parallelism call `profile_call`, `communication_of` and `largest_allocations`; models
mark their parts with `part`; `lmsys.bench.trial` calls `call_in_ranges` for --nvtx. Times of kernels are read from the
trace that torch.profiler writes (Chrome trace format, for a browser's trace viewer). On CUDA a kernel is a function
that the device runs. On a CPU an operator counts as a kernel, and its time is without that of the operators that it
calls. The *kind* of a kernel is one of KINDS, found from its name. To give a kernel another kind than "other", call
`register_kernels`, or add a line to PATTERNS.
"""

import itertools
import json
import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lmsys.measure import clock, memory
from lmsys.measure.step import Step
from lmsys.values import grouped, one_of

PART = "part: "  # in a trace, the names of ranges that `part` makes begin with this
# A new kind also goes into KINDS of benchmarks/model/anatomy_layout.py and, if steps are to have a field for it, into
# KERNELS of benchmarks/bench_steps.py.
KINDS = ("matmul", "attention", "elementwise", "reduction", "copy", "communication", "other")

_SUFFIX = r"(_backward)?(_data)?_?$"  # the end of an operator's name

PATTERNS = (  # kernels of torch and its libraries: the first pattern that is found in a name says its kind
    # Inductor's names come first: they list all fused operators, so patterns of these operators would be found in them.
    (r"^triton_(poi|for)_|distribution_elementwise", "elementwise"),
    (r"^triton_(red|per|spl|mix)_", "reduction"),
    (r"nccl|gloo:|c10d::|_c10d_functional|multimem_|(all|shot)_reduce_|Memcpy PtoP", "communication"),
    (r"(?i)flash|fmha|sdpa|scaled_dot_product|attention|attn", "attention"),
    (r"(?i)gemm|gemv|cutlass|xmma|nvjet|cublas|splitk|^triton_(tem|mm|bmm)_|^triton_\w*_mm_", "matmul"),
    (
        r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|mv|addmv|dot|vdot|einsum|mkldnn_linear|_scaled_mm|_grouped_mm|"
        rf"convolution){_SUFFIX}",
        "matmul",
    ),
    (r"Memcpy|Memset|copy_kernel|::Copy<|BatchedCopy|chunk_cat|split_with_sizes|(?i:gather|scatter)", "copy"),
    (r"indexSelect|index_elementwise|index_kernel|^aten::_foreach_copy", "copy"),
    (
        r"^aten::(copy|_to_copy|to|clone|contiguous|cat|repeat\w*|index\w*|_index_put_impl|gather|scatter\w*|"
        rf"embedding){_SUFFIX}",
        "copy",
    ),
    (
        r"(?i)reduce|softmax|norm_|norm<|lpnorm|layernorm|rmsnorm|layer_norm|rms_norm|GammaBeta|_scan_|DeviceScan",
        "reduction",
    ),
    (r"nll_loss|compute_grad_weight|embedding_backward|cross_entropy|^aten::_foreach_norm", "reduction"),
    (
        r"^aten::(sum|mean|amax|amin|max|min|argmax|argmin|prod|all|any|var|std|norm|linalg_vector_norm|_?softmax|"
        r"_?log_softmax|_?logsumexp|cumsum|topk|nll_loss\w*|cross_entropy_loss|(native_)?layer_norm|"
        rf"_?(fused_)?rms_norm|embedding_dense){_SUFFIX}",
        "reduction",
    ),
    (r"elementwise|multi_tensor_apply|pointwise|fused_dropout|triu_tril", "elementwise"),
    (
        r"^aten::(add|sub|rsub|mul|div|neg|abs|exp|exp2|log|log2|sqrt|rsqrt|reciprocal|square|pow|sin|cos|tanh|sigmoid|"
        r"silu|gelu|relu|threshold|erf|clamp\w*|maximum|minimum|where|masked_fill|tril|triu|lerp|addcmul|addcdiv|fill|"
        r"zero|ones|zeros|full|arange|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|isnan|normal|uniform|"
        rf"(native_)?dropout|_foreach_\w+|_fused_\w+){_SUFFIX}",
        "elementwise",
    ),
)

_parts_are_on = False  # True: `part` makes ranges
_registered: dict[str, str] = {}  # {pattern: kind} of kernels that PATTERNS lacks; these patterns are tried first


def register_kernels(pattern: str, kind: str) -> None:
    """Registers the kind, one of KINDS, of kernels whose names match the regular expression; "" registers nothing.

    A registered pattern counts before those of PATTERNS. A file of kernels registers its own when it is imported. An
    implementation in a table may state a pattern in its attribute `kernels` instead (`lmsys.registry.Traits`): the code
    that profiles it registers this pattern. ValueError for another kind.
    """
    one_of("kind", kind, KINDS)
    if pattern:
        re.compile(pattern)
        _registered[pattern] = kind
        kind_of.cache_clear()


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """The kind, of KINDS, of the kernel or operator that a trace calls `name`; "other" if no pattern is found in it."""
    return next((kind for pattern, kind in tuple(_registered.items()) + PATTERNS if re.search(pattern, name)), "other")


def part(name: str) -> AbstractContextManager[Any]:
    """A context that marks a part of a model: `with part("softmax"): ...`. Parts nest.

    Under `parts_on()` it is a range of torch.profiler. Else, and while torch compiles, it does nothing.
    """
    # `is_compiling` stands first, so that compiled code does not depend on _parts_are_on and is not compiled anew.
    return nullcontext() if torch.compiler.is_compiling() or not _parts_are_on else record_function(PART + name)


@contextmanager
def parts_on() -> Iterator[None]:
    """A context in which `part` marks parts."""
    global _parts_are_on
    before, _parts_are_on = _parts_are_on, True
    try:
        yield
    finally:
        _parts_are_on = before


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel: `total_s` seconds and `count` launches per call."""

    name: str
    kind: str
    total_s: float
    count: float


@dataclass(frozen=True)
class Part:
    """A part of a model, and the time of its kernels, per call.

    total_s     seconds of the kernels launched inside of the part
    backward_s  seconds of the kernels of its backward
    count       how often the part ran
    kinds       {kind: its seconds}; they add up to `total_s`
    """

    name: str
    total_s: float
    backward_s: float
    count: float
    kinds: dict[str, float]


@dataclass(frozen=True)
class Profile:
    """Where a call's time goes, per call. `dataclasses.asdict` makes JSON of it.

    profiled_s  wall time under the profiler, the mean of the profiled calls
    kernel_s    the sum over all kernels of these calls; more than the wall time if kernels ran side by side
    shares      the share of each kind in kernel_s, from 0 to 1; all 0 where kernel_s is 0
    """

    profiled_s: float
    kernel_s: float
    shares: dict[str, float]
    kernels: list[Kernel]
    parts: list[Part]


def profile_call(call: Callable[[], Any], device: str, *, steps: int = 3, trace: Path | None = None) -> Profile:
    """Profiles `steps` calls, after one that warms up and one that the profiler does not record.

    trace  a .json file to keep the trace in, for ui.perfetto.dev or chrome://tracing
    """
    call()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    samples, plan = list[float](), schedule(wait=0, warmup=1, active=steps, repeat=1)
    with parts_on(), profile(activities=activities, schedule=plan) as recorded:
        for _ in range(1 + steps):
            samples.append(clock.seconds_of(call, device))
            recorded.step()
    kernels, parts = read_trace(_events_of(recorded, trace), device, steps)
    kernel_s = sum(kernel.total_s for kernel in kernels)
    shares = dict.fromkeys(KINDS, 0.0)
    for kernel in kernels:
        shares[kernel.kind] += kernel.total_s / (kernel_s or 1.0)
    return Profile(statistics.fmean(samples[1:]), kernel_s, shares, kernels, parts)


def _events_of(recorded: profile, trace: Path | None = None) -> list[dict[str, Any]]:
    """The `traceEvents` of a recording. `trace`: a file to keep the whole trace in."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace or Path(folder, "trace.json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
        return list(json.loads(path.read_bytes())["traceEvents"])


# One run of a kernel: its name, its seconds, and when the host launched it, as (thread, microseconds) or, if the trace
# does not say it, None.
Run = tuple[str, float, tuple[Any, float] | None]


def read_trace(events: Iterable[dict[str, Any]], device: str, steps: int) -> tuple[list[Kernel], list[Part]]:
    """(kernels, parts), the longest first, from the `traceEvents` of a trace of `steps` calls."""
    ends = ({**event, "end": event.get("ts", 0) + event.get("dur", 0)} for event in events)
    by_category = defaultdict(list, grouped((event.get("cat"), event) for event in ends))
    if device == "cuda":
        host = by_category["cuda_driver"] + by_category["cuda_runtime"]
        launches = {e["args"]["correlation"]: (e["tid"], e["ts"]) for e in host if "correlation" in e.get("args", {})}
        work = [
            (event["name"], event["dur"] / 1e6, launches.get(event["args"].get("correlation")))
            for category in ("kernel", "gpu_memcpy", "gpu_memset")
            for event in by_category[category]
        ]
    else:
        work = _self_times(by_category["cpu_op"])
    total: dict[str, float] = defaultdict(float)
    for name, seconds, _ in work:
        total[name] += seconds
    count, longest = Counter(name for name, *_ in work), sorted(total.items(), key=lambda kernel: -kernel[1])
    return (
        [Kernel(name, kind_of(name), s / steps, count[name] / steps) for name, s in longest],
        _parts(by_category, work, steps),
    )


def _self_times(operators: list[dict[str, Any]]) -> list[Run]:
    """For each operator, its time without that of the operators that it called."""
    ordered = sorted(operators, key=lambda op: (op["tid"], op["ts"], -op["dur"]))
    self_us = [op["dur"] for op in ordered]
    open_: list[int] = []
    for index, op in enumerate(ordered):
        while open_ and (ordered[open_[-1]]["tid"] != op["tid"] or ordered[open_[-1]]["end"] <= op["ts"]):
            open_.pop()
        if open_:
            self_us[open_[-1]] -= op["dur"]
        open_.append(index)
    return [(op["name"], max(us, 0) / 1e6, (op["tid"], op["ts"])) for op, us in zip(ordered, self_us, strict=True)]


def _parts(events: dict[str, list[dict[str, Any]]], work: list[Run], steps: int) -> list[Part]:
    """The parts, the longest first. events: those of a trace, by category; work: all runs of kernels."""
    # A range counts for all threads (None). A part may call a backward: autograd runs it in threads of its own, while
    # the thread of the range waits.
    spans = [
        (None, event["ts"], event["end"], event["name"].removeprefix(PART))
        for event in events["user_annotation"]
        if event["name"].startswith(PART)
    ]
    launched = [(name, seconds, launch) for name, seconds, launch in work if launch]
    inside = _enclosing(spans, [(None, at_us) for *_, (_, at_us) in launched])
    # (thread, start, end, when its forward ran) of the nodes of the backward. A trace links them to their forward by
    # flows "fwdbwd", each of which has an event "s" in the forward and an event "f" in the backward.
    forward_at = {flow["id"]: flow["ts"] for flow in events["fwdbwd"] if flow["ph"] == "s"}
    # Of operators of a thread that begin at the same time, the longest holds the others. Sorted by length it comes
    # last, so it is the one that stays in the dict.
    outermost = {(op["tid"], op["ts"]): op for op in sorted(events["cpu_op"], key=lambda op: op["dur"])}
    backward_spans = [
        (flow["tid"], flow["ts"], outermost[flow["tid"], flow["ts"]]["end"], forward_at[flow["id"]])
        for flow in events["fwdbwd"]
        if flow["ph"] == "f" and (flow["tid"], flow["ts"]) in outermost and flow["id"] in forward_at
    ]
    nodes = _enclosing(backward_spans, [launch for *_, launch in launched])
    # A kernel may be launched within several nodes: the one whose forward ran last counts. A kernel within no node gets
    # the time -1, at which there is no part.
    origins = _enclosing(spans, [(None, max(forward, default=-1.0)) for forward in nodes])
    count = Counter(name for *_, name in spans)
    backward = dict.fromkeys(count, 0.0)
    kinds: dict[str, dict[str, float]] = {name: defaultdict(float) for name in count}
    for (kernel, seconds, _), names, origin in zip(launched, inside, origins, strict=True):
        for name in origin:
            backward[name] += seconds
        for name in names:
            kinds[name][kind_of(kernel)] += seconds / steps
    parts = (
        Part(
            name=name,
            total_s=sum(kinds[name].values(), 0.0),
            backward_s=backward[name] / steps,
            count=count[name] / steps,
            kinds=dict(kinds[name]),
        )
        for name in count
    )
    return sorted(parts, key=lambda part: -(part.total_s + part.backward_s))


def _enclosing(spans: list[tuple[Any, float, float, Any]], points: list[tuple[Any, float]]) -> list[set[Any]]:
    """Gives each point (thread, time) the labels of the spans (thread, start, end, label) that hold it."""
    # (time, order, index of a point, thread, label): at equal times spans that begin, order 0, come before points, 1,
    # and points before spans that end, 2.
    marks = [(time, 1, index, thread, None) for index, (thread, time) in enumerate(points)]
    for thread, start, end, label in spans:
        marks += [(start, 0, 0, thread, label), (end, 2, 0, thread, label)]
    labels: list[set[Any]] = [set() for _ in points]
    open_: dict[Any, list[Any]] = defaultdict(list)
    for _, order, index, thread, label in sorted(marks, key=lambda mark: mark[:2]):
        if order == 1:
            labels[index] = set(open_[thread])
        else:
            (open_[thread].append if order == 0 else open_[thread].remove)(label)
    return labels


@dataclass(frozen=True)
class Allocation:
    """`count` allocations of `bytes` each by one line of code; `at_peak` of them were live when memory use was highest.

    where, function  the line as file and number, and the function that it is in
    """

    bytes: int
    count: int
    at_peak: int
    where: str
    function: str


def largest_allocations(call: Callable[[], Any], device: str, *, top: int = 10) -> list[Allocation]:
    """The `top` largest allocations during `call`, with the line of code that made them.

    `memory.allocator_events` says which line that is.
    """
    events = memory.allocator_events(call, device, lines=True)
    levels = [0] + list(itertools.accumulate(event.bytes for event in events))
    live: dict[int, tuple[int, str, str]] = {}  # by address: (bytes, where, function)
    for event in events[: levels.index(max(levels))]:  # those up to the peak
        live.pop(event.address, None)
        if event.bytes > 0:
            live[event.address] = (event.bytes, event.where, event.function)
    at_peak = Counter(live.values())
    count = Counter((event.bytes, event.where, event.function) for event in events if event.bytes > 0)
    return [
        Allocation(bytes=key[0], count=count[key], at_peak=at_peak[key], where=key[1], function=key[2])
        for key in sorted(count, reverse=True)[:top]
    ]


PROFILED_STEPS = 3  # steps that `communication_of` profiles
# By device: the categories of a trace whose events are work on the device.
WORK = {"cpu": ("cpu_op", "user_annotation"), "cuda": ("kernel", "gpu_memcpy", "gpu_memset")}
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class Communication:
    """The communication of a step, on one rank.

    time_s            seconds of a step in which a collective is in flight
    overlap_fraction  the share of these seconds in which something computes too; None where nothing is sent
    timeline          (what, start_s, end_s) of the last profiled step; `what` is "communication" or "computation"
    """

    time_s: float
    overlap_fraction: float | None
    timeline: list[tuple[str, float, float]]


def communication_of(
    step: Callable[[], Any], finish: Callable[[], Any], begin: Callable[[], Any], device: str
) -> Communication:
    """Profiles a few steps of this rank; all ranks call it together.

    step    runs one training step
    finish  waits for what a step has begun and not ended, such as collectives
    begin   a barrier of all ranks

    On CUDA the host's calls are not recorded: that would slow down the host, for which many steps wait. Ranks begin
    together, after a step under the profiler: a rank that came early would wait inside a collective, and this wait
    would count as communication. No collective may be under way when a recording begins or ends: torch's profiler may
    crash on an event that a thread of gloo is recording.
    """
    with profile(
        activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=1),
    ) as recorded:
        step()
        finish()
        clock.synchronize(device)
        begin()
        recorded.step()
        for _ in range(PROFILED_STEPS):
            step()
        finish()
        clock.synchronize(device)
    return read_overlap(_events_of(recorded), device, PROFILED_STEPS)


def read_overlap(events: list[dict[str, Any]], device: str, steps: int) -> Communication:
    """The communication of a step, from the `traceEvents` of a trace of `steps` steps."""
    work = [event for event in events if event.get("cat") in WORK[device] and event.get("dur")]
    # On a CPU the work of gloo's thread is communication, not the call that issues it.
    sends = [event for event in work if device == "cuda" or event["name"].startswith("gloo:")]
    sending = merged([_seconds(event) for event in sends if kind_of(event["name"]) == "communication"])
    operators = [event for event in work if event["cat"] != "user_annotation"]
    computing = merged([_seconds(event) for event in operators if kind_of(event["name"]) != "communication"])
    total = sum(end - start for start, end in sending)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in sending for c, d in computing if c < b and d > a)
    return Communication(total / steps, hidden / total if total else None, _timeline(sending, computing, steps))


def _seconds(event: dict[str, Any]) -> tuple[float, float]:
    """When an event of a trace began and ended, in seconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def merged(intervals: Intervals, gap: float = 0.0) -> Intervals:
    """The union of intervals, in order; intervals at most `gap` apart become one."""
    union: Intervals = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1] + gap:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _timeline(sending: Intervals, computing: Intervals, steps: int) -> list[tuple[str, float, float]]:
    """`Communication.timeline`: the last of the steps, with few and short numbers, since result files keep it.

    Intervals that lie at most 1 / 2000 of the profiled time apart become one.
    """
    if not computing:
        return []
    begin, end = computing[0][0], max(spans[-1][1] for spans in (sending, computing) if spans)
    middle, gap = begin + (end - begin) * (steps - 1) / steps, (end - begin) / 2000
    rows = []
    for what, intervals in (("communication", sending), ("computation", computing)):
        late = [(max(a, middle) - middle, b - middle) for a, b in merged(intervals, gap) if b > middle]
        rows += [(what, float(f"{a:.5g}"), float(f"{b:.5g}")) for a, b in late[:400]]  # 400 intervals of each at most
    return rows


NUM_CALLS = 3  # calls that `call_in_ranges` makes


def call_in_ranges(name: str, step: Step, device: str) -> None:
    """Calls a step NUM_CALLS times, each on new inputs and in an NVTX range `name` that holds this call alone.

    A range belongs to a thread, so autograd is made to run the backward in this thread too. The range ends once the
    device has done the call.
    """
    for draw in range(NUM_CALLS):
        step.before()
        step.redraw(draw)
        prepared = step.prepare()
        step.redraw_late(draw)
        clock.synchronize(device)
        with torch.cuda.nvtx.range("{}", name), torch.autograd.set_multithreading_enabled(False):
            result = step.run(prepared)
            clock.synchronize(device)
        step.keep(result, None)
