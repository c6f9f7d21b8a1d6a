"""Reads files of tensors, which may be anybody's."""

from pathlib import Path
from typing import IO, Any

import torch

from lmsys.values import shortly


def load_state(path: Path | IO[bytes], *keys: str) -> dict[str, Any]:
    """The dictionary of tensors and plain values in a file of `torch.save`, on the CPU. No code of the file runs.

    The file is named by its path, or is open and binary.

    ValueError, with the path, for a file that holds something else, or lacks one of `keys`.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a pickle that is wrong, almost any
        kind = type(error).__name__
        raise ValueError(f"{path}: must hold tensors and plain values alone; loading it gives {kind}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold a dictionary; got {shortly(found)}")
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"{path}: must have {missing[0]!r}; got {shortly(list(found))}")
    return found
