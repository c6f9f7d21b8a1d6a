"""`lmsys check` refuses a row with a known mistake and names the mistake, and accuses no right row.

The wrong rows are the museum's exhibits (tests/museum) and the planted ones of tests/support/wrong_kernels.py, the
right rows are those that the museum lists as honest. test_strategy.py has the kinds that run on ranks. Without
`on_request`, only some rows are tested.
"""

import pytest

from lmsys.check.kinds import KINDS, kind_of
from lmsys.check.question import Fault, Options
from lmsys.registry import Entry
from tests.museum.families import exhibits, honest
from tests.support.variants import by_default_all_but, few_by_default
from tests.support.wrong_kernels import WRONG

ONE_IN = {"attention": 3, "loss": 2, "norm": 2, "rotary": 2, "swiglu": 2, "optimizer": 4}  # so many run by default
PLANTED = [("attention", Entry(x, f"tests.support.wrong_kernels:{x}"), words) for x, (words, _) in WRONG.items()]
FAULTS, RIGHT = few_by_default(PLANTED, one_in=3), []
for kind, number in ONE_IN.items():
    FAULTS += few_by_default([(kind, fault.entry, fault.mistake) for fault in exhibits(kind)], one_in=number)
    RIGHT += few_by_default(honest(kind), one_in={"attention": 2, "optimizer": 4}.get(kind, 1))


def first_fault(kind: str, entry: Entry, options: Options) -> Fault | None:
    """The fault in the first question that a row fails; None if it passes all that it is asked."""
    questions = KINDS[kind].questions(entry, options)
    faults = (question.judge() for question in questions if question.reason is None)
    return next((fault for fault in faults if fault is not None), None)


@pytest.mark.parametrize(("kind", "entry", "mistake"), FAULTS, ids=[x.values[1].name for x in FAULTS])
def test_a_fault_is_refused_and_named(kind: str, entry: Entry, mistake: str | None) -> None:
    fault = first_fault(kind, entry, Options())
    assert fault is not None
    if mistake is not None:
        # A change of inputs or of dtypes is named in the text alone.
        assert mistake in (fault.mistake or fault.text) and "no known mistake" not in fault.text, fault.text


@pytest.mark.parametrize(("kind", "entry"), RIGHT, ids=[x.values[1].name for x in RIGHT])
@pytest.mark.parametrize("seed", by_default_all_but([0, 1], 1))
def test_a_right_row_is_not_accused(kind: str, entry: Entry, seed: int) -> None:
    assert first_fault(kind, entry, Options(head_dim=32, seed=seed)) is None


def test_the_kind_of_every_exhibit_and_honest_row_is_told_from_its_parameters() -> None:
    rows = [(fault.kind, fault.entry) for fault in exhibits()] + honest()
    assert [(kind, entry.name) for kind, entry in rows if kind_of(entry.load()) != kind] == []


@pytest.mark.parametrize("kind", ["loss", "norm", "rotary", "swiglu"])
def test_only_the_dtypes_that_are_asked_for_are_asked(kind: str) -> None:
    questions = KINDS[kind].questions(honest(kind)[0][1], Options(dtypes=("bfloat16",)))
    asked = [question.about for question in questions]
    assert asked and all(about.endswith(", bfloat16") for about in asked)
