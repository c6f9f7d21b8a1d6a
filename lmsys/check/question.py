"""The types of `lmsys check`: `Question` (one case), `Fault` (of a wrong answer), and `Holds` (a table of the answers).

A *kind* is a type of implementation, such as attention or an optimizer. The module of each kind makes questions;
`kinds.py`, and `lmsys/course/parts.py` for the course CS336, ask them. `where` and `worst` find the places where a
tensor is wrong. A new option of the command is a field of `Options`, and an argument in `__main__.py`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lmsys import registry, values


@dataclass(frozen=True)
class Options:
    """The options of `lmsys check`, for every kind of implementation.

    head_dim  head dimension of attention
    grad      False: only forwards are checked
    dtypes    attention and functions of tensors, such as losses and norms, are checked in these dtypes
    seed      seed of the inputs
    layout    layout of attention's tensors: "bhsd" is (B, H, S, D), "bshd" (B, S, H, D)
    uses      False: a quick check of attention, as before a benchmark, without larger sizes and without calls as models
              make them, such as two forwards before a backward
    extremes  True: attention is asked only about extreme scores
    """

    head_dim: int = 64
    grad: bool = True
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    seed: int = 0
    layout: str = "bhsd"
    uses: bool = True
    extremes: bool = False


@dataclass(frozen=True)
class Fault:
    """The fault of a wrong answer.

    text         where, and the values expected and given, in lines for a reader
    mistake      the known mistake that gives this answer, in words; None if there is none
    error_ratio  the largest error divided by its budget, which is the error that is allowed; None if no number is
                 wrong, or if the ratio is not finite
    raises       True: the implementation raised an exception instead of an answer
    backward     True: the fault is in the backward alone, and the forward is right
    """

    text: str
    mistake: str | None = None
    error_ratio: float | None = None
    raises: bool = False
    backward: bool = False

    @classmethod
    def raised(cls, error: Exception, backward: bool = False) -> "Fault":
        """The fault of an implementation that raises an exception: its type, its first line, and where in its file."""
        what, line = "its backward" if backward else "it", registry.message_of(error).splitlines()[0]
        text = f"  {what} raises {type(error).__name__}: {line}{registry.place_of(error)}"
        # Some exceptions carry a pair `failure`, (outcome, reason). If the outcome is "wrong", the implementation did
        # answer, but not as promised, such as with another shape: that is a wrong answer, not a refusal.
        failure = getattr(error, "failure", None)
        return cls(text, raises=not (isinstance(failure, tuple) and failure[:1] == ("wrong",)), backward=backward)

    @classmethod
    def explained(
        cls, place: str, mistake: str | None, error_ratio: float | None, before: Sequence[str] = ()
    ) -> "Fault":
        """A fault whose text is `place`, and below it the mistake.

        mistake  as in the class; "" if none was searched for: then the text does not say that none is known
        before   the names of the outputs that are right in the same answer. The forward's result is the first that is
                 judged: so if any output is right, the backward alone is at fault
        """
        likely = f"\n  likely mistake: {mistake}" if mistake else "\n  no known mistake gives this result"
        more = f"\n  right in the same answer: {', '.join(before)}" * bool(before)
        ratio = error_ratio if error_ratio is not None and math.isfinite(error_ratio) else None
        return cls(place + likely * (mistake != "") + more, mistake or None, ratio, backward=bool(before))

    @property
    def line(self) -> str:
        """The fault in one line: the mistake, if one is known, and the place with the values."""
        place = self.text.strip().splitlines()[0]
        return f"{self.mistake} ({place})" if self.mistake else place


@dataclass(frozen=True)
class Question:
    """One case, and how its answer is judged.

    about    the case in a few words
    judge    asks the implementation and returns the fault of its answer; None if it is right. For attention
             named=False leaves out the search for the mistake
    shape    the case in full, in words
    reason   why the implementation is not asked; None: it is asked
    extreme  True: the inputs are extreme, as in `lmsys.extremes`
    aspect   the line of a table `Holds` in which the answer counts, if there is such a table
    """

    about: str
    judge: Callable[..., Fault | None] = field(repr=False)
    shape: str = ""
    reason: str | None = None
    extreme: bool = False
    aspect: str = ""


def device() -> str:
    """The type of device that implementations run on: "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def poison(replace: Callable[[Any, str, Any], Any]) -> None:
    """Makes torch.empty and similar functions fill floating-point memory with NaN, so that unwritten results show.

    A second call changes nothing.

    replace  (owner, name, function) -> patches torch. Checks pass setattr, which patches it for the rest of the
             process; tests pass pytest's monkeypatch.setattr, which patches it until the test ends
    """

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = allocate(*args, **kwargs)
            if x.is_floating_point() and x.device.type != "meta":
                x.detach().fill_(float("nan"))
            return x

        wrapper.poisoned = True  # type: ignore[attr-defined]
        return wrapper

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]:
        if not hasattr(getattr(owner, name), "poisoned"):
            replace(owner, name, poisoned(getattr(owner, name)))


