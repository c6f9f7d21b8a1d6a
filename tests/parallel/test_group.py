"""`lmsys.parallel.group`: ranks start once and run functions; they return results, and each way to fail is reported.

Functions whose names begin with an underscore run on ranks, except `_fails_within_seconds`. A new way to fail is such a
function, with the error that it must give.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmsys.bench.ranks import Ranks
from lmsys.measure.compare import outcome_of
from lmsys.measure.step import Failed
from lmsys.parallel.group import TorchrunGroup, WorkerError, WorkerGroup, check_backend, device
from lmsys.parallel.overlapped import Bucketed
from lmsys.watchdog import under_torchrun
from tests.support.processes import PATIENCE_S, Stopwatch
from tests.support.variants import few_by_default


def _facts(value: int) -> tuple[int, int, float]:
    """(rank, world size, sum over ranks of `value`)."""
    x = torch.tensor([float(value)])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def _fails(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("no such layer")
    dist.barrier()


def _is_killed(rank: int) -> None:
    """Trains; the rank gets SIGKILL in the backward of the sixth step, while buckets of gradients are being reduced."""
    model = Bucketed(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device()), bucket_mb=0.01)
    for step in range(1000):
        hidden = model(torch.ones(2, 64, device=device(), requires_grad=True))
        if dist.get_rank() == rank and step == 5:
            model.trainable[0].register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        hidden.sum().backward()
        model.finish_gradient_synchronization()


def _leaves(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def _is_stopped(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def _is_slow(rank: int) -> int:
    """Stops for 1 s, then computes for 2.5 s in calls that hold the interpreter lock, so that no thread can answer.

    The test's limit of 2 s is for stopped ranks: the stop is shorter, and a rank that computes is not stopped.
    """
    if dist.get_rank() == rank:
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            sum(range(10**7))
    dist.barrier()
    return dist.get_rank()


def _sleeps(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def ended(pids: list[int]) -> bool:
    """True if none of these processes is left, not even as a zombie."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (MemoryError("no room"), ("oom", "no room")),
        (WorkerError(1, "died", "rank 1 died: killed by SIGKILL"), ("error", "rank 1 died: killed by SIGKILL")),
        (
            WorkerError(0, "OutOfMemoryError", "rank 0 failed:\nTrace\ntorch.OutOfMemoryError: CUDA\n\nSet X\n"),
            ("oom", "rank 0 failed: torch.OutOfMemoryError: CUDA"),
        ),
        (Failed("unsupported", "of no use"), ("unsupported", "of no use")),
    ],
)
def test_a_failure_of_ranks_is_recorded_in_a_line(error: Exception, failure: tuple[str, str]) -> None:
    assert outcome_of(error) == failure


def test_functions_run_on_every_rank_and_results_come_by_rank(ranks: WorkerGroup) -> None:
    for value in (1, 2):
        assert ranks.run(_facts, value) == [(rank, 4, 4.0 * value) for rank in range(4)]


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    few_by_default(
        [
            (_is_killed, "died", "rank 1 died: killed by SIGKILL, in _is_killed"),
            (_leaves, "died", "rank 1 died with exit code 3, in _leaves"),
            (_fails, "KeyError", "rank 1 failed in _fails:\nTraceback.*KeyError: 'no such layer'"),
            (_sleeps, "timeout", "rank 1 did not answer within 3 s, in _sleeps"),
            (_is_stopped, "stopped", r"rank 1 was stopped \(SIGSTOP\) for 1 s, in _is_stopped"),
        ],
        one_in=4,
    ),
)
def test_a_rank_that_fails_ends_the_others_within_seconds(  # type: ignore[no-untyped-def]
    function, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMSYS_STOPPED_S", "1")
    _fails_within_seconds("gloo", function, kind, message)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (_fails, "KeyError", "rank 1 failed in _fails:\nTraceback.*KeyError: 'no such layer'"),
        (_is_killed, "died", "rank 1 died: killed by SIGKILL, in _is_killed"),
        (_is_stopped, "stopped", r"rank 1 was stopped \(SIGSTOP\) for 2 s, in _is_stopped"),
    ],
)
def test_a_rank_that_fails_ends_the_others_on_nccl(  # type: ignore[no-untyped-def]
    function, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMSYS_STOPPED_S", "2")
    _fails_within_seconds("nccl", function, kind, message)


def _fails_within_seconds(backend: str, function, kind: str, message: str) -> None:  # type: ignore[no-untyped-def]
    """AssertionError unless rank 1, which fails in `function`, ends a group of two with this error within 15 s."""
    group = WorkerGroup(2, backend, timeout_s=PATIENCE_S)
    processes, watch = group.pids, Stopwatch()
    with pytest.raises(WorkerError, match=f"(?s){message}") as caught:
        group.run(function, 1, timeout_s=3 if function is _sleeps else None)
    assert (caught.value.rank, caught.value.kind) == (1, kind)
    assert watch.keeps(15) and ended(processes)
    assert group.ended
    with pytest.raises(RuntimeError, match="this group has ended"):
        group.run(_facts, 1)


def test_a_rank_that_is_slow_or_stopped_for_a_second_goes_on(
    ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks._stopped, "limit_s", 2.0)
    assert ranks.run(_is_slow, 1) == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_wrong_limit_for_stopped_ranks_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMSYS_STOPPED_S", text)
    with pytest.raises(ValueError, match=rf"^\$LMSYS_STOPPED_S is '{text}'; it must be seconds, or 0 for no limit"):
        WorkerGroup(1, "gloo")


def test_closing_leaves_no_process() -> None:
    with WorkerGroup(1, "gloo") as group:
        processes = group.pids
        assert group.run(_facts, 3) == [(0, 1, 3.0)]
    assert ended(processes)


@pytest.mark.parametrize(
    ("make", "world_size", "backend", "gpus", "message"),
    [
        (check_backend, 2, "mpi", 0, "backend='mpi' must be one of"),
        (check_backend, 0, "gloo", 0, "world_size=0 must be at least 1"),
        (WorkerGroup, 2, "nccl", 0, "'nccl' needs CUDA, and this machine has no CUDA device"),
        (WorkerGroup, 3, "nccl", 2, "world_size=3 is more than the 2 GPUs"),
    ],
)
def test_groups_that_the_machine_cannot_run_are_refused(
    make: Any, world_size: int, backend: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=message):
        make(backend=backend, world_size=world_size)


@pytest.mark.parametrize(("text", "state"), [(None, "is not set"), ("", "is ''"), ("one", "is 'one'")])
def test_an_error_names_the_variable_of_torchrun_that_is_wrong(
    text: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may have set some of torchrun's variables, but not LOCAL_RANK."""
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False) if text is None else monkeypatch.setenv("LOCAL_RANK", text)
    assert under_torchrun()
    with pytest.raises(ValueError, match=rf"^\$LOCAL_RANK {state}, where torchrun sets a whole number"):
        TorchrunGroup()


@pytest.mark.parametrize(("kind", "goes_on"), [(TorchrunGroup, True), (WorkerGroup, False)])
def test_the_bench_keeps_the_ranks_of_torchrun_after_an_error(kind: type, goes_on: bool) -> None:
    """They are the only ones, and go on; a `WorkerGroup` has ended."""
    ranks = Ranks()
    group = Mock(spec=kind, run=Mock(side_effect=WorkerError(0, "ValueError", "no")), world_size=1, backend="gloo")
    ranks._group = group
    with pytest.raises(WorkerError):
        ranks.run(1, "gloo", _facts, 0)
    assert (ranks._group is group) is goes_on
