"""Ranks that start once and then run functions: a process each, gloo on CPUs, NCCL with one GPU each.

    with WorkerGroup(2) as group:
        results = group.run(function, argument)    # function(argument) on every rank; results by rank

Inside, torch.distributed is initialized and `device()` is the rank's. The function travels by name, so it stands at the
top of a module that the ranks can import. Under torchrun, whose processes are the ranks already, `TorchrunGroup` is the
same from within one of them: each calls `run` with the same function.
"""

import ctypes
import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from lmsys.parallel.collectives import gather_objects
from lmsys.processes import DIED, GRACE_S, NO_CPU_MEMORY, TIMEOUT, Failure, Worker, answered
from lmsys.values import shortly

BACKENDS = ("gloo", "nccl")
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
ERRORS_S = 2.0  # grace period for other ranks' errors: the first to fail is to blame
PR_SET_PDEATHSIG = 1  # of prctl(2)
LOCK_STEP_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")


class WorkerError(RuntimeError):
    """A rank failed. `rank` says which, `kind` is the exception's name, or "died" or "timeout"."""

    def __init__(self, rank: int, kind: str, message: str):
        super().__init__(message)
        self.rank, self.kind = rank, kind

    @property
    def failure(self) -> tuple[str, str]:
        """The outcome, "oom" or "error", and the reason in a line: which rank, and the line that names the kind."""
        first, *trace = str(self).strip().splitlines()
        named = [line for line in trace if self.kind in line] or trace  # torch's advice may stand behind it
        no_memory = self.kind in OUT_OF_MEMORY or NO_CPU_MEMORY in str(self)
        return "oom" if no_memory else "error", " ".join([first, *named[-1:]])


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
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        self._workers = [Worker() for _ in range(world_size)]
        for rank, worker in enumerate(self._workers):
            worker.send(_join, backend, rank, world_size, rendezvous, timeout_s)
        self._collect(timeout_s)

    @property
    def ended(self) -> bool:
        """True once it was closed or a rank has failed."""
        return not self._workers

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """function(*args) on every rank; what each returned, by rank."""
        if self.ended:
            raise RuntimeError("this group has ended: a rank failed, or it was closed; start another")
        for worker in self._workers:
            worker.send(function, *args)
        return self._collect(self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Ends the ranks; nothing of them is left."""
        for worker in self._workers:
            worker.send(dist.destroy_process_group)
            worker.end()
        self._end(GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, timeout_s: float) -> list[Any]:
        """Waits for the answer of every rank. WorkerError, with all ranks ended, when one fails or is silent."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        waiting = {worker: rank for rank, worker in enumerate(self._workers)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for worker in answered(waiting, left):
                rank = waiting.pop(worker)
                failure, results[rank] = worker.receive()
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + ERRORS_S)
        if not waiting and not failures:
            return [results[rank] for rank in range(self.world_size)]
        error = _blame(failures, sorted(waiting.values()), timeout_s)
        self._end(grace_s=0.0)
        raise error

    def _end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            worker.close(deadline - time.monotonic())
        self._workers = []
        self._folder.cleanup()


class TorchrunGroup:
    """The group that torchrun has started, seen from one of its ranks. A rank that fails ends this process's run."""

    def __init__(self, backend: str | None = None, timeout_s: float = 300.0):
        _check_environment()
        local_rank = int(os.environ["LOCAL_RANK"])
        _end_with_parent()
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        check_backend(backend, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        _initialize(backend, local_rank, timeout_s, **_torchrun_store(timeout_s, self.num_nodes))
        self.world_size, self.backend, self.timeout_s = dist.get_world_size(), backend, timeout_s
        self.rank = dist.get_rank()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Does what `WorkerGroup.run` does; a rank that waits for a failed one ends when its collective times out."""
        failure, result = None, None
        try:
            result = function(*args)
        except Exception as error:
            failure = Failure.of(error)
        found = gather_objects((failure, result), None)
        if failures := {rank: one for rank, (one, _) in enumerate(found) if one is not None}:
            raise _blame(failures, [], self.timeout_s)
        return [one for _, one in found]

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_environment() -> None:
    """ValueError that names which of the variables that torchrun sets is missing, or is no number."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name)
        if text is None or not text.isdecimal():
            told = "is not set" if text is None else f"is {shortly(text)}"
            raise ValueError(f"${name} {told}, where torchrun sets a whole number: start ranks by torchrun")


def _end_with_parent() -> None:
    """Asks Linux for SIGTERM when torchrun's agent is gone, even by SIGKILL: nobody else would end its ranks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def _blame(failures: Mapping[int, Failure], silent: Sequence[int], timeout_s: float) -> WorkerError:
    """The error to report: a dead rank comes first, then the first that raised something else than a lost peer."""
    if not failures:
        ranks = ", ".join(map(str, silent))
        return WorkerError(silent[0], TIMEOUT, f"rank {ranks} did not answer within {timeout_s:g} s; all were ended")

    def order(rank: int) -> tuple[bool, bool, float]:
        one = failures[rank]
        return one.kind != DIED, one.kind in LOCK_STEP_ERRORS, one.at_s

    rank = min(sorted(failures), key=order)
    kind, text = failures[rank].kind, failures[rank].text
    return WorkerError(rank, kind, f"rank {rank} {text}" if kind == DIED else f"rank {rank} failed:\n{text}")


def _initialize(backend: str, local_rank: int, timeout_s: float, **rendezvous: Any) -> None:
    gpu = torch.device("cuda", local_rank) if backend == "nccl" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), device_id=gpu, **rendezvous)


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


def _join(backend: str, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
    """The first call to a rank."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    _initialize(backend, rank, timeout_s, init_method=rendezvous, rank=rank, world_size=world_size)
