"""The benchmarks as a user runs them: small sweeps in processes of their own, with kernels from a file."""

import json
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.axes import parse_axes, sweep_called
from benchmarks.conftest import RecordedTimer
from benchmarks.sections import Axes, Section
from lmsys.measure import record
from tests.support import processes

KERNELS = '''
import functools
import time
import torch
from lmsys.attention.naive import naive


def right(q, k, v, *, causal=False, scale=None):
    return naive(q, k, v, causal=causal, scale=scale)


class Explicit(torch.autograd.Function):
    """Called as f(q, k, v, is_causal) on (B, S, D); its backward is exact but for a factor on dk."""

    dk_factor = 1.0

    @classmethod
    def forward(cls, ctx, q, k, v, is_causal):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            ctx.o = naive(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), causal=is_causal).squeeze(1)
        ctx.inputs = q, k, v
        return ctx.o.detach()

    @classmethod
    def backward(cls, ctx, do):
        dq, dk, dv = torch.autograd.grad(ctx.o, ctx.inputs, do)
        return dq, dk * cls.dk_factor, dv, None


class wrong_dk(Explicit):
    dk_factor = 1.01


ANSWERS = {}


def cached(q, k, v, *, causal=False, scale=None):
    key = (q.data_ptr(), q.shape, q.dtype, causal)
    if key not in ANSWERS:
        ANSWERS[key] = naive(q, k, v, causal=causal, scale=scale)
    return ANSWERS[key]


memoised = functools.lru_cache(naive)


def versioned(q, k, v, *, causal=False, scale=None):
    key = (q.data_ptr(), q._version, q.shape, q.dtype, causal)
    if key not in ANSWERS:
        ANSWERS[key] = naive(q, k, v, causal=causal, scale=scale)
    return ANSWERS[key]


class changing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        ctx.mark_dirty()
        o = naive(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), causal=is_causal).squeeze(1)
        q.mul_(1.5)
        return o


def hungry(q, k, v, *, causal=False, scale=None):
    return torch.empty(2**45, dtype=torch.int8, device=q.device)


def broken(q, k, v, *, causal=False, scale=None):
    raise TypeError("no such kernel")


def undefined(q, k, v, *, causal=False, scale=None):
    return (q + k + v) * float("nan")


def only_bfloat16_and_off(q, k, v, *, causal=False, scale=None):
    assert q.dtype == torch.bfloat16
    return naive(q, k, v, causal=causal, scale=scale) * 1.02


def slow(q, k, v, *, causal=False, scale=None):
    time.sleep(0.02)
    return naive(q, k, v, causal=causal, scale=scale)


if torch.cuda.is_available():
    SIDE = torch.cuda.Stream()


def reads_early(q, k, v, *, causal=False, scale=None):
    """On a stream that does not wait for what the caller has asked for before."""
    with torch.cuda.stream(SIDE):
        o = naive(q, k, v, causal=causal, scale=scale)
    torch.cuda.current_stream().wait_stream(SIDE)
    return o


def nobody_waits(q, k, v, *, causal=False, scale=None):
    """On a stream that the caller does not wait for."""
    SIDE.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE):
        return naive(q, k, v, causal=causal, scale=scale)
'''

CACHED = ("cached", "memoised", "versioned")
SMALL = ("--sweep", "smoke", "--batch", "1", "--heads", "2", "--head-dim", "16")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "mine.py"
    path.write_text(KERNELS)
    return path


command = partial(processes.command, "attention")
run = partial(processes.run, "attention")


def by_case(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(one["impl"], one["dtype"], one["direction"]): one for one in record.load(path)["records"]}


