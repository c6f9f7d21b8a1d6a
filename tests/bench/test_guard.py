"""`lmsys.bench.guard`: `Guard` and `State` put back what a row has changed in its process, and name it.

`Guard` remembers the functions that judge and measure, and `State` the settings of the process. A setting that a row
may leave changed is a part in `lmsys.bench.guard`, and an entry in LEAKS here.
"""

import gc
import math
import operator
import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from lmsys import testing
from lmsys.attention.naive import naive
from lmsys.bench import trial
from lmsys.bench.guard import PARTS, Guard, State
from lmsys.measure import clock, compare
from lmsys.training import optimizer
from tests.support import harness


def ignored(*_: Any) -> None: ...


# (the object that has a name, the name, how a message tells that it was replaced)
GUARDED: list[tuple[Any, str, str]] = [
    (time, "perf_counter", "time.perf_counter"),
    (operator, "call", "operator.call"),
    (torch, "stack", "torch.stack"),
    (torch.Tensor, "double", "Tensor.double"),
    (torch.cuda.Event, "elapsed_time", "Event.elapsed_time"),  # of the class or inherited, by torch's version
    (clock, "perf_counter", "lmsys.measure.clock.perf_counter"),
    (compare, "interleave", "lmsys.measure.compare.interleave"),
    (trial, "verdict", "lmsys.bench.trial.verdict"),
    (testing.Oracle, "judge", "Oracle.judge"),
    (clock.CpuClock, "sample", "CpuClock.sample"),
    (compare.outcome_of, "__code__", "the code of outcome_of"),
    # The entropy that picks calls: the class, which inherits one of these methods, and the object that sampling uses.
    (random.SystemRandom, "randrange", "SystemRandom.randrange"),
    (random.SystemRandom, "getrandbits", "SystemRandom.getrandbits"),
    (compare, "_ENTROPY", "lmsys.measure.compare._ENTROPY"),
    (compare, "MAX_ROUNDS", "lmsys.measure.compare.MAX_ROUNDS"),
]


@pytest.mark.parametrize(("owner", "name", "told"), GUARDED, ids=[told for _, _, told in GUARDED])
def test_what_a_row_replaces_is_named_and_put_back(owner: Any, name: str, told: str) -> None:
    guard, before = Guard(), getattr(owner, name)
    setattr(owner, name, ignored.__code__ if name == "__code__" else ignored)
    assert guard.mend() == [told]
    assert getattr(owner, name) == before and guard.mend() == []


