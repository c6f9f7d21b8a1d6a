"""Rows in processes of their own (`lmsys.bench.foreign`): the law of their times, their memory, and how they end."""

import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_attention import Attention, AttentionTest
from lmsys.attention import ATTENTION, AttentionCase, AttentionTraits
from lmsys.attention.naive import naive
from lmsys.bench import Entry, Failed, Settings, Table, foreign
from lmsys.bench.findings import source_of
from lmsys.bench.foreign import Process
from lmsys.deterministic import deterministic_mode
from lmsys.measure.clock import ClockError, CpuClock
from lmsys.testing import MEMORY, make_inputs
from tests.support import harness

SHAPE = (1, 2, 1, 40, 40, 16)
MARGIN = foreign.MARGIN_S
FILE = """
import os, sys, time
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmsys.attention.naive import naive

sys.modules["stolen"], calls = sys, 0


def row(q, k, v, *, causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


row.color, row.mask = "#123456", "mine:steals"


def with_options(q, k, v, *, pattern=None, causal=False, scale=None):
    return naive(q, k, v, scale=scale, **({"causal": causal} if pattern is None else {"pattern": pattern}))


def wrong(q, k, v, *, causal=False, scale=None):
    return 1.01 * row(q, k, v, causal=causal, scale=scale)


def dies(q, k, v, *, causal=False, scale=None):
    global calls
    calls += 1
    if calls == 20:
        os.abort()
    return row(q, k, v, causal=causal, scale=scale)


def hangs(q, k, v, *, causal=False, scale=None):
    time.sleep(600)


def in_mode(q, k, v, *, causal=False, scale=None):
    if not torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("no mode")
    return row(q, k, v, causal=causal, scale=scale)


def double(q, k, v, *, causal=False, scale=None):
    return row(q, k, v, causal=causal, scale=scale).double()


def raises(q, k, v, *, causal=False, scale=None):
    raise RuntimeError(60_000 * "x" + chr(0xD800))


def leaves_its_group(q, k, v, *, causal=False, scale=None):
    os.setpgid(0, os.getpgid(os.getppid()))
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file with rows, whose processes these tests share."""
    file = tmp_path_factory.mktemp("rows") / "mine.py"
    file.write_text(FILE)
    yield file
    for (target, _), process in foreign._processes.items():
        if target.startswith(f"{file}:"):
            process.close()


def row_of(file: Path, name: str) -> foreign.Foreign:
    return foreign.Foreign.of(Settings(), Entry(name, f"{file}:{name}"))


def records(file: Path, *names: str, direction: str = "fwd", **settings: Any) -> dict[str, dict[str, Any]]:
    """{row: its record} of rows of the file, beside a row of ours."""
    rows = [Entry("naive", "lmsys.attention.naive:naive"), *(row_of(file, name) for name in names)]
    cases = [AttentionTest("s", row, "cpu", *SHAPE, "float32", True, direction) for row in rows]
    return harness.records(Attention(), cases, seconds_per_row=0.02, **settings)


def seen(late: Sequence[float], copies: Sequence[float]) -> list[foreign.Seen]:
    """Calls that were late by so many margins, whose results were late by so many."""
    waits = [[(max(x, 0) * MARGIN, max(-x, 0) * MARGIN) for x in xs] for xs in (late, copies)]
    return [foreign.Seen(0.0, 0.0, *pair) for pair in zip(*waits, strict=True)]


def judged(calls: list[foreign.Seen], **options: Any) -> str:
    """The clock's words against the calls; "" if it believes them."""
    clock: Any = foreign.ApartClock(None, None, CpuClock())  # type: ignore[arg-type]
    try:
        read = clock.read(calls, **options)
        assert [replace(call, run_s=0.0) for call in read] == [replace(call, run_s=0.0) for call in calls]
    except ClockError as error:
        assert error.failure[0] == "wrong"
        return str(error)
    return ""


OUTSIDE, AFTERWARDS = "works outside of its calls", "makes its results after its calls"


