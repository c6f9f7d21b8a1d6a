"""Collects the tests of several pytest commands, without running them, in one process: `collect`.

As a program, it reads a JSON list of argument lists from stdin, and writes for each its exit code, the ids of its
tests, and its output.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.processes import ENVIRONMENT, PYTEST, ROOT

# Without running tests no cache is needed, nor unraisable errors, for which pytest collects garbage each time.
OPTIONS = ["--collect-only", *PYTEST[3:], "-p", "no:unraisableexception"]


class Collected:
    def __init__(self) -> None:
        self.ids: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = [item.name for item in session.items]


def collect(commands: Sequence[Sequence[object]], timeout: float = 240) -> list[dict[str, Any]]:
    """For each command: {"code": its exit code, "ids": of its tests, "said": its output}. They share a new process."""
    texts = json.dumps([[str(word) for word in command] for command in commands])
    line = [sys.executable, "-m", "tests.support.collected"]
    done = subprocess.run(line, input=texts, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def strays(arguments: Sequence[str], ids: Sequence[str]) -> list[str]:
    """The ids that `-k WORD` selects by accident: WORD neither begins them nor is a part of them between hyphens."""
    word = arguments[arguments.index("-k") + 1] if "-k" in arguments else ""
    if not word.replace("-", "").isidentifier():
        return []
    cells = {test_id: test_id.partition("[")[2].rstrip("]") for test_id in ids if "[" in test_id}
    return [test_id for test_id, cell in cells.items() if not cell.startswith(word) and word not in cell.split("-")]


def collected(arguments: list[str]) -> dict[str, Any]:
    plugin, output = Collected(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main([*arguments, *OPTIONS], plugins=[plugin])
    return {"code": int(code), "ids": plugin.ids, "said": output.getvalue()}


if __name__ == "__main__":
    json.dump([collected(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
