"""The language model's head and loss, forward and backward: ours in chunks, and the logits of all tokens at once."""

from collections.abc import Callable

import pytest

from benchmarks.conftest import MODEL, SESSION, SWEEP, cell_params
from benchmarks.loss_trial import cells_of, loss_trial


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    (sweep, _), session = stash[SWEEP], stash[SESSION]
    cells = [cell for part in sweep.losses for cell in cells_of(part, stash[MODEL], session.settings.device)]
    metafunc.parametrize("cell", cell_params(session.add(cells, loss_trial)))


def test_loss(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
