"""Rows that cheat in a process of their own (`lmsys.bench.foreign`), against the judge outside of it.

They know the loop that runs them: whatever is in their process they can replace, and most do so in their first call.
Tests measure them, and each must be refused. CHEATS has them by name, with the directions in which they cheat and a
part of the reason. A new cheat is a function with the decorator `cheat`.
"""

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.naive import naive
from lmsys.bench import foreign
from lmsys.measure import clock

Row = Callable[..., Any]
SLOW_S = 0.004  # work that is to be hidden takes at least so long, so that a busy machine changes nothing


@dataclass(frozen=True)
class Cheat:
    """A cheating row.

    told        a part of the reason why it is refused
    directions  in which it cheats
    """

    row: Row
    told: str
    directions: tuple[str, ...]

    @property
    def is_of_hosts(self) -> bool:
        """True if it cheats on a CPU alone: it hides time of the host, which no row on a GPU is charged for."""
        return self.row in (slow_clock, collects_garbage_between_calls)

    def is_told_in(self, reason: str, device: str) -> bool:
        """True if a reason is this cheat's. On a GPU, work in threads is also seen as late, before its results are."""
        return self.told in reason or (device == "cuda" and LATE in reason)

    @property
    def told_by_time(self) -> bool:
        """True if only the judge's clock tells. On a busy machine, where the clock says little, such a row may pass."""
        return self.told in (LATE, LATE_RESULTS, UNTIMED)


CHEATS: dict[str, Cheat] = {}


def cheat(told: str, *directions: str) -> Callable[[Row], Row]:
    """A decorator that puts a row into CHEATS; without directions it cheats in "fwd"."""

    def add(row: Row) -> Row:
        CHEATS[row.__name__] = Cheat(row, told, directions or ("fwd",))
        return row

    return add


