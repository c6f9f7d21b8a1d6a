"""The proof in a record, for others to check: which code ran, what was drawn, what came out, and a seal.

    "proof": {"generator", "seed", "source": {"name", "sha256"}, "kernels": {name: hash}, "calls": [...]}

Each of the calls is a timed one that was checked: its number among the samples, the draw of its inputs, the key of the
parts that were looked at, the errors over their budgets, and what its benchmark left as evidence. The seal is the
SHA-256 of the record without it. It finds what was changed by accident or without care; whoever seals again is found
by `python -m lmsys.verify` only where the rest contradicts itself, or the oracle.

Kernels that Triton's interpreter runs are noticed here, too: they are verified, and never timed.
"""

import hashlib
import importlib.util
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from lmsys.bench.fields import Record
from lmsys.registry import Entry


def seal(record: Record) -> str:
    """SHA-256, in hexadecimal, of a record without its seal, as JSON with its keys in order."""
    return _digest({name: value for name, value in record.items() if name != "seal"})


def file_seal(content: Record) -> str:
    """The same of a file's machine and the seals of its records, in their order."""
    return _digest([content["machine"], [one.get("seal") for one in content["records"]]])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def source_of(entry: Entry) -> Record:
    """The name and SHA-256 of the file that a row's implementation stands in; {} where it is in none."""
    try:
        target = inspect.unwrap(entry.load())
        path = Path(inspect.getsourcefile(target) or "")
        return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except (ImportError, OSError, TypeError):
        return {}


@contextmanager
def loaded_kernels() -> Iterator[dict[str, str]]:
    """Names and hashes, by Triton, of the kernels that are loaded meanwhile: each is once in a process."""
    found: dict[str, str] = {}
    if importlib.util.find_spec("triton") is None:
        yield found
        return
    import triton

    def note(module: Any, function: Any, name: str, group: Any, hash: str) -> None:
        found[name] = hash

    hooks = triton.knobs.runtime.kernel_load_end_hook
    hooks.add(note)
    try:
        yield found
    finally:
        hooks.remove(note)


@contextmanager
def interpreted_kernels() -> Iterator[list[Any]]:
    """A list that grows by every kernel that Triton's interpreter runs meanwhile, wherever it is defined."""
    launched: list[Any] = []
    if importlib.util.find_spec("triton") is None:
        yield launched
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(self)
        return launch(self, *args, **options)

    with mock.patch.object(GridExecutor, "__call__", noted):
        yield launched
