"""Whether an attention row is right, asked in a way that a cache, a changed input or a lost stream cannot answer."""

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import trial
from benchmarks.trial import verdict
from lmsys.attention.contract import AttentionCase, adapt
from lmsys.measure.clock import synchronize
from lmsys.measure.compare import Failure, attempt, release_memory
from lmsys.registry import Entry
from lmsys.testing import Inputs, Oracle, make_inputs, run

SLEEP_CYCLES = 4 * 10**7  # about 20 ms, longer than a warm call takes to launch its first kernel


@dataclass
class Contender(trial.Contender):
    """A row with or without gradients, and what has been found out about it."""

    entry: Entry
    case: AttentionCase
    call: Callable[..., Tensor] | None = None
    has_float32: bool = False

    def first_call(self, inputs: Inputs) -> None:
        """Load, compile and tune, with nothing live but the inputs: what runs out of memory here is `oom`."""

        def seconds() -> float:
            start = time.perf_counter()
            self.call = adapt(self.entry.load())
            with interpreted_kernels() as launched:
                run(self.call, inputs, causal=self.case.causal, grad=self.case.grad)
            self.interpreted = bool(launched)
            synchronize(self.case.device)
            return time.perf_counter() - start

        why_not, failure = attempt(lambda: self.entry.why_not(self.case))
        if why_not:
            failure = "unsupported", why_not
        if not failure:
            self.compile_s, failure = attempt(seconds)
        if failure:
            self.failed(*failure)


@contextmanager
def interpreted_kernels() -> Iterator[list[Any]]:
    """A list that grows by every kernel that Triton's interpreter runs meanwhile, wherever it is defined."""
    launched: list[Any] = []
    if importlib.util.find_spec("triton") is None:
        yield launched
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(self)
        return launch(self, *args, **options)

    with mock.patch.object(GridExecutor, "__call__", noted):
        yield launched


class Gate:
    """Inputs, their copy, and the oracle of one case; `check` judges one contender after another."""

    def __init__(self, inputs: Inputs, case: AttentionCase):
        self.inputs, self.case = inputs, case
        self._tensors = (inputs.q, inputs.k, inputs.v, inputs.do)
        self._saved = [x.clone() for x in self._tensors]
        self._oracle: Oracle | None = None

    def check(self, contender: Contender) -> Failure | None:
        """None when the row is right, else outcome and reason.

        The contender's `error_ratio` becomes the ratio that failed, or the largest that its own dtype showed.
        """
        outputs, failure = attempt(lambda: self._outputs(contender))
        if failure and failure[0] == "oom" and self._oracle is not None:
            self._oracle = None  # the row fits alone; that it does not beside the oracle must not be held against it
            release_memory()
            outputs, failure = attempt(lambda: {name: x.cpu() for name, x in self._outputs(contender).items()})
        if failure:
            return failure
        changed = not all(torch.equal(x, saved) for x, saved in zip(self._tensors, self._saved, strict=True))
        self.restore()
        judged, failure = self._judge(outputs, rms=False)
        if failure:
            return failure
        strictly = judged if contender.has_float32 else self._judge(outputs, rms=True)[0]
        worst, wrong = verdict(strictly, self.case.dtype)
        if wrong:
            contender.error_ratio = worst
            return wrong
        if self.case.dtype == contender.case.dtype:
            contender.error_ratio = max(*judged.values(), contender.error_ratio or 0.0)
        return ("wrong", "the row changes its inputs") if changed else None

    def restore(self) -> None:
        for x, saved in zip(self._tensors, self._saved, strict=True):
            x.data.copy_(saved)

    def _outputs(self, contender: Contender) -> dict[str, Tensor]:
        """What the row answers to inputs that arrive at the last moment on the current stream.

        Until then the inputs hold other values, and no version counter tells that they change. On CUDA they arrive
        behind a long sleep, while the host goes on: work on a stream that does not wait reads the old ones, and a
        clone taken at once finds no result of a stream that nobody waits for.
        """
        for x in self._tensors:
            x.data.mul_(0.5)
        synchronize(self.case.device)
        if self.case.device == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)
        self.restore()
        assert contender.call is not None
        found = run(contender.call, self.inputs, causal=self.case.causal, grad=contender.case.grad)
        return {name: x.clone() for name, x in found.items() if name != "lse"}

    def _judge(self, outputs: dict[str, Tensor], rms: bool) -> tuple[dict[str, float], Failure | None]:
        if self._oracle is None:
            self._oracle = Oracle(self.case, self.inputs)
        oracle, device = self._oracle, self.inputs.q.device
        judged, failure = attempt(lambda: oracle.error_ratios({k: x.to(device) for k, x in outputs.items()}, rms=rms))
        assert not (failure and failure[0] == "oom"), f"the oracle does not fit beside {self.case}: {failure}"
        return judged, failure


def gate(contenders: list[Contender], case: AttentionCase, inputs: Inputs) -> None:
    """Fails each contender that is wrong, in float32 or in the case's dtype; `case.grad` when any needs gradients.

    float32 comes first: there an error of 1 % shows. A row that cannot run it, or not in this memory, is held to
    the stricter root-mean-square rule in its own dtype.
    """
    if case.dtype != "float32":
        _gate_float32(contenders, replace(case, dtype="float32"), inputs.seed)
        release_memory()
    in_own_dtype = Gate(inputs, case)
    for contender in contenders:
        if contender.outcome == "ok" and (failure := in_own_dtype.check(contender)):
            contender.failed(*failure)


def _gate_float32(contenders: list[Contender], case: AttentionCase, seed: int) -> None:
    able = [one for one in contenders if one.entry.why_not(replace(case, grad=one.case.grad)) is None]
    if not able:
        return
    in_float32 = Gate(make_inputs(case, seed), case)
    for contender in able:
        contender.has_float32 = True
        failure = in_float32.check(contender)
        contender.has_float32 = failure is None or failure[0] == "wrong"
        if failure and contender.has_float32:
            contender.failed(*failure)
