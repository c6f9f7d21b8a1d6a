"""An exhibit of the museum of silent bugs: a published fault that gave wrong numbers and no error message."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lmsys.registry import Entry

T = TypeVar("T")


@dataclass(frozen=True)
class Exhibit:
    """A fault, restated in a few lines.

    kind       of `lmsys check`
    reference  where it was published: owner/repository#number, or with a path where there is no number
    symptom    what its users saw, in a sentence
    mistake    words that the check's name of the mistake must have; None: it is refused, and no name is asked for
    """

    name: str
    kind: str
    target: str
    reference: str
    symptom: str
    mistake: str | None

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.target)


EXHIBITS: list[Exhibit] = []


def exhibit(kind: str, reference: str, symptom: str, mistake: str | None = None) -> Callable[[T], T]:
    """Puts the function or class below it into the museum."""

    def put(fault: Any) -> Any:
        name = fault.__name__
        EXHIBITS.append(Exhibit(name, kind, f"{fault.__module__}:{name}", reference, symptom, mistake))
        return fault

    return put
