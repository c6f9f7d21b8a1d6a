"""The host's memory and load, read from Linux's /proc and /sys; on other systems nothing is known. Imports no torch.

`lmsys.bench.isolation` and `lmsys.bench.runner` use this module to see how much memory workers hold,
`lmsys.measure.memory` to learn how much is available, `lmsys.measure.sensors` and `lmsys.bench.plugin` to see the load
of other programs. The parameter `root` is the folder in which /proc and /sys lie, and `proc` is /proc itself; tests
pass folders of their own. To support another version of cgroups, add its files to CGROUP_FILES.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LEAST_LOAD_S = 0.2  # the shortest time over which a load is measured
BUSY = 0.1  # the share of the CPU's time above which other programs count as a disturbance
# By version of cgroups, 2 and 1: the files with a container's limit, its use and its statistics, and the statistic that
# says how much of the use is cache which can be dropped.
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> float:
    """The bytes that processes can still get: the machine's, or a container's if less; infinity if not known."""
    least, groups = float("inf"), root / "sys/fs/cgroup"
    with suppress(OSError, KeyError):
        least = 1024.0 * int(_facts(root / "proc/meminfo")["MemAvailable:"])
    for limit, used, statistics, droppable in CGROUP_FILES:
        with suppress(OSError, KeyError, ValueError):  # ValueError: the limit is "max"
            free = int((groups / limit).read_text()) - int((groups / used).read_text())
            least = min(least, free + int(_facts(groups / statistics)[droppable]))
    return least


def _facts(file: Path) -> dict[str, str]:
    """{first word: second word} of each line of a file."""
    return {words[0]: words[1] for words in map(str.split, file.read_text().splitlines())}


def resident_bytes(pid: int = 0) -> int:
    """The bytes of memory that a process, by default this one, holds; 0 where Linux does not tell or it has ended."""
    try:  # the second number of statm: pages in memory
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed because memory ran out, since the machine began; 0 where not told."""
    with suppress(OSError, KeyError):
        return int(_facts(root / "proc/vmstat")["oom_kill"])
    return 0


@dataclass(frozen=True)
class Load:
    """The CPU seconds that were used from the start of the machine up to a moment.

    at_s    the moment, by `time.monotonic`
    busy_s  by all processes, on the cores that this process may use
    own_s   by a process and all that it has started, which are called its family
    """

    at_s: float
    busy_s: float
    own_s: float


def load(parent: int, root: Path = Path("/")) -> Load | None:
    """The load up to now; `own_s` is that of the family of `parent`, a process id. None where Linux does not tell."""
    with suppress(OSError, ValueError, IndexError):
        ticks, processes = os.sysconf("SC_CLK_TCK"), processes_in(root / "proc")
        family_ticks = sum(processes[pid][1] for pid in family_of(parent, processes) if pid in processes)
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [words for words in map(str.split, (root / "proc/stat").read_text().splitlines()) if words]
        # Columns of a core's line: user, nice, system, irq, softirq, steal. Left out are idle, waiting for a disk,
        # and the time of guests, which user and nice include.
        busy = sum(int(words[at]) for words in lines if words[0] in cores for at in (1, 2, 3, 6, 7, 8))
        return Load(time.monotonic(), busy / ticks, family_ticks / ticks)
    return None


def family_of(parent: int, processes: dict[int, tuple[int, int]]) -> set[int]:
    """The ids of `parent` and of all its descendants. `processes` is what `processes_in` returns."""
    family = {parent}
    while more := {pid for pid, (above, _) in processes.items() if above in family} - family:
        family |= more
    return family


def others_share(before: Load | None, after: Load | None) -> float | None:
    """The share of the cores' time, from 0 to 1, that processes outside the family used between two loads.

    None where it is not known, and for less than LEAST_LOAD_S, since Linux counts in ticks of 10 ms.
    """
    if before is None or after is None or (seconds := after.at_s - before.at_s) < LEAST_LOAD_S:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(max(others_s / seconds / len(os.sched_getaffinity(0)), 0.0), 1.0)


def others_now(seconds: float = 1.25 * LEAST_LOAD_S) -> float | None:  # with a margin above the least
    """`others_share` of the next `seconds`, for the family of this process. It sleeps for that time."""
    before = load(os.getpid())
    time.sleep(seconds)
    return others_share(before, load(os.getpid()))


def processes_in(proc: Path) -> dict[int, tuple[int, int]]:
    """{a process's id: (its parent's id, the ticks that it and the children it has waited for have used)}."""
    processes = {}
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, IndexError):  # it has ended meanwhile
                words = (folder / "stat").read_text().rpartition(")")[2].split()  # a name may have spaces
                # 1: the parent. 11 to 14: ticks in user and kernel mode, and those of the children, too.
                processes[int(folder.name)] = int(words[1]), sum(map(int, words[11:15]))
    return processes