AXES = ("batch", "head", "row", "column")  # what messages call the axes of attention's tensors


def where(wrong: torch.Tensor, axes: Sequence[str] = AXES) -> str:
    """Describes where a boolean mask is True, in words that follow "wrong in".

    For example "rows 214 to 236 of 237, the last 23 (9.7 % of the elements)". An axis is left out if the mask is True
    somewhere at each of its indices.

    axes  the names of the mask's axes
    """
    parts = []
    for axis, name in enumerate(axes):
        others = [other for other in range(len(axes)) if other != axis]
        at = (wrong.amax(dim=others) if others else wrong).nonzero().flatten().tolist()
        if len(at) < wrong.shape[axis]:
            parts.append(_of_axis(name, at, wrong.shape[axis]))
    return (
        f"{', '.join(parts) or 'every ' + ' and '.join(axes[-2:])}"
        f" ({100 * wrong.float().mean().item():.3g} % of the elements)"
    )


def _of_axis(name: str, at: Sequence[int], size: int) -> str:
    """Describes the indices `at`, in increasing order, on an axis of this name and size."""
    first, last, count, names = at[0], at[-1], len(at), "batches" if name == "batch" else f"{name}s"
    second = at[min(1, count - 1)]
    is_range, ends = count == last - first + 1, f"{names} {first} to {last} of {size}"
    has_even_steps = list(at) == list(range(first, last + 1, max(1, second - first)))
    return next(
        values.sentences_of(
            (count == 1, f"{name} {first} of {size}"),
            (is_range and last == size - 1, f"{ends}, the last {count}"),
            (is_range and first == 0, f"{ends}, the first {count}"),
            (is_range, ends),
            (has_even_steps, f"{names} {first}, {second}, ... {last} of {size}"),
            (True, f"{count} of {size} {names}, from {first} to {last}"),
        )
    )


def times_allowed(ratio: float) -> str:
    """An error over its budget in words, for "the largest error is ..."."""
    return f"{ratio:.3g} times what is allowed" if math.isfinite(ratio) else "not finite"


def worst(output: torch.Tensor, expected: torch.Tensor) -> tuple[int, ...]:
    """The index of the largest error; NaN counts as the largest."""
    error = (output.double() - expected).abs().nan_to_num(nan=float("inf"))
    return tuple(map(int, torch.unravel_index(error.argmax(), error.shape)))


DIRECTIONS = ("forward", "backward")  # columns of the table `Holds`
WORST = ("wrong", "refused", "right")  # verdicts, the worst first


@dataclass
class Holds:
    """A table that counts answers: a line for each aspect of the questions, such as an option of attention.

    Each answer is "right", "wrong", or "refused" by an exception.

    grad    True: backwards are checked, too
    counts  the number of answers by aspect, direction and verdict
    """

    grad: bool
    counts: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)

    def add(self, aspect: str, fault: Fault | None) -> None:
        """Counts an answer. If the forward is at fault, no verdict on the backward is counted."""
        counts = self.counts.setdefault(aspect, {name: Counter() for name in DIRECTIONS})
        verdict = "right" if fault is None else "refused" if fault.raises else "wrong"
        in_forward = fault is not None and not fault.backward
        counts["forward"][verdict if in_forward else "right"] += 1
        if self.grad and not in_forward:
            counts["backward"][verdict] += 1

    @property
    def right_forwards(self) -> int:
        """How many answers have a right forward."""
        return sum(counts["forward"]["right"] for counts in self.counts.values())

    @property
    def right(self) -> bool:
        """True if nothing is wrong, and something is right in each direction."""
        totals = (
            sum((counts[name] for counts in self.counts.values()), Counter[str]())
            for name in DIRECTIONS[: 1 + self.grad]  # without `grad` the forward alone
        )
        return all(total["right"] and not total["wrong"] for total in totals)

    def worst(self, direction: str) -> dict[str, str]:
        """The worst verdict in a direction, by aspect."""
        judged = {aspect: counts[direction] for aspect, counts in self.counts.items() if counts[direction]}
        return {aspect: next(verdict for verdict in WORST if counts[verdict]) for aspect, counts in judged.items()}

    def __str__(self) -> str:
        width = max(map(len, self.counts), default=0) + 2
        lines = ["  " + " " * width + f"{DIRECTIONS[0]:24}{DIRECTIONS[1] * self.grad}".rstrip()]
        lines += [
            f"  {aspect:{width}}{_cell(counts['forward']):24}{_cell(counts['backward']) * self.grad}".rstrip()
            for aspect, counts in self.counts.items()
        ]
        return "\n".join(lines)


def _cell(counts: Counter[str]) -> str:
    """A cell of the table: the worst verdict; if there are others, also how many answers have it."""
    if not counts:
        return "not judged"
    worst = next(verdict for verdict in WORST if counts[verdict])
    return worst if len(counts) == 1 else f"{worst}: {counts[worst]} of {counts.total()}"
