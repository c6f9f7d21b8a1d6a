"""What the trials of all benchmarks share: sampling cells side by side, and how a cell ends."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.session import NOT_TIMED, Settings
from lmsys.measure.clock import Clock
from lmsys.measure.compare import Failure, Step, interleave

INTERPRETED = "verified in Triton's interpreter, never timed"


@dataclass
class Found:
    """What sampling one cell gave."""

    samples: list[float] | None = None
    failure: Failure | None = None
    sm_clock_mhz: float | None = None


@dataclass(kw_only=True)
class Judged:
    """How a row or a cell ends, as far as is known."""

    outcome: str = "ok"
    reason: str | None = None
    error_ratio: float | None = None

    def failed(self, outcome: str, reason: str) -> None:
        self.outcome, self.reason = outcome, reason


@dataclass(kw_only=True)
class Contender(Judged):
    """What has been found out about a row, whose trials derive from this; `interpreted` rows are never timed."""

    compile_s: float | None = None
    interpreted: bool = False


def fail_the_good(contenders: Iterable[Contender], failure: Failure | None) -> None:
    """What failed outside a row's own calls, if anything did, fails every row that was still good."""
    for contender in contenders:
        if failure and contender.outcome == "ok":
            contender.failed("error", f"the bench failed, not the row: {failure[1]}")


def sample(
    steps: Mapping[str, Step], settings: Settings, found: Mapping[str, Found], clock: Clock, trials: int = 3
) -> None:
    """Times the steps in turns; `found` of each, by the same name, takes what came of it.

    `trials` is how often each is called beforehand, to learn what it costs.
    """
    sampled = interleave(
        steps,
        clock,
        seconds=settings.seconds_per_row,
        min_rounds=settings.min_rounds,
        trials=trials,
        sm_clock=settings.sm_clock,
    )
    for name in steps:
        one = found[name]
        one.samples, one.failure = sampled.samples.get(name), sampled.failures.get(name)
        one.sm_clock_mhz = sampled.sm_clock_mhz


def verdict(ratios: Mapping[str, float], judged_as: str) -> tuple[float | None, Failure | None]:
    """Of errors over their budgets, by tensor: the worst, None where it is no number, and what is wrong if anything is.

    `judged_as` is the dtype or the precision.
    """
    name, ratio = max(ratios.items(), key=lambda item: item[1])
    worst = ratio if math.isfinite(ratio) else None
    if ratio <= 1:
        return worst, None
    size = "holds NaN or inf" if worst is None else f"is {worst:.3g} times the allowed error"
    return worst, ("wrong", f"{name} {size} ({judged_as})")


def ending(contender: Contender, found: Found) -> tuple[str, str | None, list[float] | None]:
    """(outcome, reason, samples) of a cell: what its contender came to, else what failed while it was timed."""
    outcome, reason = contender.outcome, contender.reason
    if outcome == "ok" and found.failure:
        outcome, reason = found.failure
    if outcome == "ok" and found.samples is None:
        reason = INTERPRETED if contender.interpreted else NOT_TIMED
    return outcome, reason, found.samples if outcome == "ok" else None