@pytest.mark.parametrize(
    ("late", "copies", "told"),
    [
        ([1.1] * 10, [0] * 10, f"{OUTSIDE}: 10 of 10"),
        ([50.0] * 10, [0] * 10, f"{OUTSIDE}: 10 of 10"),
        ([0] * 10, [1.1] * 10, AFTERWARDS),
        ([0] * 10, [50.0] * 10, AFTERWARDS),
        ([0.9] * 200, [-0.9] * 200, ""),
        # One call that is very late or early hides nothing.
        ([1.5] * 30 + [1e6], [0] * 31, OUTSIDE),
        ([1.5] * 30 + [-1e6], [0] * 31, OUTSIDE),
        # Calls that are early by little, as a row can make them at will, excuse none that are late by much.
        ([0] * 100, [-1.1] * 39 + [50.0] * 61, AFTERWARDS),
        # Lies in a third of the calls leave the median as it is, and move the ratio to another row's time.
        ([2.0, 0.1, -0.1] * 20, [0] * 60, f"{OUTSIDE}: 20 of 60"),
        ([2.0, 0.1, -0.1, 0.1, -0.1] * 20, [0] * 100, ""),
    ],
)
def test_a_row_is_refused_if_most_of_its_calls_are_late(late: list[float], copies: list[float], told: str) -> None:
    words = judged(seen(late, copies))
    assert told in words and bool(told) == bool(words)
    assert not judged(seen(late, copies), trusted=True)


def test_calls_may_be_late_because_others_use_the_device() -> None:
    shared = CpuClock()
    shared.others = lambda: 2  # type: ignore[method-assign]
    with pytest.raises(ClockError) as error:
        foreign.ApartClock(None, None, shared).read(seen([50.0] * 10, [0] * 10))  # type: ignore[arg-type]
    assert error.value.failure[0] == "error" and OUTSIDE in str(error.value)


def test_a_late_call_counts_with_what_the_judge_waited() -> None:
    """A run takes ten calls where they are long, and eight of ten may be late by chance."""
    calls = seen([50.0] * 5 + [0.9] + [0.0] * 4, [0.0] * 5 + [0.9] + [50.0] * 3 + [-50.0])
    clock: Any = foreign.ApartClock(None, None, CpuClock())  # type: ignore[arg-type]
    assert [call.run_s for call in clock.read(calls)] == pytest.approx(
        [50 * MARGIN] * 5 + [0] + [50 * MARGIN] * 3 + [0]
    )


def test_noise_in_both_directions_is_no_cheat() -> None:
    """On a busy machine calls are late and early by chance, by far more than the margin."""
    chance, refused = random.Random(0), 0
    for _ in range(300):
        noise = [[chance.choice((-1, 1)) * chance.expovariate(0.2) for _ in range(40)] for _ in range(2)]
        refused += bool(judged(seen(*noise)))
    assert refused <= 5


@pytest.mark.parametrize("name", ["answer_s", "copy_s"])
def test_a_row_that_waits_as_long_as_the_null_row_by_chance_is_no_cheat(name: str) -> None:
    """On a busy machine waits for both are of the same law, long or short: none is late more often than early."""
    chance, refused = random.Random(0), 0
    for _ in range(2000):
        calls = [
            foreign.Seen(1e-4, 0.0, **{"answer_s": (0.0, 0.0), "copy_s": (0.0, 0.0)} | {name: tuple(waits)})
            for waits in ([chance.expovariate(200) for _ in range(2)] for _ in range(16))
        ]
        refused += bool(judged(calls))
    assert refused <= 8  # 3 standard deviations: 0.13 %, in one direction


def test_work_between_calls_shows_in_noise() -> None:
    chance = random.Random(0)
    late = [chance.choice((-1, 1)) * chance.expovariate(1.0) + 4.0 for _ in range(40)]
    assert judged(seen(late, [0] * 40))


