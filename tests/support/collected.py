"""Lists the tests that pytest would run: on stdin a JSON list of argument lists, on stdout a list of ids for each."""

import contextlib
import io
import json
import sys

import pytest

# Nothing is run: there is no cache to keep, and no unraisable error, which pytest collects garbage for each time.
OPTIONS = "--collect-only -q -p no:cacheprovider -p no:unraisableexception".split()


class Collected:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = [item.name for item in session.items]


def ids_of(arguments: list[str]) -> list[str]:
    found = Collected()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*arguments, *OPTIONS], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        print(f"python -m pytest {' '.join(arguments)}\n{said.getvalue()}", file=sys.stderr)
    return found.ids


if __name__ == "__main__":
    json.dump([ids_of(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
