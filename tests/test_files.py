"""`lmsys.files`: files are replaced whole or not at all, by one process at a time, and code comes from safe places.

`replacing` writes a file, `claim` keeps other processes from writing it, `check_private` refuses to run code from a
place that others can write, and `read_text` also reads files that gzip has compressed.
"""

import gzip
import os
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from lmsys import files
from lmsys.files import check_private, claim, read_text, replacing
from tests.support.processes import ENVIRONMENT

# A program that claims the file that its argument names, prints "held", and sleeps.
HOLD = "import sys, time; from lmsys.files import claim; from pathlib import Path\n"
HOLD += "release = claim(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


def test_a_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half of the n")
        assert path.read_text() == "old"
        _ = 1 / 0
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        no_file = f"it is there, and it is no file: .*{name}"
        with pytest.raises(FileExistsError, match=no_file), replacing(tmp_path / name) as file:
            file.write(b"new")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "folder").is_dir() and len([*tmp_path.iterdir()]) == 2


def test_a_claim_removes_temporary_files_of_killed_writers(tmp_path: Path) -> None:
    """Only files with names such as a writer makes, NAME.xxxxxxxx.tmp, are removed, and only those of this file."""
    left = [tmp_path / name for name in ("out.json.0123abcd.tmp", "out.json.partial.89abcdef.tmp")]
    others = [tmp_path / name for name in ("out.json", "out.json.tmp", "out.json.mine.tmp", "b.json.0123abcd.tmp")]
    for file in (*left, *others):
        file.touch()
    claim(tmp_path / "out.json")()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_claim_ends_with_its_process_even_if_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    line = [sys.executable, "-c", HOLD, str(path)]
    other = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert other.stdout and other.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"process {other.pid} is writing it"):
        claim(path)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    release = claim(path)
    with pytest.raises(ValueError, match=f"process {os.getpid()} is writing it"):
        claim(path)
    release()
    claim(path)()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_safe"),
    [
        (0, 3, 0o644, True),
        (7, 3, 0o664, True),  # on many machines nobody else is in the user's own group
        (7, 4, 0o644, True),
        (7, 4, 0o664, False),
        (7, 3, 0o646, False),
        (8, 3, 0o644, False),
    ],
)
@pytest.mark.parametrize("place", [Path("/folder/library.so"), Path("/folder")])
def test_code_is_run_only_from_a_place_that_nobody_else_can_write(
    place: Path, owner: int, group: int, mode: int, is_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids are made up: this process's user is 7, in the group 3. The other place is a safe one."""
    monkeypatch.setattr(os, "getuid", lambda: 7)
    monkeypatch.setattr(os, "getgid", lambda: 3)
    facts = {place: (owner, group, mode)}  # (7, 3, 0o644) of other places
    monkeypatch.setattr(Path, "stat", lambda path: status(*facts.get(path, (7, 3, 0o644))))
    with nullcontext() if is_safe else pytest.raises(ValueError, match=f"^{place}: others can write it"):
        check_private(Path("/folder/library.so"))


def status(owner: int, group: int, mode: int) -> os.stat_result:
    """The result of `stat` for a file of this owner, group and mode."""
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))


def test_a_compressed_file_is_read_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is cut, damaged or too large is refused in one line that names it."""
    path, packed = tmp_path / "result.json", gzip.compress(b'{"a": "\xc3\xa9"}')
    path.write_bytes(packed)
    assert read_text(path) == '{"a": "é"}'
    for broken in (packed[:-9], packed[:10] + bytes(8) + packed[18:], packed[:2]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=f"^{path}: what gzip has made of it is damaged"):
            read_text(path)
    path.write_bytes(gzip.compress(bytes(1000)))
    monkeypatch.setattr(files, "MOST_BYTES", 999)
    with pytest.raises(ValueError, match=f"^{path}: it holds more than 999 bytes"):
        read_text(path)
