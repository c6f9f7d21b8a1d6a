"""All-reduce, reduce-scatter, all-gather and broadcast, by size, number of ranks and backend."""

from collections.abc import Callable

import pytest

from benchmarks.collectives_trial import cells_of, collectives_trial
from benchmarks.conftest import PARALLEL, SESSION, SWEEP, cell_params


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    (sweep, _), session = stash[SWEEP], stash[SESSION]
    world_sizes = stash[PARALLEL].get("world_sizes", ())
    cells = [one for part in sweep.collectives for one in cells_of(part, world_sizes, session.settings.device)]
    metafunc.parametrize("cell", cell_params(session.add(cells, collectives_trial)))


def test_collectives(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
