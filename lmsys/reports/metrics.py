"""What the columns of the records are called where they are read, and how the cases were timed, in words."""

from dataclasses import dataclass

import pandas as pd

from lmsys.reports.tables import number

CLOCKS = {
    "cuda_event": "CUDA events, cache cleared before each call",
    "cuda_event_in_a_loop": "CUDA events, calls following one another as in a loop: where the host launches slower "
    "than the GPU works, that is the time",
    "cuda_event_steps": "CUDA events, one call after another",
    "perf_counter": "wall clock",
}


@dataclass(frozen=True)
class Metric:
    """A column of the records as tables and plots show it; `title` may have places for words of the case."""

    stem: str
    field: str
    title: str
    short: str
    unit: str = ""
    scale: float = 1.0
    clocked: bool = False

    @property
    def head(self) -> str:
        return f"{self.short}, {self.unit}" if self.unit else self.short


def span(values: pd.Series) -> str:
    low, high = round(values.min()), round(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def timing(frame: pd.DataFrame, *beside: str) -> str:
    """How the timed cases were timed, with their values of the columns `beside`, and how far their samples spread."""
    timed = frame[frame["time_s"].notna()]
    if timed.empty:
        return ""
    named = [CLOCKS.get(clock, clock) for clock in sorted(set(timed["clock"].dropna()))]
    facts = [*named, *(value for column in beside for value in sorted(set(timed[column].dropna())))]
    rounds = timed["rounds"].dropna()
    if len(rounds):
        facts.append(f"at least {int(rounds.min())} rounds")
    if timed["sm_clock_mhz"].notna().any():
        facts.append(f"SM clock {span(timed['sm_clock_mhz'])} MHz")
    spread = ((timed["p80_s"] - timed["p20_s"]) / timed["time_s"]).max()
    if spread == spread:
        facts.append(f"p20 to p80 within {number(100 * spread)} % of the median")
    text = ", ".join(facts)
    return f"{text[0].upper()}{text[1:]}. " if text else ""
