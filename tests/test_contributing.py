"""CONTRIBUTING.md's section "Add a kernel: two places" is followed, in a copy of the repository.

The copy gets the file and the table's row that the section shows, and no more: then all tests of rows must pass. Of the
section about a strategy only the row is tried.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from lmsys import parallel

ROOT = Path(__file__).parents[1]


def section(title: str) -> str:
    """The section of CONTRIBUTING.md with this title."""
    return (ROOT / "CONTRIBUTING.md").read_text().partition(f"## {title}")[2].partition("\n## ")[0]


TEXT = section("Add a kernel: two places")
OF_WHOLE_TABLE = (  # files with tests that look at all rows of the table
    "tests/attention/test_attention_traits.py",
    "tests/attention/test_auto_order.py",
    "tests/reports/test_colors.py",
    "tests/test_docs.py",
    "tests/test_imports.py",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the repository with CONTRIBUTING's kernel: its file, and its row after the last row of our own."""
    for name in ("lmsys", "benchmarks", "tests", "dev", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)  # with compiled files, which need not be compiled again
    for file in (x for x in ROOT.iterdir() if not (tmp_path / x.name).exists() and x.name != ".git"):
        (tmp_path / file.name).symlink_to(file)
    file, table = re.findall(r"^\d\. `(lmsys/attention/\w+\.py)`", TEXT, re.MULTILINE)
    code = TEXT.partition("```python\n")[2].partition("   ```")[0]
    (tmp_path / file).write_text(dedent(code))
    (row,) = re.findall(r"^ +\+ +(_ours.*)$", TEXT, re.MULTILINE)
    rows = (tmp_path / table).read_text()
    peer = "        _peer("
    assert file.endswith("exp2.py") and peer in rows  # the first row of others follows the last of our own
    (tmp_path / table).write_text(rows.replace(peer, f"        {row}\n{peer}", 1))
    return tmp_path


def pytest_output(tree: Path, *arguments: str) -> str:
    """The output of pytest in the tree; AssertionError if a test fails."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_a_file_and_a_row_add_a_kernel(tree: Path) -> None:
    of_all_rows = "states_every_trait or single_rows or colors_of_their_own or is_documented"
    output = pytest_output(tree, "tests/attention/test_attention_traits.py", "tests/test_docs.py", "-k", of_all_rows)
    assert "test_every_row_states_every_trait[exp2] PASSED" in output


def test_the_row_of_a_strategy_is_one_of_its_table() -> None:
    (row,) = re.findall(r"`(_row\(.*?\))`", section("Add a strategy: four places"))
    entry = eval(row, vars(parallel))
    assert (entry.name, entry.target) == ("reverse", "lmsys.parallel.reverse:Reverse")
    assert entry.traits == {}  # an empty color would be refused where a result is read


@pytest.mark.on_request
def test_all_tests_of_rows_pass_with_the_new_kernel(tree: Path) -> None:
    assert "passed" in pytest_output(tree, *OF_WHOLE_TABLE)
    assert "passed" in pytest_output(tree, "tests", "-k", "exp2")
