"""A folder of files that one program writes again and again. It touches no file that it did not write.

`manifest.json` names what was written. Files beside it that others made stay as they are; one
that stands where a file is to be written, and a link in its place or in a folder's, are refused.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lmsys.strict_json import read_json

MANIFEST = "manifest.json"
NAME = r"([\w-]{1,100}/)?[\w-]{1,200}\.(html|md|csv|svg)"


def write(out: Path, files: Mapping[str, str]) -> None:
    """Make `out` hold these files, by relative name, and none of those written there before.

    ValueError, before anything is changed, where that would touch what is somebody else's; OSError where it fails.
    """
    for name in files:
        if not re.fullmatch(NAME, name):
            raise ValueError(f"a file {name[:80]!r} cannot be written: its name must match {NAME}")
    if folder := next((one for one in (out, *out.parents) if one.exists() and not one.is_dir()), None):
        raise ValueError(f"{str(out)!r}: {folder} is a file, and a folder is needed")
    before = _written(out)
    for name in (*files, *before, MANIFEST):
        _check_place(out, name)
    for name in files:
        if name not in before and (out / name).exists():
            raise ValueError(f"{out / name} is there, and this did not write it: remove it, or name another folder")
    out.mkdir(parents=True, exist_ok=True)
    _note(out, before | files.keys())  # before they are there: what an interrupted run leaves is known, too
    for name, text in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    for name in before - files.keys():
        (out / name).unlink(missing_ok=True)
    _note(out, files)


def _note(out: Path, names: Iterable[str]) -> None:
    (out / MANIFEST).write_text(json.dumps({"files": sorted(names)}, indent=1) + "\n")


def _written(out: Path) -> set[str]:
    """The names of what was written there before."""
    path = out / MANIFEST
    if not path.exists():
        return set()
    try:
        found = read_json(path, files=list)["files"]
        if not all(isinstance(name, str) and re.fullmatch(NAME, name) for name in found):
            raise ValueError("its files must be names of ours")
    except ValueError as error:
        cause = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path}: is no list of the files of a report ({cause}); name another folder") from None
    return set(found)


def _check_place(out: Path, name: str) -> None:
    path = out / name
    for one in (path, path.parent) if path.parent != out else (path,):
        if one.is_symlink():
            raise ValueError(f"{one} is a link, and this writes through none: remove it, or name another folder")
    if path.parent.exists() and not path.parent.is_dir():
        raise ValueError(f"{path.parent} is there, and it is no folder")
