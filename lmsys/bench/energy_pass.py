"""A case's pass for its energy, on request: behind its samples and its memory, alone on the device."""

from typing import TYPE_CHECKING, Any

from lmsys.bench.fields import Record
from lmsys.measure import energy
from lmsys.measure.clock import synchronize

if TYPE_CHECKING:
    from lmsys.bench.trial import Trial

OF_OTHERS = "energy is measured of calls that the bench's own process makes again and again: here others make them"


def energy_fields(trial: "Trial", case: Any) -> Record:
    """The fields on the energy of the case's calls, or on why there is none.

    Inputs are drawn once, before the pass: to draw them again would count, too. So a row may know them by then; one
    that is faster than its arithmetic can be has no energy.
    """
    benchmark, candidate, runner = trial.benchmark, trial.candidate(case), trial.runner
    if case.id not in trial.called_here:
        return {"energy_note": OF_OTHERS}
    if why_not := runner.sensors.why_no_joules:
        return {"energy_note": why_not}

    def measured() -> energy.Energy:
        step = benchmark.step(case, candidate, trial.setup)
        trial.redraw_of(step)(trial.settings.seed)
        step.redraw_late(trial.settings.seed)
        return energy.of_step(step, runner.sensors, done)

    def done() -> None:
        synchronize(trial.settings.device)
        runner.heartbeat.renew(trial.settings.deadline_s)  # the deadline is that of a few calls

    found, failure = candidate.watched(measured)
    if failure is None:
        failure = trial.impossible(case, found.call_s, cached=True)
    return {"energy_note": failure[1]} if failure else found.record(benchmark.tokens(case))
