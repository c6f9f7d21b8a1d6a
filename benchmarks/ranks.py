"""The ranks of a run: started when first needed, again when one has failed; under torchrun those that are there."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from lmsys.measure.compare import Failure, outcome_of
from lmsys.parallel.group import TorchrunGroup, WorkerError, WorkerGroup, under_torchrun

TIMEOUT_S = 420.0
_SUBGROUPS: dict[int, Any] = {}  # of a rank, by world size


@cache
def joined() -> TorchrunGroup | None:
    """The group that torchrun has started, if this process is one of its ranks."""
    return TorchrunGroup(timeout_s=TIMEOUT_S) if under_torchrun() else None


def default_world_size(backend: str) -> int:
    """Every GPU; on a CPU two; under torchrun all that there are."""
    if (group := joined()) is not None:
        return group.world_size
    return torch.cuda.device_count() if backend == "nccl" else 2


class Ranks:
    """One group at a time."""

    def __init__(self) -> None:
        self._group: WorkerGroup | TorchrunGroup | None = joined()

    @property
    def num_nodes(self) -> int:
        return self._group.num_nodes if isinstance(self._group, TorchrunGroup) else 1

    def run(self, world_size: int, backend: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) on `world_size` ranks or more; what each returned. ValueError where there are fewer."""
        group = self._ready(world_size, backend)
        try:
            return group.run(function, *args)
        except WorkerError:
            self._group = None  # it has ended
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def _ready(self, world_size: int, backend: str) -> WorkerGroup | TorchrunGroup:
        if isinstance(self._group, TorchrunGroup):
            if (self._group.backend, self._group.world_size) < (backend, world_size) or self._group.backend != backend:
                raise ValueError(
                    f"torchrun has started {self._group.world_size} ranks with {self._group.backend}: there are no"
                    f" {world_size} with {backend}"
                )
            return self._group
        if self._group is not None and (self._group.backend != backend or self._group.world_size < world_size):
            self.close()
        if self._group is None:
            self._group = WorkerGroup(world_size, backend, TIMEOUT_S)
        return self._group


def failure_of(error: Exception) -> Failure:
    """(outcome, reason) of what failed on ranks; `unsupported` for a ValueError here, before any rank was asked."""
    if isinstance(error, WorkerError):
        kind = "oom" if error.kind in ("OutOfMemoryError", "MemoryError") else "error"
        first, *trace = str(error).strip().splitlines()
        named = [line for line in trace if error.kind in line] or trace  # torch's advice may stand behind it
        return kind, " ".join([first, *named[-1:]])
    return ("unsupported", str(error)) if isinstance(error, ValueError) else outcome_of(error)


def subgroup(world_size: int) -> Any:
    """On a rank: the group of the first `world_size` ranks. Asked of all of them."""
    if world_size == dist.get_world_size():
        return dist.group.WORLD
    if world_size not in _SUBGROUPS:
        _SUBGROUPS[world_size] = dist.new_group(range(world_size))
    return _SUBGROUPS[world_size]
