"""Reports of made-up records of every benchmark, {path: content}. Several test files read them; each is built once."""

import pytest

from tests.support.records import built, of_everything, save


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("everything")
    return built(folder / "out", save(folder / "r.json", of_everything()))


@pytest.fixture(scope="session")
def in_one_file(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The report of `everything`, made with --single-file."""
    folder = tmp_path_factory.mktemp("in_one_file")
    return built(folder / "out", save(folder / "r.json", of_everything()), "--single-file", drawn="attention")
