"""Starts ranks once, then runs functions on them. A rank is a process: on a CPU with gloo, or on its own GPU with NCCL.

    with WorkerGroup(2) as group:
        results = group.run(function, argument)    # function(argument) on every rank; results by rank

Inside of the function torch.distributed is initialized, and `device()` is the rank's device. Ranks get the function by
its name, so it must stand at the top level of a module that they can import. Under torchrun the processes are ranks
already: there each process makes a `TorchrunGroup`, and calls its `run` with the same function. `lmsys train`,
benchmarks, `lmsys check` and `lmsys course` start their ranks here. Each rank writes a note on what it is doing, such
as "in step 12", into memory that it shares with the process that started it (`lmsys.doing`). So an error message can
say what a rank was doing, even if the rank has died.

To change what a rank does before its first function, change `_join`, or under torchrun the constructor of
`TorchrunGroup`. `_blame` decides which rank's error is reported; an exception by which torch says that another rank is
gone must be in LOCK_STEP_ERRORS.

With the benchmarks' option `--against`, which also measures an earlier state of the code, this file as it is today runs
with that state's `lmsys.parallel.collectives`. So it may import only names that this module has in the earlier state.
"""

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from lmsys import doing, processes, values, watchdog
from lmsys.parallel.collectives import gather_objects

BACKENDS = ("gloo", "nccl")
STOPPED = "stopped"  # the kind of failure of a rank that SIGSTOP has stopped; other kinds: see `WorkerError`
# Seconds to wait for other ranks' errors once one has come: the rank that failed first is reported, and its error may
# arrive last.
ERRORS_S = 2.0
LOCALHOST = "127.0.0.1"
CONNECT_S = 20.0  # seconds to connect to the store of torchrun's agent
# The names of the exceptions that torch raises on a rank when another rank is gone: see `is_lost_peer`.
LOCK_STEP_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
GLOO_LOST = "gloo/transport"  # in gloo's message about a connection that another rank has closed


class WorkerError(RuntimeError):
    """A rank failed. `rank` says which one; `kind` says how: an exception's name, "died", "stopped" or "timeout"."""

    def __init__(self, rank: int, kind: str, message: str):
        super().__init__(message)
        self.rank, self.kind = rank, kind

    @property
    def failure(self) -> tuple[str, str]:
        """(outcome, reason), as the bench records them in a case. The outcome is "oom" or "error".

        The reason is one line: it says which rank failed, and has the line of the trace that names the exception.
        """
        first, *trace = str(self).strip().splitlines()
        named = [line for line in trace if self.kind in line] or trace  # the last line may be torch's advice
        no_memory = self.kind in ("OutOfMemoryError", "MemoryError") or processes.NO_CPU_MEMORY in str(self)
        return "oom" if no_memory else "error", " ".join([first, *named[-1:]])


def device() -> torch.device:
    """This rank's device: its GPU under NCCL, else the CPU."""
    nccl = dist.is_initialized() and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def check_backend(backend: str, world_size: int) -> None:
    """ValueError for a backend that this machine lacks, and under NCCL for more ranks than GPUs."""
    nccl, count = backend == "nccl", torch.cuda.device_count()
    values.hold(
        (backend in BACKENDS, f"{backend=} must be one of {BACKENDS}"),
        (
            not nccl or torch.cuda.is_available(),
            "backend='nccl' needs CUDA, and this machine has no CUDA device; gloo runs on CPUs",
        ),
        (
            values.whole("world_size", world_size, least=1) <= count or not nccl,
            f"{world_size=} is more than the {count} GPUs: NCCL needs one a rank",
        ),
    )


