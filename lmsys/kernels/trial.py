"""Tries a row, one of our kernels, once on a version of Triton that is new to it, and keeps the verdict on disk.

`lmsys/attention/flash_gluon/support.py` calls `refusal`, and `lmsys/attention/tuning.py` calls `digest_of`. The file is
`trials.json` in $LMSYS_CACHE_DIR (default ~/.cache/lmsys). A verdict belongs to one version of Triton, of torch and of
the kernels' source, and to one compute capability; verdicts on others are kept beside it. To have another row tried,
call `refusal` in its `supports`, with a function that runs its kernels and raises an exception if a result is wrong.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from lmsys import processes, strict_json, values
from lmsys.kernels.tritons import ON_GPUS

DEADLINE_S = 600.0  # a trial takes a minute or two; the rest is for compiling on a busy machine
EXACT = ""  # the verdict of a trial whose results were exact. Any other verdict says what was wrong
OF_THE_MOMENT = "out of memory"  # a verdict with these words may change later, so it is not kept on disk

_verdicts: dict[str, str] = {}  # by key: EXACT, or what was wrong


def _verdict(value: Any) -> str:
    """A value of the file, which must be a verdict: ValueError for any other."""
    values.hold((isinstance(value, str), f"a verdict must be a text; got {values.shortly(value)}"))
    return value


KEPT = strict_json.Kept(name="trials.json", what="verdicts", again="try", parsed=_verdict)


def refusal(row: str, trial: processes.Function, sources: tuple[Path, ...], capability: tuple[int, int]) -> str | None:
    """None if trial(capability) ended without an error, now or in an earlier run; else why the row is refused.

    The trial runs in a process of its own, since it may crash. It fails by an exception, by a crash, or by not ending
    within DEADLINE_S.

    row      the row's name
    trial    the function that tries the row, or its name "module:function"
    sources  files and folders: the verdict holds until one of these files, or a Python file in one of the folders,
             changes
    """
    versions = f"triton {triton.__version__}", f"torch {torch.__version__}", f"sm_{capability[0]}{capability[1]}"
    key = "/".join((row, *versions, digest_of(*sources)))
    if key not in _verdicts:
        known = KEPT.read()
        if key not in known:
            print(f"lmsys: trying {row} on {', '.join(versions)} (once, a minute or two)", file=sys.stderr, flush=True)
            known[key] = _verdict_now(trial, capability)
            if OF_THE_MOMENT not in known[key]:
                KEPT.add(key, known[key])
        _verdicts[key] = known[key]
    refused = (
        f"was tried on {versions[0]}, on which its GPU tests have not run: {_verdicts[key]}; it runs on triton "
        f"{', '.join(ON_GPUS)}; to try again, delete {KEPT.path}"
    )
    return None if _verdicts[key] == EXACT else refused


def _verdict_now(trial: processes.Function, capability: tuple[int, int]) -> str:
    """The verdict of a trial that runs now: EXACT, or in a line what was wrong.

    A trial that does not end gives a verdict like any other, which is kept: otherwise a version that hangs would
    cost every process DEADLINE_S.
    """
    try:
        processes.in_own_process(trial, capability, timeout_s=DEADLINE_S)
    except processes.ProcessError as error:  # it crashed, did not end in time, or its exception cannot be pickled
        return values.shortened(error.failure[1])
    except Exception as error:  # the trial's own, raised here again
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"  # the compiler ends with its reason
        return values.shortened(f"{type(error).__name__}: {text}")
    return EXACT


def digest_of(*sources: Path) -> str:
    """12 hex digits, a hash of files, and of the Python files in folders: a key made of it changes with the code.

    Folders inside of these folders are not read.
    """
    files = [file for source in sources for file in (sorted(source.glob("*.py")) if source.is_dir() else [source])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
