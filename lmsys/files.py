"""Writes files wholly or not at all, one process at a time; reads text; makes checksums; runs git. Imports no torch.

Results, pages, tokens and checkpoints are written by `replacing` or `write_json`: a reader sees the old file or the
whole new one. Runs of the bench, trainings and downloads `claim` the path that they write, so that no second process
writes it. The attention kernel `flash_cuda` calls `check_private` before it loads its compiled code.
"""

import errno
import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**30  # the most bytes that are unpacked: a few compressed kilobytes could fill the memory


def cache_folder() -> Path:
    """The folder for what is kept between runs: $LMSYS_CACHE_DIR, by default ~/.cache/lmsys. It may be missing."""
    return Path(os.environ.get("LMSYS_CACHE_DIR", "~/.cache/lmsys")).expanduser()


def git(folder: Path, *words: str) -> str | None:
    """The output of `git words...` in a folder, without blanks at its ends; None where git fails or is missing."""
    try:
        ended = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)
    except OSError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def commit_of(root: Path, ref: str) -> str:
    """The whole hash of the commit that a git reference names in the repository at `root`; "" if it names none."""
    commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}") or ""
    return commit if commit.isalnum() else ""  # for a range, such as ^HEAD, git prints a hash with a sign before it


def unpack_commit(root: Path, commit: str, folder: Path, *paths: str) -> None:
    """Puts a commit's files into `folder`, which is made: all of them, or those under `paths`."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / ".tar"
    git(root, "archive", f"--output={archive}", commit, *paths)
    shutil.unpack_archive(archive, folder, "tar", filter="data")
    archive.unlink()


def read_text(path: Path) -> str:
    """The text of a file, unpacked if it begins as gzip's files do.

    ValueError, with the path, for a file that cannot be read or is not UTF-8, and for one that unpacks to more than
    MOST_BYTES.
    """
    try:
        content = path.read_bytes()
        return (_unpacked(path, content) if content[:2] == b"\x1f\x8b" else content).decode()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start:,}") from None


def _unpacked(path: Path, packed: bytes) -> bytes:
    """The content that gzip has packed. ValueError, with the path, if it is damaged, or larger than MOST_BYTES."""
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(MOST_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: what gzip has made of it is damaged: {error}") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path}: it holds more than {MOST_BYTES:,} bytes, the most that is unpacked")
    return content


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes a file of JSON, as `replacing` does: a reader sees the old file or the new one.

    ValueError for NaN and infinities, which JSON lacks: `strict_json.read_json` would refuse the file.
    """
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Gives a file with a temporary name; at the end of `with` it is synced to the disk and renamed to `path`.

    The folder of `path` is made where there is none. After an exception `path` is as it was. FileExistsError if `path`
    is a folder, or a device such as /dev/null, which root would otherwise replace by a file.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is there, and it is no file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def claim(path: Path) -> Callable[[], None]:
    """Makes this process the only one that writes `path`, until it ends or calls the function that is returned.

    The caller must keep that function: it holds the lock file open, and the lock ends when the file is closed. The lock
    is `<path>.lock`; `path` itself is not touched. Temporary files of `replacing` that a killed process has left beside
    `path` are removed. So are those of `<path>.partial`, the journal into which the bench writes each record as it
    comes, until it writes the result to `path`. ValueError, with the other process's number, where another process
    holds the lock.
    """
    lock = path.with_name(path.name + ".lock")
    while True:
        file = lock.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            number = file.read().strip() or "unknown"
            file.close()
            raise ValueError(f"{path}: process {number} is writing it; wait for its end, or write elsewhere") from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                break
        file.close()  # the process that held the lock has removed the lock file meanwhile: opens a new one
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    left_over = re.compile(re.escape(path.name) + r"(\.partial)?\.[0-9a-f]{8}\.tmp")
    for beside in path.parent.iterdir():
        if left_over.fullmatch(beside.name):
            beside.unlink(missing_ok=True)

    def release() -> None:
        """Ends the claim."""
        lock.unlink(missing_ok=True)
        file.close()  # this ends the lock

    return release


def check_private(path: Path) -> None:
    """ValueError if other users could write the file or its folder: the caller will run code from the file.

    The owner must be this user or root, and only the user's own group may write.
    """
    for place in (path, path.parent):
        status = place.stat()
        by_others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != os.getgid() else 0)
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & by_others:
            raise ValueError(
                f"{place}: others can write it, and code would be run from there: chmod go-w, or remove it"
            )


def digest_of(content: object) -> str:
    """The SHA-256, in hexadecimal digits, of content as JSON with keys in order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
