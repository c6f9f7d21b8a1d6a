"""Finds which code of a row ran: the file of its source, the Triton kernels it loads, and those that are interpreted.

A *row* is an implementation under test. `lmsys.bench.trial` calls these functions for each row.

- `source_of` and `loaded_kernels` give "source" and "kernels" of the record's "proof". They are hashes, by which a
  reader sees which code was measured; no command compares them with anything. `lmsys verify` reads the other items:
  "calls", "seed" and "generator". trial.py puts all of them in. If `lmsys verify` is to judge a new item, it also needs
  a check in `_of_record` of lmsys/verify.py.
- `interpreted_kernels` notices kernels that Triton's interpreter runs: such rows are verified, and never timed.
  `lmsys.check.attention`, `lmsys.course.parts`, `lmsys.bench.foreign` and benchmarks/training/rank.py call it, too.
"""

import hashlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from lmsys.registry import Entry, load_target


def source_of(entry: Entry) -> dict[str, str]:
    """{"name", "sha256"} of the file that defines a row's implementation; {} if no such file is found.

    The module of a row that runs apart (in a process of its own) is not imported here. So such a row gets {}, unless it
    is one of ours, or its target names the file.
    """
    try:
        # The path of a user's file; nothing useful for a target "module:name".
        path = Path(entry.target.rpartition(":")[0])
        if not entry.apart or entry.is_ours:
            path = Path(inspect.getsourcefile(inspect.unwrap(load_target(entry.target))) or "")
        return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except (ImportError, OSError, TypeError):
        return {}


@contextmanager
def loaded_kernels() -> Iterator[dict[str, str]]:
    """A context whose dict {name: Triton's hash} gets each kernel that the process loads for the first time within it.

    It stays empty where triton is not installed.
    """
    hashes: dict[str, str] = {}

    # Triton calls this function, with these arguments, after it has loaded a kernel.
    def note(module: Any, function: Any, name: str, group: Any, hash: str) -> None:
        hashes[name] = hash

    with ExitStack() as stack:
        if importlib.util.find_spec("triton"):
            import triton

            hooks = triton.knobs.runtime.kernel_load_end_hook
            hooks.add(note)
            stack.callback(hooks.remove, note)
        yield hashes


@contextmanager
def interpreted_kernels() -> Iterator[list[Any]]:
    """A context whose list gets every kernel that Triton's interpreter runs within it."""
    launched: list[Any] = []
    with ExitStack() as stack:
        if importlib.util.find_spec("triton"):
            from triton.runtime.interpreter import GridExecutor

            launch = GridExecutor.__call__

            def noted(self: Any, *args: Any, **options: Any) -> Any:
                launched.append(self)
                return launch(self, *args, **options)

            stack.enter_context(mock.patch.object(GridExecutor, "__call__", noted))
        yield launched
