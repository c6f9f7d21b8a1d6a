"""The benchmark of whole trainings: its cells, what makes one wrong, what is kept of a run that was interrupted."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import training_data
from benchmarks.axes import parse_training_axes
from benchmarks.model_cells import rows_called
from benchmarks.ranks import Ranks, failure_of
from benchmarks.sections import TrainingSection
from benchmarks.session import Session, Settings, read_results
from benchmarks.sweeps import SWEEPS
from benchmarks.training_cells import cells_of
from benchmarks.training_data import tokens_of
from benchmarks.training_trial import CURVE_POINTS, training_trial
from lmsys.measure import machine, record
from lmsys.parallel.group import WorkerError
from lmsys.testing import CURVE_BUDGET, CURVE_STEPS, NORM_BUDGET, curve_ratios
from lmsys.training.corpora import END_OF_TEXT, Corpus, text_file
from tests.support import processes

STRATEGIES = '''
import torch.distributed as dist

from lmsys.parallel.naive import Naive


class one_percent_off(Naive):
    def _synchronize(self):
        super()._synchronize()
        for p in self.trainable:
            p.grad.div_(1.01)


class late(Naive):
    """Right in the first step, and no synchronization later."""

    def _synchronize(self):
        if not hasattr(self, "begun"):
            super()._synchronize()
        self.begun = True


class apart(Naive):
    """A parameter that hardly matters is left to each rank."""

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
TINY = TrainingSection(
    "s", ("tiny",), (16,), ("naive",), ("none", "bucketed"), ("fp32",), batch=(2,), world_sizes=(2,), epochs=3,
    train_tokens=330, val_tokens=64, vocab_size=300,
)  # fmt: skip
OTHERS = "attention", "model", "loss", "anatomy", "precision", "data_parallel", "collectives", "tokenizer"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(scope="module", autouse=True)
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The modules here in the place of the standard library's."""
    text = tmp_path_factory.mktemp("corpus") / "text"
    sources = sorted(Path(training_data.__file__).parent.glob("*.py"))
    text.write_text("".join(path.read_text() + END_OF_TEXT for path in sources))
    corpus: Corpus = text_file(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_data, "stdlib", lambda: corpus)
        tokens_of.cache_clear()
        yield
    tokens_of.cache_clear()


@pytest.fixture
def settings(ranks: Ranks) -> Settings:
    found = Settings("cpu", "smoke", 0.0, 10, True, None, "")
    found.__dict__["machine"] = machine.describe("cpu", command="", seed=0, sweep="smoke")
    found.__dict__["ranks"] = ranks
    return found


def records(section: TrainingSection, settings: Settings) -> dict[str, dict[str, Any]]:
    """By attention row and strategy."""
    cells = list(cells_of(section, {}, None, "cpu"))
    found = [result.record for result in training_trial(cells, settings)]
    assert [one["id"] for one in found] == [cell.id for cell in cells]
    return {one["impl"]: record.check_record(one) for one in found}


def test_every_sweep_has_cells_of_its_own() -> None:
    for sweep in SWEEPS.values():
        for device in sweep.values():
            ids = [cell.id for part in device.trainings for cell in cells_of(part, {}, None, "cpu")]
            assert ids and len(set(ids)) == len(ids)
            assert not any(word in one for one in ids for word in OTHERS)


def test_the_matrix_is_that_of_the_sources() -> None:
    (part,) = SWEEPS["full"]["cuda"].trainings
    cells = list(cells_of(replace(part, world_sizes=(2,)), {}, None, "cpu"))
    assert len(cells) == 4 * 7 and len({cell.group for cell in cells}) == 1
    assert {cell.global_batch for cell in cells} == {16} and cells[0].steps * part.epochs >= CURVE_STEPS
    assert [cell.world_size for cell in cells[:7]] == [1, 2, 2, 2, 2, 2, 2]
    model = cells[0].model
    assert (model.d_model, model.num_layers, model.num_heads, model.context_length) == (768, 12, 12, 1024)


