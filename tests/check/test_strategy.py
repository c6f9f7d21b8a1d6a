"""`lmsys check` on strategies and sharded optimizers (lmsys/check/strategy.py): mistakes are named, right ones pass.

The wrong rows are the published faults of tests/museum (exhibits) and the planted ones of
tests/support/wrong_strategies.py, whose WRONG tables map a class to the words that name its mistake. A question is a
training that the check compares with one process; `first_fault` asks one strategy until it fails a question, on ranks
that all tests share.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from lmsys.check import strategy
from lmsys.check.kinds import WRONG as WRONG_VERDICT
from lmsys.check.kinds import check, find
from lmsys.check.question import Fault, Options, Question
from lmsys.check.strategy import Ranks
from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry
from tests.museum import parallel
from tests.museum import sharded_optimizer as optimizers
from tests.museum.exhibit import EXHIBITS
from tests.support.variants import by_default_all_but, few_by_default
from tests.support.wrong_strategies import WRONG, WRONG_OPTIMIZERS

KINDS = {"strategy": strategy.questions, "sharded_optimizer": strategy.optimizer_questions}
QUICK = "bucketed", "torch_ddp_tuned", "MyDDP"  # right strategies; the others are checked on request
SUPPORT = Path(__file__).parents[1] / "support"
# (kind, row, words that name its mistake or None) of each wrong row, and (kind, row) of each right one
PLANTED = [
    (kind, Entry(name, f"tests.support.wrong_strategies:{name}"), words)
    for kind, wrong in zip(KINDS, (WRONG, WRONG_OPTIMIZERS), strict=True)
    for name, words in wrong.items()
]
PUBLISHED = [(fault.kind, fault.entry, fault.mistake) for fault in EXHIBITS if fault.kind in KINDS]
FAULTS = few_by_default(PUBLISHED, one_in=6) + few_by_default(PLANTED, one_in=3)
RIGHT = by_default_all_but(parallel.HONEST, *(row for row in parallel.HONEST if row.name not in QUICK))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """The processes in which the check runs a strategy, shared by the tests of this file."""
    with Ranks() as ranks:
        yield ranks


def first_fault(ranks: Ranks, kind: str, entry: Entry) -> tuple[Question, Fault] | None:
    """The first question that a row fails, with its fault, or None if it passes all; asked in the command's order."""
    for question in KINDS[kind](entry, Options(), ranks):
        if question.reason is None and (fault := question.judge()):
            return question, fault
    return None


@pytest.mark.parametrize(("kind", "entry", "mistake"), FAULTS, ids=[x.values[1].name for x in FAULTS])
def test_a_fault_is_refused_and_named(ranks: Ranks, kind: str, entry: Entry, mistake: str | None) -> None:
    wrong = first_fault(ranks, kind, entry)
    assert wrong is not None, f"no fault is found in {entry.name}"
    assert mistake is None or mistake in (wrong[1].mistake or ""), wrong[1].text


@pytest.mark.parametrize("row", [*RIGHT, *optimizers.HONEST], ids=lambda row: row.name)
def test_a_right_row_is_not_accused(ranks: Ranks, row: Entry) -> None:
    kind = "sharded_optimizer" if row in optimizers.HONEST else "strategy"
    assert first_fault(ranks, kind, row) is None


def test_no_question_is_asked_that_a_strategy_does_not_support(ranks: Ranks) -> None:
    questions = list(strategy.questions(STRATEGIES["torch_fsdp2"], Options(), ranks))
    reasons = {question.about: question.reason for question in questions if question.reason is not None}
    assert not any(question.judge() for question in questions if question.reason is None)
    assert reasons["small buckets"] == "it takes no size of buckets"
    assert "NotImplementedError: FSDP does not support non-contiguous" in reasons["a weight transposed in memory"]
    assert reasons["parameters that one rank does not use"].startswith("FSDP2 reduces the gradients that a rank has")


@pytest.mark.on_request
def test_ranks_that_have_died_are_started_again(ranks: Ranks) -> None:
    assert first_fault(ranks, "strategy", Entry("Crashes", "tests.support.faulty_strategies:Crashes")) is not None
    assert first_fault(ranks, "strategy", Entry("MyDDP", "docs/examples/mine.py:MyDDP")) is None


def test_the_kind_is_found_from_the_parameters() -> None:
    assert find("docs/examples/mine.py:MyDDP", None)[0] == "strategy"
    assert find(f"{SUPPORT}/wrong_strategies.py:NotShared", None)[0] == "sharded_optimizer"
    assert find("torch_ddp", None)[0] == "strategy"


def test_json_lines_hold_the_verdict_and_the_mistake(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(strategy, "Ranks", lambda: nullcontext(ranks))
    forgets = Entry("OneLayerForgotten", "tests.support.wrong_strategies:OneLayerForgotten")
    assert check(forgets, Options(), "strategy", as_json=True) == WRONG_VERDICT
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["case"], first["verdict"], last["verdict"]) == ("one step", "wrong", "wrong")
    assert first["mistake"].startswith("the gradients of layers.1.weight are never synchronized")


# (row whose ranks fail, words of the report). The last ones end the ranks that all tests share: they are started again.
FAILURES = [
    (
        "tests.support.wrong_strategies:RaisesInItsSecondStep",
        "rank 1 raises IndexError in finish_gradient_synchronization of step 2: there are no more buckets (",
        "wrong_strategies.py, line ",
        '("there are no more buckets"))',
    ),
    (
        "tests.museum.parallel:SkipsMissing",
        "rank 0 comes to all_reduce of 36 elements in float32, rank 1 comes to all_reduce of 66 elements",
        "in finish_gradient_synchronization of step 1",
    ),
    (
        "tests.support.faulty_strategies:Crashes",
        "rank 1 died: killed by SIGSEGV, in finish_gradient_synchronization of step 1",
    ),
    ("tests.support.faulty_strategies:Hangs", "where it waits for rank 1 in all_reduce"),
]


@pytest.mark.parametrize("row", by_default_all_but(range(4), 3))
def test_a_failure_names_the_rank_and_what_it_was_doing(ranks: Ranks, row: int) -> None:
    target, *words = FAILURES[row]
    wrong = first_fault(ranks, "strategy", Entry("row", target))
    assert wrong is not None and all(part in wrong[1].text for part in words), wrong
