"""The benchmarks as a user starts them: pytest in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# One thread: tiny kernels on several wait for each other when the machine is busy.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
ENVIRONMENT.pop("PYTEST_XDIST_WORKER", None)  # these are no workers, even if their caller is


def command(selector: str, *options: object) -> list[str]:
    return [sys.executable, "-m", "pytest", "benchmarks", "-k", selector, "-q", *map(str, options)]


def run(selector: str, *options: object) -> subprocess.CompletedProcess[str]:
    line = command(selector, *options)
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
