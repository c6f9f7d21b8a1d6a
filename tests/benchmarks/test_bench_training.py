"""benchmarks/bench_training.py: its cases, which trainings are wrong, and what an interrupted run keeps.

STRATEGIES is a user's file with wrong strategies. A training is judged by its loss curve, and by the norm of its first
gradient. The corpus is a small one, and a model trains for seconds.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_training import CURVE_POINTS, Training
from benchmarks.sweeps import SWEEPS
from benchmarks.training import rank
from benchmarks.training.rank import TrainingCase, tokens_of
from lmsys.bench import Failed, Grid, Settings, Sweep, record
from lmsys.bench.ranks import Ranks
from lmsys.bench.results import Session, read_results
from lmsys.bench.runner import Runner
from lmsys.measure import machine
from lmsys.testing import CURVE_BUDGET, CURVE_STEPS, NORM_BUDGET, curve_ratios
from lmsys.training.corpora import END_OF_TEXT, Corpus, text_file
from tests.support import harness

STRATEGIES = '''
import torch.distributed as dist

from lmsys.parallel.baselines import Naive


class one_percent_off(Naive):
    def _synchronize(self):
        super()._synchronize()
        for p in self.trainable:
            p.grad.div_(1.01)


class late(Naive):
    """Synchronizes only in the first step."""

    def _synchronize(self):
        if not hasattr(self, "begun"):
            super()._synchronize()
        self.begun = True


class apart(Naive):
    """Leaves one parameter, which hardly matters, unsynchronized."""

    def _synchronize(self):
        kept = self.trainable[1].grad.clone()
        super()._synchronize()
        self.trainable[1].grad = kept


class broken(Naive):
    def _synchronize(self):
        if dist.get_rank() == 1:
            raise TypeError("no such collective")
        super()._synchronize()
'''
TINY = {
    "size": ("tiny",),
    "context": (16,),
    "precision": ("fp32",),
    "batch": (2,),
    "world_size": (2,),
    "attention": ("naive",),
    "strategy": ("none", "bucketed"),
    "epochs": 3,
    "train_tokens": 330,
    "val_tokens": 64,
    "vocab_size": 300,
}


@pytest.fixture(scope="module", autouse=True)
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The corpus is the text of benchmarks/*.py, in place of the standard library's modules."""
    file = tmp_path_factory.mktemp("corpus") / "text"
    sources = sorted(Path(rank.__file__).parents[1].glob("*.py"))
    file.write_text("".join(path.read_text() + END_OF_TEXT for path in sources))
    corpus: Corpus = text_file(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.corpora, "stdlib", lambda: corpus)
        tokens_of.cache_clear()
        yield
    tokens_of.cache_clear()


def cases_of(**changes: Any) -> list[TrainingCase]:
    """The cases of a grid with the values of TINY, but for `changes`."""
    session = Session(Settings(device="cpu"), Sweep(grids={"training": (Grid("s", **(TINY | changes)),)}))
    return [session._cases["training", name] for name in session.add(Training)]


def records(settings: dict[str, Any], **changes: Any) -> dict[str, dict[str, Any]]:
    """{"attention row-strategy": record} of these cases. `settings`: of `harness.runner`."""
    by_row = harness.records(Training(), cases_of(**changes), seconds_per_row=0.0, **settings)
    return {name: record.check_record(row) for name, row in by_row.items()}


def session_of(**texts: str) -> Session:
    """A session of the sweep TINY with these options of the command line, such as val_tokens="15"."""
    options = {"--" + name.replace("_", "-"): text for name, text in texts.items()}
    return Session(Settings(device="cpu"), Sweep(grids={"training": (Grid("s", **TINY),)}), texts=options)


def test_the_sweep_matrix_crosses_attention_rows_with_strategies() -> None:
    (grid,) = (grid for grid in SWEEPS["full"]["cuda"].grids["training"] if grid.name == "matrix")
    cases = cases_of(**{"batch": (8,), "precision": ("bf16",), "val_tokens": 65_536, **grid, "world_size": (2,)})
    assert len(cases) == 4 * 7 and len({case.group for case in cases}) == 1
    assert {case.global_batch for case in cases} == {16} and cases[0].steps * cases[0].epochs >= CURVE_STEPS
    assert [case.world_size for case in cases[:7]] == [1, 2, 2, 2, 2, 2, 2]
    model = cases[0].run_config(seed=0).model
    assert (model.d_model, model.num_layers, model.num_heads, model.context_length) == (768, 12, 12, 1024)


