"""Attention rows that cheat: right in checks before timing, but fast or wrong while they are timed.

Tests of the harness measure them, and each must be recorded as wrong. `CHEATS` has them by name, with their family and
the directions in which they cheat. A new cheat is a function with the decorator `cheat`.
"""

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.naive import naive

Row = Callable[..., Tensor]
CLOCK, SAMPLING = "measure/clock.py", "measure/compare.py"  # files that are on the stack while a row is timed


@dataclass(frozen=True)
class Cheat:
    """A cheating row.

    family        the kind of cheat
    directions    the directions in which it cheats
    devices       where it can run
    seen_at_once  True if checks before timing already find it
    """

    row: Row
    family: str
    directions: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    seen_at_once: bool = False


CHEATS: dict[str, Cheat] = {}


def cheat(family: str, *directions: str, **options: Any) -> Callable[[Row], Row]:
    """A decorator that puts a row into CHEATS; without directions it cheats in "fwd" and "bwd".

    options  the other fields of `Cheat`
    """

    def add(row: Row) -> Row:
        CHEATS[row.__name__] = Cheat(row, family, directions or ("fwd", "bwd"), **options)
        return row

    return add


def honest(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return naive(q, k, v, causal=causal, scale=scale)


def seen(*names: str) -> bool:
    """True if a function of a file with one of these names is on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(names):
            return True
        frame = frame.f_back
    return False


def timed() -> bool:
    """True while the harness times the call."""
    return seen(CLOCK)


def within(file: str, function: str) -> dict[str, Any]:
    """The variables of the innermost call of this function of this file that is on the stack; {} without one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(file) and frame.f_code.co_name == function:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def trains(q: Tensor) -> bool:
    """True in a forward that a backward may follow."""
    return q.requires_grad and torch.is_grad_enabled()


_times: deque[float] = deque(maxlen=12)  # when the latest calls of `garbage_when_hurried` began, in seconds
_last: dict[Any, Any] = {}  # results and counts that cheats keep from earlier calls


def forget() -> None:
    """Empties what cheats remember of earlier calls, as a new process would."""
    _times.clear()
    _last.clear()


class Altered(torch.autograd.Function):
    """Honest attention, whose backward returns alter(gradients, (q, k, v), do).

    alter      a function of a cheat, that returns the gradients of (q, k, v), right or wrong
    gradients  a function without arguments, that computes the right ones
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Any, alter: Any, inputs: Any = None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.rest = options, alter
        return honest(q, k, v, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        options, alter = ctx.rest
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)

        def gradients() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(honest(q, k, v, **options), (q, k, v), grads[0])

        return *alter(gradients, (q, k, v), grads[0]), None, None, None


# Deferred work.


class Later(Tensor):
    """A tensor that is computed when a function of torch reads it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def real(x: Any) -> Any:
            if isinstance(x, Later):
                return x.compute()
            return type(x)(map(real, x)) if isinstance(x, list | tuple) else x

        return function(*real(list(args)), **(kwargs or {}))


@cheat("deferred work", "fwd")
def lazy_subclass(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    later = torch.Tensor._make_subclass(Later, torch.empty_like(q))
    later.compute = lambda: honest(q, k, v, **options)  # type: ignore[attr-defined]
    return later


@cheat("deferred work", "fwd")
def deferred_to_a_thread(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if not timed():
        return honest(q, k, v, **options)
    o = torch.empty_like(q)

    def fill() -> None:
        time.sleep(0.005)
        with torch.no_grad():
            o.copy_(honest(q, k, v, **options))

    threading.Thread(target=fill).start()
    return o


@cheat("side streams", "fwd", devices=("cuda",))
def side_stream(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if not timed():
        return honest(q, k, v, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**6)
        return honest(q, k, v, **options)


@cheat("side streams", "bwd", devices=("cuda",))
def side_stream_in_the_backward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    is_timed = timed()

    def alter(gradients: Any, inputs: Any, do: Tensor) -> Any:
        if not is_timed:
            return gradients()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**6)
            return gradients()

    return Altered.apply(q, k, v, options, alter)


# Rows that look at the stack, or at how quickly calls come.


@cheat("stack inspection", "fwd")
def looks_for_the_clock(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return q * 1 if timed() else honest(q, k, v, **options)


@cheat("stack inspection", "bwd")
def looks_for_the_clock_in_the_backward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    is_timed = timed()
    return Altered.apply(
        q, k, v, options, lambda gradients, inputs, _: [x * 1 for x in inputs] if is_timed else gradients()
    )


@cheat("stack inspection", "fwd")
def looks_for_the_sampling(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.zeros_like(q) if seen(SAMPLING) and timed() else honest(q, k, v, **options)


@cheat("stack inspection", "fwd")
def right_when_a_frame_says_that_it_is_kept(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Looks into the variables of the sampling function for the key that says which results are kept."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(SAMPLING) and frame.f_locals.get("key") is not None:
            return honest(q, k, v, **options)
        frame = frame.f_back
    return torch.zeros_like(q) if timed() else honest(q, k, v, **options)


@cheat("stack inspection", "fwd")
def right_while_every_call_is_kept(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Reads the number of its call from the sampling function. The harness keeps the results of the first three calls
    at first, and replaces them by results of later calls: this row is wrong in all later ones. By chance none of 16
    calls replaces one of the first three in 1 of 560 cases."""
    is_later = timed() and within(SAMPLING, "_sample").get("index", 0) >= 3
    return torch.zeros_like(q) if is_later else honest(q, k, v, **options)


@cheat("timing inspection", "fwd")
def garbage_when_hurried(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if trains(q):
        return honest(q, k, v, **options)
    _times.append(time.monotonic())
    hurried = len(_times) == _times.maxlen and _times[-1] - _times[0] < 2  # 12 calls within 2 seconds
    return torch.zeros_like(q) if hurried else honest(q, k, v, **options)


@cheat("timing inspection", "fwd")
def garbage_after_some_calls(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    _last["calls"] = _last.get("calls", 0) + 1
    return honest(q, k, v, **options) if _last["calls"] % 20 < 10 or trains(q) else torch.zeros_like(q)


@cheat("lower precision when hurried", "fwd")
def rough_when_timed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    o = honest(q, k, v, **options)
    return o.to(torch.float8_e4m3fn).to(o.dtype) if timed() else o


@cheat("lower precision when hurried", "bwd")
def rough_gradients_when_timed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    is_timed = timed()

    def alter(gradients: Any, inputs: Any, do: Tensor) -> Any:
        return [x.to(torch.float8_e4m3fn).to(x.dtype) if is_timed else x for x in gradients()]

    return Altered.apply(q, k, v, options, alter)


# Results of other calls.


@cheat("the last call's result", "fwd")
def the_last_result(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    kind = q.shape, q.dtype
    if not timed() or kind not in _last:
        _last[kind] = honest(q, k, v, **options)
    return _last[kind].clone()


@cheat("the last call's result", "bwd")
def the_last_gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    is_timed, kind = timed(), (q.shape, q.dtype)

    def alter(gradients: Any, inputs: Any, do: Tensor) -> Any:
        if not is_timed or kind not in _last:
            _last[kind] = gradients()
        return [x.clone() for x in _last[kind]]

    return Altered.apply(q, k, v, options, alter)


def remembered(key: Any, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
    """Honest attention; while timed, the result of an earlier call with an equal key and shape."""
    if trains(q):
        return honest(q, k, v, **options)
    key = key, q.shape, q.dtype, options["causal"]
    if key not in _last or not timed():
        _last[key] = honest(q, k, v, **options)
    return _last[key].clone()


@cheat("caches", "fwd")
def cache_by_pointer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return remembered((q.data_ptr(), k.data_ptr()), q, k, v, options)


@cheat("caches", "fwd")
def cache_by_version(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return remembered((id(q), q._version, k._version), q, k, v, options)


@cheat("caches", "fwd")
def cache_by_some_content(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return remembered(round(float(q[0, 0, 0, 0])), q, k, v, options)


@cheat("caches", "fwd")
def cache_by_statistics(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return remembered((round(float(q.float().mean())), round(float(q.float().std()))), q, k, v, options)


# Parts of the work.


@cheat("parts of the work", "fwd")
def half_of_the_queries(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if not timed():
        return honest(q, k, v, **options)
    half = max(1, q.shape[2] // 2)
    o = honest(q[:, :, :half], k, v, **options)
    return torch.cat([o, o[:, :, : q.shape[2] - half]], dim=2)


@cheat("parts of the work", "bwd")
def half_of_the_heads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    is_timed = timed()

    def alter(gradients: Any, inputs: Any, do: Tensor) -> Any:
        grads = gradients()
        for x in grads if is_timed else ():
            x[:, x.shape[1] // 2 :] = 0
        return grads

    return Altered.apply(q, k, v, options, alter)


@cheat("what is not a result", "fwd")
def one_row_for_all(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return honest(q[:, :, :1], k, v, **options).expand(q.shape) if timed() else honest(q, k, v, **options)


@cheat("what is not a result", seen_at_once=True)
def another_dtype(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return honest(q, k, v, **options).double()


@cheat("what is not a result", "fwd")
def the_input_itself(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return q.detach() if timed() else honest(q, k, v, **options)


# Work that is done while the clock does not run.


@cheat("work moved into the forward", "bwd")
def gradients_made_in_the_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Computes gradients in the forward, from the do of the call before, since this call's is not known yet."""
    before = _last.get("do")
    guess = before if before is not None and before.shape == q.shape and before.dtype == q.dtype else torch.ones_like(q)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        made = torch.autograd.grad(honest(*leaves, **options), leaves, guess)
    is_timed = timed()

    def alter(gradients: Any, inputs: Any, do: Tensor) -> Any:
        _last["do"] = do.clone()
        return [x.clone() for x in made] if is_timed else gradients()

    return Altered.apply(q, k, v, options, alter)


@cheat("work moved into the forward", "bwd")
def a_forward_that_does_much_more(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Repeats its forward forty times, as if it prepared the backward. On a busy machine a dozen might go unnoticed."""
    for _ in range(40 if trains(q) else 0):
        honest(q.detach(), k.detach(), v.detach(), **options)
    return honest(q, k, v, **options)


# Rows that change the clock, or the functions that judge them.


@cheat("the clock's own events", "fwd", devices=("cuda",))
def starts_the_clock_again(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Finds the clock's CUDA events among Python's objects, and records the start event again after its work."""
    o = honest(q, k, v, **options)
    if timed():
        for holder in gc.get_objects(generation=0):
            if type(holder) in (tuple, list) and len(holder) == 4 and isinstance(holder[0], torch._C._CudaEventBase):
                _last["events"] = holder
        if "events" in _last:
            _last["events"][2].record(torch.cuda.current_stream())
    return o


@cheat("what is kept of calls", "fwd")
def takes_the_kept_calls_away(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Empties the lists of results that the harness has kept of timed calls, to compare them afterwards."""
    if taken := within(SAMPLING, "interleave").get("taken"):
        taken.result.kept = {name: [] for name in taken.result.kept}
    return torch.zeros_like(q) if timed() else honest(q, k, v, **options)


@cheat("what is kept of calls", "fwd")
def keeps_nothing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Replaces the hook of its own step that copies results."""
    if step := within(SAMPLING, "_sample").get("step"):
        step.keep = lambda result, key: None
    return torch.zeros_like(q) if timed() else honest(q, k, v, **options)


@cheat("what is kept of calls", "fwd")
def checks_nothing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Replaces the method of the harness that checks timed calls, by an attribute of the object, not of its class."""
    if trial := within("bench/trial.py", "interleave").get("self"):
        trial._check_timed = lambda case: None
    return torch.zeros_like(q) if timed() else honest(q, k, v, **options)


def replaces(owner: Callable[[], Any], name: str, other: Any) -> Row:
    """A row that replaces the attribute `name` of owner(), a part of the harness or of torch, when it is called."""

    def row(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        setattr(owner(), name, other)
        return honest(q, k, v, **options)

    return row


def module(name: str) -> Callable[[], Any]:
    """A function that returns the imported module of this name, as an `owner` of `replaces`."""
    return lambda: sys.modules[name]


_perf_counter = time.perf_counter
PATCHES = {  # rows by name; each replaces one function or constant, so that times or errors seem smaller
    "slow_clock": replaces(module("lmsys.measure.clock"), "perf_counter", lambda: _perf_counter() / 10),
    "slow_time": replaces(module("time"), "perf_counter", lambda: _perf_counter() / 10),
    "quick_events": replaces(lambda: torch.cuda.Event, "elapsed_time", lambda self, end: 1e-3),
    "easy_oracle": replaces(lambda: sys.modules["lmsys.testing"].Oracle, "judge", lambda self, found, rms: {"o": 0.0}),
    "kind_verdict": replaces(module("lmsys.bench.trial"), "verdict", lambda ratios: (0.0, None)),
    "keeps_no_calls": replaces(module("benchmarks.attention.check"), "NUM_KEPT", 0),
    "own_entropy": replaces(module("lmsys.measure.compare"), "_ENTROPY", Random(0)),
    "known_entropy": replaces(lambda: SystemRandom, "randrange", lambda self, stop: stop - 1),
    "kind_maximum": replaces(module("torch"), "zeros_like", lambda x, **_: x),
}
for _name, _row in PATCHES.items():
    _row.__name__ = _name
    cheat("patched clocks and libraries", seen_at_once=True)(_row)
globals().update(PATCHES)  # a row is imported by its name from this module