def test_what_the_judge_waits_is_compared_with_the_null_row() -> None:
    null = SimpleNamespace(windows={"call": 3e-3, "took": 2.9e-3, "read": 1e-4, "copy": 1e-4})
    row = SimpleNamespace(windows={"call": 5e-3, "took": 1e-3, "read": 2e-4, "copy": 3e-4})
    clock: Any = foreign.ApartClock(null, row, CpuClock())  # type: ignore[arg-type]
    asked: list[Any] = []
    taken, result = clock.sample(lambda pair: asked.append(pair[0]) or "o")
    assert asked == [null, row] and result == "o" and taken.run_s == 1e-3 and taken.prepare_s == 0.0
    assert taken.answer_s == pytest.approx((4e-3, 1e-4)) and taken.copy_s == pytest.approx((5e-4, 2e-4))
    # Of an untimed call before it, all that the judge waits longer than for the null row counts.
    for windows, call_s, copy_s in ((null.windows, 1e-3, 1e-4), (row.windows, 2e-3, 3e-3)):
        windows |= {"call forward": call_s, "copy forward": copy_s}
    taken, _ = clock.sample(lambda _: "o", lambda _: "graph")
    assert taken.prepare_s == pytest.approx(2e-3 + 3e-3 - 1e-4)


@pytest.mark.parametrize(
    ("name", "most_s"),
    [("answer_s", MARGIN + 0.25 * 1e-3 + 0.1 * 2e-3), ("copy_s", MARGIN + 1e-3)],
)
def test_the_margin_is_the_same_in_both_directions(name: str, most_s: float) -> None:
    """A margin counts from the shorter of the two waits, here of 1 ms; the call took 2 ms."""
    for factor, told in ((0.99, False), (1.01, True)):
        for waits, sign in (((1e-3 + factor * most_s, 1e-3), 1), ((1e-3, 1e-3 + factor * most_s), -1)):
            by_s = foreign.Seen(2e-3, 0.0, waits, waits).late_s(name)
            assert by_s == pytest.approx(told * sign * factor * most_s)


@given(st.lists(st.integers(-50, 50), max_size=40), st.integers(1, 1000))
def test_leaning_knows_signs_and_order_alone(late: list[int], unit: int) -> None:
    some = [x for x in late if x]
    leaning = foreign.leaning(some)
    assert foreign.leaning(late) == leaning == foreign.leaning([1e-3 * x * unit for x in some])
    most = foreign.leaning([abs(x) for x in some])
    assert leaning <= most == pytest.approx(len(some) ** 0.5)


def test_this_process_never_imports_the_file(mine: Path) -> None:
    row, before = row_of(mine, "row"), set(sys.modules)
    assert records(mine, "row")["row"]["outcome"] == "ok"
    assert "stolen" not in sys.modules and not any("mine" in name for name in sys.modules.keys() - before)
    assert row.to_json() == {"name": "row", "label": "row", "peer": False, "color": "#123456"}
    assert source_of(row)["name"] == "mine.py" and row.why_not(None) is None


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwdbwd"])
def test_an_honest_row_is_measured_beside_ours_and_a_wrong_one_is_named(direction: str, mine: Path) -> None:
    measured = records(mine, "row", "wrong", "double", direction=direction)
    assert {name: record["outcome"] for name, record in measured.items()} == {
        "naive": "ok",
        "row": "ok",
        "wrong": "wrong",
        "double": "wrong",
    }, measured["row"]["reason"]
    assert [measured[name]["own_process"] for name in ("naive", "row")] == [False, True]
    row = measured["row"]
    assert row["time_s"] > 0 and row["repeatable"] and len(row["proof"]["calls"]) == 8 and row["peak_bytes"] > 0
    assert "times the allowed error" in measured["wrong"]["reason"]
    assert measured["double"]["reason"] == "o must have dtype torch.float32; got torch.float64"


