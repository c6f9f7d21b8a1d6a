"""Records the collectives that a rank begins, and compares them with those of the other ranks before they run.

`trained.py` records each training. Ranks that begin different collectives wait for ever, or add up values that do not
belong together. So each rank first writes a *note* of what it is about to begin into the key-value store of the process
group, and reads the notes of the others. If they differ, all ranks raise `Mismatch`. Another collective to record is an
entry of KINDS.

With gloo, the result of an asynchronous collective is delivered only when the strategy waits for it (`Delayed`), so
that a missing wait() shows as wrong weights.
"""

import datetime
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from lmsys import doing

PEER_S = 5.0  # how long a rank waits for the others' notes; then the collective begins in any case
# By the name of a method of torch's ProcessGroup: (the collective in words; the index of the argument that gets the
# result, not counting self, or None if the result is not to be delayed).
KINDS = {
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
    """Another rank has raised an exception, so it will not begin this collective."""


@dataclass
class Recorder:
    """Records the collectives of this rank inside of `with recorder.recording()`.

    trial     a number that identifies the training, the same on all ranks
    group     the process group of the ranks that train
    names     {number of elements: parameter's name}, by which messages name a collective of so many elements
    unwaited  {handle: words} of running collectives that the strategy has not waited for yet
    raced     collectives whose tensors were written to while they were running, in words
    _numbers  by the name of a process group: a counter, which gives the number of this rank's next note
    """

    trial: int
    group: Any
    names: dict[int, str] = field(default_factory=dict)
    unwaited: dict[Any, str] = field(default_factory=dict)
    raced: list[str] = field(default_factory=list)
    _numbers: dict[str, Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))

    def recording(self) -> AbstractContextManager[object]:
        """A context in which this rank's collectives are recorded."""
        group = torch.distributed.ProcessGroup
        recorded: dict[str, Any] = {
            name: self._recorded(name, getattr(group, name)) for name in KINDS if name in vars(group)
        }
        return mock.patch.multiple(group, **recorded)

    def fail(self, error: BaseException) -> None:
        """Notes for the other ranks that this rank has failed, so that they do not wait for it."""
        # By the "!" at its beginning `mark` knows that this note reports a failure.
        self._note(f"!{type(error).__name__}", self.group, next(self._numbers[self.group.group_name]))

    def others_end(self, timeout_s: float) -> bool:
        """Notes that this rank has ended. True once every rank has, False after `timeout_s`."""
        return _read(self._note("", self.group, "ended"), timeout_s) is not None

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of a method of torch's ProcessGroup: records a call, and delays its result if possible."""
        kind, written = KINDS[name]

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = _tensors(args[written or 0]) if args else []
            what = self._words(kind, tensors)
            self.mark(what, group)
            # A result is delayed only if the strategy's own code begins the collective, by gloo, on contiguous tensors.
            if (
                written is None
                or group.name() != "gloo"
                or not _begun_by_strategy()
                or not tensors
                or not all(x.is_contiguous() for x in _tensors(args))
            ):
                return method(group, *args, **kwargs)
            # The collective runs on `copies`. `before` are second copies. If the strategy's tensors differ from them as
            # the result is delivered, they were written to while the collective was running.
            copies, before = (
                torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), args) for _ in range(2)
            )
            work = method(group, *copies, **kwargs)
            self.unwaited[work] = what

            def deliver() -> None:
                """Copies the result into the tensors, or NaN if they were written to before it was delivered."""
                if self.unwaited.pop(work, None) is None:
                    return
                changed = not all(
                    torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
                    for x, y in zip(_tensors(args), _tensors(before), strict=True)
                )
                self.raced += [what] * changed
                for x, copy in zip(tensors, _tensors(copies[written or 0]), strict=True):
                    x.data.copy_(copy)
                    if changed and x.is_floating_point():
                        x.data.fill_(torch.nan)

            return Delayed(work, deliver)

        return call

    def _words(self, kind: str, tensors: list[torch.Tensor]) -> str:
        """A collective in words, such as "all_reduce of 64 elements (bias) in float32"."""
        if not tensors:
            return kind
        count = sum(x.numel() for x in tensors)
        name = f" ({self.names[count]})" if count in self.names else ""
        return f"{kind} of {count} elements{name} in {str(tensors[0].dtype).removeprefix('torch.')}"

    def _note(self, what: str, group: Any, number: Any) -> list[str]:
        """Writes `what` into the store as this rank's `number`-th note. Returns the keys of all ranks' such notes."""
        prefix = f"lmsys-check/{self.trial}/{group.group_name}/{number}"
        _store().set(f"{prefix}/{torch.distributed.get_rank(group)}", what)
        return [f"{prefix}/{rank}" for rank in range(torch.distributed.get_world_size(group))]

    def mark(self, what: str, group: Any = None) -> None:
        """Notes that this rank has reached `what`, which all ranks must reach: a collective, or the end of a step.

        Raises Mismatch if another rank's next note is different, and PeerFailed if another rank has failed.
        """
        group = self.group if group is None else group
        number = next(self._numbers[group.group_name])  # of this group; two threads get two numbers
        keys = self._note(what, group, number)
        if (noted := _read(keys, PEER_S)) is None:
            missing = [str(rank) for rank, key in enumerate(keys) if not _store().check([key])]
            # If the collective then hangs, the error of the ranks' group quotes these words.
            doing.now(f"{doing.last()}, where it waits for rank {', '.join(missing)} in {what}")
            return
        if failed := [rank for rank, other in enumerate(noted) if other.startswith("!")]:
            raise PeerFailed(f"rank {failed[0]} has raised {noted[failed[0]][1:]}")
        if len(set(noted)) > 1:
            # A rank that read no notes within PEER_S, and went on, finds this failure at its next collective.
            self.fail(Mismatch())
            calls = ", ".join(f"rank {rank} comes to {other}" for rank, other in enumerate(noted))
            raise Mismatch(f"after {number} equal calls {calls}")


class Delayed:
    """The handle of a running collective, which a strategy gets in place of torch's `Work`.

    It delivers the result once the strategy waits: by `wait`, by `get_future`, or by an `is_completed` that is True.
    All other attributes are those of the `Work` inside.
    """

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
    """The key-value store that all ranks share."""
    return torch.distributed.distributed_c10d._get_default_store()


def _read(keys: list[str], timeout_s: float) -> list[str] | None:
    """The notes under these keys, once the store has all of them; None after `timeout_s`."""
    try:
        _store().wait(keys, datetime.timedelta(seconds=timeout_s))
    except torch.distributed.DistStoreError:
        return None
    return [note.decode() for note in _store().multi_get(keys)]


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def _begun_by_strategy() -> bool:
    """True if a strategy's own code began the collective; False for torch's code, such as DistributedDataParallel.

    Between that code and the collective are functions of torch.distributed, which are skipped.
    """
    frame: Any = sys._getframe(2)  # the caller of `call` in `Recorder._recorded`
    while frame.f_globals.get("__name__") in ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"):
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith("torch.")
