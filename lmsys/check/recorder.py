"""Collectives of a rank, recorded as they begin, and compared with those of the other ranks before they do.

Ranks that begin different collectives wait for ever, or add up what does not belong together. So each rank first notes
in the ranks' common store what it is about to begin, and reads what the others noted: where that differs, all of them
raise `Mismatch`. With gloo the result of a collective that does not wait arrives when it is waited for, and not before.
"""

import datetime
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lmsys import doing

PEER_S = 5.0  # for other ranks to come to a collective: after that it begins, whatever they do
KINDS = {  # by the name of torch's method: the collective, and the number of the arguments that it writes
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", None),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "reduce_scatter_single": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "alltoall_base": ("all_to_all", 0),
    "barrier": ("barrier", None),
}


class Mismatch(RuntimeError):
    """Ranks are about to begin different collectives; the text says which."""


class PeerFailed(RuntimeError):
    """Another rank has raised an exception, so that it will not come."""


@dataclass
class Recorder:
    """Records collectives of this rank while it is `recording`.

    trial  a number that no other training has, the same on all ranks
    group  of the ranks that train
    names  of parameters, by their number of elements
    unwaited  collectives that nobody has waited for; raced: those whose tensors were written to while under way
    """

    trial: int
    group: Any
    names: dict[int, str] = field(default_factory=dict)
    unwaited: dict[Any, str] = field(default_factory=dict)
    raced: list[str] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def recording(self) -> Iterator[None]:
        group = dist.ProcessGroup
        recorded: dict[str, Any] = {
            name: self._recorded(name, getattr(group, name)) for name in KINDS if name in vars(group)
        }
        with mock.patch.multiple(group, **recorded):
            yield

    def fail(self, error: BaseException) -> None:
        """Notes that this rank comes to nothing more, so that no other waits for it."""
        self._note(f"!{type(error).__name__}", self.group, self._counts[self.group.group_name])

    def others_end(self, timeout_s: float) -> bool:
        """True once every rank has noted that it comes to nothing more; False when the time is up."""
        return _read(self._note("", self.group, "ended"), timeout_s) is not None

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        kind, written = KINDS[name]

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = _tensors(args[written or 0]) if args else []
            what = self._words(kind, tensors)
            self.mark(what, group)
            delayed = written is not None and group.name() == "gloo" and _caller_is_a_users()
            if not (delayed and tensors and all(x.is_contiguous() for x in _tensors(args))):
                return method(group, *args, **kwargs)
            copies, before = (
                torch.utils._pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), args) for _ in range(2)
            )
            work = method(group, *copies, **kwargs)
            self.unwaited[work] = what

            def deliver() -> None:
                """Makes NaN of what arrives where the tensors were written to meanwhile: it could be anything."""
                if self.unwaited.pop(work, None) is None:
                    return
                changed = not all(map(_same_bits, _tensors(args), _tensors(before)))
                self.raced += [what] * changed
                for x, copy in zip(tensors, _tensors(copies[written or 0]), strict=True):
                    x.data.copy_(copy)
                    if changed and x.is_floating_point():
                        x.data.fill_(torch.nan)

            return Delayed(work, deliver)

        return call

    def _words(self, kind: str, tensors: list[Tensor]) -> str:
        if not tensors:
            return kind
        count = sum(x.numel() for x in tensors)
        name = f" ({self.names[count]})" if count in self.names else ""
        return f"{kind} of {count} elements{name} in {str(tensors[0].dtype).removeprefix('torch.')}"

    def _note(self, what: str, group: Any, number: Any) -> list[str]:
        """Notes what this rank has come to as its `number`-th; the keys of such notes, by rank."""
        prefix = f"lmsys-check/{self.trial}/{group.group_name}/{number}"
        _store().set(f"{prefix}/{dist.get_rank(group)}", what)
        return [f"{prefix}/{rank}" for rank in range(dist.get_world_size(group))]

    def mark(self, what: str, group: Any = None) -> None:
        """Notes that this rank has come to what all ranks of the group come to: a collective, or the end of a step.

        Mismatch where another rank notes something else as its next; PeerFailed where it has failed.
        """
        group = self.group if group is None else group
        with self._lock:
            number = self._counts[group.group_name]
            self._counts[group.group_name] += 1
        keys = self._note(what, group, number)
        if (noted := _read(keys, PEER_S)) is None:
            missing = [str(rank) for rank, key in enumerate(keys) if not _store().check([key])]
            doing.now(f"{doing.last()}, where it waits for rank {', '.join(missing)} in {what}")
            return
        if lost := [rank for rank, other in enumerate(noted) if other.startswith("!")]:
            raise PeerFailed(f"rank {lost[0]} has raised {noted[lost[0]][1:]}")
        if len(set(noted)) > 1:
            self.fail(Mismatch())
            calls = ", ".join(f"rank {rank} comes to {other}" for rank, other in enumerate(noted))
            raise Mismatch(f"after {number} equal calls {calls}")


class Delayed:
    """A collective under way whose result arrives when it is waited for, by whichever of torch's ways."""

    def __init__(self, work: Any, deliver: Callable[[], None]):
        self._work, self._deliver = work, deliver

    def wait(self, *args: Any) -> bool:
        done = self._work.wait(*args)
        self._deliver()
        return bool(done)

    def is_completed(self) -> bool:
        if done := self._work.is_completed():
            self._deliver()
        return bool(done)

    def get_future(self) -> Any:
        self.wait()
        return self._work.get_future()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _read(keys: list[str], timeout_s: float) -> list[str] | None:
    """The notes under these keys, once the store has all of them; None when the time is up."""
    store, before = _store(), _store().timeout
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    try:
        return [note.decode() for note in store.multi_get(keys)]
    except dist.DistStoreError:
        return None
    finally:
        store.set_timeout(before)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def _caller_is_a_users() -> bool:
    """False where torch's code, other than the functions of torch.distributed, has begun the collective."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__") in ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"):
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith("torch.")
