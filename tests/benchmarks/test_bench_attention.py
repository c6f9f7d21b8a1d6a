"""benchmarks/bench_attention.py: right rows are timed, and rows that fail in any way have records without a time.

A row is an implementation. KERNELS is the file of a user, whose rows fail in different ways. A new way to fail is a
function there, with its outcome in `test_every_row_has_its_outcome`. Rows that are wrong for some inputs alone are in
tests/support/wrong_kernels.py.
"""

import json
import os
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.attention.check import check_small
from benchmarks.bench_attention import Attention, rows_of
from benchmarks.sweeps import SWEEPS
from lmsys.attention import ATTENTION
from lmsys.bench import Candidate, Entry, Grid, Settings
from lmsys.bench.fields import OPTION
from lmsys.deterministic import CUBLAS_WORKSPACE
from lmsys.measure import compare
from tests.support import processes
from tests.support.harness import cases_of, results
from tests.support.processes import ROOT
from tests.support.variants import few_by_default

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
    """Runs on a stream that does not wait for the caller's earlier work."""
    with torch.cuda.stream(SIDE):
        o = naive(q, k, v, causal=causal, scale=scale)
    torch.cuda.current_stream().wait_stream(SIDE)
    return o


def nobody_waits(q, k, v, *, causal=False, scale=None):
    """Runs on a stream for which the caller does not wait."""
    SIDE.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE):
        return naive(q, k, v, causal=causal, scale=scale)
