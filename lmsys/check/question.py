"""A question that an implementation is asked, and the fault that its answer may have."""

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
    def explained(cls, place: str, mistake: str | None, error_ratio: float, before: Sequence[str] = ()) -> "Fault":
        """The fault of a number, with its mistake where one is known; "": nobody has searched for one.

        before  what is right of the same answer, its result first
        """
        pattern = f"\n  pattern: {mistake}" if mistake else "\n  no known mistake gives this result"
        more = f"\n  right before it: {', '.join(before)}" if before else ""
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
