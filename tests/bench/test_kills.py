"""Sweeps are killed again and again, and resumed with `--resume`: the result has each record once, and loses none."""

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmsys.bench import record
from tests.bench.test_plugin import EXAMPLE, command
from tests.support.processes import ENVIRONMENT

SWEEP = (
    "bench_matmul.py",
    "--lmsys-axis",
    "dtype=float32",
    "--benchmark-max-time",
    "0.02",
    "--benchmark-json",
    "out.json",
)
JOURNAL = "out.json.partial"


def start(folder: Path, sizes: Sequence[int]) -> "subprocess.Popen[str]":
    resumed = ("--lmsys-resume", "out.json") if (folder / JOURNAL).exists() else ()
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    asked = "--lmsys-axis", f"size={','.join(map(str, sizes))}"
    return subprocess.Popen(command(*SWEEP, *asked, *resumed), cwd=folder, env=ENVIRONMENT, **quiet)


def measured(folder: Path) -> dict[str, Any]:
    """{id: samples} of the result or its journal, whose last line may be cut."""
    if not (folder / "out.json").exists() and not (folder / JOURNAL).exists():
        return {}
    cases = record.load(folder / "out.json")["records"]
    assert len({case["id"] for case in cases}) == len(cases)
    return {case["id"]: case["samples_s"] for case in cases}


def is_new(journal: Path, before: int) -> bool:
    """True if the journal is another file than the one with the inode `before`."""
    return journal.exists() and journal.stat().st_ino != before


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "sizes", "kills"),
    [
        pytest.param(0, range(16, 66), (1,), id="once"),
        *(pytest.param(seed, range(16, 516), (0, 1) * 10, marks=pytest.mark.on_request) for seed in range(10)),
    ],
)
def test_a_sweep_that_is_killed_loses_nothing(seed: int, sizes: range, kills: tuple[int, ...], tmp_path: Path) -> None:
    """kills: 1 for a kill in the second after the journal begins anew, 0 for one at a random moment."""
    folder, moments, before = Path(shutil.copy(EXAMPLE, tmp_path)).parent, random.Random(seed), dict[str, Any]()
    journal = folder / JOURNAL
    for as_it_begins in kills:
        inode = journal.stat().st_ino if journal.exists() else -1
        run = start(folder, sizes)
        if as_it_begins:
            while run.poll() is None and not is_new(journal, inode):
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 1))
        else:
            time.sleep(moments.uniform(0, 12))
        assert run.poll() is None, run.communicate()[0]
        run.kill()
        run.communicate()
        now = measured(folder)
        assert now.items() >= before.items()
        before = now
    assert before
    run = start(folder, sizes)
    said, _ = run.communicate(timeout=900)
    assert run.returncode == 0, said
    after = measured(folder)
    assert len(after) == 2 * len(sizes) and not journal.exists() and after.items() >= before.items()
    entries = json.loads((folder / "out.json").read_text())["benchmarks"]
    assert len({name["name"] for name in entries}) == len(entries)
    assert [name for name in os.listdir(folder) if name.endswith(".tmp")] == []
