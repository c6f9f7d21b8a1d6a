"""Starts pytest on the benchmarks as a user does, and modules that need a process of their own.

`run` runs pytest, `compiling` runs a module in a process in which Triton compiles, and `smoke_sweep` makes a result
file that many tests read. To change the environment or the options of all these processes, edit the constants.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lmsys.measure import host

ROOT = Path(__file__).parents[2]
# Strategies that the smoke sweep of the tests leaves out, since others like them are in it.
ALIKE = "naive flat overlapped zero1 fsdp torch_ddp torch_ddp_tuned torch_zero1 torch_fsdp2_zero2".split()
PATIENCE_S = 600.0  # how long a test waits for another process, even on a busy machine
STARTUP = ROOT / "tests" / "support" / "startup"  # in an interpreter's path it makes imports quicker
PATH = os.pathsep.join([str(ROOT), str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])
# One thread: tiny kernels on several wait for each other when the machine is busy.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": PATH}
ENVIRONMENT.pop("PYTEST_XDIST_WORKER", None)  # the new process is no worker of xdist
# Without a cache, and without plugins that no benchmark needs: importing them takes more than half a second.
# jaxtyping's plugin, which courses install, imports numpy.
PYTEST_OPTIONS = "-q -p no:cacheprovider -p no:hypothesispytest -p no:anyio -p no:jaxtyping".split()
PYTEST = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS]


class Stopwatch:
    """Measures time for limits in tests. A limit applies only if no other program keeps this machine busy."""

    def __init__(self) -> None:
        self._began, self._load = time.monotonic(), host.load(os.getppid())

    def keeps(self, seconds: float, since: float | None = None) -> bool:
        """True if fewer than `seconds` have passed, or if the machine is busy.

        since  the moment, by time.monotonic(), from which time is counted; None: the stopwatch was made then
        """
        took = time.monotonic() - (self._began if since is None else since)
        share = host.others_share(self._load, host.load(os.getppid()))
        return took < seconds or share is None or share > host.BUSY


def command(*options: object) -> list[str]:
    """The command line of pytest with these arguments."""
    return [*PYTEST, *map(str, options)]


def run(*options: object) -> subprocess.CompletedProcess[str]:
    """Runs pytest with these arguments, from the repository's root."""
    return subprocess.run(
        command(*options), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRONMENT
    )  # fmt: skip


def compiling(module: str, *words: object, **variables: str) -> list[Any]:
    """The JSON lines that `python -m module words` prints, in a process in which Triton compiles, not interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    line = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stdout.splitlines()]


def smoke_sweep(folder: Path) -> Path:
    """The result file of the smoke sweep. The first of several processes makes it, and the others wait.

    Some cases are left out to save time:
    - models in bfloat16, which takes a CPU ten times as long as float32;
    - backwards of attention that are timed without their forward, and naive attention compiled, which takes seconds;
      flex is compiled, too;
    - the longer shape of interpreted attention;
    - the strategies in ALIKE, since each takes seconds on two ranks. tests/benchmarks/test_passes.py checks ours;
    - other people's tokenizers but one: each has a process of its own, by which its memory is measured.
    """
    result = folder / "smoke.json"
    with (folder / "smoke.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            quick = ("--sweep", "smoke", "--precision", "fp32", "--benchmark-only", "--benchmark-max-time", "0.005")
            left_out = ["-bwd-", "naive_compiled", "Q137 and flash_triton", "gigatoken", "fastokens", "tiktoken"]
            few = f"not ({' or '.join([*left_out, *(f'S32B2-fp32-W2-{name}' for name in ALIKE)])})"
            ended = run("benchmarks", *quick, "-k", few, "--benchmark-json", folder / "making.json")
            (folder / "smoke.txt").write_text(ended.stdout + ended.stderr)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            (folder / "making.json").rename(result)
    return result
