"""Rows run in a worker process (`lmsys.bench.isolation`): harm that a row does costs only its own cases.

Groups have good rows and rows that do harm, from FAULTS of tests/support/faults.py; to test new harm, add it there. A
faulty row's records must say what it did, and the other rows must be measured.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.bench_attention import Attention, AttentionTest
from lmsys import processes
from lmsys.bench import Entry, Settings
from lmsys.bench.isolation import Isolated
from lmsys.bench.record import load
from lmsys.bench.results import Session
from lmsys.bench.watch import NOBODY, TIMED, Beat, place_in
from lmsys.doing import map_file, shared_file
from lmsys.measure.host import available_bytes
from tests.support.faults import FAULTS
from tests.support.harness import MACHINE
from tests.support.processes import ENVIRONMENT, PATIENCE_S, ROOT, command
from tests.support.variants import few_by_default

TIMED_CALL = 16  # number of a row's call that is timed: its check makes fewer calls before
LEAVES_CHANGED = [name for name, fault in FAULTS.items() if not fault.ends]  # faults that do not end the process
GOOD = "good", "also_good"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def threes(device: str) -> list[tuple[str, str, str]]:
    """Triples of faults, for the first, the middle and the last row of a group: each fault is once in each place."""
    names = [name for name, fault in FAULTS.items() if device == "cuda" or not fault.on_gpu]
    step = len(names) // 3
    return [
        (name, names[(at + step) % len(names)], names[(at + 2 * step) % len(names)]) for at, name in enumerate(names)
    ]


@contextmanager
def isolated(monkeypatch: pytest.MonkeyPatch, call: int, device: str = "cpu") -> Iterator[Isolated]:
    """A runner with a worker, whose rows do harm in this call; 0: in any call, by chance.

    A row exceeds its deadline a second after it has marked that it hangs, so that a busy machine changes nothing.
    """
    runner = Isolated(Settings(device=device, seconds_per_row=0.01, deadline_s=PATIENCE_S, checks_files=False))
    runner._machine = MACHINE
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:

        def is_late(beat: Beat) -> bool:
            mark = Path(folder) / str(runner._worker.pid if runner._worker else "none")
            return mark.exists() and time.time() > mark.stat().st_mtime + 1.0

        patch.setenv("LMSYS_FAULT_CALL", str(call))
        patch.setenv("LMSYS_FAULT_HANGS", folder)
        patch.setattr(Beat, "is_late", property(is_late))
        try:
            yield runner
        finally:
            runner.close()


def records(runner: Isolated, names: Sequence[str], *directions: str) -> dict[tuple[str, str], dict[str, Any]]:
    """{(row, direction): record} of a group with these rows."""
    shape = 1, 2, 2, 64, 64, 32, "float32", True
    rows = [Entry(name, f"tests.support.faults:{name}") for name in names]
    pairs = [(row, direction) for row in rows for direction in directions or ("fwd",)]
    cases = [AttentionTest("faults", row, runner.settings.device, *shape, direction) for row, direction in pairs]
    measured = list(runner.run(Attention(), cases))
    assert [record["id"] for record in measured] == [case.id for case in cases]
    return {(record["impl"], record["direction"]): record for record in measured}


def check(measured: dict[tuple[str, str], dict[str, Any]], by_chance: bool = False) -> None:
    """Good rows have times, and the others have an error with its reason.

    by_chance  the harm need not have come: other rows may have times, too
    """
    for (name, direction), record in measured.items():
        if name in GOOD or (by_chance and record["outcome"] == "ok") or (name, direction) == ("leaves_no_grad", "fwd"):
            assert record["outcome"] == "ok" and record["time_s"] > 0, (name, record["reason"])
        else:
            assert record["outcome"] == FAULTS[name].outcome and "time_s" not in record, (
                name,
                record["outcome"],
                record["reason"],
            )
            assert FAULTS[name].told in record["reason"], record["reason"]


@pytest.mark.parametrize(
    "call", [1, pytest.param(2, marks=pytest.mark.on_request), pytest.param(TIMED_CALL, marks=pytest.mark.long)]
)
def test_what_a_row_leaves_changed_is_its_own_error(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change comes in the row's first call, in its check or in a timed call. Rows before and after it are ok."""
    with isolated(monkeypatch, call) as runner:
        measured = records(runner, ["good", "leaves_no_grad", "also_good"], "bwd")
        assert [record["outcome"] for record in measured.values()] == ["ok", "error", "ok"]
        check(records(runner, ["good", *LEAVES_CHANGED, "also_good"], "fwd"))


