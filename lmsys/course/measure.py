"""Measures the right parts of a checkout as rows of the bench, beside others, on the workloads of the handout.

A part that can be measured has a name in ROWS, from which a file of rows is written, and one in WORKLOADS.
"""

import shlex
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import torch

from lmsys.course import checkout

ROWS = '''"""The parts of {root} as rows of a benchmark."""

import sys

import torch

sys.path[:0] = {path}
from lmsys.course import checkout, systems

PARTS = {{
    "student_pytorch": "flash_pytorch",
    "student_triton": "flash_triton",
    "student_ddp": "Ddp",
    "student_individual": "Individual",
    "student_bucketed": "Bucketed",
}}
if not torch.cuda.is_available():  # NVTX does nothing
    vars(torch.cuda.nvtx).update(dict.fromkeys(("range_push", "range_pop", "mark"), lambda *_: None))
checkout.load()


def __getattr__(name):
    """A part, when it is asked for: others may not be written."""
    if name not in PARTS:
        raise AttributeError(name)
    return getattr(systems, PARTS[name])
'''
ATTENTION = {
    "FlashAttention in PyTorch, backward": "student_pytorch",
    "FlashAttention in Triton, backward": "student_triton",
}
CONTAINERS = {
    "DDP": "student_ddp",
    "DDP, each parameter": "student_individual",
    "DDP, bucketed": "student_bucketed",
}
# By benchmark: (names of rows by part, options, options that make it smaller where there is no GPU). --no-check leaves
# checks out, since what goes beyond the handout may be wrong; the timed calls are judged all the same.
WORKLOADS = {
    "attention": (ATTENTION, "-k leaderboard --sweep full --no-check", "--length 256 --head-dim 16 --dtype float32"),
    "data_parallel": (
        CONTAINERS,
        "-k buckets --sweep full --world-size 2",
        "--size tiny --context 32 --batch 2 --bucket-mb 1",
    ),
}


def measure(root: Path, right: Collection[str], folder: Path) -> list[list[str]]:
    """Runs the benchmarks of the `right` parts and builds their report in folder/site; returns the commands that ran.

    A command that fails prints why, and the others go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.py").write_text(ROWS.format(root=root, path=checkout.path_of(root)))
    commands = []
    for benchmark, (rows, options, small) in WORKLOADS.items():
        names = [f"--row={folder / 'rows.py'}:{name}" for part, name in rows.items() if part in right]
        commands += [
            [
                "-m",
                "lmsys.bench",
                benchmark,
                *names,
                "-o",
                str(folder / f"{benchmark}.json"),
                *shlex.split(options),
                *([] if torch.cuda.is_available() else shlex.split(small)),
            ]
        ] * bool(names)
    results = [command[command.index("-o") + 1] for command in commands]
    commands += [["-m", "lmsys.reports", *results, "-o", str(folder / "site")]] * bool(results)
    for command in commands:
        print(shlex.join(["python"] + command), flush=True)
        subprocess.run([sys.executable] + command, check=False)
    return commands
