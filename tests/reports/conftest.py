"""Reports of made-up records of every benchmark, {path: content}. Several test files read them; each is built once.

`no_fsync` applies to every test here.
"""

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
    result, few = save(folder / "r.json", of_everything()), "causal-fwd-(time|heat)"
    return built(folder / "out", result, "--single-file", drawn=few)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is forced to the disk, which may take longer than to make a report."""
    monkeypatch.setattr("os.fsync", lambda _: None)
