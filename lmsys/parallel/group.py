"""Ranks that start once and then run functions: a process each, gloo on CPUs, NCCL with one GPU each.

    with WorkerGroup(2) as group:
        results = group.run(function, argument)    # function(argument) on every rank; results by rank

Inside, torch.distributed is initialized and `device()` is the rank's. The function travels by name, so it stands at the
top of a module that the ranks can import. Under torchrun, whose processes are the ranks already, `TorchrunGroup` is the
same from within one of them: each calls `run` with the same function.
"""

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from lmsys import doing, processes, values, watchdog
from lmsys.parallel.collectives import gather_objects

BACKENDS = ("gloo", "nccl")
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
STOPPED = "stopped"  # how a rank may fail, beside "died" and "timeout"
ERRORS_S = 2.0  # grace period for other ranks' errors: the first to fail is to blame
LOCALHOST = "127.0.0.1"
CONNECT_S = 20.0  # to the store of torchrun's agent
LOCK_STEP_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
GLOO_LOST = "gloo/transport"  # in its message about a connection that another rank has left


class WorkerError(RuntimeError):
    """A rank failed. `rank` says which, `kind` is the exception's name, or "died", "stopped" or "timeout"."""

    def __init__(self, rank: int, kind: str, message: str):
        super().__init__(message)
        self.rank, self.kind = rank, kind

    @property
    def failure(self) -> tuple[str, str]:
        """The outcome, "oom" or "error", and the reason in a line: which rank, and the line that names the kind."""
        first, *trace = str(self).strip().splitlines()
        named = [line for line in trace if self.kind in line] or trace  # torch's advice may stand behind it
        no_memory = self.kind in OUT_OF_MEMORY or processes.NO_CPU_MEMORY in str(self)
        return "oom" if no_memory else "error", " ".join([first, *named[-1:]])


def device() -> torch.device:
    """This rank's device: its GPU under NCCL, else the CPU."""
    nccl = dist.is_initialized() and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def check_backend(backend: str, world_size: int) -> None:
    """ValueError for a backend that this machine has not, and for more ranks than it can give GPUs."""
    nccl, count = backend == "nccl", torch.cuda.device_count()
    values.hold(
        (backend in BACKENDS, f"{backend=} must be one of {BACKENDS}"),
        (world_size >= 1, f"{world_size=} must be at least 1"),
        (
            not nccl or torch.cuda.is_available(),
            "backend='nccl' needs CUDA, and this machine has no CUDA device; gloo runs on CPUs",
        ),
        (not nccl or world_size <= count, f"{world_size=} is more than the {count} GPUs: NCCL needs one a rank"),
    )