@pytest.fixture(scope="module")
def swept(kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    output = tmp_path_factory.mktemp("swept") / "out.json"
    names = ("right", "Explicit", "wrong_dk", *CACHED, "changing", "hungry", "broken", "undefined")
    mine = [f"{kernels}:{name}" for name in (*names, "only_bfloat16_and_off")]
    rows = ",".join(["naive", *mine, "flash_attn_2"])
    options = (*SMALL, "--length", "33", "--causal", "yes", "--benchmark-only", "--benchmark-min-rounds", "12")
    return run(*options, "--benchmark-max-time", "0.01", "--attention", rows, "--benchmark-json", output), output


def test_every_row_ends_as_a_cell_and_the_sweep_succeeds(swept: tuple[Any, Path]) -> None:
    ended, output = swept
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = by_case(output)
    for dtype in ("float32", "bfloat16"):
        for direction in ("fwd", "bwd", "fwdbwd"):
            outcome = {row: one["outcome"] for (row, *rest), one in found.items() if rest == [dtype, direction]}
            assert {row: outcome[row] for row in ("naive", "right", "Explicit")} == dict.fromkeys(
                ("naive", "right", "Explicit"), "ok"
            )
            assert outcome["wrong_dk"] == ("ok" if direction == "fwd" else "wrong")
            assert (outcome["hungry"], outcome["broken"], outcome["undefined"]) == ("oom", "error", "wrong")
            assert outcome["flash_attn_2"] == "unsupported"
            for row in CACHED:
                assert outcome[row] == ("wrong" if direction == "fwd" else "error")  # its graph is used up
            assert outcome["changing"] == ("wrong" if direction == "fwd" else "error")  # and it has no backward
    assert not output.with_name("out.json.partial").exists()
    assert found["changing", "float32", "fwd"]["reason"] == "the row changes its inputs"
    assert found["only_bfloat16_and_off", "bfloat16", "fwd"]["outcome"] == "wrong"  # the root-mean-square rule
    assert "wrong smoke-B1H2Q33K33D16-bfloat16-causal-bwd-wrong_dk (error ratio" in ended.stdout


def test_a_wrong_row_has_its_error_ratio_and_no_time(swept: tuple[Any, Path]) -> None:
    for (row, _, direction), one in by_case(swept[1]).items():
        if row == "wrong_dk" and direction != "fwd":
            assert one["error_ratio"] > 1 and "dk" in one["reason"]
        if one["outcome"] == "ok":
            assert 0 <= one["error_ratio"] <= 1 and one["time_s"] > 0 and one["rounds"] >= 12
            assert one["peak_bytes"] > 0 and (one["saved_bytes"] is None) == (direction == "fwd")
            assert one["flops_per_s"] == pytest.approx(one["flops"] / one["time_s"])
        else:
            assert "time_s" not in one and "samples_s" not in one and one["reason"]


def test_the_result_is_pytest_benchmarks_and_ours(swept: tuple[Any, Path]) -> None:
    content = json.loads(swept[1].read_text())
    records = {one["id"]: one for one in content["lmsys"]["records"]}
    assert {"name", "torch", "commit", "command", "ceilings"} <= content["lmsys"]["machine"].keys()
    assert "node" not in content["machine_info"]
    timed = [one["id"] for one in records.values() if one["outcome"] == "ok"]
    assert sorted(entry["extra_info"]["id"] for entry in content["benchmarks"]) == sorted(timed)
    for entry in content["benchmarks"]:
        one = records[entry["extra_info"]["id"]]
        assert entry["stats"]["data"] == one["samples_s"] and len(one["samples_s"]) <= 30
        assert (entry["stats"]["median"], entry["stats"]["rounds"]) == (one["time_s"], one["rounds"])
    sampled_together = {one["comparison"] for one in records.values() if one["id"].startswith("smoke-B1H2Q33")}
    assert len(sampled_together) == 2 * 3


TIMER = RecordedTimer()


@pytest.mark.benchmark(timer=TIMER)
def test_replayed_samples_are_the_stats(benchmark: Any) -> None:
    samples = [0.1, 1 / 3, 2e-7, 1e-9, 123.456, 0.1 + 0.2]
    TIMER.replay(samples)
    benchmark.pedantic(lambda: None, rounds=len(samples))
    if benchmark.enabled:
        assert benchmark.stats.stats.data == samples


def test_what_an_interrupted_run_measured_is_kept_and_resumed(kernels: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    rows = f"naive,{kernels}:slow,{kernels}:wrong_dk"
    options = (
        *SMALL,
        "--benchmark-max-time",
        "0.05",
        "--causal",
        "yes",
        "--dtype",
        "float32",
        "--direction",
        "fwd,bwd",
        "--attention",
        rows,
    )
    lengths = ("--length", "16,17,18,19,20,21,22,23")
    line = command(*options, *lengths, "--benchmark-json", output)
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a test run in the background would not
    process = subprocess.Popen(
        line, cwd=processes.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=processes.ENVIRONMENT,
        preexec_fn=heed,
    )  # fmt: skip
    partial = output.with_name("out.json.partial")
    while process.poll() is None and (not partial.is_file() or partial.read_text().count("\n") < 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    # pytest itself fails to show where, now and then: in Python 3.11 an interrupt may fall between two lines.
    assert process.returncode == 2 or "self._rawentry.tb_lineno - 1" in said, printed + said
    before = {one["id"]: one for one in record.load(output)["records"]}
    assert 0 < len(before) < 8 * 2 * 3

    fewer = ("--length", "16,23")
    resumed = run(*options, *fewer, "--resume", output, "--benchmark-json", tmp_path / "more.json")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    after = {one["id"]: one for one in record.load(tmp_path / "more.json")["records"]}
    assert {one["queries"] for one in after.values()} >= {16, 23}
    for name, one in before.items():
        if one["outcome"] == "ok":
            assert after[name] == one
    entries = {entry["extra_info"]["id"] for entry in json.loads(output.read_text())["benchmarks"]}
    carried = {entry["extra_info"]["id"] for entry in json.loads((tmp_path / "more.json").read_text())["benchmarks"]}
    assert entries <= carried <= {name for name, one in after.items() if one["outcome"] == "ok"}


def test_without_timing_rows_are_verified_only(kernels: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    options = (*SMALL, "--length", "16", "--dtype", "float32", "--causal", "no", "--direction", "bwd")
    rows = f"naive,{kernels}:wrong_dk"
    ended = run(*options, "--attention", rows, "--benchmark-disable", "--benchmark-json", output)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = by_case(output)
    assert found["naive", "float32", "bwd"]["outcome"] == "ok" and "time_s" not in found["naive", "float32", "bwd"]
    assert found["wrong_dk", "float32", "bwd"]["outcome"] == "wrong"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--benchmark-timer=time.time"], "--benchmark-timer is not for these benchmarks"),
        (["--attention", "naive,flash_torhc"], "did you mean flash_torch"),
        (["--attention", ""], "unknown attention ''"),
        (["--benchmark-min-rounds", "3"], "--benchmark-min-rounds 3: a median needs at least 10 samples"),
        (["--resume", "pyproject.toml"], "--resume pyproject.toml: "),
    ],
)
def test_bad_options_end_the_run_with_one_line(options: list[str], message: str) -> None:
    ended = run(*options)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tiers", "128:64,100:64", "'100:64': must read queries:keys, both powers of two"),
        ("--tiers", "128", "powers of two"),
        ("--length", "0", "--length '0': must be a positive whole number"),
        ("--head-dim", "64.5", "positive whole number"),
        ("--dtype", "bfloat", "must be one of float32, float16, bfloat16; did you mean bfloat16"),
        ("--direction", "forward", "must be one of fwd, bwd, fwdbwd"),
        ("--causal", "maybe", "must be one of yes, no"),
        ("--heads", "12:5", "must be a multiple of key/value heads"),
    ],
)
def test_bad_axis_values_are_named(option: str, value: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_axes({option: value})
    assert message in str(caught.value)


def test_an_unknown_sweep_is_named() -> None:
    with pytest.raises(ValueError, match="--sweep 'fulll'.*did you mean full"):
        sweep_called("fulll", "cpu")


def test_named_axes_take_the_place_of_a_sections_own() -> None:
    section = Section("s", ((1024, 1024),), (64,), ("float32",), (True,), ("fwd",), tokens=4096, width=256)
    (shape,) = section.shapes()
    assert (shape.batch, shape.heads, shape.kv_heads) == (4, 4, 4)
    axes = parse_axes({"--tiers": "128:64", "--heads": "8:2", "--head-dim": "32,128"})
    assert axes == Axes(heads=((8, 2),), lengths=((128, 64),), head_dims=(32, 128))
    shapes = list(axes.over(section).shapes())
    assert [(one.batch, one.heads, one.kv_heads, one.queries, one.keys) for one in shapes] == [(32, 8, 2, 128, 64)] * 2
    assert [one.head_dim for one in shapes] == [32, 128]


@pytest.mark.gpu
def test_work_on_another_stream_is_wrong(kernels: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    rows = f"naive,{kernels}:reads_early,{kernels}:nobody_waits"
    options = (*SMALL, "--length", "2048", "--dtype", "float32", "--causal", "no", "--direction", "fwd")
    ended = run(*options, "--attention", rows, "--benchmark-json", output)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcome = {row: one["outcome"] for (row, *_), one in by_case(output).items()}
    assert outcome == {"naive": "ok", "reads_early": "wrong", "nobody_waits": "wrong"}
