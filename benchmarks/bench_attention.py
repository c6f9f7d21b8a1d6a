"""Attention: every selected row of the table, by shape, dtype, mask and direction."""

from collections.abc import Callable

import pytest

from benchmarks.attention_trial import attention_trial, cells_of
from benchmarks.conftest import ROWS, SESSION, SWEEP, cell_params


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    (sweep, axes), (entries, named), session = stash[SWEEP], stash[ROWS], stash[SESSION]
    cells = [cell for part in sweep.sections for cell in cells_of(part, axes, entries, named, session.settings.device)]
    metafunc.parametrize("cell", cell_params(session.add(cells, attention_trial)))


def test_attention(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
