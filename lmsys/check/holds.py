"""A table of what holds of an implementation: its answers to many questions, by aspect and direction."""

from collections import Counter
from dataclasses import dataclass, field

from lmsys.check.question import Fault

DIRECTIONS = ("forward", "backward")
WORST = ("wrong", "refused", "right")


@dataclass
class Holds:
    """Answers are "right", "wrong", or "refused" by an exception.

    grad    the backward is asked for, too
    counts  of answers, by aspect and direction
    """

    grad: bool
    counts: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)

    def add(self, aspect: str, fault: Fault | None) -> None:
        """Counts an answer; its backward, where the forward is at fault, is not judged."""
        counts = self.counts.setdefault(aspect, {name: Counter() for name in DIRECTIONS})
        verdict = "right" if fault is None else "refused" if fault.raises else "wrong"
        in_forward = fault is not None and not fault.backward
        counts["forward"][verdict if in_forward else "right"] += 1
        if self.grad and not in_forward:
            counts["backward"][verdict] += 1

    @property
    def right(self) -> bool:
        """True where nothing is wrong, and in each direction something is right."""
        asked = DIRECTIONS if self.grad else DIRECTIONS[:1]
        totals = {name: sum((of[name] for of in self.counts.values()), Counter[str]()) for name in asked}
        return all(total["right"] and not total["wrong"] for total in totals.values())

    def worst(self, direction: str) -> dict[str, str]:
        """By aspect the worst of its answers in a direction, where there are any."""
        judged = {aspect: of[direction] for aspect, of in self.counts.items() if of[direction]}
        return {aspect: next(verdict for verdict in WORST if counts[verdict]) for aspect, counts in judged.items()}

    def __str__(self) -> str:
        width = max(map(len, self.counts), default=0) + 2
        lines = ["  " + " " * width + f"{DIRECTIONS[0]:24}{DIRECTIONS[1] if self.grad else ''}".rstrip()]
        for aspect, of in self.counts.items():
            lines.append(f"  {aspect:{width}}{_cell(of['forward']):24}{_cell(of['backward'])}".rstrip())
        return "\n".join(lines)


def _cell(counts: Counter[str]) -> str:
    """The worst of the answers, and how many they are, where not all are alike."""
    if not counts:
        return ""
    worst = next(verdict for verdict in WORST if counts[verdict])
    return worst if len(counts) == 1 else f"{worst}: {counts[worst]} of {counts.total()}"
