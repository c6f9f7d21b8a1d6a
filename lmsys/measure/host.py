"""The host's memory, as Linux tells it; elsewhere nothing is known. Imports no torch."""

import os
from contextlib import suppress
from pathlib import Path

NO_LIMIT = float("inf")
GROUPS = (  # a control group's limit, what it holds and what of that it could drop, in cgroup 2 and in cgroup 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> float:
    """The bytes that the machine, and a container's limit, still allow; infinity where that is not told."""
    return min(_of_the_machine(root), *(_of_the_group(root / "sys/fs/cgroup", *names) for names in GROUPS))


def _of_the_machine(root: Path) -> float:
    with suppress(OSError, KeyError):
        return 1024.0 * int(_facts(root / "proc/meminfo")["MemAvailable:"])
    return NO_LIMIT


def _of_the_group(folder: Path, limit: str, held: str, stat: str, cached: str) -> float:
    with suppress(OSError, KeyError, ValueError):  # ValueError: the limit is "max"
        most, now = (int((folder / name).read_text()) for name in (limit, held))
        return most - now + int(_facts(folder / stat)[cached])
    return NO_LIMIT


def _facts(file: Path) -> dict[str, str]:
    return {words[0]: words[1] for words in map(str.split, file.read_text().splitlines())}


def resident_bytes(pid: int = 0) -> int:
    """The bytes that a process, by default this one, holds; 0 where that is not told, or it has ended."""
    try:
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed because memory ran out, since the machine began; 0 where not told."""
    with suppress(OSError, KeyError):
        return int(_facts(root / "proc/vmstat")["oom_kill"])
    return 0
