"""Sweeps that are killed again and again, and resumed: each record once, none lost."""

import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lmsys.bench import record
from tests.bench.test_plugin import EXAMPLE, command
from tests.support.processes import ENVIRONMENT, ROOT

SIZES = range(16, 316)
SWEEP = ("bench_matmul.py", "--axis", f"size={','.join(map(str, SIZES))}", "--axis", "dtype=float32")
SWEEP += ("--benchmark-max-time", "0.005", "--benchmark-json", "out.json")
JOURNAL = "out.json.partial"
KILLS = 20


def start(folder: Path) -> "subprocess.Popen[str]":
    resumed = ("--resume", "out.json") if (folder / JOURNAL).exists() else ()
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command(*SWEEP, *resumed), cwd=folder, env=environment, **quiet)


def measured(folder: Path) -> dict[str, Any]:
    """Samples by id, of a journal that may have been cut."""
    if not (folder / "out.json").exists() and not (folder / JOURNAL).exists():
        return {}
    found = record.load(folder / "out.json")["records"]
    assert len({one["id"] for one in found}) == len(found)
    return {one["id"]: one["samples_s"] for one in found}


def is_new(journal: Path, before: int) -> bool:
    return journal.exists() and journal.stat().st_ino != before


@pytest.mark.on_request
@pytest.mark.parametrize("seed", range(10))
def test_a_sweep_that_is_killed_loses_nothing(seed: int, tmp_path: Path) -> None:
    """Half of the kills come in the second in which the journal begins anew, half at any moment."""
    folder, moments, before = Path(shutil.copy(EXAMPLE, tmp_path)).parent, random.Random(seed), dict[str, Any]()
    journal = folder / JOURNAL
    for kill in range(KILLS):
        inode = journal.stat().st_ino if journal.exists() else -1
        run = start(folder)
        if kill % 2:
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
    run = start(folder)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    after = measured(folder)
    assert len(after) == 2 * len(SIZES) and not journal.exists() and after.items() >= before.items()
    entries = json.loads((folder / "out.json").read_text())["benchmarks"]
    assert len({one["name"] for one in entries}) == len(entries)
    assert [one for one in os.listdir(folder) if one.endswith(".tmp")] == []
