"""Fixtures of the tests of training: a text with its tokenizer and tokens, and two ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lmsys.parallel.group import WorkerGroup
from lmsys.training import pipeline
from tests.support.training_runs import config, corpus


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has a tokenizer and tokens, and has trained nothing; `copy_of` makes others of it."""
    folder = tmp_path_factory.mktemp("data")
    assert pipeline.run(config(folder, f"data.corpus={corpus(folder)}"), pipeline.DATA_STEPS) == 0
    return folder


@pytest.fixture
def group(ready_ranks: Callable[[], WorkerGroup]) -> WorkerGroup:
    """A running group of two processes on the CPU, which other tests use, too."""
    return ready_ranks()