def test_the_command_line_names_rows_and_sizes() -> None:
    options = {"strategy": "none,bucketed,naive", "world_size": "1,2", "bucket_mb": "1,25", "batch": "3"}
    options |= {"epochs": "5", "train_tokens": "1000", "val_tokens": "200", "context": "32", "dtype": "x"}
    session = session_of(**options, attention="sdpa_flash")
    start, ids = "s-tiny-S32B3-fp32-", session.add(Training)
    assert [name.removeprefix(start) for name in ids] == [
        *("W1-T1000x5-sdpa_flash-none", "W2-T1000x5-sdpa_flash-none", "W2-T1000x5-sdpa_flash-bucketed-1MiB"),
        *("W2-T1000x5-sdpa_flash-bucketed-25MiB", "W2-T1000x5-sdpa_flash-naive"),
    ]
    first, second = (session._cases["training", name] for name in ids[:2])
    assert [(case.global_batch, case.steps, case.windows) for case in (first, second)] == [(3, 10, 6), (6, 5, 6)]


def test_too_few_tokens_for_a_step_or_a_window_are_refused() -> None:
    step = r"--train-tokens 63: must be at least 64, .* \(batch 2 x 2 ranks x context 16"
    with pytest.raises(ValueError, match=step):
        session_of(train_tokens="63").add(Training)
    with pytest.raises(ValueError, match="--val-tokens 15: must be at least the context, 16"):
        session_of(val_tokens="15").add(Training)


def test_as_many_tokens_are_made_as_options_name() -> None:
    paths = tokens_of(1000, 50, 300)
    assert [len(np.load(path)) for path in paths] == [1001, 51]
    assert tokens_of(1000, 50, 300) == paths, "made once a run"
    with pytest.raises(Failed, match=r"--train-tokens 10000000: must be less than \d+, which is all"):
        tokens_of(10_000_000, 50, 300)


TIMES_BUDGET = st.floats(-1.5, 1.5)  # a deviation as a multiple of its budget: right from -1 to 1


@given(
    st.lists(st.tuples(TIMES_BUDGET, st.floats(1, 9)), min_size=1, max_size=120),
    TIMES_BUDGET,
    st.sampled_from([*CURVE_BUDGET]),
)
def test_a_curve_is_right_within_its_budget(steps: list[tuple[float, float]], norm: float, dtype: str) -> None:
    """Each step has a deviation of its loss, and a loss; `norm` is the deviation of the first gradient's norm."""
    budget = CURVE_BUDGET[dtype]
    reference = [loss for _, loss in steps]
    losses = [loss + off * budget for off, loss in steps]
    ratios = curve_ratios(losses, reference, 2 * (1 + norm * NORM_BUDGET[dtype]), 2.0, dtype)
    worst, first = ratios.values()
    assert worst == pytest.approx(max(abs(off) for off, _ in steps[:CURVE_STEPS]), abs=1e-9)
    assert first == pytest.approx(abs(norm), abs=1e-9)
    losses[0] = math.nan
    assert max(curve_ratios(losses, reference, math.nan, 2.0, dtype).values()) == math.inf


def test_all_supported_strategies_have_one_loss_curve(two_ranks: Ranks) -> None:
    lines: list[str] = []
    strategies = ("none", "zero1", "torch_ddp_tuned", "torch_fsdp2")
    settings = {"ranks": two_ranks, "say": lines.append}
    by_row = records(settings, attention=("sdpa_flash",), strategy=strategies)
    assert "torch_fsdp2" in by_row["sdpa_flash-torch_fsdp2"]["reason"]
    assert by_row.pop("sdpa_flash-torch_fsdp2")["outcome"] == "unsupported"
    for row in by_row.values():
        assert row["outcome"] == "ok", row["reason"]
        assert row["rounds"] == 2 and row["steps"] == 15 and row["steps_per_epoch"] == 5 and row["tokens"] == 320
        assert row["tokens_per_s"] == pytest.approx(320 / row["time_s"])
        assert row["error_ratio"] <= 1 and row["curve_difference"] <= 1e-3 and row["first_step_s"] > 0
        assert len(row["curve_steps"]) == len(row["curve_losses"]) == 15 <= CURVE_POINTS + 1
        assert row["world_size"] == (1 if row["strategy"] == "none" else 2)
        assert row["peak_bytes"] == max(row["rank_peak_bytes"]) > 4 * row["num_parameters"]
        assert len(row["rank_peak_bytes"]) == row["world_size"] and row["loss"] == row["curve_losses"][-1]
    held_out = [row["valid_loss"] for row in by_row.values()]
    assert max(held_out) - min(held_out) < 1e-3
    assert by_row["sdpa_flash-none"]["curve_losses"][-1] < by_row["sdpa_flash-none"]["curve_losses"][0]
    assert any("[2/4] sdpa_flash-zero1" in line and "tokens/s" in line for line in lines)
    assert sum("the reference: naive attention" in line for line in lines) == 1


