"""A line about what this process is doing, which another process can read after this one has died.

    doing.now("in step 12")

The training loop, the trainings of `lmsys check` and the ranks of `lmsys.parallel.group` write the line.
`lmsys.watchdog` and `lmsys.parallel.group` read it for their error messages. The line lies in a file that both
processes have mapped into their memory: writing it takes about a microsecond. The file has no name in any folder, so
that no file is left behind. `lmsys.bench.watch` shares its own data, the heartbeat, through such a file, too. Imports
no torch.
"""

import mmap
import os
import tempfile
from typing import Any

SIZE = mmap.PAGESIZE  # bytes of a shared file
LENGTH = 128  # bytes of a line; a longer one is cut off
AT_FIRST = "as it began"  # the line that readers get before one was written


def shared_file() -> int:
    """Opens a file without a name that several processes can map. Returns its descriptor, which the caller closes."""
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def map_file(file: int) -> mmap.mmap:
    """The memory of a file that `shared_file` opened, by its descriptor; -1: memory of this process alone."""
    return mmap.mmap(file, SIZE)


_memory: Any = bytearray(SIZE)  # holds this process's line; it belongs to this process alone until `share` is called


def share(file: int) -> None:
    """From now on this process writes its line into the shared file. Closes the descriptor: the memory stays mapped."""
    global _memory
    _memory = map_file(file)
    os.close(file)


def now(text: str) -> None:
    """Writes this process's line: text that may follow "it died, ", such as "in step 12"."""
    write(_memory, text)


def last() -> str:
    """The line that this process wrote last."""
    return read(_memory)


def write(memory: Any, text: str) -> None:
    """Writes a line into shared memory."""
    memory[:LENGTH] = text.encode()[:LENGTH].ljust(LENGTH, b"\0")


def read(memory: Any) -> str:
    """The line in shared memory; AT_FIRST if none was written."""
    return bytes(memory[:LENGTH]).rstrip(b"\0").decode(errors="replace") or AT_FIRST