ENDS = (
    ("segmentation_fault", "hangs_in_c", "interrupts"),
    ("leaves_with_0", "hangs_in_python"),
    ("eats_memory",),
)


@pytest.mark.parametrize("ends", few_by_default([(ends,) for ends in ENDS], one_in=3), ids=range(len(ENDS)))
def test_a_row_that_ends_its_process_costs_its_own_cases(
    ends: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harm in a timed backward: a crash, an exit, an interrupt, and hangs with and without the interpreter lock.

    The journal has what was measured before, and the row itself, for instance with "oom" if it was seen to hold more
    memory than there is. The next group begins in a fresh worker.
    """
    monkeypatch.setattr("lmsys.bench.isolation.MOST_HELD", 2**30 / available_bytes())
    rows = [f"tests/support/faults.py:{name}" for name in ("good", *ends, "also_good")]
    options = {"--attention": ",".join(rows), "--length": "64", "--batch": "1", "--heads": "2", "--head-dim": "32"}
    options |= {"--dtype": "float32", "--causal": "yes", "--direction": "bwd"}
    with isolated(monkeypatch, TIMED_CALL) as runner:
        session = Session(runner.settings, output=tmp_path / "out.json", texts=options)
        session.__dict__["runner"] = runner
        keys = [("attention", name) for name in session.add(Attention)]
        session.select(keys)
        session.result(keys[0])
        journal = load(tmp_path / "out.json.partial")["records"]
        assert [record["impl"] for record in journal] == ["good", *ends, "also_good"]
        check({(record["impl"], record["direction"]): record for record in journal})
        for record in journal:
            assert record["impl"] != "segmentation_fault" or record["crashed"]
            assert record["impl"] != "eats_memory" or "GiB of memory" in record["reason"]
            assert record["impl"] != "hangs_in_c" or (
                "timed call" in record["reason"] and ", at faults.py:" in record["reason"]
            )
        check(records(runner, GOOD, "fwd", "bwd"))


@pytest.mark.long
@pytest.mark.parametrize(("more", "outcome"), few_by_default([(1, "oom"), (0, "error")], one_in=2))
def test_a_row_that_is_killed_as_memory_ran_out_is_out_of_memory(
    more: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner compares the kernel's count of such kills before a worker starts and after it has ended."""
    kills = count(step=more)
    monkeypatch.setattr("lmsys.bench.isolation.host.oom_kills", lambda: next(kills))
    with isolated(monkeypatch, 1) as runner:
        measured = records(runner, ["good", "killed"])
    assert measured["good", "fwd"]["outcome"] == "ok" and measured["killed", "fwd"]["outcome"] == outcome
    assert ("memory ran out" in measured["killed", "fwd"]["reason"]) == (outcome == "oom")


FAULTY = [
    *(pytest.param("cpu", *three, marks=pytest.mark.on_request) for three in threes("cpu")),
    *(pytest.param("cuda", *three, marks=pytest.mark.gpu) for three in threes("cuda")[:3]),
    *(pytest.param("cuda", *three, marks=(pytest.mark.gpu, pytest.mark.on_request)) for three in threes("cuda")[3:]),
]


# A row's first call, a call of its check, a timed call.
@pytest.mark.parametrize(("call", "direction"), [(1, "fwd"), (2, "fwd"), (9, "bwd")])
@pytest.mark.parametrize(("device", "first", "middle", "last"), FAULTY)
def test_each_fault_in_each_place(
    device: str, first: str, middle: str, last: str, call: int, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [first, "good", middle, "also_good", last]
    with isolated(monkeypatch, call, device) as runner:
        check(records(runner, names, direction), by_chance=call > 1)


@pytest.mark.on_request
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", range(20))
def test_faults_by_chance(run: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["good", "leaves_with_0", "leaves_default_dtype", "segmentation_fault", "also_good"]
    names += ["writes_out_of_bounds"] if device == "cuda" else []
    with isolated(monkeypatch, 0, device=device) as runner:
        check(records(runner, names, "fwd", "bwd"), by_chance=True)


@pytest.mark.gpu
def test_the_process_that_runs_no_row_has_no_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with isolated(monkeypatch, 1, device="cuda") as runner:
        check(records(runner, GOOD))
        assert runner._worker is not None
        held = subprocess.run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True)
    assert not torch.cuda.is_initialized() and str(os.getpid()) not in held.stdout.decode().split()


def test_a_heartbeat_is_read_by_another_and_outlives_its_process() -> None:
    file = shared_file()
    line = f"from lmsys.bench.watch import Heartbeat; Heartbeat({file}).beat(3, 'in its check', 60.0); import os; "
    subprocess.run([sys.executable, "-c", line + "os.abort()"], cwd=ROOT, pass_fds=[file], check=False)
    beat = Beat.from_buffer_copy(map_file(file))
    assert (beat.row, beat.doing, beat.gpu_row) == (3, "in its check", NOBODY)
    assert not beat.is_late
    beat.until = time.monotonic() - 1.0
    assert beat.is_late
    os.close(file)


@pytest.mark.parametrize(("seen_s_ago", "row"), [(0.0, 1), (10.0, 2)])
def test_the_row_at_work_is_the_gpus_unless_nobody_could_look(seen_s_ago: float, row: int) -> None:
    beat = Beat(1, 0.0, row=2, phrase=TIMED.encode(), gpu_row=1, gpu_seen=time.monotonic() - seen_s_ago)
    assert beat.row_on_device == row
    beat.phrase = b"in its check"
    assert beat.row_on_device == 2


def test_the_place_that_is_told_is_the_users() -> None:
    trace = f"""Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "{sys.base_prefix}/lib/python3.11/ctypes/__init__.py", line 522 in string_at
  File "{ROOT}/lmsys/attention/naive.py", line 3 in naive
  File "/home/somebody/mine.py", line 12 in backward
  File "/home/somebody/mine.py", line 40 in row
"""
    assert place_in(trace) == "mine.py:12 in backward"
    assert place_in("") == ""


HANGS = """
import os, time
open("{pids}", "w").write(str(os.getpid()))


def row(q, k, v, *, causal=False, scale=None):
    time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", few_by_default([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], one_in=3))
def test_no_worker_outlives_pytest(number: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGS.format(pids=tmp_path / "pids"))
    options = "--attention", f"{tmp_path}/mine.py:row", "--length", "64", "--dtype", "float32", "--benchmark-disable"
    run = subprocess.Popen(
        command("benchmarks/bench_attention.py", *options), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    try:
        assert _eventually(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
        time.sleep(1.0)
        run.send_signal(number)
        run.wait(PATIENCE_S)
    finally:
        run.kill()
    worker = Path("/proc") / (tmp_path / "pids").read_text()
    assert _eventually(lambda: not worker.exists() or "Z" in (worker / "stat").read_text().split()[2])


IMPORTED = {
    "while True: pass": ("deadline", 1),
    "import os; os._exit(0)": ("exit code 0", PATIENCE_S),
    "raise SystemExit(3)": ("SystemExit", PATIENCE_S),
}


@pytest.mark.long
@pytest.mark.parametrize("text", few_by_default(IMPORTED, one_in=3))
def test_a_file_that_cannot_be_imported_is_a_usage_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    reason, deadline_s = IMPORTED[text]
    options = "--attention", f"{tmp_path}/mine.py:row", "--deadline", str(deadline_s)
    ended = subprocess.run(
        command("benchmarks/bench_attention.py", *options), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR, ended.stdout
    errors = [line for line in (ended.stdout + ended.stderr).splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1 and "mine.py" in errors[0] and reason in errors[0], errors


@pytest.mark.on_request
def test_what_has_crashed_is_resumed_only_on_request(tmp_path: Path) -> None:
    """A resumed run keeps the crash as an error, and does not run its cases again, except with --retry-crashed."""
    rows = "sdpa_math,tests/support/faults.py:leaves_with_0"
    shape = "--length 64 --head-dim 32 --dtype float32 --causal yes --direction fwd --batch 1 --heads 2".split()
    options = [
        "benchmarks/bench_attention.py",
        "-k",
        "tiers",
        "--attention",
        rows,
        *shape,
        "--benchmark-max-time",
        "0.01",
    ]
    out = tmp_path / "out.json"

    def run(*more: object) -> str:
        ended = subprocess.run(
            command(*options, "--benchmark-json", out, *more), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    assert "1 ok, 1 error" in run()
    before = load(out)["records"]
    assert {record["outcome"]: record.get("crashed") for record in before} == {"ok": None, "error": True}
    assert "already measured: error" in run("--resume", out, "-rs")
    assert load(out)["records"] == before
    assert "exit code 0" in run("--resume", out, "--retry-crashed")
    assert len(load(out)["records"]) == 2


def _eventually(holds: Any, seconds: float = PATIENCE_S) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.on_request
def test_a_strategy_that_does_harm_on_a_rank_costs_its_own_cases(tmp_path: Path) -> None:
    from tests.support.faulty_strategies import TOLD

    file = ROOT / "tests" / "support" / "faulty_strategies.py"
    rows = ",".join(["naive", *(f"{file}:{name}" for name in TOLD), "flat"])
    options = "--sweep", "smoke", "--precision", "fp32", "--strategy", rows, "--benchmark-max-time", "0.005"
    ended = subprocess.run(
        command(
            "benchmarks/bench_data_parallel.py", *options, "--deadline", "40", "--benchmark-json", tmp_path / "out"
        ),
        cwd=ROOT,
        env=ENVIRONMENT | {"LMSYS_STOPPED_S": "3"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    for record in load(tmp_path / "out")["records"]:
        if record["impl"] in TOLD:
            outcome = "oom" if record["impl"] == "LeaksMemory" else "error"
            assert record["outcome"] == outcome and TOLD[record["impl"]] in record["reason"], record["reason"]
        else:
            assert record["outcome"] == "ok" and record["time_s"] > 0


@pytest.fixture(scope="module")
def asked() -> Iterator[Isolated]:
    """A runner whose worker is running, for tests after which it, or another one, is running again."""
    runner = Isolated(Settings(device="cpu", seconds_per_row=0.01), Mock())
    assert runner.ask("facts")["device"] == "cpu"
    yield runner
    runner.close()


# {a function behind which an interrupt comes: what is called in its place before}
INTERRUPTED: dict[str, Callable[..., object]] = {
    "lmsys.processes.Worker.send": processes.Worker.send,  # the question was sent
    "lmsys.bench.isolation.answered": lambda workers, _: processes.answered(workers, PATIENCE_S),  # the answer has come
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_leaves_no_answer_to_the_next_question(
    name: str, asked: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes behind a question or with its answer, and ends the worker. The next question goes to a fresh one."""

    def interrupted(*arguments: Any) -> None:
        INTERRUPTED[name](*arguments)
        raise KeyboardInterrupt

    asked._say.reset_mock()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(name, interrupted)
        asked.ask("facts")
    assert "clock_share" in asked.ask("ready")
    asked._say.assert_called_with("measuring what this machine reaches")  # by the worker


def test_an_answer_that_nobody_read_to_its_end_is_not_that_of_the_next_question(asked: Isolated) -> None:
    """An interrupt may fall while an answer is read; a traceback then keeps the reader's frame, and so the reader."""
    unread = asked.stream("ready")
    next(filter(None, unread))
    assert asked.machine == asked.machine and asked.ask("facts") and asked._worker is not None
    pid = asked._worker.pid
    unread.close()  # too late: a new worker has replaced the one from which it read
    assert asked.ask("facts") and asked._worker.pid == pid
