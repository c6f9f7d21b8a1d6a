"""`value_of` evaluates the expressions of layouts as Python does, and refuses all else that Python would evaluate.

Layouts come from result files of other people, so their expressions must be harmless.
"""

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.reports.expressions import value_of
from lmsys.reports.load import InputError

CASE: dict[str, Any] = {"a": 3, "b": -2, "c": 0.5, "none": None, "zero": 0, "word": "naive", "parts": {"a": 1}}


SIGNS = ["+", "-", "*", "<", "<=", ">", ">=", "==", "!=", "and", "or", "is", "is not"]
LEAVES = ["a", "b", "c", "none", "zero"]


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Larger expressions of numbers, made of smaller ones."""
    signs = st.sampled_from(["+", "-", "*", "<", "<=", "==", "!=", "and", "or"])  # defined for all numbers
    pairs = st.tuples(inner, signs, inner).map(lambda parts: f"({' '.join(parts)})")
    choices = st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})")
    return pairs | choices | inner.map(lambda text: f"(not {text})") | inner.map(lambda text: f"(-{text})")


EXPRESSIONS = st.recursive(st.sampled_from(["a", "b", "c", "1", "2.5", "0"]), joined, max_leaves=12)


@given(EXPRESSIONS)
def test_the_value_is_pythons(text: str) -> None:
    assert value_of(text, CASE) == eval(text, {}, dict(CASE))


@pytest.mark.parametrize("sign", SIGNS)
def test_each_sign_is_pythons(sign: str) -> None:
    for left, right in product(LEAVES, LEAVES):
        try:
            right_value = eval(f"{left} {sign} {right}", {}, dict(CASE))
        except TypeError:
            with pytest.raises(TypeError):
                value_of(f"{left} {sign} {right}", CASE)
        else:
            assert value_of(f"{left} {sign} {right}", CASE) == right_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('f"{a:,}/{b}" if word in ("naive", "flex") else ""', "3/-2"),
        ('parts["a"] + absent if "b" in parts else number(1234.56)', "1,235"),
        ("none is None and absent is None", True),
        ("open", None),  # a field that is absent, and not Python's function
        ('joined("", "x", word) + ended("oom")', "x, naiveOOM"),
    ],
)
def test_texts_and_fields_within_fields(text: str, value: object) -> None:
    assert value_of(text, CASE) == value


@pytest.mark.parametrize(
    "text",
    [
        "word.upper()", "__import__('os')", "[one for one in parts]", "lambda: 1", "a ** b", "(a := 1)", "*a", "a if",
        'f"{a:>999999999}"', "1 < a < 3", "(" * 300, "x" * 2000, "\0",
    ],
)  # fmt: skip
def test_nothing_else_of_python_is_evaluated(text: str) -> None:
    with pytest.raises(InputError):
        value_of(text, CASE)


def test_a_text_is_not_repeated() -> None:
    with pytest.raises(TypeError):
        value_of("word * 9", CASE)
