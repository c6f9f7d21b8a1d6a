"""Lists of parameters for tests: some always run, others only with `-m on_request`, since all would take minutes."""

from collections.abc import Iterable
from typing import Any

import pytest


def few_by_default(values: Iterable[Any], one_in: int) -> list[Any]:
    """For `parametrize`: the first of every `one_in` values always runs, the others only with -m on_request.

    values  parameters, or tuples of several parameters
    """
    marked = []
    for index, value in enumerate(values):
        several = value if isinstance(value, tuple) else (value,)
        marked.append(pytest.param(*several, marks=[pytest.mark.on_request] if index % one_in else []))
    return marked


def by_default_all_but(values: Iterable[Any], *on_request: Any) -> list[Any]:
    """For `parametrize`: the values in `on_request` run only with -m on_request, the others always."""
    return [pytest.param(value, marks=[pytest.mark.on_request] if value in on_request else []) for value in values]