class WorkerGroup(AbstractContextManager["WorkerGroup"]):
    """world_size ranks on this machine.

    backend          None: NCCL where there is a GPU for each rank, else gloo
    timeout_s        seconds that every `run` and every collective may take
    environment      environment variables that the ranks get besides those of this process
    with_last_words  True: if this process is killed, each rank's last activity is written to standard error

    ValueError as in `check_backend`. WorkerError when a rank raises, dies, has been stopped (SIGSTOP) for
    $LMSYS_STOPPED_S seconds, or is not done in time: then all ranks are ended. The error says what the rank was doing,
    or which function it ran.
    """

    def __init__(
        self,
        world_size: int,
        backend: str | None = None,
        timeout_s: float = 300.0,
        with_last_words: bool = False,
        environment: Mapping[str, str] | None = None,
    ):
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= values.whole("world_size", world_size)
        backend = ("nccl" if enough else "gloo") if backend is None else backend
        check_backend(backend, world_size)
        self.world_size, self.backend, self.timeout_s = (
            world_size,
            backend,
            values.finite("timeout_s", timeout_s, 0, most=1e9),
        )
        # Ranks meet in a store in this process's memory: no file is left when a process is killed.
        # Port 0 stands for any free one.
        self._store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        self._stopped = watchdog.Stopped(watchdog.stopped_s())
        # Two lists by rank: the memory with the note on what the rank is doing, which this process reads; its process.
        self._doing, self._workers = list[Any](), list[processes.Worker]()
        for rank in range(world_size):
            file = doing.shared_file()
            self._doing.append(doing.map_file(file))
            doing.write(self._doing[-1], doing.AT_FIRST)
            words = last_words(rank, file) if values.flag("with_last_words", with_last_words) else ""
            worker = processes.Worker(
                values.instance("environment", environment, Mapping | None), open_files=[file], last_words=words
            )
            worker.send(_join, backend, rank, world_size, self._store.port, timeout_s, file)
            self._workers.append(worker)
            os.close(file)
        self._collect(timeout_s)

    @property
    def ended(self) -> bool:
        """True once the group was closed or a rank has failed."""
        return not self._workers

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank; empty once the group has ended."""
        return [worker.pid for worker in self._workers]

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Runs function(*args) on every rank, for at most `timeout_s` seconds; returns the results by rank.

        timeout_s  None: that of the group

        RuntimeError once the group has ended. WorkerError as the class says.
        """
        values.hold(
            (not self.ended, "this group has ended: a rank failed, or it was closed; start another"),
            error=RuntimeError,
        )
        for worker, memory in zip(self._workers, self._doing, strict=True):
            # This note stands until the rank has imported the function's module: then `_noted` writes another.
            doing.write(memory, doing.AT_FIRST)
            worker.send(_noted, function, *args)
        return self._collect(self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Ends the ranks' processes; one that does not end by itself is killed."""
        for worker in self._workers:
            worker.send(dist.destroy_process_group)
            worker.end()  # all are asked to end before `_end` waits for any
        self._end(processes.GRACE_S)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, timeout_s: float) -> list[Any]:
        """The ranks' results, once all have answered. WorkerError, with all ranks ended, when one fails or is late."""
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
                    deadline = min(deadline, time.monotonic() + ERRORS_S)  # an earlier error may arrive later
            stopped = self._stopped.among(worker.pid for worker in waiting)
            for worker in [worker for worker in waiting if worker.pid in stopped]:
                failures[waiting.pop(worker)] = processes.Failure(STOPPED, watchdog.told_of_stop(self._stopped.limit_s))
                deadline = 0.0  # no more waiting: the other ranks wait for this one
        if not waiting and not failures:
            return [results[rank] for rank in range(self.world_size)]
        error = _blame(failures, sorted(waiting.values()), timeout_s, list(map(doing.read, self._doing)))
        self._end(grace_s=0.0)
        raise error

    def _end(self, grace_s: float) -> None:
        """Ends all ranks; those that have not ended after `grace_s` seconds are killed."""
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            worker.close(deadline - time.monotonic())
        self._workers = []


