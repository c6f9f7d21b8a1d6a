"""The museum's losses, norms, rotary embeddings and gates: faults are refused and named, what is honest is right."""

import pytest

from lmsys.check.kinds import KINDS, RIGHT, WRONG, check, kind_of
from lmsys.check.question import Options
from lmsys.registry import Entry
from tests.museum import loss, norm, rotary, swiglu
from tests.museum.exhibit import EXHIBITS, Exhibit
from tests.support.variants import some

MODULES = {"loss": loss, "norm": norm, "rotary": rotary, "swiglu": swiglu}
FAULTS = [one for one in EXHIBITS if one.kind in MODULES]
HONEST = [(kind, entry) for kind, module in MODULES.items() for entry in module.HONEST]


@pytest.mark.parametrize("one", some(FAULTS, 2), ids=lambda one: one.name)
def test_a_fault_is_refused_and_named(one: Exhibit, capsys: pytest.CaptureFixture[str]) -> None:
    assert kind_of(one.entry.load()) == one.kind
    assert check(one.entry, Options(), one.kind) == WRONG
    said = capsys.readouterr().out
    if one.mistake is not None:
        (pattern,) = [line for line in said.splitlines() if "likely mistake:" in line] or [said]
        assert one.mistake in pattern, said


@pytest.mark.parametrize(("kind", "entry"), HONEST, ids=lambda one: getattr(one, "name", one))
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.on_request)])
def test_an_honest_one_is_right(kind: str, entry: Entry, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert kind_of(entry.load()) == kind
    assert check(entry, Options(seed=seed), kind) == RIGHT, capsys.readouterr().out


@pytest.mark.parametrize(("kind", "entry"), [(kind, module.HONEST[0]) for kind, module in MODULES.items()])
def test_only_the_dtypes_that_are_asked_for_are_asked(kind: str, entry: Entry) -> None:
    asked = [question.about for question in KINDS[kind].questions(entry, Options(dtypes=("bfloat16",)))]
    assert asked and all(about.endswith(", bfloat16") for about in asked)