def test_the_command_line_names_rows_and_sizes() -> None:
    options = {"--strategy": "none,bucketed,naive", "--world-size": "1,2", "--bucket-mb": "1,25", "--batch": "3"}
    options |= {"--epochs": "5", "--train-tokens": "1000", "--val-tokens": "200", "--context": "32", "--dtype": "x"}
    found = list(cells_of(TINY, parse_training_axes(options), rows_called(["sdpa_flash", "llama"]), "cpu"))
    start = "s-tiny-S32B3-fp32-"
    assert [cell.id.removeprefix(start) for cell in found] == [
        "W1-T1000x5-sdpa_flash-none", "W2-T1000x5-sdpa_flash-none", "W2-T1000x5-sdpa_flash-bucketed-1MiB",
        "W2-T1000x5-sdpa_flash-bucketed-25MiB", "W2-T1000x5-sdpa_flash-naive",
    ]  # fmt: skip
    assert [(cell.global_batch, cell.steps, cell.windows) for cell in found[:2]] == [(3, 10, 6), (6, 5, 6)]


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--epochs", "1", "--epochs 1: must be at least 2"),
        ("--epochs", "2,3", "--epochs '2,3': must be one positive whole number"),
        ("--train-tokens", "0", "--train-tokens '0': must be one positive whole number"),
        ("--val-tokens", "many", "--val-tokens 'many': must be one positive whole number"),
    ],
)
def test_a_bad_value_is_refused(option: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_training_axes({option: text})


def test_tokens_that_fill_no_step_or_window_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--train-tokens 63: must be at least 64, .* \(batch 2 x 2 ranks x context 16"
    ):
        list(cells_of(TINY, parse_training_axes({"--train-tokens": "63"}), None, "cpu"))
    with pytest.raises(ValueError, match="--val-tokens 15: must be at least the context, 16"):
        list(cells_of(TINY, parse_training_axes({"--val-tokens": "15"}), None, "cpu"))


def test_tokens_are_the_text_s_and_as_many_as_asked_for() -> None:
    found = tokens_of(1000, 50, 300)
    assert (len(np.load(found.train)), len(np.load(found.valid))) == (1001, 51)
    assert tokens_of(1000, 50, 300) == found, "made once a run"
    with pytest.raises(ValueError, match=r"--train-tokens 10000000: must be less than \d+, which is all"):
        tokens_of(10_000_000, 50, 300)


SMALL = st.floats(-1.5, 1.5)


@given(st.lists(st.tuples(SMALL, st.floats(1, 9)), min_size=1, max_size=120), SMALL, st.sampled_from([*CURVE_BUDGET]))
def test_a_curve_is_right_within_its_budget(steps: list[tuple[float, float]], norm: float, dtype: str) -> None:
    budget = CURVE_BUDGET[dtype]
    reference = [loss for _, loss in steps]
    losses = [loss + off * budget for off, loss in steps]
    ratios = curve_ratios(losses, reference, 2 * (1 + norm * NORM_BUDGET[dtype]), 2.0, dtype)
    worst, first = ratios.values()
    assert worst == pytest.approx(max(abs(off) for off, _ in steps[:CURVE_STEPS]), abs=1e-9)
    assert first == pytest.approx(abs(norm), abs=1e-9)
    losses[0] = math.nan
    assert max(curve_ratios(losses, reference, math.nan, 2.0, dtype).values()) == math.inf


def test_all_that_can_be_trained_has_one_curve(settings: Settings) -> None:
    said: list[str] = []
    settings.say = said.append
    strategies = ("none", "zero1", "torch_ddp_tuned", "torch_fsdp2")
    found = records(replace(TINY, rows=("sdpa_flash",), strategies=strategies), settings)
    assert "torch_fsdp2" in found["sdpa_flash-torch_fsdp2"]["reason"]
    assert found.pop("sdpa_flash-torch_fsdp2")["outcome"] == "unsupported"
    for one in found.values():
        assert one["outcome"] == "ok", one["reason"]
        assert one["rounds"] == 2 and one["steps"] == 15 and one["steps_per_epoch"] == 5 and one["tokens"] == 320
        assert one["tokens_per_s"] == pytest.approx(320 / one["time_s"])
        assert one["error_ratio"] <= 1 and one["curve_difference"] <= 1e-3 and one["first_step_s"] > 0
        assert len(one["curve_steps"]) == len(one["curve_losses"]) == 15 <= CURVE_POINTS + 1
        assert one["world_size"] == (1 if one["strategy"] == "none" else 2)
        assert one["peak_bytes"] == max(one["rank_peak_bytes"]) > 4 * one["num_parameters"]
        assert len(one["rank_peak_bytes"]) == one["world_size"] and one["loss"] == one["curve_losses"][-1]
    held_out = [one["valid_loss"] for one in found.values()]
    assert max(held_out) - min(held_out) < 1e-3
    assert found["sdpa_flash-none"]["curve_losses"][-1] < found["sdpa_flash-none"]["curve_losses"][0]
    assert any("[2/4] sdpa_flash-zero1" in line and "tokens/s" in line for line in said)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("of no use"), ("unsupported", "of no use")),
        (MemoryError("no room"), ("oom", "no room")),
        (WorkerError(1, "died", "rank 1 died: killed by SIGKILL"), ("error", "rank 1 died: killed by SIGKILL")),
        (
            WorkerError(0, "OutOfMemoryError", "rank 0 failed:\nTrace\ntorch.OutOfMemoryError: CUDA\n\nSet X\n"),
            ("oom", "rank 0 failed: torch.OutOfMemoryError: CUDA"),
        ),
    ],
)
def test_what_fails_on_ranks_is_told_in_a_line(error: Exception, failure: tuple[str, str]) -> None:
    assert failure_of(error) == failure


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_tokens": 10}, "--train-tokens 10: must be at least 64"),
        ({"bucket_mbs": ("auto",), "strategies": ("bucketed",)}, "--bucket-mb is to name MiB"),
        ({"precisions": ("tf32",)}, "TF32 is an arithmetic of CUDA"),
        ({"precisions": ("fp16",)}, "precision='fp16' must be one of"),
        ({"compiles": ("graphed",)}, "--compile is to be eager or compiled"),
        ({"rows": ("sdpa_cudnn",)}, "CUDA"),
    ],
)
def test_what_cannot_run_is_a_cell_with_its_reason(changes: dict[str, Any], said: str, settings: Settings) -> None:
    for one in records(replace(TINY, **changes), settings).values():
        assert one["outcome"] == "unsupported" and said in one["reason"]


