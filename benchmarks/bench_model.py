"""The language model: what is done with it, by size, context, batch, precision, compile mode and attention row."""

from collections.abc import Callable

import pytest

from benchmarks.conftest import MODEL, MODEL_ROWS, SESSION, SWEEP, cell_params
from benchmarks.model_cells import cells_of
from benchmarks.model_trial import model_trial


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    (sweep, _), session = stash[SWEEP], stash[SESSION]
    axes, rows, device = stash[MODEL], stash[MODEL_ROWS], session.settings.device
    cells = [cell for part in sweep.models for cell in cells_of(part, axes, rows, device)]
    metafunc.parametrize("cell", cell_params(session.add(cells, model_trial)))


def test_model(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