def test_changed_defaults_of_keywords_are_noticed() -> None:
    guard, function = Guard(), cast(Any, compare.interleave)
    before = dict(function.__kwdefaults__)
    function.__kwdefaults__["trials"] = 1
    assert guard.mend() == ["the defaults of interleave.trials"]
    assert function.__kwdefaults__ == before and guard.mend() == []
    function.__kwdefaults__ = None
    assert guard.mend() == ["the code of interleave"] and function.__kwdefaults__ == before


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_kernel_of_torch_that_a_row_replaces_ends_the_process() -> None:
    """Results are compared by `sub`, which cannot be put back. An operator that the row defines is not replaced."""
    guard = Guard()
    with torch.library._scoped_library("lmsys_of_a_row", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        assert guard.mend() == []
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sub.Tensor", lambda x, other, alpha=1: torch.zeros_like(x), "CPU")
        with pytest.raises(compare.Lost, match="it replaces aten/sub.Tensor/CPU, by which it is judged"):
            guard.mend()
    assert guard.mend() == [] and (torch.ones(1) - 3).item() == -2


def test_entries_of_a_table_of_constants_are_guarded() -> None:
    guard, budget = Guard(), testing.NORM_BUDGET
    budget["float32"] = 1e9
    assert guard.mend() == ["lmsys.testing.NORM_BUDGET.float32"]
    assert testing.NORM_BUDGET is budget and budget["float32"] < 1 and not guard.mend()


def test_honest_code_replaces_nothing() -> None:
    guard = Guard()
    torch.manual_seed(0)
    setattr(math, "of_a_row", lambda: 0)  # noqa: B010 - a new name, which replaces nothing
    try:
        torch.compile(naive, backend="eager")(*torch.ones(3, 1, 1, 2, 2))
        within = Guard()
        torch.compiler.reset()
        assert guard.mend() == within.mend() == []
    finally:
        delattr(math, "of_a_row")


def test_torch_may_wrap_the_step_of_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does so when the first optimizer is made."""
    step = optimizer.AdamW.step
    monkeypatch.setattr(optimizer.AdamW, "step", getattr(step, "__wrapped__", step))
    guard = Guard()
    optimizer.AdamW([torch.ones(1, requires_grad=True)])
    assert guard.mend() == []


# {how a message names a change: a function that makes it, as a row or its file may do in the process of other rows}
LEAKS: dict[str, Callable[[], Any]] = {
    "the CPUs that it may use": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "torch's number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "when garbage is collected": lambda: gc.set_threshold(1),
    "callbacks of the garbage collector": lambda: gc.callbacks.append(ignored),
    "whether garbage is collected": gc.disable,
    "a hook of sys.setprofile": lambda: sys.setprofile(ignored),
    "a hook of sys.settrace": lambda: sys.settrace(ignored),
    "a timer of signal.ITIMER_VIRTUAL": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000.0),
    "a timer of signal.ITIMER_PROF": lambda: signal.setitimer(signal.ITIMER_PROF, 1000.0),
    "a torch_function mode": lambda: torch.overrides.BaseTorchFunctionMode().__enter__(),
    "a torch_dispatch mode": lambda: torch.utils._python_dispatch.BaseTorchDispatchMode().__enter__(),
    "whether flash SDPA is allowed": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "whether memory-efficient SDPA is allowed": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "whether math SDPA is allowed": lambda: torch.backends.cuda.enable_math_sdp(False),
    "whether cuDNN SDPA is allowed": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "whether oneDNN is used": lambda: torch._C._set_mkldnn_enabled(False),
    "whether tiny numbers are flushed to zero": lambda: torch.set_flush_denormal(True),
    "anomaly detection": lambda: torch.set_anomaly_enabled(True),
    "the precision of float32 matmuls": lambda: torch.set_float32_matmul_precision("medium"),
    "deterministic mode": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.fixture
def state() -> Iterator[State]:
    state = State()
    yield state
    state.mend()
    state.close()


@pytest.mark.parametrize("name", LEAKS)
def test_changes_that_a_row_leaves_are_named_and_put_back(name: str, state: State) -> None:
    (part,) = [part for part in PARTS if part.name == name]
    before = part.get()
    LEAKS[name]()
    assert (state.mend() or "").startswith(f"it leaves changed: {name}")
    assert part.get() == before and state.mend() is None


def test_added_variables_are_removed_and_named_beside_other_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone they are no fault, since honest libraries add some when they are imported."""
    state = State()  # made here, as pytest changes a variable of its own between fixtures and a test
    os.environ["LMSYS_OF_A_ROW"] = "1"
    assert state.mend() is None and "LMSYS_OF_A_ROW" not in os.environ
    home = os.environ["HOME"]
    os.environ |= {"LMSYS_OF_A_ROW": "1", "LMSYS_AND_ANOTHER": "2", "TORCH_OF_A_COMPILER": "3"}
    del os.environ["HOME"]
    added = "environment variables that it adds: LMSYS_AND_ANOTHER, LMSYS_OF_A_ROW"
    assert state.mend() == f"it leaves changed: environment variable HOME; {added}"
    assert os.environ["HOME"] == home and not {"LMSYS_OF_A_ROW", "LMSYS_AND_ANOTHER"} & os.environ.keys()
    monkeypatch.delenv("TORCH_OF_A_COMPILER")
    state.close()


def test_threads_of_a_row_may_use_all_cpus_again(state: State) -> None:
    """A thread inherits the CPUs of the thread that starts it: OpenMP's pool would stay on a single CPU."""
    if len(cpus := os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may use one CPU: another machine is needed to see threads pinned")
    os.sched_setaffinity(0, {min(cpus)})
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert os.sched_getaffinity(thread.native_id or 0) == {min(cpus)}
    message = state.mend()
    assert message and "the CPUs" in message and os.sched_getaffinity(thread.native_id or 0) == cpus
    end.set()
    thread.join()


def test_a_change_that_cannot_be_put_back_ends_the_process(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Niceness cannot be lowered without a permission. The worker then ends, and other rows run in a new one."""
    (niceness,) = [part for part in state._parts if part.name == "its niceness"]
    state._parts[niceness] -= 1  # as if the row had raised it
    refuse = Mock(side_effect=PermissionError("only root may"))
    changed = type(niceness)(niceness.name, niceness.get, refuse)
    state._parts = {changed: state._parts[niceness]}
    with pytest.raises(compare.Lost, match=r"it leaves changed: its niceness \(-?\d+, now -?\d+\)"):
        state.mend()
    state._parts = {}


def test_modules_that_a_worker_imports_later_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker measures the machine, with a guard, before it is sent the first benchmark and imports its module."""
    runner = harness.runner()
    assert runner.guard.mend() == []
    late = types.ModuleType("benchmarks.late")
    late.judge = len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, late.__name__, late)

    class Replacing(harness.Telling):
        def open(self, candidate: Any, setup: Any) -> None:
            late.judge = max  # type: ignore[attr-defined]

    benchmark = Replacing()
    for record in runner.run(benchmark, harness.cases_of(benchmark)[:1]):
        assert record["outcome"] == "wrong"
        assert record["reason"] == "a row replaced benchmarks.late.judge, by which it is judged"
    assert late.judge is len  # type: ignore[attr-defined]
