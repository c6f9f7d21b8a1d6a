"""The repository's conftest.py: tests that a plain run leaves out are counted in its summary, with their command.

Tests with the marks gpu, long, on_request or browser are left out unless `-m` names the mark; some are skipped, others
deselected. `collected` calls conftest.py's hooks on made-up tests, in the order of pytest with workers.
"""

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.processes import ROOT

# The made-up tests: name and marks.
MARKS = {"plain": [], "gpu": ["gpu"], "long": ["long"], "hours": ["on_request"], "page": ["browser"]}
MARKS["both"] = ["gpu", "on_request"]


class Item:
    """Takes the place of a pytest.Item; `added` has the marks that a hook adds, such as a skip."""

    def __init__(self, name: str):
        self.name, self.added = name, list[Any]()

    def get_closest_marker(self, name: str) -> bool:
        return name in MARKS[self.name]

    def add_marker(self, marker: Any) -> None:
        self.added.append(marker)


def collected(asked: str) -> tuple[dict[str, bool], list[str], list[str]]:
    """(name of each test that is selected: whether it is skipped; names of deselected tests; lines of the summary).

    asked  the expression of `-m`, "" for none
    """
    conftest, deselected, lines = runpy.run_path(str(ROOT / "conftest.py")), list[Any](), list[str]()
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    worker: Any = SimpleNamespace(option=SimpleNamespace(markexpr=asked), hook=hook, stash=pytest.Stash())
    worker.workeroutput = {}
    main = SimpleNamespace(stash=pytest.Stash())
    items: list[Any] = [Item(name) for name in MARKS]
    conftest["pytest_collection_modifyitems"](worker, items)
    conftest["pytest_sessionfinish"](SimpleNamespace(config=worker))
    conftest["pytest_testnodedown"](SimpleNamespace(config=main))  # a worker that died, and reports nothing
    conftest["pytest_testnodedown"](SimpleNamespace(config=main, workeroutput=worker.workeroutput))
    conftest["pytest_terminal_summary"](SimpleNamespace(write_line=lines.append), main)
    return {item.name: bool(item.added) for item in items}, [item.name for item in deselected], lines


@pytest.mark.parametrize(
    ("asked", "has_gpu", "runs", "counts"),  # runs: whether a selected test is skipped; counts: of the four lines
    [
        ("", False, {"plain": False}, (2, 1, 1, 1)),
        ("gpu", False, {"plain": False, "gpu": True, "both": True}, (0, 1, 1, 1)),
        ("on_request", False, {"plain": False, "hours": False}, (2, 1, 0, 1)),
        ("long", False, {"plain": False, "long": False}, (2, 0, 1, 1)),
        ("browser", False, {"plain": False, "page": False}, (2, 1, 1, 0)),
        ("", True, {"plain": False, "gpu": False}, (0, 1, 2, 1)),
        ("gpu or long or on_request or browser", True, dict.fromkeys(MARKS, False), (0, 0, 0, 0)),
    ],
)
def test_what_does_not_run_is_counted(
    asked: str, has_gpu: bool, runs: dict[str, bool], counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    selected, deselected, lines = collected(asked)
    assert selected == runs and {*selected, *deselected} == {*MARKS} and len(selected) + len(deselected) == len(MARKS)
    expected = [
        f"tests left out, which need a GPU: {counts[0]} (python -m pytest -m gpu, where there is one)",
        f"tests left out, which compile, or start many processes: {counts[1]} (python3 -m nox -s long, as CI does)",
        f"tests left out, which take minutes: {counts[2]} (python -m pytest -m on_request)",
        f"tests left out, which open pages in a browser: {counts[3]} (python3 -m nox -s browser)",
    ]
    assert lines == [line for line, count in zip(expected, counts, strict=True) if count]
