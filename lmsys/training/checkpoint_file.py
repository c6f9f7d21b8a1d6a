"""A model, its optimizer and the number of steps that are done, in one file: the checkpoint of a loop of your own.

The training loop's checkpoints (`lmsys.training.checkpoint`) also hold random numbers and what each rank keeps, and
know by checksums whether they are whole.
"""

import os
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.optim import Optimizer

from lmsys.files import replacing
from lmsys.tensor_files import load_state
from lmsys.values import whole

File = str | os.PathLike[str] | IO[bytes]


def save_checkpoint(model: nn.Module, optimizer: Optimizer, iteration: int, out: File) -> None:
    """Saves a dictionary of `model`, `optimizer` (their state dicts) and `iteration` to a path or a binary file.

    A path's folder is made. The file is there whole or, as before, not at all. ValueError unless iteration is a whole
    number from 0 on.
    """
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "iteration": whole("iteration", iteration, least=0),
    }
    if not isinstance(out, str | os.PathLike):
        torch.save(state, out)
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(state, file)


def load_checkpoint(src: File, model: nn.Module, optimizer: Optimizer) -> int:
    """The iteration that `save_checkpoint` was given; model and optimizer get the state that they had, in place.

    No code of the file runs. ValueError for a file that holds something else, or the state of another model.
    """
    found = load_state(Path(src) if isinstance(src, str | os.PathLike) else src, "model", "optimizer", "iteration")
    try:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{src}: does not fit this model and optimizer: {error}") from error
    return whole("iteration", found["iteration"], least=0)
