"""Whole trainings on text: attention rows by parallel strategies, held to the curve of one plain process."""

from collections.abc import Callable

import pytest

from benchmarks.conftest import MODEL_ROWS, SESSION, SWEEP, TRAINING, cell_params
from benchmarks.training_cells import cells_of
from benchmarks.training_trial import training_trial


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    (sweep, _), session = stash[SWEEP], stash[SESSION]
    axes, rows, device = stash[TRAINING], stash[MODEL_ROWS], session.settings.device
    cells = [cell for part in sweep.trainings for cell in cells_of(part, axes, rows, device)]
    metafunc.parametrize("cell", cell_params(session.add(cells, training_trial)))


def test_training(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