def under_way(case: TrainingCase, text: rank.Tokens) -> int:
    """How many gathers of ZeRO-1 go on on this rank when a profiled step has ended, of those that it has begun."""
    seen = list[int]()

    def first_steps(make: Any, step: Any, device: str) -> Any:
        make()
        step()
        gathers = rank._TRAINER[0].strategy.wrapper._gathering
        assert gathers
        seen.append(sum(gather.work is not None for gather in gathers))
        return 0.0, {"step": {"peak_bytes": 0}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.memory, "first_steps", first_steps)
        rank.inspect(case, text, 0)
    return seen[0]


def test_no_collective_is_under_way_when_a_profile_ends(two_ranks: Ranks) -> None:
    """torch's profiler crashes on it, some time later."""
    (case,) = cases_of(strategy=("zero1",))
    text = tokens_of(case.tokens, case.val_tokens, case.vocab_size)
    assert two_ranks.run(2, "gloo", under_way, case, text) == [0, 0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train_tokens": 10}, "--train-tokens 10: must be at least 64"),
        ({"bucket_mb": ("auto",), "strategy": ("bucketed",)}, "--bucket-mb is to name MiB"),
        ({"precision": ("tf32",)}, "TF32 is an arithmetic of CUDA"),
        ({"precision": ("fp16",)}, "with fp16 each row may skip other steps"),
        ({"compile": ("graphed",)}, "CUDA graphs need train.device=cuda, not cpu"),
        ({"compile": ("fused",)}, "fused blocks are kernels for a CUDA device, and this is cpu"),
        ({"compile": ("fused",), "strategy": ("zero1",)}, "fused blocks are not called"),
        ({"attention": ("sdpa_cudnn",)}, "CUDA"),
        ({"attention": ("llama", "llama_tuned")}, "a training is of our own model: name a row of attention"),
    ],
)
def test_unsupported_trainings_say_why(changes: dict[str, Any], reason: str, two_ranks: Ranks) -> None:
    for row in records({"ranks": two_ranks}, **changes).values():
        assert row["outcome"] == "unsupported" and reason in row["reason"]


def test_cases_are_only_checked_without_timing(two_ranks: Ranks) -> None:
    for row in records({"ranks": two_ranks, "timed": False}, strategy=("bucketed",)).values():
        assert row["outcome"] == "ok" and "not timed" in row["reason"] and "time_s" not in row
        assert row["steps"] == 15 and row["curve_difference"] <= 1e-3


def test_an_interrupted_run_keeps_its_records_and_is_resumed(
    two_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "ready", lambda self: None)  # no ceilings
    facts = machine.describe("cpu", command="", seed=0, sweep="smoke")
    lines: list[str] = []

    def interrupted(line: str) -> None:
        lines.append(line)
        if "[2/3]" in line:
            raise KeyboardInterrupt

    sweep = Sweep(grids={"training": (Grid("s", **(TINY | {"strategy": ("none", "bucketed", "naive")})),)})
    output = tmp_path / "out.json"

    def session(say: Any) -> tuple[Session, list[tuple[str, str]]]:
        opened = Session(Settings(device="cpu", seconds_per_row=0.0), sweep, output)
        vars(opened)["runner"] = harness.runner(two_ranks, say, seconds_per_row=0.0)
        vars(opened.runner)["machine"] = facts
        return opened, [("training", name) for name in opened.add(Training)]

    first, keys = session(interrupted)
    first.select(keys)
    with pytest.raises(KeyboardInterrupt):
        first.result(keys[0])
    (kept,) = record.load(output)["records"]
    assert kept["id"] == keys[0][1] and kept["time_s"] > 0
    lines.clear()
    second, _ = session(lines.append)
    for content, entries in read_results(output):
        second.resume(content, entries)
    second.select(keys)
    assert second.result(keys[2])["outcome"] == "ok"
    assert second.carried[keys[0]] == kept and not any("naive-none" in line for line in lines)
    assert [saved["id"] for saved in record.load(output)["records"]] == [name for _, name in keys]


def test_wrong_and_failing_strategies_have_records(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STRATEGIES)
    users_rows = tuple(f"{tmp_path}/own.py:{name}" for name in ("one_percent_off", "late", "apart", "broken"))
    by_row = records({"ranks": two_ranks}, strategy=users_rows)
    outcomes = {name.removeprefix("naive-"): row["outcome"] for name, row in by_row.items()}
    wrong = dict.fromkeys(("one_percent_off", "late", "apart"), "wrong")
    assert outcomes == wrong | {"broken": "error"}, [row["reason"] for row in by_row.values()]
    off = by_row["naive-one_percent_off"]
    assert "the first gradient's norm, off by 0.99 %" in off["reason"] and off["error_ratio"] > 5
    assert off["norm_difference"] == pytest.approx(0.0099, abs=1e-4) and "time_s" not in off
    failed = by_row["naive-broken"]["reason"]
    assert "rank 1 failed" in failed and "no such collective" in failed
