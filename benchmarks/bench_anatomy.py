"""The language model opened up: time by kind of kernel and by part, memory by phase and by allocation."""

from collections.abc import Callable
from functools import partial

import pytest

from benchmarks.anatomy_trial import anatomy_cells, anatomy_trial
from benchmarks.conftest import MODEL, MODEL_ROWS, SESSION, SWEEP, cell_params


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    (sweep, _), session = stash[SWEEP], stash[SESSION]
    axes, rows, device = stash[MODEL], stash[MODEL_ROWS], session.settings.device
    cells = [cell for part in sweep.anatomies for cell in anatomy_cells(part, axes, rows, device)]
    trial = partial(anatomy_trial, traces=metafunc.config.getoption("traces"))
    metafunc.parametrize("cell", cell_params(session.add(cells, trial)))


def test_anatomy(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