def test_without_timing_cells_are_checked_only(settings: Settings) -> None:
    settings.timed = False
    found = records(replace(TINY, strategies=("bucketed",)), settings)
    for one in found.values():
        assert one["outcome"] == "ok" and "not timed" in one["reason"] and "time_s" not in one


def test_what_an_interrupted_run_measured_is_kept_and_resumed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "_ready", lambda self: None)  # no ceilings, and this process keeps its memory
    said: list[str] = []

    def interrupted(text: str) -> None:
        said.append(text)
        if "[2/3]" in text:
            raise KeyboardInterrupt

    section = replace(TINY, strategies=("none", "bucketed", "naive"))
    output, cells = tmp_path / "out.json", list(cells_of(section, {}, None, "cpu"))

    def session(say: Any) -> Session:
        settings.say = say
        found = Session(settings, output)
        found.add(cells, training_trial)
        return found

    first = session(interrupted)
    first.select([cell.id for cell in cells])
    with pytest.raises(KeyboardInterrupt):
        first.result(cells[0].id)
    (kept,) = record.load(output)["records"]
    assert kept["id"] == cells[0].id and kept["time_s"] > 0
    said.clear()
    second = session(said.append)
    for found, entries in read_results(output):
        second.resume(found, entries)
    second.select([cell.id for cell in cells])
    assert second.result(cells[2].id).record["outcome"] == "ok"
    assert second.carried[cells[0].id] == kept and not any("naive-none" in text for text in said)
    assert [one["id"] for one in record.load(output)["records"]] == [cell.id for cell in cells]


def test_what_is_wrong_or_fails_is_a_cell(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STRATEGIES)
    own = tuple(f"{tmp_path}/own.py:{name}" for name in ("one_percent_off", "late", "apart", "broken"))
    found = records(replace(TINY, strategies=own), settings)
    outcomes = {name.removeprefix("naive-"): one["outcome"] for name, one in found.items()}
    wrong = dict.fromkeys(("one_percent_off", "late", "apart"), "wrong")
    assert outcomes == wrong | {"broken": "error"}, [one["reason"] for one in found.values()]
    off = found["naive-one_percent_off"]
    assert "the first gradient's norm, off by 0.99 %" in off["reason"] and off["error_ratio"] > 5
    assert off["norm_difference"] == pytest.approx(0.0099, abs=1e-4) and "time_s" not in off
    assert (
        "rank 1 failed" in found["naive-broken"]["reason"] and "no such collective" in found["naive-broken"]["reason"]
    )


def test_a_run_writes_a_record_for_each_cell(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    options = "--sweep smoke --attention naive --strategy none,bucketed --epochs 2 --train-tokens 300 --benchmark-only"
    ended = processes.run("training", *options.split(), "--benchmark-json", output)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(output.read_text())["lmsys"]["records"]
    assert [(one["impl"], one["outcome"]) for one in found] == [("naive-none", "ok"), ("naive-bucketed", "ok")]
    assert "[2/2] naive-bucketed" in ended.stdout and "smoke-tiny-S64B2-fp32-W2-T300x2" in ended.stdout