'''

CACHED = ("cached", "memoised", "versioned")
SMALL = {  # values of the benchmark's axes
    "length": ((33, 33),),
    "head_dim": (16,),
    "heads": ((2, 2),),
    "causal": (True,),
    "direction": ("fwd", "bwd", "fwdbwd"),
}
Records = dict[tuple[str, str, str], dict[str, Any]]  # by row, dtype and direction


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "mine.py"
    path.write_text(KERNELS)
    return path


def swept_rows(
    rows: list[str], device: str = "cpu", timed: bool = True, checks_files: bool = True, **changes: Any
) -> Records:
    """The records of these rows.

    timed         False: rows are checked, but not timed
    checks_files  True: rows from a file are first checked in the small cases of `lmsys check`
    changes       other values of axes than those of SMALL
    """
    values = {"dtype": ("float32", "bfloat16"), **SMALL, **changes}
    cases = cases_of(Attention(), Settings(device=device), attention=tuple(rows), **values)
    records: Records = {}
    for group in dict.fromkeys(case.group for case in cases):
        for record in results(
            Attention(),
            [case for case in cases if case.group == group],
            min_rounds=12,
            device=device,
            timed=timed,
            checks_files=checks_files,
        ):
            records[record["impl"], record["dtype"], record["direction"]] = record
    return records


@pytest.fixture(scope="module")
def swept(kernels: Path) -> Records:
    names = ("right", "Explicit", "wrong_dk", *CACHED, "changing", "hungry", "broken", "undefined")
    users_rows = [f"{kernels}:{name}" for name in (*names, "only_bfloat16_and_off")]
    # Without the small cases of `lmsys check`, so that each row reaches the check at its case's shape.
    return swept_rows(["naive", *users_rows, "flash_attn_2"], checks_files=False)


def test_every_row_has_its_outcome(swept: Records) -> None:
    for dtype in ("float32", "bfloat16"):
        for direction in ("fwd", "bwd", "fwdbwd"):
            outcome = {row: record["outcome"] for (row, *rest), record in swept.items() if rest == [dtype, direction]}
            assert {outcome[row] for row in ("naive", "right", "Explicit")} == {"ok"}
            assert outcome["wrong_dk"] == ("ok" if direction == "fwd" else "wrong")
            assert (outcome["hungry"], outcome["broken"], outcome["undefined"]) == ("oom", "error", "wrong")
            assert outcome["flash_attn_2"] == "unsupported"
            for row in CACHED:
                # A backward fails, since autograd's graph of the remembered result is used up.
                assert outcome[row] == ("wrong" if direction == "fwd" else "error")
            assert outcome["changing"] == ("wrong" if direction == "fwd" else "error")  # it has no backward
    assert swept["changing", "float32", "fwd"]["reason"] == "the row changes its inputs"
    assert swept["only_bfloat16_and_off", "bfloat16", "fwd"]["outcome"] == "wrong"  # the root-mean-square rule


def test_a_wrong_row_has_its_error_ratio_and_no_time(swept: Records) -> None:
    for (row, _, direction), record in swept.items():
        if row == "wrong_dk" and direction != "fwd":
            assert record["error_ratio"] > 1 and "dk" in record["reason"]
        if record["outcome"] == "ok":
            assert 0 <= record["error_ratio"] <= 1 and record["time_s"] > 0 and record["rounds"] >= 12
            assert record["peak_bytes"] > 0 and (record["saved_bytes"] is None) == (direction == "fwd")
            assert record["flops_per_s"] == pytest.approx(record["flops"] / record["time_s"])
            assert record["matmul_ceiling_fraction"] == pytest.approx(
                record["flops_per_s"] / (1e12 if record["dtype"] == "float32" else 2e12)
            )
        else:
            assert "time_s" not in record and "samples_s" not in record and record["reason"]
    assert len({record["comparison"] for record in swept.values()}) == 2 * 3


REFUSED = ("beyond_128_keys", "no_scale", "other_heads", "no_tail")
TAKEN = ("right", "of_a_course")  # the second has no parameter `scale`, and is not checked with one


@pytest.mark.parametrize("device", few_by_default(["cpu", "cuda"], one_in=2))
def test_the_smoke_sweep_refuses_what_is_wrong_beyond_one_tile(device: str) -> None:
    """It also refuses rows that are wrong for grouped heads, an odd length or a given scale.

    device  the sweep's shapes for this device are used; the rows run on a CPU
    """
    outcomes: dict[str, set[str]] = {}
    rows = [f"{ROOT / 'tests' / 'support' / 'wrong_kernels.py'}:{name}" for name in (*TAKEN, *REFUSED)]
    for grid in SWEEPS["smoke"][device].grids["attention"][:2]:
        axes = {name: grid[name] for name in ("length", "head_dim", "causal", "batch", "heads")}
        for record in swept_rows(rows, **axes, dtype=("float32",), direction=("fwdbwd",), timed=False).values():
            outcomes.setdefault(record["impl"], set()).add(record["outcome"])
            if record["impl"] == "no_scale":
                assert "a scale of its own, float32: the argument scale is ignored" in record["reason"], record[
                    "reason"
                ]
    assert all(outcomes[name] == {"ok"} for name in TAKEN) and all("wrong" in outcomes[name] for name in REFUSED), (
        outcomes
    )


def test_a_row_from_a_file_is_checked_at_other_shapes_before_it_is_timed() -> None:
    """The row is right in the only shape of this run. So it is timed if the check of files is left out (--no-check)."""
    row = f"{ROOT / 'tests' / 'support' / 'wrong_kernels.py'}:other_heads"
    axes: dict[str, Any] = {"dtype": ("float32",), "direction": ("fwd",), "heads": ((2, 2),)}
    (checked,) = swept_rows([row], **axes).values()
    assert checked["outcome"] == "wrong" and "time_s" not in checked and "samples_s" not in checked
    assert checked["reason"].startswith("lmsys check: grouped heads, float32: query head h reads key head h % kv_heads")
    assert checked["quick_check"] in checked["reason"]
    (unchecked,) = swept_rows([row], **axes, checks_files=False).values()
    assert unchecked["outcome"] == "ok" and unchecked["time_s"] > 0 and "quick_check" not in unchecked
    (table,) = swept_rows(["naive"], **axes, checks_files=False).values()
    assert table["quick_check"] == "4 cases"


@pytest.mark.parametrize(
    ("name", "message", "of_table"),
    [("unshifted", "no maximum is subtracted", "wrong"), ("other_heads", "grouped heads, float32", "ok")],
)
def test_a_row_of_the_table_is_checked_with_extreme_scores_before_it_is_timed(
    name: str, message: str, of_table: str
) -> None:
    """The row is judged as a row of the table, and as one from a file, which is checked at other shapes, too."""
    axes = {"dtype": ("float32",), "direction": ("fwd",), "length": ((64, 64),)}
    (case,) = cases_of(Attention(), Settings(device="cpu"), attention=("naive",), **{**SMALL, **axes})
    from_file = f"{ROOT / 'tests' / 'support' / 'wrong_kernels.py'}:{name}"
    for target, outcome in ((f"tests.support.wrong_kernels:{name}", of_table), (from_file, "wrong")):
        candidate = Candidate(case=replace(case, entry=Entry(name, target)))
        candidate.watched = compare.attempt
        check_small([candidate])
        assert candidate.outcome == outcome and (message in str(candidate.reason)) == (outcome == "wrong")


@pytest.mark.parametrize(
    ("file", "axes", "named"),
    [
        (
            "museum/attention.py",
            {"length": ((64, 64),), "causal": (False, True), "direction": ("bwd",), "dtype": ("bfloat16",)},
            {
                "no_max": "no maximum is subtracted",
                "fixed_max": "a fixed number, about 10",
                "oob_zero": "keys that pad the last tile count in the maximum",
                "finite_sentinel": "the running maximum starts at about -5",
            },
        ),
        (
            "support/wrong_kernels.py",
            {"dtype": ("float32",), "direction": ("bwd",)},
            {
                "by_16_bytes": "wrong for inputs that are not aligned",
                "no_expanded_gradient": "wrong for a gradient of stride 0",
            },
        ),
    ],
)
def test_the_sweep_refuses_and_names_mistakes_that_usual_inputs_do_not_show(
    file: str, axes: dict[str, Any], named: dict[str, str]
) -> None:
    """`oob_zero` is right at this shape, where no key pads the last tile. The check of files finds it, too."""
    rows = [f"{ROOT}/tests/{file}:{name}" for name in named]
    swept = swept_rows(["naive", *rows], timed=False, **axes)
    assert {row for row, *_ in swept} == {"naive", *named}
    for (row, *_), record in swept.items():
        assert record["outcome"] == ("ok" if row == "naive" else "wrong"), record["reason"]
        assert row == "naive" or named[row] in record["reason"]


def test_timed_calls_with_extreme_scores_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is wrong for extreme scores, and is not checked with them before, is found wrong when it is timed.

    All draws for timed calls are extreme here (SHARE); usually only some are.
    """
    monkeypatch.setattr("benchmarks.attention.check.check_small", lambda *_: None)
    monkeypatch.setattr("lmsys.extremes.attention.SHARE", 1.0)
    row = f"{ROOT / 'tests' / 'support' / 'wrong_kernels.py'}:unshifted"
    (record,) = swept_rows([row], dtype=("float32",), direction=("fwd",)).values()
    assert record["outcome"] == "wrong" and "right before it was timed, not in timed call" in record["reason"]


def test_rows_named_on_the_command_line_run_in_every_grid_and_others_by_the_grids() -> None:
    def rows(**values: Any) -> list[str]:
        named = {"attention": (), "without": ()} | values
        cases = cases_of(Attention(), dtype=("float32",), **(SMALL | {"direction": ("fwd",)}), **named)
        return [case.impl for case in cases]

    assert rows(attention=("vectorized", "auto", "naive", "llama")) == ["vectorized", "naive"]
    grid = Grid("s", attention=("vectorized", "naive"), without=("naive",))
    assert [row.name for row in rows_of(grid)] == ["vectorized"]
    assert [row.name for row in rows_of(grid.but(attention=(), without=("flex",)))] == [
        n for n in ATTENTION if n != "flex"
    ]


@pytest.mark.gpu
def test_work_on_another_stream_is_wrong(kernels: Path) -> None:
    rows = ["naive", f"{kernels}:reads_early", f"{kernels}:nobody_waits"]
    records = swept_rows(rows, "cuda", length=((2048, 2048),), dtype=("float32",), causal=(False,), direction=("fwd",))
    outcome = {row: record["outcome"] for (row, *_), record in records.items()}
    assert outcome == {"naive": "ok", "reads_early": "wrong", "nobody_waits": "wrong"}


IN_ORDER = """
import torch
from lmsys.attention.naive import naive


def in_order(q, k, v, *, causal=False, scale=None):
    assert torch.are_deterministic_algorithms_enabled(), "torch is in its usual mode"
    return naive(q, k, v, causal=causal, scale=scale)
"""


def test_a_deterministic_case_runs_in_torchs_deterministic_mode(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(IN_ORDER)
    small = SMALL | {"direction": ("bwd",), "dtype": ("float32",), "attention": (f"{file}:in_order",)}
    for mode, outcome in ((True, "ok"), (None, "error")):
        (record,) = results(Attention(), cases_of(Attention(), **small, deterministic=(mode,)))
        assert record["outcome"] == outcome and record["deterministic"] is mode, record["reason"]
        assert mode or "in its usual mode" in record["reason"]
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("option", "axes", "is_set"),
    [
        ("no,yes", [], True),
        ("true", [], True),
        (None, ["deterministic=yes"], True),
        ("no", ["size=tiny"], False),
        ("maybe", [], False),
        (None, ["no equals sign"], False),
    ],
)
def test_deterministic_runs_set_what_torch_reads_once(
    option: str | None, axes: list[str], is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads CUBLAS_WORKSPACE_CONFIG once, so conftest.py sets it if any case is to be deterministic."""
    name, value = CUBLAS_WORKSPACE
    monkeypatch.setitem(os.environ, name, "")  # so that the variable is restored after the test
    del os.environ[name]
    given = SimpleNamespace(**{f"{OPTION}--deterministic": option})
    configure = runpy.run_path(str(processes.ROOT / "conftest.py"))["pytest_configure"]
    configure(SimpleNamespace(option=given, getoption={"lmsys_axis": axes}.__getitem__))
    assert os.environ.get(name) == (value if is_set else None)


@pytest.mark.gpu
def test_a_gpu_runs_deterministic_cases_after_others(tmp_path: Path) -> None:
    """torch reads how cuBLAS is to be deterministic at a process's first matmul, long before such a case."""
    out, rows = tmp_path / "out.json", "naive,sdpa_flash,flash_triton"
    small = "--length 256 --head-dim 64 --dtype bfloat16 --causal yes --direction bwd --benchmark-max-time 0.01".split()
    options = ("-k", "by_length", "--attention", rows, "--deterministic", "no,yes", "--benchmark-only")
    ended = processes.run("benchmarks/bench_attention.py", *options, *small, "--benchmark-json", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = json.loads(out.read_text())["lmsys"]["records"]
    assert len(records) == 6 and all(record["outcome"] == "ok" for record in records), [
        record["reason"] for record in records
    ]
    assert all(record["repeatable"] for record in records if record["deterministic"])
