"""The museum's losses, norms, rotary embeddings and SwiGLUs: each fault is refused and named, each honest row passes.

The exhibits are in tests/museum/{loss,norm,rotary,swiglu}.py. Without `on_request`, only some of the faults are tested.
"""

import pytest

from lmsys.check.kinds import KINDS, RIGHT, WRONG, check, kind_of
from lmsys.check.question import Options
from lmsys.registry import Entry
from tests.museum import loss, norm, rotary, swiglu
from tests.museum.exhibit import EXHIBITS, Exhibit
from tests.support.variants import few_by_default

MODULES = {"loss": loss, "norm": norm, "rotary": rotary, "swiglu": swiglu}
FAULTS = [exhibit for exhibit in EXHIBITS if exhibit.kind in MODULES]
HONEST = [(kind, entry) for kind, module in MODULES.items() for entry in module.HONEST]


@pytest.mark.parametrize("exhibit", few_by_default(FAULTS, one_in=2), ids=lambda exhibit: exhibit.name)
def test_a_fault_is_refused_and_named(exhibit: Exhibit, capsys: pytest.CaptureFixture[str]) -> None:
    assert kind_of(exhibit.entry.load()) == exhibit.kind
    assert check(exhibit.entry, Options(), exhibit.kind) == WRONG
    report = capsys.readouterr().out
    if exhibit.mistake is not None:
        (pattern,) = [line for line in report.splitlines() if "likely mistake:" in line] or [report]
        assert exhibit.mistake in pattern, report


@pytest.mark.parametrize(("kind", "entry"), HONEST, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.on_request)])
def test_an_honest_one_is_right(kind: str, entry: Entry, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert kind_of(entry.load()) == kind
    assert check(entry, Options(seed=seed), kind) == RIGHT, capsys.readouterr().out


@pytest.mark.parametrize(("kind", "entry"), [(kind, module.HONEST[0]) for kind, module in MODULES.items()])
def test_only_the_dtypes_that_are_asked_for_are_asked(kind: str, entry: Entry) -> None:
    asked = [question.about for question in KINDS[kind].questions(entry, Options(dtypes=("bfloat16",)))]
    assert asked and all(about.endswith(", bfloat16") for about in asked)