class WorkerGroup:
    """world_size ranks on this machine.

    backend          None: NCCL where there are as many GPUs, else gloo
    timeout_s        for every `run` and every collective
    environment      variables of the ranks besides those of this process
    with_last_words  should this process be killed, standard error says of each rank what it was doing
    ValueError as in `check_backend`; WorkerError when a rank raises, dies, has been stopped for $LMSYS_STOPPED_S, or is
    not done in time: then all are ended. It says what the rank was `doing`, or else which function it ran.
    """

    def __init__(
        self,
        world_size: int,
        backend: str | None = None,
        timeout_s: float = 300.0,
        with_last_words: bool = False,
        environment: Mapping[str, str] | None = None,
    ):
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
        backend = ("nccl" if enough else "gloo") if backend is None else backend
        check_backend(backend, world_size)
        self.world_size, self.backend, self.timeout_s = world_size, backend, timeout_s
        # Ranks meet in memory of this process, of which nothing is left whoever is killed.
        self._store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        self._stopped = watchdog.Stopped(watchdog.stopped_s())
        self._doing, self._workers = list[Any](), list[processes.Worker]()
        for rank in range(world_size):
            file = doing.shared_file()
            self._doing.append(doing.map_file(file))
            doing.write(self._doing[-1], doing.AT_FIRST)
            words = last_words(rank, file) if with_last_words else ""
            worker = processes.Worker(environment, open_files=[file], last_words=words)
            worker.send(_join, backend, rank, world_size, self._store.port, timeout_s, file)
            self._workers.append(worker)
            os.close(file)
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
        for worker, memory in zip(self._workers, self._doing, strict=True):
            doing.write(memory, doing.AT_FIRST)  # until it has imported the function's module
            worker.send(_noted, function, *args)
        return self._collect(self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Ends the ranks; nothing of them is left."""
        for worker in self._workers:
            worker.send(dist.destroy_process_group)
            worker.end()
        self._end(processes.GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, timeout_s: float) -> list[Any]:
        """Waits for the answer of every rank. WorkerError, with all ranks ended, when one fails or is silent."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, processes.Failure] = {}
        waiting = {worker: rank for rank, worker in enumerate(self._workers)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for worker in processes.answered(waiting, min(left, watchdog.LOOK_S)):
                rank = waiting.pop(worker)
                failure, results[rank] = worker.receive()
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + ERRORS_S)
            stopped = self._stopped.among(worker.pid for worker in waiting)
            for worker in [worker for worker in waiting if worker.pid in stopped]:
                failures[waiting.pop(worker)] = processes.Failure(STOPPED, watchdog.told_of_stop(self._stopped.limit_s))
                deadline = 0.0
        if not waiting and not failures:
            return [results[rank] for rank in range(self.world_size)]
        error = _blame(failures, sorted(waiting.values()), timeout_s, [doing.read(board) for board in self._doing])
        self._end(grace_s=0.0)
        raise error

    def _end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            worker.close(deadline - time.monotonic())
        self._workers = []


class TorchrunGroup:
    """The group that torchrun has started, seen from one of its ranks. A rank that fails ends this process's run."""

    def __init__(self, backend: str | None = None, timeout_s: float = 300.0):
        _check_environment()
        watchdog.stopped_s()  # refused here, in a sentence
        watchdog.begin()
        backend = ("nccl" if torch.cuda.is_available() else "gloo") if backend is None else backend
        check_backend(backend, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        _initialize(backend, int(os.environ["LOCAL_RANK"]), timeout_s, **_torchrun_store(timeout_s, self.num_nodes))
        self.rank, self.world_size, self.backend, self.timeout_s = (
            dist.get_rank(), dist.get_world_size(), backend, timeout_s,
        )  # fmt: skip

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Does what `WorkerGroup.run` does; a rank that waits for a failed one ends when its collective times out."""
        failure, result = None, None
        try:
            result = function(*args)
        except Exception as error:
            failure = processes.Failure.of(error)
        failed, results, notes = zip(*gather_objects((failure, result, doing.last()), None), strict=True)
        failures = {rank: failure for rank, failure in enumerate(failed) if failure is not None}
        if failures:
            raise _blame(failures, [], self.timeout_s, notes)
        return list(results)

    def close(self) -> None:
        watchdog.end()
        if dist.is_initialized():
            dist.destroy_process_group()


def _noted(function: Callable[..., Any], *args: Any) -> Any:
    doing.now(f"in {getattr(function, '__name__', function)}")
    return function(*args)


def _check_environment() -> None:
    """ValueError that names which of the variables that torchrun sets is missing, or is no number."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name)
        state = "is not set" if text is None else f"is {values.shortly(text)}"
        values.hold(
            (
                text is not None and text.isdecimal(),
                f"${name} {state}, where torchrun sets a whole number: start ranks by torchrun",
            )
        )


def is_lost_peer(kind: str, text: str) -> bool:
    """True for an error that says no more than that another rank is gone."""
    return kind in LOCK_STEP_ERRORS or GLOO_LOST in text


def last_words(rank: int, file: int) -> str:
    """A shell's command that names a rank whose launcher has gone: nobody else is left to do it."""
    return f"echo lmsys: rank {rank} has lost the process that started it, $(tr -d '\\0' </proc/self/fd/{file}) >&2;"


def _blame(
    failures: Mapping[int, processes.Failure], silent: Sequence[int], timeout_s: float, notes: Sequence[str]
) -> WorkerError:
    """The error to report: a dead rank comes first, then the first that raised something else than a lost peer.

    notes  what each rank was doing
    """
    if not failures:
        ranks = ", ".join(f"{rank} did not answer within {timeout_s:g} s, {notes[rank]}" for rank in silent)
        return WorkerError(silent[0], processes.TIMEOUT, f"rank {ranks}; all were ended")

    def order(rank: int) -> tuple[bool, bool, float]:
        failure = failures[rank]
        return failure.kind not in (processes.DIED, STOPPED), is_lost_peer(failure.kind, failure.text), failure.at_s

    rank = min(sorted(failures), key=order)
    kind, text = failures[rank].kind, failures[rank].text
    words = f"{text}, {notes[rank]}" if kind in (processes.DIED, STOPPED) else f"failed {notes[rank]}:\n{text}"
    return WorkerError(rank, kind, f"rank {rank} {words}")


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
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it stands by now, or the agent is gone
    connect_s = min(timeout_s, CONNECT_S) if agents else timeout_s
    store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=connect_s)))
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    prefix = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return {"store": dist.PrefixStore(prefix, store), "rank": rank, "world_size": world_size}


def _join(backend: str, rank: int, world_size: int, port: int, timeout_s: float, file: int) -> None:
    """The first call to a rank."""
    doing.share(file)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    store = dist.TCPStore(LOCALHOST, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
    _initialize(backend, rank, timeout_s, store=store, rank=rank, world_size=world_size)
