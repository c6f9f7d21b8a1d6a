"""Notices the kernels that Triton's interpreter runs: what it runs is verified, and never timed."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def interpreted_kernels() -> Iterator[list[Any]]:
    """A list that grows by every kernel that Triton's interpreter runs meanwhile, wherever it is defined."""
    launched: list[Any] = []
    if importlib.util.find_spec("triton") is None:
        yield launched
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(self)
        return launch(self, *args, **options)

    with mock.patch.object(GridExecutor, "__call__", noted):
        yield launched
