"""stdout and stderr of this process, put back where somebody else's code has closed or replaced them. Imports no torch.

Workers, the bench and `lmsys check` run code of users, and what they print afterwards must be seen.
"""

import os
import sys

OUTPUTS = {1: "stdout", 2: "stderr"}  # {file number: name in sys}


class Outputs:
    """stdout and stderr as they are when this is made, by file number and in `sys`.

    The owner calls `close`, which closes the copies of the files.
    """

    def __init__(self) -> None:
        self._streams = {number: stream for number, name in OUTPUTS.items() if (stream := getattr(sys, name))}
        self._files = {number: (os.dup(number), file) for number in OUTPUTS if (file := _file(number))}

    def mend(self) -> list[str]:
        """Puts back what has been closed or replaced, and returns the names of these files and streams, for messages.

        A closed stream is opened anew.
        """
        changed = []
        for number, (copy, file) in self._files.items():
            if _file(number) != file:
                os.dup2(copy, number)
                changed.append(f"file {number}, which is {OUTPUTS[number]}")
        for number, stream in self._streams.items():
            try:
                stream.writable()
            except ValueError:  # it is closed, or detached from its buffer
                self._streams[number] = open(  # noqa: SIM115
                    number, "w", encoding=getattr(stream, "encoding", None), closefd=False
                )
            if getattr(sys, OUTPUTS[number]) is not self._streams[number]:
                setattr(sys, OUTPUTS[number], self._streams[number])
                changed.append(f"sys.{OUTPUTS[number]}")
        return changed

    def close(self) -> None:
        """Closes the copies of the files; after that nothing can be put back."""
        for copy, _ in self._files.values():
            os.close(copy)


def _file(number: int) -> tuple[int, int] | None:
    """(device, inode) of the file that is open under this number; None if none is."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
