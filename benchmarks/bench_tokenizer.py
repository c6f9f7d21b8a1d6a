"""Tokenizers: training and encoding, ours beside tiktoken and Hugging Face tokenizers, where they are installed."""

from collections.abc import Callable

import pytest

from benchmarks.conftest import SESSION, SWEEP, cell_params
from benchmarks.tokenizer_trial import cells_of, tokenizer_trial


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    stash = metafunc.config.stash
    (sweep, _), session = stash[SWEEP], stash[SESSION]
    cells = [cell for part in sweep.tokenizers for cell in cells_of(part)]
    metafunc.parametrize("cell", cell_params(session.add(cells, tokenizer_trial)))


def test_tokenizer(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
