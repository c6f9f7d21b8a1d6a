"""Memory as lmsys/measure/host.py reads it: how much can be allocated, how much a process holds, and who was killed.

`write` makes a tree of files as Linux has them in /proc and /sys, below a temporary root.
"""

import mmap
from pathlib import Path

import pytest

from lmsys.measure.host import available_bytes, oom_kills, resident_bytes

GIB = 2**30


def write(root: Path, **files: object) -> None:
    """Write each content to the file of that name below `root`; in names, __ stands for / and _DOT_ for a dot."""
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 9 * GIB), (8 * GIB, 8 * GIB - 3 * GIB + GIB), (64 * GIB, 9 * GIB)]
)
def test_the_least_of_the_machine_and_of_its_container_counts(limit: object, expected: int, tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=f"MemTotal: {16 * 2**20} kB\nMemAvailable: {9 * 2**20} kB")
    folder = tmp_path / "sys/fs/cgroup"
    write(folder, memory_DOT_max=limit, memory_DOT_current=3 * GIB, memory_DOT_stat=f"anon 5\ninactive_file {GIB}")
    assert available_bytes(tmp_path) == expected


def test_nothing_is_known_elsewhere(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == float("inf") and oom_kills(tmp_path) == 0


def test_what_a_process_holds() -> None:
    with mmap.mmap(-1, 2**26) as fresh:  # not a bytearray: Python might reuse memory that the process holds already
        before = resident_bytes()
        fresh.write(bytes(2**26))
        assert resident_bytes() - before > 0.9 * len(fresh)
    assert resident_bytes(2**30) == 0


def test_the_kernel_counts_whom_it_killed(tmp_path: Path) -> None:
    """`oom_kills` is Linux's count of processes that it has killed because memory ran out."""
    write(tmp_path, proc__vmstat="nr_free_pages 5\noom_kill 3")
    assert oom_kills(tmp_path) == 3
