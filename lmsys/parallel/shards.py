"""A sharded optimizer's state on disk: a file for each rank, read again by any number of ranks."""

import re
from pathlib import Path
from typing import Any

import torch

from lmsys.parallel.sharded_optimizer import ShardedOptimizer, merge_shares
from lmsys.tensor_files import load_state

NAME = re.compile(r"optimizer-(\d{5})-of-(\d{5})\.pt")


def save(optimizer: ShardedOptimizer, folder: Path) -> Path:
    """Writes this rank's share and returns its path. Every rank calls it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"optimizer-{optimizer.rank:05}-of-{optimizer.world_size:05}.pt"
    torch.save(optimizer.state_dict(), path)
    return path


def load(optimizer: ShardedOptimizer, folder: Path) -> None:
    """Loads what any number of ranks has saved. ValueError that names the files which are not there."""
    optimizer.load_state_dict(read(folder))


def read(folder: Path) -> dict[str, Any]:
    """The shares of a folder as one state dict, as the optimizer without shards would give it."""
    found = {path: match for path in sorted(Path(folder).glob("*.pt")) if (match := NAME.fullmatch(path.name))}
    totals = {int(match[2]) for match in found.values()}
    if len(totals) != 1:
        raise ValueError(f"{folder}: holds shards of {sorted(totals) or 'no'} optimizers; there must be those of one")
    total = totals.pop()
    names = {f"optimizer-{rank:05}-of-{total:05}.pt" for rank in range(total)}
    if missing := sorted(names - {path.name for path in found}):
        raise ValueError(f"{folder}: the shards {', '.join(missing)} are not there")
    return merge_shares([load_state(path) for path in found])
