"""An exhibit of the museum of silent bugs: a published fault that gave wrong numbers and no error message."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lmsys.registry import Entry

T = TypeVar("T")


@dataclass(frozen=True)
class Exhibit:
    """A fault, restated in a few lines.

    name       name of the function or class that has the fault
    kind       its kind in `lmsys check`, which judges it as it judges a user's
    target     `module:name`, from which a rank can import the function or class by itself
    reference  where it was published: owner/repository#number, or with a path where there is no number
    symptom    what its users saw, in a sentence
    mistake    a part of the sentence by which the check must name the mistake. None: the check must refuse the exhibit,
               and need not name its mistake

    `families.exhibits` imports the modules of all exhibits, and so fills EXHIBITS.
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
    """A decorator that puts a function or class into the museum. Its arguments are fields of `Exhibit`."""

    def put(fault: Any) -> Any:
        name = fault.__name__
        if fault.__module__.startswith(f"{__package__}."):  # not a second copy, of a file that is loaded by its path
            EXHIBITS.append(Exhibit(name, kind, f"{fault.__module__}:{name}", reference, symptom, mistake))
        return fault

    return put
