"""A question that an implementation is asked, the fault that its answer may have, and a table of the answers."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmsys.registry import place_of


@dataclass(frozen=True)
class Options:
    """The command's options, for every kind of implementation.

    head_dim  of attention
    grad      False: forwards alone
    dtypes    of attention, losses and norms: these alone
    seed      of the inputs
    layout    of attention's tensors: "bhsd" is (B, H, S, D), "bshd" (B, S, H, D)
    uses      attention is asked for what models do with it, too, and for sizes that small cases do not have
    extremes  attention is asked extreme scores alone
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
    """The error of an answer, for a reader and for a table.

    text         the place and the values, in lines for a reader
    mistake      the known mistake that gives this answer, in words; None where no known one does
    error_ratio  the largest error over its budget; None where no number is at fault
    raises       there is no answer, but an exception
    backward     it is in the backward alone: the forward is right
    """

    text: str
    mistake: str | None = None
    error_ratio: float | None = None
    raises: bool = False
    backward: bool = False

    @classmethod
    def raised(cls, error: Exception, backward: bool = False) -> "Fault":
        """The fault of an implementation that raises an exception: its kind, its first line, and where in its file."""
        lines = str(error).strip().splitlines() or ["no message"]
        text = f"  {'its backward' if backward else 'it'} raises {type(error).__name__}: {lines[0]}{place_of(error)}"
        return cls(text, raises=True, backward=backward)

    @classmethod
    def explained(
        cls, place: str, mistake: str | None, error_ratio: float | None, before: Sequence[str] = ()
    ) -> "Fault":
        """A fault with its mistake, where one is known; "": nobody has searched for one.

        before  what is right of the same answer, its result first
        """
        pattern = f"\n  pattern: {mistake}" if mistake else "\n  no known mistake gives this result"
        more = f"\n  right in the same answer: {', '.join(before)}" if before else ""
        return cls(place + pattern * (mistake != "") + more, mistake or None, error_ratio, backward=bool(before))

    @property
    def line(self) -> str:
        """The place and the values in a line, behind the mistake where one is known."""
        place = self.text.strip().splitlines()[0]
        return f"{self.mistake} ({place})" if self.mistake else place


@dataclass(frozen=True)
class Question:
    """One case, and how its answer is judged.

    about    the case in a few words
    judge    asks the implementation: None where the answer is right. With named=False, which attention takes, nobody
             searches for the mistake
    shape    the case in full
    reason   why the implementation is not asked; None: it is
    extreme  the inputs are ones that a normal draw does not have: `lmsys.extremes`
    aspect   what it is a question of, of many that are asked to the end
    """

    about: str
    judge: Callable[..., Fault | None] = field(repr=False)
    shape: str = ""
    reason: str | None = None
    extreme: bool = False
    aspect: str = ""


def poison(replace: Callable[[Any, str, Any], Any]) -> None:
    """Uninitialised floating-point memory is NaN from now on, by `replace(owner, name, function)`. Once is enough."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            x = allocate(*args, **kwargs)
            if x.is_floating_point() and x.device.type != "meta":
                x.detach().fill_(float("nan"))
            return x

        wrapper.poisoned = True  # type: ignore[attr-defined]
        return wrapper

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]:
        if not hasattr(getattr(owner, name), "poisoned"):
            replace(owner, name, poisoned(getattr(owner, name)))


AXES = ("batch", "head", "row", "column")


def where(wrong: Tensor, axes: Sequence[str] = AXES) -> str:
    """The axes of a mask, by default (B, H, S, D), on which only some elements are wrong: "rows 214 to 236 of 237, the
    last 23"."""
    parts = []
    for axis, name in enumerate(axes):
        others = [other for other in range(len(axes)) if other != axis]
        at = (wrong.amax(dim=others) if others else wrong).nonzero().flatten().tolist()
        if len(at) < wrong.shape[axis]:
            parts.append(_of_axis(name, at, wrong.shape[axis]))
    return f"{', '.join(parts) or 'everywhere'} ({100 * wrong.float().mean().item():.3g} % of the elements)"


def _of_axis(name: str, at: Sequence[int], size: int) -> str:
    first, last = at[0], at[-1]
    if len(at) == 1:
        return f"{name} {first} of {size}"
    names = "batches" if name == "batch" else f"{name}s"
    if len(at) == last - first + 1:
        tail = f", the last {len(at)}" if last == size - 1 else f", the first {len(at)}" if first == 0 else ""
        return f"{names} {first} to {last} of {size}{tail}"
    if list(at) == list(range(first, last + 1, at[1] - first)):
        return f"{names} {first}, {at[1]}, ... {last} of {size}"
    return f"{len(at)} of {size} {names}, from {first} to {last}"


def worst(output: Tensor, expected: Tensor) -> tuple[int, ...]:
    """The index of the largest error; what is not finite is the largest."""
    error = (output.double() - expected).abs().nan_to_num(nan=float("inf"))
    return tuple(map(int, torch.unravel_index(error.argmax(), error.shape)))


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
        totals = (
            sum((of[name] for of in self.counts.values()), Counter[str]()) for name in DIRECTIONS[: 1 + self.grad]
        )
        return all(total["right"] and not total["wrong"] for total in totals)

    def worst(self, direction: str) -> dict[str, str]:
        """By aspect the worst of its answers in a direction, where there are any."""
        judged = {aspect: of[direction] for aspect, of in self.counts.items() if of[direction]}
        return {aspect: next(verdict for verdict in WORST if counts[verdict]) for aspect, counts in judged.items()}

    def __str__(self) -> str:
        width = max(map(len, self.counts), default=0) + 2
        lines = ["  " + " " * width + f"{DIRECTIONS[0]:24}{DIRECTIONS[1] if self.grad else ''}".rstrip()]
        lines += [
            f"  {aspect:{width}}{_cell(of['forward']):24}{_cell(of['backward'])}".rstrip()
            for aspect, of in self.counts.items()
        ]
        return "\n".join(lines)


def _cell(counts: Counter[str]) -> str:
    """The worst of the answers, and how many they are, where not all are alike."""
    if not counts:
        return ""
    worst = next(verdict for verdict in WORST if counts[verdict])
    return worst if len(counts) == 1 else f"{worst}: {counts[worst]} of {counts.total()}"
