"""Expressions of layouts are those of Python, and nothing else of Python is evaluated."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.reports.expressions import value_of
from lmsys.reports.load import InputError

CASE: dict[str, Any] = {"a": 3, "b": -2, "c": 0.5, "none": None, "word": "naive", "parts": {"a": 1}}


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signs = st.sampled_from(["+", "-", "*", "<", "<=", "==", "!=", "and", "or"])
    pairs = st.tuples(inner, signs, inner).map(lambda parts: f"({' '.join(parts)})")
    choices = st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})")
    return pairs | choices | inner.map(lambda text: f"(not {text})") | inner.map(lambda text: f"(-{text})")


EXPRESSIONS = st.recursive(st.sampled_from(["a", "b", "c", "1", "2.5", "0"]), joined, max_leaves=12)


@given(EXPRESSIONS)
def test_the_value_is_pythons(text: str) -> None:
    assert value_of(text, CASE) == eval(text, {}, dict(CASE))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('f"{a:,}/{b}" if word in ("naive", "flex") else ""', "3/-2"),
        ('parts["a"] + absent if "b" in parts else number(1234.56)', "1,235"),
        ("none is None and absent is None", True),
        ('joined("", "x", word) + ended("oom")', "x, naiveOOM"),
    ],
)
def test_texts_and_fields_within_fields(text: str, value: object) -> None:
    assert value_of(text, CASE) == value


@pytest.mark.parametrize(
    "text",
    [
        "word.upper()", "__import__('os')", "[one for one in parts]", "lambda: 1", "a ** b", "(a := 1)", "*a", "a if",
        'f"{a:>999999999}"', "open", "1 < a < 3", "(" * 300, "x" * 2000, "\0",
    ],
)  # fmt: skip
def test_nothing_else_of_python_is_evaluated(text: str) -> None:
    if text == "open":
        assert value_of(text, CASE) is None
        return
    with pytest.raises(InputError):
        value_of(text, CASE)


def test_a_text_is_not_repeated() -> None:
    with pytest.raises(TypeError):
        value_of("word * 9", CASE)
