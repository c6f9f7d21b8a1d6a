"""`python -m lmsys.check`: right kernels pass, and of wrong ones the mistake is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.attention import ATTENTION, Pattern
from lmsys.attention.naive import naive
from lmsys.check import attention, places
from lmsys.check.__main__ import main
from lmsys.check.question import Options
from lmsys.check.verdict import RIGHT, WRONG, check
from lmsys.registry import Entry
from tests.support import wrong_kernels

FILE = Path(wrong_kernels.__file__)


def entry(name: str) -> Entry:
    return Entry(name, f"{FILE}:{name}")


@pytest.mark.parametrize("name", ["right", "of_a_course"])
def test_what_is_right_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(entry(name), Options(32, grad=True)) == RIGHT
    said = capsys.readouterr().out
    asked = [question for question in attention.questions(entry(name), Options(32)) if question.reason is None]
    assert said.count(": right\n") == len(asked)
    assert ("it takes no scale" in said) == (name == "of_a_course")
    assert "the same bits in 3 calls: yes; alone as in a batch of 2: " in said


def test_what_does_not_repeat_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(entry("any_order"), Options(32, grad=False)) == RIGHT
    assert "the same bits in 3 calls: no (o); " in capsys.readouterr().out
    assert check(entry("by_batch"), Options(32, grad=False)) == RIGHT
    assert "the same bits in 3 calls: yes; alone as in a batch of 2: no (o)\n" in capsys.readouterr().out


def test_the_example_of_the_pages_is_right() -> None:
    mine = Path(__file__).parents[2] / "docs" / "examples" / "mine.py"
    assert check(Entry("mine", f"{mine}:my_attention"), Options(32)) == RIGHT


@pytest.mark.parametrize("name", wrong_kernels.WRONG)
def test_a_mistake_is_named(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told, function = wrong_kernels.WRONG[name]
    monkeypatch.setattr(wrong_kernels, name, function, raising=False)
    assert check(Entry(name, f"tests.support.wrong_kernels:{name}"), Options(32)) == WRONG
    said = capsys.readouterr().out
    assert told in said, said
    assert "no known mistake" not in said


def with_options(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, window: int | None = None,
    sinks: Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    return naive(q, k, v, scale=scale, pattern=Pattern(causal, window, sinks=sinks, return_lse=return_lse))


def off_by_one(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, window: int | None = None) -> Any:
    return naive(q, k, v, scale=scale, pattern=Pattern(causal, window and window + 1))


def of_first_head(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, sinks: Any = None) -> Any:
    return naive(q, k, v, scale=scale, pattern=Pattern(causal, sinks=None if sinks is None else sinks[:, :1]))


def without_gradient(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: Any, return_lse: bool = False) -> Any:
    found = naive(q, k, v, scale=scale, pattern=Pattern(causal, return_lse=return_lse))
    return (found[0], found[1].detach() + 0 * q.sum()) if return_lse else found


@pytest.mark.parametrize("name", ["with_options", "off_by_one", "of_first_head", "without_gradient"])
def test_a_row_is_asked_for_the_options_that_it_has_a_parameter_for(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Entry(name, f"{__file__}:{name}")
    assert check(row, Options(32, dtypes=("float32",))) == (RIGHT if name == "with_options" else WRONG)
    said = capsys.readouterr().out
    wrong = {"off_by_one": "with window", "of_first_head": "with sinks", "without_gradient": "with return_lse"}
    assert name == "with_options" or f"{wrong[name]}, float32: wrong" in said, said
    assert "with softcap" not in said


@pytest.mark.parametrize("name", ["naive", "vectorized", "flash_torch", "sdpa_math"])
def test_rows_of_the_table_are_right(name: str) -> None:
    assert check(ATTENTION[name], Options(32, seed=1)) == RIGHT


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([f"{FILE}:dies", "--head-dim", "32"]) == 1
    assert "one tile, float32: wrong\n" in (said := capfd.readouterr().out) and "killed by SIGABRT" in said
    assert main([f"{FILE}:nothing"]) == 2
    assert "defines no 'nothing'" in capfd.readouterr().err


def test_where_it_is_wrong() -> None:
    wrong = torch.zeros(2, 3, 8, 4, dtype=torch.bool)
    wrong[:, 1, 5:] = True
    assert places.where(wrong) == "head 1 of 3, rows 5 to 7 of 8, the last 3 (12.5 % of the elements)"
    wrong[:] = True
    assert places.where(wrong) == "everywhere (100 % of the elements)"
    wrong[:, :, 1::2] = False
    assert places.where(wrong) == "rows 0, 2, ... 6 of 8 (50 % of the elements)"
    found, expected = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    found[0, 0, 1, 0] = torch.nan
    assert places.worst(found, expected) == (0, 0, 1, 0)
