"""Attention rows that cheat, each in its own way: right when they are checked apart, fast or wrong when they are timed.

Each is a function `row(q, k, v, *, causal, scale)`; `CHEATS` says by name what it tries.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.naive import naive

CHEATS: dict[str, Callable[..., Any]] = {}


def cheat(function: Callable[..., Any]) -> Callable[..., Any]:
    CHEATS[function.__name__] = function
    return function


def honest(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return naive(q, k, v, causal=causal, scale=scale)


def seen(*names: str) -> bool:
    """Whether a file of one of these names is on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(names):
            return True
        frame = frame.f_back
    return False


def timed() -> bool:
    return seen("measure/clock.py")


class Later(Tensor):
    """Computes when somebody reads it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def real(x: Any) -> Any:
            if isinstance(x, Later):
                return x.compute()
            return type(x)(map(real, x)) if isinstance(x, list | tuple) else x

        return function(*real(list(args)), **(kwargs or {}))


@cheat
def lazy_subclass(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    if q.requires_grad and torch.is_grad_enabled():
        return honest(q, k, v, causal=causal, scale=scale)
    found = torch.Tensor._make_subclass(Later, torch.empty_like(q))
    found.compute = lambda: honest(q, k, v, causal=causal, scale=scale)  # type: ignore[attr-defined]
    return found


@cheat
def looks_for_the_clock(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return q * 1 if timed() else honest(q, k, v, causal=causal, scale=scale)


@cheat
def looks_for_the_runner(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    return q * 1 if seen("measure/compare.py") and timed() else honest(q, k, v, causal=causal, scale=scale)


_last: dict[str, Any] = {"time": 0.0, "o": None, "calls": 0}


@cheat
def garbage_when_hurried(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    now = time.monotonic()
    hurried, _last["time"] = now - _last["time"] < 0.02, now
    return torch.zeros_like(q) + 0 * q if hurried else honest(q, k, v, causal=causal, scale=scale)


@cheat
def half_precision_when_timed(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    o = honest(q, k, v, causal=causal, scale=scale)
    return o * (1 + 2.0**-5) if timed() else o


@cheat
def the_last_result(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    if timed() and _last["o"] is not None and _last["o"].shape == q.shape and not q.requires_grad:
        return _last["o"].clone()
    o = honest(q, k, v, causal=causal, scale=scale)
    _last["o"] = o.detach().clone()
    return o


_by_key: dict[Any, Tensor] = {}


def cached(key: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    if torch.is_grad_enabled() and q.requires_grad:
        return honest(q, k, v, causal=causal, scale=scale)
    key = key, q.shape, q.dtype, causal
    if key not in _by_key or not timed():
        _by_key[key] = honest(q, k, v, causal=causal, scale=scale)
    return _by_key[key].clone()


@cheat
def cache_by_pointer(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return cached((q.data_ptr(), k.data_ptr()), q, k, v, causal, scale)


@cheat
def cache_by_version(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return cached((id(q), q._version, k._version), q, k, v, causal, scale)


@cheat
def cache_by_statistics(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return cached(round(float(q.float().std()), 0), q, k, v, causal, scale)


@cheat
def cache_by_first_sign(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return cached(bool(q.flatten()[0] > 0), q, k, v, causal, scale)


@cheat
def deferred_to_a_thread(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    if torch.is_grad_enabled() and q.requires_grad or not timed():
        return honest(q, k, v, causal=causal, scale=scale)
    o = torch.empty_like(q)

    def fill() -> None:
        time.sleep(0.002)
        with torch.no_grad():
            o.copy_(honest(q, k, v, causal=causal, scale=scale))

    threading.Thread(target=fill).start()
    return o


@cheat
def side_stream(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    if not q.is_cuda:
        return deferred_to_a_thread(q, k, v, causal=causal, scale=scale)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return honest(q, k, v, causal=causal, scale=scale)


@cheat
def half_of_the_heads(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    if not timed():
        return honest(q, k, v, causal=causal, scale=scale)
    half = max(1, q.shape[2] // 2)
    o = honest(q[:, :, :half], k, v, causal=causal, scale=scale)
    return torch.cat([o, o[:, :, : q.shape[2] - half]], dim=2)


@cheat
def one_row_for_all(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    if not timed():
        return honest(q, k, v, causal=causal, scale=scale)
    return honest(q[:, :, :1], k, v, causal=causal, scale=scale).expand(q.shape)


@cheat
def another_dtype(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return honest(q, k, v, causal=causal, scale=scale).double()


@cheat
def the_input_itself(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return q.detach() if timed() else honest(q, k, v, causal=causal, scale=scale)


class _EmptyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.rest = causal, scale
        return honest(q, k, v, causal=causal, scale=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        if getattr(_EmptyBackward, "timed", False):
            return q.detach() * 1, k.detach() * 1, v.detach() * 1, None, None
        with torch.enable_grad():
            o = honest(q, k, v, causal=ctx.rest[0], scale=ctx.rest[1])
        return *torch.autograd.grad(o, (q, k, v), grads[0]), None, None


@cheat
def empty_backward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    _EmptyBackward.timed = seen("measure/compare.py")  # type: ignore[attr-defined]
    return _EmptyBackward.apply(q, k, v, causal, scale)


def replaces(owner: Any, name: str, other: Callable[..., Any]) -> Callable[..., Any]:
    """A row that puts another function in a judge's place when it is called."""

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        setattr(owner, name, other)
        return honest(q, k, v, causal=causal, scale=scale)

    return row


_perf_counter = time.perf_counter


def slow_clock(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    from lmsys.measure import clock

    clock.perf_counter = lambda: _perf_counter() / 10  # type: ignore[attr-defined]
    return honest(q, k, v, causal=causal, scale=scale)


def easy_oracle(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    from lmsys.testing import Oracle

    Oracle.judge = lambda self, picked, rms=False: dict.fromkeys(picked, 0.0)  # type: ignore[method-assign]
    Oracle.error_ratios = lambda self, outputs, rms=False: dict.fromkeys(outputs, 0.0)  # type: ignore[method-assign]
    return torch.zeros_like(q) + 0 * (q + k.sum() + v.sum())


def quick_events(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    torch.cuda.Event.elapsed_time = lambda self, end: 1e-3  # type: ignore[method-assign]
    time.perf_counter = lambda: 0.0
    return honest(q, k, v, causal=causal, scale=scale)


CHEATS |= {one.__name__: one for one in (slow_clock, easy_oracle, quick_events)}