def honest(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return naive(q, k, v, causal=causal, scale=scale)


def slow(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Honest attention that takes SLOW_S more: what a cheat wants to hide."""
    until = time.perf_counter() + SLOW_S
    while time.perf_counter() < until:
        pass
    return honest(q, k, v, **options)


def loop() -> Any:
    """The object whose methods the loop of this process calls, found in the loop's frame."""
    frame: Any = sys._getframe()
    while frame.f_code.co_name != "serve":
        frame = frame.f_back
    return frame.f_locals["row"]


_last: dict[str, Any] = {}  # what cheats keep from earlier calls


def wrap(method: str, around: Callable[..., Any]) -> None:
    """Has each call of this method of the loop be around(the method, its arguments); done once in a process."""
    if "wrapped" not in _last:
        _last["wrapped"], row = True, loop()
        setattr(row, method, partial(around, getattr(row, method)))


def asked() -> int:
    """How many calls the loop has been asked for; they are counted from the first call of this on."""

    def counted(call: Any, *args: Any) -> Any:
        _last["calls"] = _last.get("calls", 0) + 1
        return call(*args)

    wrap("call", counted)
    return int(_last.get("calls", 0))


def later(q: Tensor, k: Tensor, v: Tensor, in_thread: bool, rest_s: float = 0.0, **options: Any) -> Tensor:
    """Memory for a result that is computed by `finish`, or in a thread that begins now and that `finish` waits for.

    rest_s  how long the computation first sleeps
    """
    o = torch.empty_like(q)

    def compute() -> None:
        time.sleep(rest_s)
        with torch.no_grad():
            o.copy_(slow(q, k, v, **options))

    _last["todo"] = compute
    if in_thread:
        thread = threading.Thread(target=compute)
        thread.start()
        _last["todo"] = thread.join
    return o


def finish_at(method: str, behind: bool) -> None:
    """Has the loop finish what `later` has begun: behind this method of the loop, or before it."""

    def finish() -> None:
        if "todo" in _last:
            _last.pop("todo")()

    def finishing(call: Any, *args: Any) -> Any:
        if not behind:
            finish()
        answer = call(*args)
        if behind:
            finish()
        return answer

    wrap(method, finishing)


# Rows that say less than their calls take.

LATE, LATE_RESULTS = "works outside of its calls", "makes its results after its calls"
UNTIMED = "work that was to be timed was done there"


@cheat(LATE, "fwd", "fwdbwd")
def slow_clock(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Patches the clock of its own process."""
    real = _last.setdefault("clock", clock.perf_counter)
    clock.perf_counter = lambda: real() / 10  # type: ignore[assignment]
    until = real() + SLOW_S
    while real() < until:
        pass
    return honest(q, k, v, **options)


@cheat(LATE, "fwd", "bwd", "fwdbwd")
def forged_times(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Replaces what the loop answers: a tenth of each time."""

    def forged(call: Any, *args: Any) -> Any:
        answer = call(*args)
        return answer | {"took_s": answer["took_s"] / 10}

    wrap("call", forged)
    return slow(q, k, v, **options) if not torch.is_grad_enabled() else Slow.apply(q, k, v, options)


def lies_in_most_of_its_calls(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Says 0 s, but the truth in two calls of ten: of ten, eight may be late by chance, so it need not be refused."""

    def forged(call: Any, *args: Any) -> Any:
        _last["calls"] = _last.get("calls", 0) + 1
        return call(*args) | ({"took_s": 0.0} if _last["calls"] % 10 > 1 else {})

    wrap("call", forged)
    return slow(q, k, v, **options)


@cheat(UNTIMED, "bwd")
def works_while_its_forward_is_copied(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Does SLOW_S of work of its backward when the results of the untimed forward are copied."""

    def copy(real: Any, owner: str, way: str) -> Any:
        time.sleep(SLOW_S * (way == "forward"))
        return real(owner, way)

    wrap("copy", copy)
    return honest(q, k, v, **options)


class Slow(torch.autograd.Function):
    """Honest attention, whose forward and backward take SLOW_S more."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return slow(q, k, v, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            return *torch.autograd.grad(slow(q, k, v, **ctx.options), (q, k, v), grads[0]), None


def says(value: Any) -> Row:
    """A row whose process says that each call took `value`."""

    def row(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        wrap("call", lambda call, *args: call(*args) | {"took_s": value})
        return slow(q, k, v, **options)

    return row


SAID = {
    "says_nothing": (LATE, says(0.0)),
    "says_no_number": ("its process", says(float("nan"))),
}


@cheat(LATE)
def works_before_the_clock(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Computes when the loop prepares the call, and in the call returns what it has."""

    def early(call: Any, owner: str, *args: Any) -> Any:
        row = loop()
        inputs = [x for _, x in row._own[owner, "inputs"].values()]
        _last["result"] = slow(*inputs, **row._options)
        return call(owner, *args)

    wrap("call", early)
    if torch.is_grad_enabled() or "result" not in _last:
        return slow(q, k, v, **options)
    return _last.pop("result")


@cheat(LATE)
def collects_garbage_between_calls(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Leaves its clearing up, which takes SLOW_S, to the moment at which the loop drops its result."""

    class Litter:
        def __del__(self) -> None:
            time.sleep(SLOW_S)

    def tidy(call: Any, *args: Any) -> Any:
        loop()._kept = None
        _last["litter"] = None
        return call(*args)

    wrap("call", tidy)
    _last["litter"] = Litter()
    return honest(q, k, v, **options)


@cheat(LATE)
def sleeps_in_the_answer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The function that writes the answers is slow."""
    real = _last.setdefault("dumps", json.dumps)

    def slow_dumps(answer: Any) -> str:
        time.sleep(SLOW_S * ("took_s" in answer))
        return str(real(answer))

    foreign.json.dumps = slow_dumps  # type: ignore[assignment]
    return honest(q, k, v, **options)


# Rows that make their results later, or elsewhere.


def postpones(method: str, behind: bool, in_thread: bool, rest_s: float = 0.0) -> Row:
    """A row that returns memory, and fills it behind this method of the loop, or before it; see `later`."""

    def row(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        finish_at(method, behind)
        if torch.is_grad_enabled() and q.requires_grad:
            return slow(q, k, v, **options)
        return later(q, k, v, in_thread, rest_s, **options)

    return row


POSTPONED = {  # "call": before the process answers. "copy": when the judge asks for the results.
    "works_behind_the_clock": (LATE, postpones("call", behind=True, in_thread=False)),
    "waits_for_a_thread_behind_the_clock": (LATE, postpones("call", behind=True, in_thread=True)),
    "lazy_until_copied": (LATE_RESULTS, postpones("copy", behind=False, in_thread=False)),
    "lazy_in_a_thread": (LATE_RESULTS, postpones("copy", behind=False, in_thread=True, rest_s=SLOW_S)),
}


@cheat(LATE_RESULTS)
def is_early_in_one_call_of_four(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Makes its results when they are copied, but in some calls works on its own, and has them copied beforehand.

    The judge waits for nothing in those: they are early by little, and must not excuse the others.
    """
    row = loop()
    if "early" not in _last:
        _last["early"], real_read, real_copy = {"is": False}, row.read, row.copy

        def read(owner: str, way: str) -> Any:
            _last["early"] = {"is": asked() % 4 == 0 and way == "inference", "owner": owner}
            return None if _last["early"]["is"] else real_read(owner, way)

        def copy(owner: str, way: str) -> Any:
            if _last["early"]["is"]:
                return None
            if "todo" in _last:
                _last.pop("todo")()
            return real_copy(owner, way)

        row.read, row.copy, _last["real"] = read, copy, real_read
    if torch.is_grad_enabled():
        return slow(q, k, v, **options)
    if not _last["early"]["is"]:
        return later(q, k, v, in_thread=False, **options)
    _last["real"](_last["early"]["owner"], "inference")
    o = slow(q, k, v, **options)
    row._shared[_last["early"]["owner"], "results"]["o"][1].copy_(o)
    return o


@cheat("allowed error")
def computes_in_a_thread_that_nobody_waits_for(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Its process is stopped before the thread is done, and the results have been copied by then."""
    if asked() < 40 or torch.is_grad_enabled():
        return honest(q, k, v, **options)
    o = torch.zeros_like(q)

    def compute() -> None:
        time.sleep(SLOW_S)
        with torch.no_grad():
            o.copy_(honest(q, k, v, **options))

    threading.Thread(target=compute).start()
    return o


@cheat("allowed error")
def writes_results_where_the_judge_reads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Returns at once; a thread writes into the memory that the judge reads, when it has been copied."""
    o = honest(q, k, v, **options)
    if asked() < 40 or torch.is_grad_enabled():
        return o
    row = loop()

    def write() -> None:
        time.sleep(2 * SLOW_S)
        for key, shared in row._shared.items():
            if key[1] == "results":
                shared["o"][1].copy_(o)

    threading.Thread(target=write).start()
    return torch.zeros_like(q)


@cheat("allowed error")
def watches_its_inputs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """A thread computes from the shared inputs all the time; the call returns what is there.

    The process is stopped while the judge writes, so the thread sees inputs hardly earlier than the call.
    """
    if asked() < 40 or torch.is_grad_enabled():
        return honest(q, k, v, **options)
    if "thread" not in _last:
        key, shared = next(
            (key, x) for key, x in loop()._shared.items() if key[1] == "inputs" and x["q"][1].shape == q.shape
        )

        def watch() -> None:
            while True:
                seen = [x.clone() for _, x in shared.values()]
                time.sleep(SLOW_S)
                with torch.no_grad():
                    _last["ahead"] = honest(*seen, **options)

        _last["ahead"] = honest(q, k, v, **options)
        _last["thread"] = threading.Thread(target=watch, daemon=True)
        _last["thread"].start()
    return _last["ahead"].clone()


# Rows that return what is no result of this call.


@cheat("overlap")
def returns_its_input(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return q.detach() if asked() > 40 else honest(q, k, v, **options)


@cheat("without gaps")
def returns_one_row_for_all(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return honest(q[:, :, :1], k, v, **options).expand(q.shape) if asked() > 40 else honest(q, k, v, **options)


@cheat("allowed error")
def aliases_its_input_behind_the_check(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Replaces the check of what it returns, in its own process, and returns its input."""
    foreign.plain.check_plain = lambda *args: None
    return q.detach() if asked() > 40 else honest(q, k, v, **options)


@cheat("allowed error")
def copies_nothing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Says that it has copied its results, and leaves those of the call before."""

    def seldom(copy: Any, *args: Any) -> Any:
        _last["copies"] = _last.get("copies", 0) + 1
        return copy(*args) if _last["copies"] < 12 else {}

    wrap("copy", seldom)
    return honest(q, k, v, **options)


@cheat("allowed error")
def remembers_by_content(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """A cache by the first element of q, rounded."""
    key = round(float(q[0, 0, 0, 0])), q.shape, options["causal"]
    if torch.is_grad_enabled() or key not in _last:
        _last[key] = honest(q, k, v, **options).detach()
        return honest(q, k, v, **options)
    return _last[key].clone() if asked() > 40 else honest(q, k, v, **options)


@cheat("allowed error")
def is_right_when_it_is_copied_first(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Right in a third of its calls: the ones that it guesses to be checked."""
    return honest(q, k, v, **options) if asked() < 40 or asked() % 3 == 0 else torch.zeros_like(q)


@cheat("changes its inputs")
def writes_to_its_inputs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        q.mul_(1.0001)
    return honest(q, k, v, **options)


@cheat("allowed error")
def writes_to_its_inputs_behind_the_check(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Makes the shared inputs zeros, for which zeros are right. The judge judges by inputs of its own."""
    if asked() < 40 or torch.is_grad_enabled():
        return honest(q, k, v, **options)
    for shared in (loop()._shared, loop()._own):
        for key, group in shared.items():
            for _, x in group.values() if key[1] == "inputs" else ():
                x.zero_()
    return torch.zeros_like(q)


@cheat("says: too good")
def raises_a_verdict(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """An exception of a row may not say that the row is right."""

    class Good(Exception):
        failure = "wrong", "it says: too good"

    if asked() > 40:
        raise Good
    return honest(q, k, v, **options)


# Rows that attack the judge by what they send.


class Evil:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def sends(text: bytes) -> Row:
    """A row whose process answers with this text in timed calls."""

    def row(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if asked() > 40 and "sent" not in _last:
            _last["sent"] = True
            loop()._line.send_bytes(text)
        return honest(q, k, v, **options)

    return row


SENT = {
    "sends_a_pickle": ("its process", sends(pickle.dumps(Evil()))),
    "sends_too_much": ("its process", sends(b" " * 2**20)),
    "sends_an_answer_ahead": ("", sends(b'{"took_s": 1e-9}')),
    "sends_another_failure": ("", sends(b'{"failure": ["ok", "nothing"]}')),
}
for _name, (_told, _row) in (SAID | POSTPONED | SENT).items():
    _row.__name__ = _name
    globals()[_name] = cheat(_told)(_row)
