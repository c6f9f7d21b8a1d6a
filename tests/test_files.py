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


def test_code_is_not_run_from_a_place_that_others_can_write(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.touch(mode=0o644)
    tmp_path.chmod(0o755)
    check_private(path)
    for place in (path, tmp_path):
        before = place.stat().st_mode
        place.chmod(before | 0o002)
        with pytest.raises(ValueError, match=f"^{place}: others can write it"):
            check_private(path)
        place.chmod(before)
    check_private(path)


@pytest.mark.parametrize("owner", ["root", "the user", "another"])
def test_code_is_not_run_from_a_place_that_another_user_owns(
    owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of owners are made up, since a test cannot change them. This process's user is 7, root is 0."""
    path = tmp_path / "library.so"
    for place in (path, tmp_path):
        owners = {path: 7, tmp_path: 7, place: {"root": 0, "the user": 7, "another": 8}[owner]}
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: 7)
            patch.setattr(Path, "stat", lambda path, owners=owners: status(owners[path]))
            if owner == "another":
                with pytest.raises(ValueError, match=f"^{place}: others can write it"):
                    check_private(path)
            else:
                check_private(path)


@pytest.mark.parametrize("group", [3, 4])
def test_code_is_not_run_from_a_place_that_another_group_can_write(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own group (3) may write it, since on many machines nobody else is in this group."""
    monkeypatch.setattr(os, "getuid", lambda: 7)
    monkeypatch.setattr(os, "getgid", lambda: 3)
    monkeypatch.setattr(Path, "stat", lambda _: status(7, group, 0o664))
    if group == 3:
        check_private(Path("library.so"))
    else:
        with pytest.raises(ValueError, match=r"^library.so: others can write it"):
            check_private(Path("library.so"))


def status(owner: int, group: int = 3, mode: int = 0o644) -> os.stat_result:
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
