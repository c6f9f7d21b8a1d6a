"""Data parallel training of the language model: a step, by strategy, size, batch, number of ranks and bucket size."""

from collections.abc import Callable

import pytest

from benchmarks.conftest import PARALLEL, SESSION, SWEEP, cell_params
from benchmarks.parallel_cells import cells_of
from benchmarks.parallel_trial import parallel_trial


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    (sweep, _), session = stash[SWEEP], stash[SESSION]
    device = session.settings.device
    cells = [cell for part in sweep.parallels for cell in cells_of(part, stash[PARALLEL], device)]
    metafunc.parametrize("cell", cell_params(session.add(cells, parallel_trial)))


def test_data_parallel(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
