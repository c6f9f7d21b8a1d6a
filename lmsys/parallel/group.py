"""Ranks that start once and then run functions: a process each, gloo on CPUs, NCCL with one GPU each.

    with WorkerGroup(2) as group:
        results = group.run(function, argument)    # function(argument) on every rank; results by rank

Inside, torch.distributed is initialized and `device()` is the rank's. The function travels by name, so it stands at the
top of a module that the ranks can import. Under torchrun, whose processes are the ranks already, `TorchrunGroup` is the
same from within one of them: each calls `run` with the same function.
"""

import contextlib
import datetime
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from lmsys.parallel.collectives import gather_objects

BACKENDS = ("gloo", "nccl")
GRACE_S = 2.0  # grace period for other ranks' errors: the first to fail is to blame
LOCK_STEP_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")


class WorkerError(RuntimeError):
    """A rank failed. `rank` says which, `kind` is the exception's name, or "died" or "timeout"."""

    def __init__(self, rank: int, kind: str, message: str):
        super().__init__(message)
        self.rank, self.kind = rank, kind


@dataclass(frozen=True)
class _Failure:
    """An error on a rank; at_s is read on the clock that all processes of a machine share."""

    rank: int
    kind: str
    text: str
    at_s: float


def device() -> torch.device:
    """This rank's device: its GPU under NCCL, else the CPU."""
    nccl = dist.is_initialized() and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def check_backend(backend: str, world_size: int) -> None:
    """ValueError for a backend that this machine has not, and for more ranks than it can give GPUs."""
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of {BACKENDS}")
    if world_size < 1:
        raise ValueError(f"{world_size=} must be at least 1")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise ValueError("backend='nccl' needs CUDA, and this machine has no CUDA device; gloo runs on CPUs")
        if world_size > torch.cuda.device_count():
            raise ValueError(f"{world_size=} is more than the {torch.cuda.device_count()} GPUs: NCCL needs one a rank")


