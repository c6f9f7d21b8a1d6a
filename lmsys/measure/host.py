"""The host's memory, as Linux tells it; elsewhere nothing is known. Imports no torch."""

import os
from pathlib import Path


def available_bytes() -> float:
    """What can still be had; infinity where that is not told."""
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * int(facts["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return float("inf")


def resident_bytes(pid: int = 0) -> int:
    """What a process, by default this one, holds; 0 where that is not told, or it has ended."""
    try:
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
