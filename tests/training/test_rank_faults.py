"""A rank or its launcher is killed, is stopped or raises at a random moment of a training on two ranks.

All processes must then end within LIMIT_S, with a message that names the rank and what it was doing, and leave nothing
behind. `strike` kills or stops a process, tests/support/raising_strategies.py raises. Faults are the keys of MESSAGES:
"kill", "stop" and "raise" befall a rank, "agent" kills its launcher.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import PATIENCE_S, ROOT, Stopwatch
from tests.support.training_runs import SETTINGS, copy_of

LIMIT_S = 30.0  # seconds from the fault to the end of the last process
OWN, TORCHRUN = "own", "torchrun"
RUNS = {
    OWN: ("-m", "lmsys.training", "train", "--ranks", "2"),
    TORCHRUN: (*"-m torch.distributed.run --nproc-per-node 2 --standalone -m lmsys.training train".split(),),
}
# Steps, evaluations and saves all come often, so that faults fall into each of them.
ENDLESS = ("train.steps=1000000", "evaluate.interval=2", "checkpoint.interval=3")
STRATEGIES = ROOT / "tests" / "support" / "raising_strategies.py"
DOING = r"(as it began|in 'train'|in step [\d,]+|in the (evaluation|save) after step [\d,]+)"
MESSAGES = {
    "kill": rf"rank 1 (died: |was )killed by SIGKILL, {DOING}",
    "stop": rf"rank 1 was stopped \(SIGSTOP\) for \d+ s, {DOING}",
    "raise": rf"rank 1 failed {DOING}",
    "agent": rf"rank [01] has lost the process that started it, {DOING}",
}
ALWAYS = [(TORCHRUN, "stop"), (TORCHRUN, "raise")]  # others always run in test_watchdog, test_group, test_training


@dataclass
class Run:
    """A training on two ranks, started as a user does. All of its processes have `mark` in their environment."""

    process: "subprocess.Popen[str]"
    folder: Path
    mark: str
    began_s: float

    def pids(self) -> set[int]:
        """The ids of all of its processes that live."""
        return {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self.mark in environment(pid)}

    def rank(self, number: int) -> int:
        """Waits for the process of a rank, and returns its id."""
        while True:
            assert self.process.poll() is None, self.process.communicate()[0]
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            ranks = [pid for pid in map(int, children) if is_rank(pid)]
            if len(ranks) > number:
                return ranks[number]
            time.sleep(0.01)

    def steps(self) -> int:
        """The number of steps that the log has."""
        log = self.folder / "log.jsonl"
        return log.read_text().count("loss") if log.exists() else 0

    def wait_for_steps(self) -> None:
        while not self.steps():
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.02)


def environment(pid: int) -> str:
    """The environment of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def is_rank(pid: int) -> bool:
    """True if the process already runs as a rank; just after a fork it is still a copy of its launcher."""
    line = command_line(pid)
    return "_serve" in line or "lmsys.training" in line and "\0RANK=" in environment(pid)


def command_line(pid: int) -> str:
    """The command line of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def start(data: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a training by a launcher, with options of the command and environment variables; kills it at the end."""
    begun: list[Run] = []

    def begin(launcher: str, *options: str, **variables: str) -> Run:
        folder, mark = copy_of(data, tmp_path / "run"), f"LMSYS_TEST_RUN={uuid.uuid4().hex}"
        (tmp_path / "tmp").mkdir()
        settings = [part for setting in (*SETTINGS, *ENDLESS) for part in ("--set", setting)]
        line = [sys.executable, *RUNS[launcher], *settings, "--output", str(folder), *options]
        own_variables = dict([mark.split("=")], TMPDIR=str(tmp_path / "tmp"), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        output_file, began_s = (tmp_path / "output.txt").open("w"), time.time()
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=os.environ | own_variables | variables,
            stdout=output_file,
            stderr=output_file,
            start_new_session=True,
        )
        begun.append(Run(process, folder, mark, began_s))
        return begun[-1]

    yield begin
    for run in begun:
        for pid in run.pids():
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