def test_a_row_that_dies_or_hangs_costs_its_own_cases(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = records(mine, "dies", "row")
    assert "killed by SIGABRT" in measured["dies"]["reason"] and ", at mine.py:" in measured["dies"]["reason"]
    assert measured["row"]["outcome"] == "ok" and measured["naive"]["outcome"] == "ok"
    process = row_of(mine, "hangs").load()
    monkeypatch.setattr("lmsys.bench.foreign.MOST_S", 0.5)
    with pytest.raises(Failed, match="no answer within the deadline .*, at mine.py:"):
        process(*(torch.ones(1, 1, 4, 4) for _ in "qkv"), causal=False, scale=None)


def test_a_row_that_leaves_its_process_group_is_killed(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = row_of(mine, "leaves_its_group").load()
    pid = process._worker.pid
    monkeypatch.setattr("lmsys.bench.foreign.MOST_S", 0.5)
    with pytest.raises(Failed, match="no answer within the deadline"):
        process(*(torch.ones(1, 1, 4, 4) for _ in "qkv"), causal=False, scale=None)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_row_cannot_make_the_result_unreadable(mine: Path) -> None:
    reason = records(mine, "raises")["raises"]["reason"]
    assert reason.startswith("RuntimeError: xxx") and reason.isprintable() and len(reason) < 1000


@pytest.mark.parametrize("facts", [{"parameters": 5}, {"traits": 5}, {"traits": {"color": "red"}}])
def test_facts_that_are_none_are_refused(facts: dict[str, Any], mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(Entry("row", f"{mine}:row"), Settings())
    monkeypatch.setattr(process, "ask", lambda name, *_, **__: facts)
    monkeypatch.setitem(foreign._processes, (process.entry.target, process.settings.device), process)
    with pytest.raises(ValueError, match="row"):
        row_of(mine, "row")
    process.close()


def test_a_deterministic_case_is_deterministic_there_too(mine: Path) -> None:
    process, inputs = row_of(mine, "in_mode").load(), [torch.ones(1, 1, 4, 4) for _ in "qkv"]
    with deterministic_mode():
        process(*inputs, causal=False, scale=None)
    with pytest.raises(Failed, match="no mode"):
        process(*inputs, causal=False, scale=None)


def test_the_options_of_attention_are_asked_there_too(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick check asks a row that knows windows, documents, masks, a log-sum-exp that is returned, and so on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else the check asks on the GPU
    measured = records(mine, "row", "with_options", direction="fwdbwd", timed=False)
    assert measured["with_options"]["outcome"] == "ok", measured["with_options"]["reason"]
    cases = [int(measured[name]["quick_check"].removesuffix(" cases")) for name in ("row", "with_options")]
    assert cases[0] + 10 <= cases[1]


def test_a_file_that_cannot_be_loaded_is_a_bad_value(mine: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine.py:missing"):
        row_of(mine, "missing")
    (tmp_path / "ends.py").write_text("import os; os._exit(3)")
    with pytest.raises(ValueError, match="exit code 3"):
        row_of(tmp_path / "ends.py", "row")


@pytest.mark.usefixtures("foreign_processes")
@pytest.mark.parametrize("name", ["naive", "flash_triton", "flex", "sdpa_flash"])
def test_a_row_of_the_table_is_the_same_row_in_a_process_of_its_own(name: str) -> None:
    entry = ATTENTION[name]
    apart = foreign.Foreign.of(Settings(), entry)
    assert apart.apart and apart.to_json() == entry.to_json() and source_of(apart) == source_of(entry)
    assert AttentionTraits.of(apart) == AttentionTraits.of(entry)
    for grad in (False, True):
        case = AttentionCase(1, 1, 1, 2048, 2048, 64, "float64", grad=grad)
        assert apart.why_not(case) == entry.why_not(case)


def test_a_row_of_a_missing_package_cannot_run_here() -> None:
    row = foreign.Foreign.of(Settings(), Entry("row", "no_such_package:row"))
    assert "no_such_package" in (row.why_not(None) or "")


def test_a_process_is_stopped_between_questions(mine: Path) -> None:
    process = row_of(mine, "row").load()
    stat = Path(f"/proc/{process._worker.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":  # the signal is on its way
        os.sched_yield()
    os.killpg(process._worker.pid, signal.SIGKILL)
    with pytest.raises(Failed, match="SIGKILL"):
        process.ask("tell", {}, None, [False] * 3)
    assert process.ask("tell", {}, None, [False] * 3) == {}  # a new one


@pytest.mark.parametrize("memory", ["", *MEMORY])
def test_inputs_have_their_layout_in_memory_there_too(memory: str) -> None:
    case = AttentionTest("s", Entry("naive", ""), "cpu", 2, 4, 2, 9, 7, 5, "float32", False, "fwdbwd").asked
    inputs = make_inputs(case, 0, memory=memory)
    layout = foreign.layout_of(inputs.tensors)
    block = foreign.Block(layout, "cpu").fill(inputs.tensors)
    for copied in (False, True):
        mapped = foreign._mapped(block.file)
        for name, (_, x) in foreign._placed(mapped, layout, copied).items():
            like = inputs.tensors[name]
            assert torch.equal(x, like) and x.stride() == like.stride() and (x.data_ptr() - like.data_ptr()) % 64 == 0
    with pytest.raises(OSError):
        os.ftruncate(block.file.fileno(), 1)  # type: ignore[attr-defined]


def test_a_call_outside_of_all_timing_has_a_backward(mine: Path) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in "qkv")
    do = torch.randn(1, 2, 9, 8)
    process = row_of(mine, "row").load()
    o = process(q, k, v, causal=True, scale=0.3)
    right = naive(q, k, v, causal=True, scale=0.3)
    torch.testing.assert_close(o, right)
    torch.testing.assert_close(torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(right, (q, k, v), do))
    assert foreign.inspect.signature(process).parameters.keys() == {*"qkv", "causal", "scale"}


def test_what_the_row_is_told_is_no_seed_and_no_draw(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All questions of a whole run, as they are sent: names of settings, oracles and draws are not among them."""
    sent: list[bytes] = []
    dumps = foreign.pickle.dumps

    def noted(what: Any, **options: Any) -> bytes:
        sent.append(dumps(what, **options))
        return sent[-1]

    monkeypatch.setattr("lmsys.bench.foreign.pickle.dumps", noted)
    assert records(mine, "row")["row"]["outcome"] == "ok"
    assert len(sent) > 50 and not any(word in text for text in sent for word in (b"seed", b"draw", b"Settings"))


@pytest.mark.parametrize("text", [b"[1]", b"null", b"{", b"[" * 50000, b"\x80\x04."], ids=range(5))
def test_answers_are_json_that_nothing_unpickles(text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = foreign.Process(Entry("row", "mine.py:row"), Settings())
    process._worker, process._line, process._trace = Mock(), Mock(), (tmp_path / "trace").open("w+b")
    monkeypatch.setattr("lmsys.bench.foreign.os.killpg", Mock())
    process._line.recv_bytes.return_value = b'{"a": 1}'
    assert process.ask("tell") == {"a": 1}
    process._line.recv_bytes.return_value = text
    with pytest.raises(Failed):
        process.ask("tell")


def test_every_row_of_a_comparison_is_foreign_and_no_file_is_loaded(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("raise AssertionError('its code is loaded')")
    table = Table("attention", [Entry("naive", "lmsys.attention.naive:naive")])
    vars(table)["_all_rows"] = table._own_rows | {"plugin": Entry("plugin", "plugin:row")}  # as entry points add them
    foreign_row = Mock(side_effect=lambda entry: entry)
    names = ["naive", "plugin", f"{mine}:row"]
    assert [row.name for row in table.select(names, foreign_row)] == ["naive", "plugin", "row"]
    assert [call.args[0].name for call in foreign_row.call_args_list] == ["naive", "plugin", "row"]
    with pytest.raises(ValueError, match="a row 'naive' of its own"):
        table.select([f"{mine}:naive"], foreign_row)


@pytest.mark.gpu
@pytest.mark.usefixtures("foreign_processes")
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwdbwd"])
@pytest.mark.parametrize("length", [256, 4096])
def test_on_a_gpu_a_row_takes_as_long_in_its_own_process(direction: str, length: int, tmp_path: Path) -> None:
    """The same function in both: within a tenth and 5 us. Figures of a GPU that others use say nothing.

    The row is plain `scaled_dot_product_attention`, which is wrong for inputs that are not aligned: no small cases.
    """
    settings, file = Settings(device="cuda"), tmp_path / "mine.py"
    file.write_text(FILE)
    rows = [
        Entry("ours", "lmsys.attention.peers:sdpa"),
        replace(foreign.Foreign.of(settings, Entry("row", f"{file}:row")), name="theirs"),
    ]
    shape = 1, 16, 16, length, length, 64, "bfloat16", True
    cases = [AttentionTest("s", row, "cuda", *shape, direction) for row in rows]
    ours, theirs = harness.records(Attention(), cases, device="cuda", seconds_per_row=0.5, checks_files=False).values()
    assert ours["outcome"] == theirs["outcome"] == "ok", (ours["reason"], theirs["reason"])
    assert theirs["time_s"] == pytest.approx(ours["time_s"], rel=0.1, abs=5e-6)
