"""Collects the tests of several pytest commands, or runs them, in one new process: `collect`.

Tests of documents and of options call it to see which tests a command selects. A command whose first word is RUN is
run, as by itself: a process of its own would import torch anew. As a program, this module is that process: it reads a
JSON list of argument lists from stdin, and writes for each its exit code, the ids of its tests, and its output. To
collect with another option of pytest, add it to OPTIONS.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.processes import ENVIRONMENT, PATIENCE_S, PYTEST_OPTIONS, ROOT

# Without the plugin for unraisable exceptions, which collects garbage each time: no test runs, so there are none.
RUN = "run"
OPTIONS = ["--collect-only", *PYTEST_OPTIONS, "-p", "no:unraisableexception"]


class IdPlugin:
    """A plugin of pytest that keeps the ids of the tests that a command selects."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    @pytest.hookimpl(trylast=True)  # after other plugins have changed the list
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = [item.name for item in session.items]


def collect(commands: Sequence[Sequence[object]], timeout: float = PATIENCE_S) -> list[dict[str, Any]]:
    """For each command, its arguments to pytest: {"code": its exit code, "ids": of its tests, "said": its output}.

    commands  one that begins with RUN is run, others are collected
    timeout   seconds for all of them
    """
    texts = json.dumps([[str(word) for word in command] for command in commands])
    line = [sys.executable, "-m", "tests.support.collected"]
    done = subprocess.run(line, input=texts, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def strays(arguments: Sequence[str], ids: Sequence[str]) -> list[str]:
    """The ids that `-k WORD` selects by accident, since pytest looks for WORD anywhere in an id.

    The brackets of an id contain words, joined by hyphens. A user who writes WORD means ids that have this word, or
    whose brackets begin with it.
    """
    word = arguments[arguments.index("-k") + 1] if "-k" in arguments else ""
    if not word.replace("-", "").isidentifier():  # an expression, such as "naive and not bwd", is not examined
        return []
    words = {test_id: test_id.partition("[")[2].rstrip("]") for test_id in ids if "[" in test_id}
    return [test_id for test_id, text in words.items() if not text.startswith(word) and word not in text.split("-")]


def collect_here(arguments: list[str]) -> dict[str, Any]:
    """The answer of `collect` to one command, collected or run in this process."""
    plugin, output = IdPlugin(), io.StringIO()
    is_run = arguments[0] == RUN
    line = [*arguments[1:], *PYTEST_OPTIONS[1:]] if is_run else [*arguments, *OPTIONS]  # -q is not known everywhere
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(line, plugins=[plugin])
    return {"code": int(code), "ids": plugin.ids, "said": output.getvalue()}


if __name__ == "__main__":
    json.dump([collect_here(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