def wait_for_end(run: Run, tmp_path: Path, since: Callable[[str], float]) -> str:
    """Waits until the run has ended; AssertionError if that took too long, or left something. Returns its output.

    since  output -> the time of the fault, by time.monotonic()
    """
    until, watch = time.monotonic() + PATIENCE_S, Stopwatch()
    while run.process.poll() is None or run.pids():
        assert time.monotonic() < until, f"{[command_line(pid) for pid in run.pids()]} live on"
        time.sleep(0.05)
    ended_s, output = time.monotonic(), (tmp_path / "output.txt").read_text()
    print(f"ended {ended_s - since(output):.1f} s after the fault")  # shown by -rP
    assert run.process.returncode != 0 and watch.keeps(LIMIT_S, since(output)), output
    assert left_behind(run) == []
    return output


def left_behind(run: Run) -> list[str]:
    """Temporary files and shared memory that the run, whose processes have ended, has left.

    Files that begin with "torch" do not count: a cache of torch's, and logs of a torchrun that was killed itself.
    Shared memory that torch made for a process that lives belongs to another program: its name is torch_PID_...
    """
    shared = [
        path
        for path in Path("/dev/shm").iterdir()
        if path.name.startswith("nccl")
        or (path.name.startswith("torch_") and not Path("/proc", path.name.split("_")[1]).exists())
    ]
    files = [path for path in (run.folder.parent / "tmp").iterdir() if not path.name.startswith("torch")]
    return [str(path) for path in files] + [str(path) for path in shared if path.stat().st_ctime > run.began_s]


def strike(run: Run, fault: str, seed: int, at_start: bool) -> float:
    """Kills or stops a process at a random moment, drawn by `seed`; returns the time, by time.monotonic()."""
    random_s = random.Random(seed).uniform(0.0, 4.0 if at_start else 1.5)
    victim = run.process.pid if fault == "agent" else run.rank(1)
    if not at_start:
        run.wait_for_steps()
    time.sleep(random_s)
    os.kill(victim, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    return time.monotonic()


def cases(counts: dict[str, int]) -> list[Any]:
    """Parameters (launcher, fault, seed, True for a fault before the first step), for so many seeds of each fault.

    Those in ALWAYS run always, the others on request.
    """
    return [
        pytest.param(
            launcher,
            fault,
            seed,
            seed % 3 == 2,
            marks=[] if seed == 0 and (launcher, fault) in ALWAYS else [pytest.mark.on_request],
        )
        for launcher in RUNS
        for fault, count in counts.items()
        for seed in range(count)
    ]


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "fault", "seed", "at_start"), cases({"kill": 20, "stop": 10, "agent": 5}))
def test_a_fault_ends_all_processes(
    launcher: str, fault: str, seed: int, at_start: bool, start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(launcher, **({} if seed else {"LMSYS_STOPPED_S": "2"}))
    since = strike(run, fault, seed, at_start)
    output = wait_for_end(run, tmp_path, lambda _: since)
    assert re.search(MESSAGES[fault], output), output


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
@pytest.mark.parametrize("fault", ["kill", "stop", "agent"])
@pytest.mark.parametrize("launcher", RUNS)
def test_a_fault_ends_all_processes_on_nccl(
    launcher: str, fault: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    """A rank that waits for a dead rank on its GPU receives no signal, and no error of a lost connection."""
    run = start(launcher, "--set", "train.device=cuda", LMSYS_STOPPED_S="2")
    since = strike(run, fault, 0, at_start=False)
    output = wait_for_end(run, tmp_path, lambda _: since)
    assert re.search(MESSAGES[fault], output), output


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "fault", "seed", "at_start"), cases({"raise": 10}))
def test_a_rank_that_raises_ends_all_processes(
    launcher: str, fault: str, seed: int, at_start: bool, start: Callable[..., Run], tmp_path: Path
) -> None:
    kind, at = ("InForward", "InHook", "InData")[seed % 3], 1 if at_start else 4 + 3 * seed
    options = "--strategy", f"{STRATEGIES}:{kind}", "--set", "train.micro_batch_size=4"
    run = start(launcher, *options, LMSYS_RAISE_AT=str(at))
    output = wait_for_end(run, tmp_path, lambda output: float(re.search(r"Fault: .* at ([\d.]+) s", output)[1]))  # type: ignore[index]
    assert re.search(MESSAGES[fault], output), output