class WorkerGroup:
    """world_size ranks on this machine.

    backend    None: NCCL where there are as many GPUs, else gloo
    timeout_s  for every `run` and every collective
    ValueError as in `check_backend`; WorkerError when a rank raises, dies or is not done in time: then all are ended.
    """

    def __init__(self, world_size: int, backend: str | None = None, timeout_s: float = 300.0):
        if backend is None:
            enough = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
            backend = "nccl" if enough else "gloo"
        check_backend(backend, world_size)
        self.world_size, self.backend, self.timeout_s = world_size, backend, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="lmsys-ranks-")
        context = multiprocessing.get_context("spawn")
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, backend, rendezvous, timeout_s, theirs)
            worker = context.Process(target=_serve, args=arguments, daemon=True, name=f"lmsys-rank-{rank}")
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        self._collect(timeout_s)  # each says that it is there

    @property
    def ended(self) -> bool:
        """True once it was closed or a rank has failed."""
        return not self._workers

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """function(*args) on every rank; what each returned, by rank."""
        if self.ended:
            raise RuntimeError("this group has ended: a rank failed, or it was closed; start another")
        for pipe in self._pipes:
            try:
                pipe.send((function, args))
            except OSError:
                break  # its end is noticed below
        return self._collect(self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Ends the ranks; nothing of them is left."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        self._end(grace_s=5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, timeout_s: float) -> list[Any]:
        """Waits for the answer of every rank. WorkerError, with all ranks ended, when one fails or is silent."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        open_ = set(range(self.world_size))
        while open_ and (left := deadline - time.monotonic()) > 0:
            by_handle: dict[Any, int] = {self._pipes[rank]: rank for rank in open_}
            by_handle |= {self._workers[rank].sentinel: rank for rank in open_}
            for rank in sorted({by_handle[handle] for handle in wait(list(by_handle), left)}):
                failure, result = self._receive(rank)
                open_.discard(rank)
                if failure is None:
                    results[rank] = result
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failures.append(failure)
        if not open_ and not failures:
            return [results[rank] for rank in range(self.world_size)]
        error = _blame(failures, sorted(open_), timeout_s)
        self._end(grace_s=0.0)
        raise error

    def _receive(self, rank: int) -> tuple[_Failure | None, Any]:
        pipe, worker = self._pipes[rank], self._workers[rank]
        try:
            if pipe.poll():
                failure, result = pipe.recv()
                return failure, result
        except (EOFError, OSError):
            pass
        worker.join(1.0)
        return _Failure(rank, "died", _how_it_ended(worker.exitcode), 0.0), None

    def _end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
        for worker in self._workers:
            worker.join()
            worker.close()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        self._folder.cleanup()


class TorchrunGroup:
    """The group that torchrun has started, seen from one of its ranks. A rank that fails ends this process's run."""

    def __init__(self, backend: str | None = None, timeout_s: float = 300.0):
        local_rank = int(os.environ["LOCAL_RANK"])
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        check_backend(backend, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        _initialize(backend, local_rank, timeout_s, **_torchrun_store(timeout_s, self.num_nodes))
        self.world_size, self.backend, self.timeout_s = dist.get_world_size(), backend, timeout_s
        self.rank = dist.get_rank()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """As `WorkerGroup.run`; a rank that waits for one that has failed ends when its collective times out."""
        failure, result = None, None
        try:
            result = function(*args)
        except Exception as error:
            failure = _Failure(self.rank, type(error).__name__, traceback.format_exc(), time.monotonic())
        found = gather_objects((failure, result), None)
        if failures := [one for one, _ in found if one is not None]:
            raise _blame(failures, [], self.timeout_s)
        return [one for _, one in found]

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def _blame(failures: list[_Failure], silent: list[int], timeout_s: float) -> WorkerError:
    """The error to report: a dead rank comes first, then the first that raised something else than a lost peer."""
    if not failures:
        ranks = ", ".join(map(str, silent))
        return WorkerError(silent[0], "timeout", f"rank {ranks} did not answer within {timeout_s:g} s; all were ended")
    order = sorted(failures, key=lambda one: (one.kind != "died", one.kind in LOCK_STEP_ERRORS, one.at_s))
    first = order[0]
    verb = first.text if first.kind == "died" else f"failed:\n{first.text}"
    return WorkerError(first.rank, first.kind, f"rank {first.rank} {verb}")


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"died: killed by {signal.Signals(-exitcode).name}"
    return f"died with exit code {exitcode}"


def _initialize(backend: str, local_rank: int, timeout_s: float, **rendezvous: Any) -> None:
    gpu = torch.device("cuda", local_rank) if backend == "nccl" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=limit, device_id=gpu, **rendezvous)


def _torchrun_store(timeout_s: float, num_nodes: int) -> dict[str, Any]:
    """torchrun's store, under a prefix of this start: it outlives restarts, with addresses of ranks that are gone.

    Restarts are counted by each node on its own, so over several nodes the store is taken as it is: there, torchrun
    makes a new one each time with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    if num_nodes > 1:
        return {"init_method": "env://"}
    store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"start-{start}", store), "rank": rank, "world_size": world_size}


def _serve(rank: int, world_size: int, backend: str, rendezvous: str, timeout_s: float, pipe: Connection) -> None:
    """A rank's life: join, then run what is sent until there is no more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        _initialize(backend, rank, timeout_s, init_method=rendezvous, rank=rank, world_size=world_size)
        pipe.send((None, None))
        while (task := pipe.recv()) is not None:
            function, args = task
            pipe.send((None, function(*args)))
        dist.destroy_process_group()
    except EOFError:  # the parent is gone
        return
    except BaseException as error:
        pipe.send((_Failure(rank, type(error).__name__, traceback.format_exc(), time.monotonic()), None))
        # Not through what is still open: a peer may wait for a collective that never comes. The parent ends us.
        time.sleep(timeout_s)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
