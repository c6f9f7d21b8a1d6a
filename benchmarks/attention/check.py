"""The check of an attention row, asked in a way that a cache, a changed input or a lost stream cannot answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.spots import LIKE
from lmsys.attention import AttentionCase, Pattern
from lmsys.attention.contract import why_not_told
from lmsys.bench import Candidate
from lmsys.bench.benchmark import verdict
from lmsys.bench.plain import check_plain
from lmsys.check import attention, extremes
from lmsys.check.cases import ODD, cases_of_options, in_memory
from lmsys.check.question import Fault
from lmsys.measure.clock import synchronize
from lmsys.measure.compare import Failure, attempt, release_memory
from lmsys.testing import Inputs, Oracle, make_inputs, run

SLEEP_CYCLES = 4 * 10**7  # about 20 ms, longer than a warm call takes to launch its first kernel
_PASSED: set[tuple[Any, ...]] = set()  # targets of rows, and small cases that they are right in
OWN_SCALE = 0.3  # head_dim ** -0.5 of no head dimension
SMALL_SCORES = 2**22  # of a case that is checked with it, too


def check_float32(candidates: Sequence[Candidate], case: AttentionCase, pattern: Pattern, seed: int) -> None:
    """Fails each candidate that has a float32 form and is wrong in it."""
    able = [one for one in candidates if one.entry.why_not(replace(case, grad=one.case.asked.grad)) is None]
    if not able:
        return
    in_float32 = Gate(make_inputs(case, seed), case, pattern)
    for candidate in able:
        candidate.state = "has float32"
        failure = in_float32.check(candidate)
        if failure and failure[0] == "wrong":
            candidate.failed(*failure)
        elif failure:
            candidate.state = None  # it cannot, in this memory


def check_scale(candidates: Sequence[Candidate], inputs: Inputs, case: AttentionCase, pattern: Pattern) -> None:
    """Fails each candidate that is wrong with a scale of its own, where the case is small.

    Rows that take none, as those of CS336, are not asked, nor those that would compile for it.
    """
    if case.batch * case.heads * case.queries * case.keys > SMALL_SCORES:
        return
    gate = Gate(inputs, replace(case, scale=OWN_SCALE), pattern)
    for candidate in candidates:
        asked = replace(candidate.case.asked, scale=OWN_SCALE)
        takes_one = candidate.call is candidate.entry.load() and not candidate.entry.trait("compiles")
        able = candidate.outcome == "ok" and takes_one and candidate.entry.why_not(asked) is None
        if able and (failure := gate.check(candidate)):
            candidate.failed(failure[0], f"with the scale {OWN_SCALE}: {failure[1]}")


def check_extremes(candidates: Sequence[Candidate], seed: int) -> None:
    """Fails each candidate that is wrong on inputs which a normal draw has not, in a small case.

    Its length is one that no tile divides, and for a row that takes none, one of tiles. A row is asked once of each
    dtype, head dimension, mask and direction, but not where it would compile for it, nor where it is interpreted: that
    takes seconds, and no figure rests on it. Patterns have extremes in their timed calls alone.
    """
    for candidate in filter(_asked_more, candidates):
        for length in (None, extremes.WHOLE):
            case = extremes.case_of_kinds(replace(candidate.case.asked, scale=None), length)
            rms = candidate.state != "has float32"
            if candidate.entry.why_not(case) is None and _takes(
                candidate, extremes.failure, case, case.grad, seed, rms
            ):
                break


def check_memory(candidates: Sequence[Candidate], seed: int) -> None:
    """Fails each candidate that is wrong where inputs do not lie as fresh tensors do, in a small case.

    Asked as seldom as extremes are. A row that raises an exception has refused such memory.
    """
    for candidate in filter(_asked_more, candidates):
        small = {"batch": 2, "heads": 2, "kv_heads": 2, "queries": ODD, "keys": ODD, "scale": None}
        for asked in in_memory(replace(candidate.case.asked, **small)):
            if candidate.outcome == "ok" and candidate.entry.why_not(asked.case) is None:
                _takes(candidate, attention.failure, asked, asked.case.grad, seed)


def check_options(candidates: Sequence[Candidate], seed: int) -> None:
    """Fails each user's row that is wrong with an option which it has a parameter for, in a small case of each."""
    for candidate in filter(_is_quick, candidates):
        if candidate.entry.target.startswith("lmsys."):
            continue
        for asked in cases_of_options(replace(candidate.case.asked, scale=None)):
            able = candidate.entry.why_not(asked.case) is None and not why_not_told(candidate.call, asked.case.options)
            if candidate.outcome == "ok" and able:
                _takes(candidate, attention.failure, asked, asked.case.grad, seed)


