"""The check of an attention row, asked in a way that a cache, a changed input or a lost stream cannot answer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from benchmarks.attention.spots import LIKE
from lmsys.attention import AttentionCase, Pattern
from lmsys.bench import Candidate, benchmark, plain
from lmsys.check import kinds, question
from lmsys.measure import clock, compare
from lmsys.registry import Entry
from lmsys.testing import Inputs, Oracle, make_inputs, run

SLEEP_CYCLES = 4 * 10**7  # about 20 ms, longer than a warm call takes to launch its first kernel


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


def check_small(candidates: Sequence[Candidate]) -> None:
    """Fails each candidate that is wrong in what `lmsys check` asks a kernel in small cases, and names its mistake.

    They have several tiles, odd lengths, Q != K, grouped heads, a scale, other memory, inputs which a normal draw has
    not. A row is asked once of each dtype, head dimension and direction, but not where it would compile for it, nor
    where it is interpreted: that takes seconds, and no figure rests on it. An exception refuses a case. Patterns have
    extremes in their timed calls alone.
    """
    judged = [one for one in candidates if one.outcome in ("ok", "wrong") and not one.case.asked.options]
    for candidate in [one for one in judged if not (one.interpreted or one.entry.trait("compiles"))]:
        asked = candidate.case.asked
        options = question.Options(asked.head_dim, asked.grad, tuple(dict.fromkeys(("float32", asked.dtype))))
        answer, failure = candidate.watched(_answer, candidate.entry, options)
        candidate.notes["quick_check"] = str(answer or failure)
        if candidate.outcome == "wrong" and answer and answer.fault:
            candidate.reason = f"{candidate.reason}; in small cases: {answer}"
        elif candidate.outcome == "ok" and (failure or answer.fault):
            candidate.failed(*(failure or ("wrong", f"lmsys check: {answer}")))


@cache
def _answer(entry: Entry, options: question.Options) -> kinds.Answer:
    return kinds.verdict_on(entry, options, "attention", may_raise=True)


class Gate:
    """Inputs, their copy, and the oracle of one case; `check` judges one candidate after another."""

    def __init__(self, inputs: Inputs, case: AttentionCase, pattern: Pattern):
        self.inputs, self.case, self.pattern = inputs, case, pattern
        self._tensors = (inputs.q, inputs.k, inputs.v, inputs.do)
        self._saved = [x.clone() for x in self._tensors]
        self._oracle: Oracle | None = None

    def check(self, candidate: Candidate) -> compare.Failure | None:
        """None when the row is right, else outcome and reason.

        The candidate's `error_ratio` becomes the ratio that failed, or the largest that its own dtype showed.
        """
        outputs, failure = candidate.watched(self._outputs, candidate)
        if failure and failure[0] == "oom" and self._oracle is not None:
            self._oracle = None  # the row fits alone; that it does not beside the oracle must not be held against it
            compare.release_memory()
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
        worst, wrong = benchmark.verdict(strictly, self.case.dtype)
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
        clock.synchronize(self.case.device)
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
            plain.check_plain(name, x, self.inputs.tensors[LIKE[name]], self._tensors)
        return {name: x.clone() for name, x in found.items() if name != "lse"}

    def _judge(self, outputs: dict[str, Tensor], rms: bool) -> tuple[dict[str, float], compare.Failure | None]:
        if self._oracle is None:
            self._oracle = Oracle(self.case, self.inputs, scale=self.case.scale, pattern=self.pattern)
        oracle, device = self._oracle, self.inputs.q.device
        judged, failure = compare.attempt(
            lambda: oracle.error_ratios({k: x.to(device) for k, x in outputs.items()}, rms=rms)
        )
        assert not (failure and failure[0] == "oom"), f"the oracle does not fit beside {self.case}: {failure}"
        return judged, failure