class TorchrunGroup:
    """The ranks that torchrun has started, seen from one of them. If one fails, `run` raises on all.

    backend    None: NCCL where there is a GPU, else gloo
    timeout_s  seconds that every collective may take

    ValueError for a backend that cannot run here, and where torchrun's environment variables are missing.
    """

    def __init__(self, backend: str | None = None, timeout_s: float = 300.0):
        _check_environment()
        watchdog.stopped_s()  # ValueError here for a wrong $LMSYS_STOPPED_S, which the watchdog could not raise
        # Starts the watchdog, a process that reports it if this rank dies or is stopped. A second call does nothing.
        watchdog.begin()
        backend = ("nccl" if torch.cuda.is_available() else "gloo") if backend is None else backend
        check_backend(backend, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        _initialize(backend, int(os.environ["LOCAL_RANK"]), timeout_s, **_torchrun_store(timeout_s, self.num_nodes))
        self.rank, self.world_size, self.backend, self.timeout_s = (
            dist.get_rank(), dist.get_world_size(), backend, timeout_s,
        )  # fmt: skip

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """As `WorkerGroup.run`. A rank that waits for a failed one ends when its collective times out.

        `timeout_s` has no effect. It is a parameter so that callers can run either group alike. The function runs in
        this process, and nothing ends it early but a collective in it that takes longer than the group's `timeout_s`.
        """
        failure, result = None, None
        try:
            result = function(*args)
        except Exception as error:
            failure = processes.Failure.of(error)
        failed, results, notes = zip(*gather_objects((failure, result, doing.last()), group=None), strict=True)
        if failures := {rank: failure for rank, failure in enumerate(failed) if failure is not None}:
            raise _blame(failures, silent=[], timeout_s=self.timeout_s, notes=notes)
        return list(results)

    def close(self) -> None:
        """Ends this rank's watchdog (`lmsys.watchdog`) and process group. All ranks call it, unless one has failed."""
        watchdog.end()
        if dist.is_initialized():
            dist.destroy_process_group()


def _noted(function: Callable[..., Any], *args: Any) -> Any:
    """Notes, for error messages, that this rank is in the function, and then runs function(*args)."""
    doing.now(f"in {getattr(function, '__name__', function)}")
    return function(*args)


def _check_environment() -> None:
    """ValueError, with its name, where a variable that torchrun sets is missing or is no number."""
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
    """True for an error that says only that another rank, here called a peer, is gone.

    kind, text  the name of the exception, and its message or traceback
    """
    return kind in LOCK_STEP_ERRORS or GLOO_LOST in text


def last_words(rank: int, file: int) -> str:
    """A shell command that reports what a rank was doing when the process that had started it died.

    The shell that `lmsys.processes` has started beside the rank runs it, as no other process is left to report this.

    file  the descriptor of the open file that has the rank's note (`lmsys.doing`)
    """
    return f"echo lmsys: rank {rank} has lost the process that started it, $(tr -d '\\0' </proc/self/fd/{file}) >&2;"


def _blame(
    failures: Mapping[int, processes.Failure], silent: Sequence[int], timeout_s: float, notes: Sequence[str]
) -> WorkerError:
    """The error to report: that of a rank that has died or was stopped, if there is one.

    Otherwise it is the earliest error that says more than that another rank is gone (`is_lost_peer`). If all errors say
    only that, it is the earliest of them. If no rank has failed, it names the ranks that are late.

    failures  by rank
    silent    ranks that have not answered in time
    notes     what each rank was doing, by rank
    """
    if not failures:
        ranks = ", ".join(f"{rank} did not answer within {timeout_s:g} s, {notes[rank]}" for rank in silent)
        return WorkerError(silent[0], processes.TIMEOUT, f"rank {ranks}; all were ended")

    def order(rank: int) -> tuple[bool, bool, float]:
        """A key that sorts ranks, the one to blame first."""
        failure = failures[rank]
        return failure.kind not in (processes.DIED, STOPPED), is_lost_peer(failure.kind, failure.text), failure.at_s

    rank = min(sorted(failures), key=order)
    kind, text = failures[rank].kind, failures[rank].text
    words = f"{text}, {notes[rank]}" if kind in (processes.DIED, STOPPED) else f"failed {notes[rank]}:\n{text}"
    return WorkerError(rank, kind, f"rank {rank} {words}")


def _initialize(backend: str, local_rank: int, timeout_s: float, **rendezvous: Any) -> None:
    """Makes the default process group; under NCCL this rank's GPU becomes the current one."""
    gpu = torch.device("cuda", local_rank) if backend == "nccl" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), device_id=gpu, **rendezvous)


def _torchrun_store(timeout_s: float, num_nodes: int) -> dict[str, Any]:
    """Arguments of `init_process_group` for torchrun's store, under a prefix with the number of this start.

    When torchrun restarts ranks, its store still has the addresses of ranks that are gone: the prefix hides them. Each
    node counts restarts by itself, so several nodes might choose different prefixes. So with several nodes there is no
    prefix; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun begin a new store each time.
    """
    if num_nodes > 1:
        return {"init_method": "env://"}
    # True: torchrun's agent has the store, and began it before the ranks. So a store that does not answer is gone, and
    # there is no reason to wait longer than CONNECT_S.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    connect_s = min(timeout_s, CONNECT_S) if agents else timeout_s
    store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=connect_s)))
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    prefix = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return {"store": dist.PrefixStore(prefix, store), "rank": rank, "world_size": world_size}


def _join(backend: str, rank: int, world_size: int, port: int, timeout_s: float, file: int) -> None:
    """The first function that a rank runs: joins the process group, and puts its notes (`doing`) into the open file."""
    doing.share(file)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    store = dist.TCPStore(LOCALHOST, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
    _initialize(backend, rank, timeout_s, store=store, rank=rank, world_size=world_size)