def _is_quick(candidate: Candidate) -> bool:
    slow = candidate.interpreted or candidate.entry.trait("compiles")
    return candidate.outcome == "ok" and not slow


def _asked_more(candidate: Candidate) -> bool:
    return _is_quick(candidate) and not candidate.case.asked.options


def _takes(candidate: Candidate, judge: Callable[..., Fault | None], *asked: Any) -> bool:
    """False where the row raises an exception. A candidate that is wrong is failed."""
    if (known := (candidate.entry.target, *asked)) in _PASSED:
        return True
    fault, failure = candidate.watched(judge, candidate.call, *asked)
    if failure:
        candidate.failed(*failure)
    elif fault is None:
        _PASSED.add(known)
    elif fault.raises:
        return False
    else:
        candidate.failed("wrong", fault.line)
    return True


def name_mistakes(candidates: Sequence[Candidate], seed: int) -> None:
    """Adds to the reason of each candidate that is wrong the mistake that gives such results, where one is known."""
    for candidate in candidates:
        if candidate.outcome == "wrong" and not candidate.entry.trait("compiles"):
            asked = replace(candidate.case.asked, scale=None)
            mistake, _ = candidate.watched(attention.known_mistake, candidate.entry, candidate.call, asked, seed)
            if mistake:
                candidate.reason = f"{candidate.reason}; in a small case: {mistake}"


class Gate:
    """Inputs, their copy, and the oracle of one case; `check` judges one candidate after another."""

    def __init__(self, inputs: Inputs, case: AttentionCase, pattern: Pattern):
        self.inputs, self.case, self.pattern = inputs, case, pattern
        self._tensors = (inputs.q, inputs.k, inputs.v, inputs.do)
        self._saved = [x.clone() for x in self._tensors]
        self._oracle: Oracle | None = None

    def check(self, candidate: Candidate) -> Failure | None:
        """None when the row is right, else outcome and reason.

        The candidate's `error_ratio` becomes the ratio that failed, or the largest that its own dtype showed.
        """
        outputs, failure = candidate.watched(self._outputs, candidate)
        if failure and failure[0] == "oom" and self._oracle is not None:
            self._oracle = None  # the row fits alone; that it does not beside the oracle must not be held against it
            release_memory()
            outputs, failure = candidate.watched(
                lambda: {name: x.cpu() for name, x in self._outputs(candidate).items()}
            )
        if failure:
            return failure
        changed = not all(torch.equal(x, saved) for x, saved in zip(self._tensors, self._saved, strict=True))
        self.restore()
        judged, failure = self._judge(outputs, rms=False)
        if failure:
            return failure
        strictly = judged if candidate.state == "has float32" else self._judge(outputs, rms=True)[0]
        worst, wrong = verdict(strictly, self.case.dtype)
        if wrong:
            candidate.error_ratio = worst
            return wrong
        if self.case.dtype == candidate.case.dtype:
            candidate.error_ratio = max(*judged.values(), candidate.error_ratio or 0.0)
        return ("wrong", "the row changes its inputs") if changed else None

    def restore(self) -> None:
        for x, saved in zip(self._tensors, self._saved, strict=True):
            x.data.copy_(saved)

    def _outputs(self, candidate: Candidate) -> dict[str, Tensor]:
        """The row's answer to inputs that arrive at the last moment on the current stream.

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
        found = run(
            candidate.call,
            self.inputs,
            pattern=self.pattern,
            scale=self.case.scale,
            grad=candidate.case.asked.grad,
        )
        for name, x in found.items():
            check_plain(name, x, self.inputs.tensors[LIKE[name]], self._tensors)
        return {name: x.clone() for name, x in found.items() if name != "lse"}

    def _judge(self, outputs: dict[str, Tensor], rms: bool) -> tuple[dict[str, float], Failure | None]:
        if self._oracle is None:
            self._oracle = Oracle(self.case, self.inputs, scale=self.case.scale, pattern=self.pattern)
        oracle, device = self._oracle, self.inputs.q.device
        judged, failure = attempt(lambda: oracle.error_ratios({k: x.to(device) for k, x in outputs.items()}, rms=rms))
        assert not (failure and failure[0] == "oom"), f"the oracle does not fit beside {self.case}: {failure}"
        return judged, failure
