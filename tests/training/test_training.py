"""Whole trainings: settings; a resumed run equals an uninterrupted one; many ranks equal one; bad steps are skipped.

Runs are made by tests/support/training_runs.py: in this process, on ranks (`group`), or as the command in another
process (`start`), which tests may kill. tests/training/ has a file for each part of training.
"""

import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.cost.memory import training_memory
from lmsys.parallel.group import WorkerError, WorkerGroup
from lmsys.strict_json import parse_json
from lmsys.training import pipeline
from lmsys.training.__main__ import main
from lmsys.training.checkpoint import save
from lmsys.training.config import RunConfig
from lmsys.training.log import JsonLines, Progress
from lmsys.training.loop import NonFiniteError
from tests.support.pages import blocks
from tests.support.processes import PATIENCE_S
from tests.support.training_runs import (
    SETTINGS,
    config,
    copy_of,
    end_all,
    error_of_different_ranks,
    error_on_rank,
    first_losses,
    is_alive,
    losses,
    nan_on_one_rank,
    on,
    ranks_of,
    read_lines,
    start,
    train_on_rank,
    trainer,
    weights,
)
from tests.support.variants import by_default_all_but, few_by_default


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """Ends what a test has started, also if it has failed."""
    yield
    end_all()


@given(
    st.integers(1, 10**6), st.floats(1e-8, 1), st.booleans(), st.none() | st.integers(1, 9), st.text(max_size=9),
    st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
)  # fmt: skip
@settings(max_examples=30)
def test_a_config_goes_through_json(
    batch: int, lr: float, flag: bool, keep: int | None, prompt: str, betas: tuple[float, float]
) -> None:
    given_ = {"train": {"batch_size": batch, "lr": lr, "min_lr": 0, "compile": flag, "betas": list(betas)}}
    given_ |= {"checkpoint": {"keep": keep}, "generate": {"prompt": prompt}}
    read = RunConfig.from_json(json.dumps(given_))
    assert (read.train.batch_size, read.train.lr, read.train.compile, read.train.betas) == (batch, lr, flag, betas)
    assert (read.checkpoint.keep, read.generate.prompt) == (keep, prompt)
    assert RunConfig.from_json(read.to_json()) == read and read.model == RunConfig().model


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"trian": {}}', "trian: unknown key; did you mean train?"),
        ('{"train": {"stesp": 3}}', "train.stesp: unknown key; did you mean train.steps?"),
        ('{"train": {"packing": 3}}', "train.packing: unknown key; did you mean data.packing?"),
        ('{"train": {"interval": 3}}', "mean evaluate.interval or checkpoint.interval or train.log_interval?"),
        ('{"train": {"contxt_length": 3}}', "train.contxt_length: unknown key; did you mean model.context_length?"),
        ('{"data": {"batch_size": 3}}', "data.batch_size: .* mean train.batch_size or evaluate.batch_size?"),
        ('{"learning": {}}', "learning: unknown key; did you mean output or data or model"),
        ('{"log": {"tensorboard": true}}', "log: unknown key"),
        ('{"min_lr": 1}', "min_lr: unknown key; did you mean train.min_lr"),
        ('{"train": {"steps": "3"}}', 'train.steps: must be a whole number; got "3"'),
        ('{"train": {"steps": true}}', "train.steps: must be a whole number; got true"),
        ('{"train": {"lr": 1e999}}', "train.lr: must be a finite number"),
        ('{"train": {"lr": NaN}}', "NaN is not a JSON number"),
        ('{"train": {"betas": [0.9]}}', "train.betas: must be a list of 2 numbers"),
        ('{"train": {"betas": [0.9, "x"]}}', r"train.betas\[1\]: must be a finite number"),
        ('{"train": {"lr": 1, "lr": 2}}', "'lr' is given twice"),
        ('{"train": 3}', "train: must be a JSON object; got 3"),
        ('{"model": {"num_heads": 3}}', "model: d_model=128 must divide"),
        ('{"train": {"precision": "bf17"}}', "train: precision='bf17' must be one of"),
        ('{"train": {"compile": true, "fused": true}}', "train: compile=true and fused=true are two ways to run the"),
        ('{"train": {"seed": -1}}', "train: seed=-1 must be at least 0 and at most 9,223,372,036,854,775,807"),
        ('{"generate": {"seed": 9223372036854775808}}', "generate: seed=9223372036854775808 must be at least 0"),
        ('{"checkpoint": {"keep": 0}}', "checkpoint: keep=0 must be at least 1"),
        ('{"train": {"memory_gib": 0}}', "train: memory_gib=0.0 must be more than 0"),
        ('{"train": {"optimizer": "sgd"}}', "train: optimizer='sgd' must be one of adamw, muon"),
        ('{"train": {"adjust_lr_fn": "none"}}', "adjust_lr_fn='none' must be one of original, match_rms_adamw"),
        ('{"train": {"momentum": 1}}', "momentum=1.0 must be less than 1"),
        ('{"train": {"matrix_lr": -1}}', "matrix_lr=-1.0 must be at least 0"),
        ('{"train": {"optimizer": "muon", "lr": 0, "min_lr": 0}}', "lr=0 with optimizer=muon: it must be above 0"),
        ('{"train": {"leaves": 3}}', "leaves=3 must be a power of two"),
        ('{"train": {"leaves": 0}}', "leaves=0 must be at least 1"),
        ('{"train": {"leaves": 32, "reproducible": true}}', "batch_size=16 must be a multiple of leaves=32"),
        ('{"data": {"engine": "rust"}}', "data: engine='rust' must be one of own, auto, gigatoken"),
        ('{"data": {"packing": "docs"}}', "data: packing='docs' must be one of none, documents"),
        ('{"data": {"url": "ftp://host/a.txt"}}', "data: url='ftp://host/a.txt' must begin with http:// or https://"),
        ('{"data": {"valid_url": "https://host/"}}', "data: valid_url='https://host/' must .* end in a file's name"),
        ('{"data": {"url": "https://host/.."}}', "data: url='https://host/..' must .* end in a file's name"),
        ('{"data": {"url": "https:///a.txt"}}', "data: url='https:///a.txt' must begin"),
        ('{"data": {"url": "http://[::1/a.txt"}}', "data: url='http://\\[::1/a.txt' is no address: Invalid IPv6 URL"),
        ('{"data": {"url": "http://a/x", "valid_url": "http://b/x?v"}}', "url='http://a/x' and .* in different names"),
        ('{"data": {"sha256": "abc"}}', "data: sha256='abc' must be 64 hexadecimal digits, or null"),
        ('{"data": {"valid_sha256": 3}}', "data.valid_sha256: must be a string or null; got 3"),
        ('{"data": {"url": null}}', "data.url: must be a string; got null"),
        ('{"data": {"urls": "http://a/x"}}', "data.urls: unknown key; did you mean data.url"),
        ("[]", "the config: must be a JSON object"),
        ("{", "Expecting"),
    ],
)  # fmt: skip
def test_a_config_that_is_wrong_says_where(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        RunConfig.from_json(text)


def test_settings_of_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"train": {"lr": 0.5, "seed": 7}}')
    options = [
        "--config",
        str(file),
        "--strategy",
        "zero1",
        "--attention",
        "naive",
        "--size",
        "small",
        "--print-config",
    ]
    assert (
        main([*options, "--set", "train.lr=3e-1", "--set", "generate.prompt=12", "--set", "checkpoint.keep=null"]) == 0
    )
    read = RunConfig.from_json(capsys.readouterr().out)
    assert (read.train.lr, read.train.seed, read.train.strategy) == (0.3, 7, "zero1")
    assert (read.model.attention, read.model.d_model, read.generate.prompt) == ("naive", 768, "12")
    assert read.checkpoint.keep is None
    for options, steps in (
        (("--set", "train.steps=40", "--steps", "50"), 50),
        (("--steps", "50", "--set", "train.steps=40"), 40),
        (("--steps", "50", "--steps", "60"), 60),
    ):
        assert main([*options, "--print-config"]) == 0
        assert RunConfig.from_json(capsys.readouterr().out).train.steps == steps
    assert main(["--set", "train.lr"]) == 2 and "must be PATH=VALUE" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "no.json")]) == 2 and "No such file" in capsys.readouterr().err


def test_a_full_disk_of_a_rank_is_a_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = "Traceback (most recent call last):\n  File x\ncheckpoint.SaveError: a.json: could not be saved\n"

    def fail(*_: Any) -> int:
        raise WorkerError(1, "SaveError", f"rank 1 failed in the save after step 4:\n{trace}")

    monkeypatch.setattr("lmsys.training.__main__.start", fail)
    assert main([]) == 1
    said = "rank 1 failed in the save after step 4: checkpoint.SaveError: a.json: could not be saved"
    assert capsys.readouterr().err == f"lmsys train: {said}\n"


@pytest.mark.parametrize(("packing", "cuts"), [("none", (3, 4)), ("documents", (2,))])
def test_a_resumed_run_equals_the_uninterrupted(tmp_path: Path, packing: str, cuts: tuple[int, ...]) -> None:
    packed = f"data.packing={packing}"
    trainer(config(tmp_path / "whole", packed)).fit(tmp_path / "whole" / "checkpoints")
    run = config(tmp_path / "cut", packed, "checkpoint.interval=0")
    for cut in cuts:
        part = trainer(run, resume=True)
        while part.step < cut:
            part.train_step()
        part.save(run.folder / "checkpoints")
    torch.rand(3)
    trainer(run, resume=True).fit(run.folder / "checkpoints")
    assert same_weights(tmp_path / "whole", tmp_path / "cut")


def same_weights(first: Path, second: Path) -> bool:
    """True if the models of the newest checkpoints of two runs have equal bits."""
    others = weights(second)
    return all(torch.equal(others[name], x) for name, x in weights(first).items())


def test_accumulated_micro_batches_equal_one_batch(tmp_path: Path) -> None:
    whole, *others = (first_losses(config(tmp_path, f"train.micro_batch_size={micro}"), 8) for micro in (8, 4, 1))
    for curve in others:
        assert curve == pytest.approx(whole, abs=1e-5, rel=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_is_left_out(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tmp_path, f"train.optimizer={optimizer}", "train.max_nonfinite=2", "checkpoint.interval=1")
    training = trainer(run)
    loss_of, bad = training.model.loss, {2, 3}

    def loss(*batch: torch.Tensor) -> torch.Tensor:
        return loss_of(*batch) * (torch.nan if training.step in bad else 1.0)

    monkeypatch.setattr(training.model, "loss", loss)
    for _ in range(2):
        assert training.train_step()[0].taken
    before = {name: x.clone() for name, x in training.model.state_dict().items()}
    for skipped in (1, 2):
        assert not training.train_step()[0].taken and training.skipped == training.in_a_row == skipped
    assert all(torch.equal(before[name], x) for name, x in training.model.state_dict().items())
    assert training.train_step()[0].taken and (training.skipped, training.in_a_row) == (2, 0)
    training.save(tmp_path / "checkpoints")
    bad |= set(range(5, 99))
    with pytest.raises(NonFiniteError, match=r"3 steps in a row were not finite, up to step 8"):
        training.fit(tmp_path / "checkpoints")
    assert all(x.isfinite().all() for x in weights(tmp_path).values()), "the last good checkpoint is there"


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [(3, "up to step 7"), (4, "step 4: token_embeddings.weight is not finite, so this step is not saved")],
)
def test_weights_that_are_not_finite_replace_no_good_checkpoint(
    spoiled: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose loss and gradient are finite may spoil them, at a save or before one; those after are left out."""
    one = trainer(config(tmp_path, "train.max_nonfinite=3", "checkpoint.interval=2", "checkpoint.keep=1"))
    step = one.optimizer.step

    def spoiling() -> None:
        step()
        if one.step + 1 == spoiled:
            with torch.no_grad():
                next(one.model.parameters()).fill_(torch.nan)

    monkeypatch.setattr(one.optimizer, "step", spoiling)
    with pytest.raises(NonFiniteError, match=message):
        one.fit(tmp_path / "checkpoints")
    assert all(x.isfinite().all() for x in weights(tmp_path).values())


@pytest.mark.parametrize("strategy", ["bucketed", "zero1", "fsdp"])
def test_all_ranks_leave_out_what_is_not_finite_on_one(tmp_path: Path, group: WorkerGroup, strategy: str) -> None:
    run = config(tmp_path, f"train.strategy={strategy}")
    assert group.run(nan_on_one_rank, run) == [[True, True, False, True]] * 2


def test_all_steps_then_each_alone(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(data, tmp_path / "run")
    options = ["--output", str(folder), "--corpus", str(folder / "text.txt")]
    options += [part for setting in (*SETTINGS, "train.reproducible=true") for part in ("--set", setting)]
    assert main([*options, "--skip-data"]) == 0
    output = capsys.readouterr().out
    assert "a unigram model: loss" in output and "sample of step 8:\ndef " in output and "step 8/8  loss" in output
    log = read_lines(folder / "log.jsonl")
    assert [line["step"] for line in log if "loss" in line] == list(range(1, 9))
    assert f"weights after step 8: sha256 {log[-1]['weights_sha256']}\n" in output
    assert RunConfig.from_json((folder / "config.json").read_text()).folder == folder
    (tmp_path / "earlier").hardlink_to(folder / "config.json")
    for step in ("train", "evaluate", "generate"):
        assert main([step, *options]) == 0
    assert not (tmp_path / "earlier").samefile(folder / "config.json"), "it is replaced: a kill leaves no half of it"
    assert len(losses(folder)) == 8, "a run that is done is not trained again"
    assert main(["train", *options, "--output", str(tmp_path / "new")]) == 2
    assert "there is no tokenizer; make one" in capsys.readouterr().err


UNDECAYED = "train.undecayed=ln|embeddings", "train.weight_decay=0.9"


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that one process has trained."""
    folder = copy_of(data, tmp_path_factory.mktemp("alone") / "run")
    assert pipeline.run(config(folder, *UNDECAYED), ("train",)) == 0
    return folder


def assert_alike(run: Path, alone: Path) -> None:
    """AssertionError unless both runs have all losses, and equal losses and weights but for rounding."""
    assert len(losses(run)) == 8 and losses(run) == pytest.approx(losses(alone), abs=1e-4, rel=0)
    expected = weights(alone)
    assert max((expected[name] - x).abs().max() for name, x in weights(run).items()) < 1e-3


def forget_after(folder: Path, step: int) -> None:
    """Removes checkpoints of later steps, so that the run goes on from this step."""
    for manifest in (folder / "checkpoints").glob("step-*.json"):
        if int(manifest.stem.partition("-")[2]) > step:
            manifest.unlink()


ALL_ON_TWO = "bucketed", "zero1", "fsdp", "naive+sharded", "torch_ddp_tuned", "torch_zero1"


@pytest.mark.parametrize("strategy", by_default_all_but(ALL_ON_TWO, "torch_zero1"))
def test_two_ranks_equal_one_process_and_resume(
    data: Path, alone: Path, tmp_path: Path, group: WorkerGroup, strategy: str
) -> None:
    options = [*on(strategy), "checkpoint.keep=null", *UNDECAYED]
    if strategy == "torch_ddp_tuned":
        (error, _) = group.run(error_on_rank, config(data, *options))
        assert "cannot accumulate micro-batches: train.micro_batch_size is to be 4" in error
        options.append("train.micro_batch_size=4")
    both = copy_of(data, tmp_path / "both")
    assert group.run(train_on_rank, config(both, *options)) == [0, 0]
    assert_alike(both, alone)
    expected = weights(both)
    forget_after(both, 6)
    assert group.run(train_on_rank, config(both, *options)) == [0, 0]
    resumed = weights(both)
    assert all(torch.equal(resumed[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("before", "after"),
    few_by_default(
        [
            ("fsdp", "bucketed"),
            ("fsdp", "fsdp"),
            ("zero1", "bucketed"),
            ("zero1", "zero1"),
            ("bucketed", "fsdp"),
            ("torch_zero1", "naive"),
            ("zero1", "fsdp"),
            ("bucketed", "zero1"),
        ],
        one_in=4,
    ),
)
def test_another_number_of_ranks_goes_on(
    data: Path, alone: Path, tmp_path: Path, group: WorkerGroup, before: str, after: str
) -> None:
    """A run goes from two ranks to one, by two ranks' checkpoint, and back by that of one."""
    run, options = copy_of(data, tmp_path / "run"), ["checkpoint.keep=null", "checkpoint.interval=1", *UNDECAYED]
    on_two, on_one = (config(run, *options, f"train.strategy={name}") for name in (before, after))
    assert group.run(train_on_rank, on_two) == [0, 0]
    forget_after(run, 3)
    assert pipeline.run(on_one, ("train",)) == 0
    forget_after(run, 6)
    assert group.run(train_on_rank, on_two) == [0, 0]
    assert_alike(run, alone)


@pytest.mark.parametrize("lost", ["model", "progress"])
def test_a_checkpoint_that_lacks_a_part_is_named(tmp_path: Path, lost: str) -> None:
    run = config(tmp_path)
    training = trainer(run)
    shared = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "progress": {}}
    del shared[lost]
    save(run.folder / "checkpoints", 1, shared, facts=training.facts)
    with pytest.raises(ValueError, match=rf"step-00000001-shared-\w+\.pt: must have '{lost}'"):
        trainer(run, resume=True)


def test_how_it_is_computed_changes_little(tmp_path: Path) -> None:
    plain, checkpointed, bf16 = (
        first_losses(config(tmp_path, setting), 6)
        for setting in ("model.checkpoint_blocks=0", "model.checkpoint_blocks=1", "train.precision=bf16")
    )
    assert plain == checkpointed and plain != bf16 == pytest.approx(plain, abs=0.05, rel=0)


def test_fit_takes_what_the_memory_allows(tmp_path: Path) -> None:
    """With more memory less is computed again, and the loss is the same. The chosen levels can be set by hand, too."""
    one_batch = ("train.batch_size=64", "train.micro_batch_size=64", "train.strategy=none")
    settings_ = config(tmp_path, "model.num_layers=3", *one_batch)
    model, held = settings_.model, settings_.train.sequences_at_once
    peaks = {
        levels: training_memory(replace(model, checkpoint_blocks=levels), held, model.context_length, "fp32").peak
        for levels in ("none*3", "whole*1,attention*2", "whole*2,attention*1")
    }
    losses = set()
    for levels, peak in peaks.items():
        training = trainer(settings_.changed(["model.checkpoint_blocks=fit", f"train.memory_gib={(peak + 1) / 2**30}"]))
        assert training.model.config.checkpoint_blocks == levels
        assert trainer(settings_.changed([f"model.checkpoint_blocks={levels}"])).model.config == training.model.config
        losses.add(training.train_step()[0].loss)
    assert len(losses) == 1
    with pytest.raises(ValueError, match="checkpoint_blocks='fit': a step needs"):
        trainer(settings_.changed(["model.checkpoint_blocks=fit", "train.memory_gib=1e-6"]))


SLOW = ("--set", "train.steps=60", "--set", "checkpoint.interval=1")


@pytest.mark.long
@pytest.mark.parametrize("kills", [range(20, 21), pytest.param(range(100), marks=pytest.mark.on_request)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_killed_run_goes_on(data: Path, tmp_path: Path, kills: range, precision: str) -> None:
    """Each run saves in every step, and is killed in a step that differs from run to run.

    `-m on_request` kills a hundred runs.
    """
    whole = copy_of(data, tmp_path / "whole")
    settings = "train.steps=60", f"train.precision={precision}"
    assert pipeline.run(config(whole, *settings, "checkpoint.interval=0"), ("train",)) == 0
    for number in kills:
        folder, step = copy_of(data, tmp_path / f"killed-{number}"), 1 + number % 50
        process = start(folder, "train", *SLOW, "--set", settings[-1])
        while process.poll() is None and not [*folder.glob(f"checkpoints/step-{step:08}.json")]:
            time.sleep(0.001)
        time.sleep(random.Random(number).uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGKILL, "the run had ended before it was killed"
        assert pipeline.run(config(folder, *settings), ("train",)) == 0
        assert same_weights(whole, folder) and losses(folder) == losses(whole)


@pytest.mark.long
def test_a_rank_that_is_killed_is_started_again(data: Path, tmp_path: Path, group: WorkerGroup) -> None:
    whole, run = copy_of(data, tmp_path / "whole"), copy_of(data, tmp_path / "run")
    assert group.run(train_on_rank, config(whole, "train.steps=20")) == [0, 0]
    launcher = "-m torch.distributed.run --nproc-per-node 2 --max-restarts 1 --standalone".split()
    options = "--set", "train.steps=20", "--set", "checkpoint.interval=1"
    process = start(run, "train", *options, launcher=tuple(launcher))
    while not list(run.glob("checkpoints/step-*.json")) and process.poll() is None:
        time.sleep(0.01)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "going on from" in output, output
    assert same_weights(whole, run)


@pytest.mark.parametrize(
    ("ranks", "number", "times"),
    [
        (None, signal.SIGTERM, 2),
        (2, signal.SIGINT, 1),
        pytest.param(None, signal.SIGTERM, 1, marks=pytest.mark.on_request),
        pytest.param(2, signal.SIGINT, 2, marks=pytest.mark.on_request),
    ],
)
def test_a_signal_ends_with_a_checkpoint(
    data: Path, tmp_path: Path, ranks: int | None, number: int, times: int
) -> None:
    """A second signal right after the first, as from a terminal and a launcher, changes nothing."""
    folder = copy_of(data, tmp_path / "run")
    options = ["--set", "train.steps=100000", "--set", "checkpoint.interval=0"]
    process = start(folder, "train", *options, *(["--ranks", str(ranks)] if ranks else []))
    while not losses(folder) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    for _ in range(times - 1):
        time.sleep(0.005)
        process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, output
    last = read_lines(folder / "log.jsonl")[-1]["step"]
    assert (folder / "checkpoints" / f"step-{last:08}.json").is_file() and f"saved at step {last:,}" in output


ENDLESS = ("--set", "train.steps=1000000", "--set", "checkpoint.interval=0")


@pytest.mark.on_request
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_signals_end_a_run_of_which_a_rank_has_stopped(data: Path, tmp_path: Path, number: int) -> None:
    """The other rank waits inside a collective, where Python runs no signal handler."""
    folder = copy_of(data, tmp_path / "run")
    process = start(folder, "train", *ENDLESS, "--ranks", "2")
    while not losses(folder) and process.poll() is None:
        time.sleep(0.05)
    ranks = ranks_of(process)
    os.kill(ranks[-1], signal.SIGSTOP)
    for _ in range(2):
        time.sleep(1.0)
        process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode and "told to end twice" in output, output
    assert len(ranks) == 2 and not any(map(is_alive, ranks))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has gone")
def test_ranks_end_with_the_agent_that_torchrun_is(data: Path, tmp_path: Path) -> None:
    folder = copy_of(data, tmp_path / "run")
    launcher = "-m torch.distributed.run --nproc-per-node 2 --standalone".split()
    process = start(folder, "train", *ENDLESS, launcher=tuple(launcher))
    while not losses(folder) and process.poll() is None:
        time.sleep(0.05)
    ranks = ranks_of(process)
    process.kill()
    until = time.monotonic() + PATIENCE_S
    while any(map(is_alive, ranks)) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(ranks) == 2 and not any(map(is_alive, ranks))
    assert list(folder.glob("checkpoints/step-*.json"))  # ranks save, as after any SIGTERM


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.micro_batch_size=4", "train.micro_batch_size is 2 on rank 0 and 4 on rank 1"),
        ("train.batch_size=3", "train.batch_size is 8 on rank 0 and 3 on rank 1"),
        ("train.precision=bf16", "train.precision is 'fp32' on rank 0 and 'bf16' on rank 1"),
        ("train.clip_norm=2", "train.clip_norm is 1.0 on rank 0 and 2.0 on rank 1"),
        ("train.seed=1", "train.seed is 0"),
        ("train.steps=9", "train.steps is 3"),
        ("train.lr=0.1", "train.lr is 0.003"),
        ("checkpoint.interval=2", "checkpoint.interval is 3"),
        ("train.strategy=naive", "train.strategy is 'bucketed' on rank 0 and 'naive' on rank 1"),
        ("model.d_ff=64", "model.d_ff is 32 on rank 0 and 64 on rank 1"),
        ("output=elsewhere", "output is"),
        ("train.threads=2", "nothing"),
    ],
)
def test_ranks_with_different_settings_are_told(
    setting: str, message: str, data: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    run = config(copy_of(data, tmp_path / "run"), "train.steps=3")
    for error in group.run(error_of_different_ranks, run, setting):
        assert message in error


def test_a_log_begins_where_the_run_does(tmp_path: Path) -> None:
    """Lines that are not kept at a resume are moved to a file beside the log, which keeps those of every resume."""
    path = tmp_path / "log.jsonl"
    later = ['{"step\0": 1', "[2]", '{"loss": 2}', '{"step": 3}', '{"st']
    path.write_text("\n".join(['{"step": 1}', *later[:3], '{"step": 2}', *later[3:]]))
    for _ in range(2):
        log = JsonLines(str(path), 2)  # type: ignore[arg-type]
        log.write(step=3, loss=1.0)
        log.close()
        assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0}]
    assert (tmp_path / "log.jsonl.replaced").read_text().splitlines() == [*later, '{"step": 3, "loss": 1.0}']


@pytest.mark.parametrize("writer", ["this version", "an earlier one"])
@given(st.lists(st.floats(), max_size=6), st.integers(0, 7))
@settings(max_examples=20)
def test_a_log_is_json_whatever_the_loss_is_and_a_resume_drops_no_line(
    tmp_path_factory: pytest.TempPathFactory, writer: str, values: list[float], step: int
) -> None:
    """This also holds for a log of an earlier version, which wrote NaN as Python does."""
    path = tmp_path_factory.mktemp("logs") / "log.jsonl"
    with closing(JsonLines(path, 0)) as log:
        for facts in ({"step": number, "loss": value} for number, value in enumerate(values, start=1)):
            log.write(**facts) if writer == "this version" else log._file.write(json.dumps(facts) + "\n")
    JsonLines(path, step).close()
    kept, beside = values[:step], path.with_name("log.jsonl.replaced")
    objects = [parse_json(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in objects] == list(range(1, len(kept) + 1))
    assert [repr(float(line["loss"])) for line in objects] == [repr(value) for value in kept]
    assert len(read_lines(beside)) == len(values) - len(kept)


def test_the_page_shows_a_log_in_tensorboard(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in replaces the package tensorboard, which no session of nox installs."""
    run, scalars = tmp_path / "out" / "training", []
    run.mkdir(parents=True)
    with Path(shutil.copy(alone / "log.jsonl", run)).open("a") as log:
        log.write('{"step": 99, "loss": "NaN"}\n')
    writer = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    board = SimpleNamespace(SummaryWriter=lambda folder: nullcontext(writer))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.chdir(tmp_path)
    (code,) = (code for code in blocks("docs/training.md", "python") if "SummaryWriter" in code)
    exec(compile(code, "docs/training.md", "exec"), {})
    *shown, last = [(value, step) for name, value, step in scalars if name == "loss"]
    assert shown == [(value, step) for step, value in enumerate(losses(alone), start=1)]
    assert math.isnan(last[0]) and last[1] == 99
    assert {"lr", "grad_norm", "valid_loss"} <= {name for name, *_ in scalars}
    assert all(isinstance(value, float) for _, value, _ in scalars)


ADAMW_ANEW = {"betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0}
MUON_ANEW = {"momentum": 0.5, "adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize(
    ("setting", "anew"),
    [
        ("train.strategy=bucketed", ADAMW_ANEW),
        ("train.strategy=fsdp", ADAMW_ANEW),
        ("train.sharded_optimizer=true", ADAMW_ANEW),
        ("train.optimizer=muon", MUON_ANEW),
    ],
)
def test_a_run_that_goes_on_has_its_own_settings_of_the_optimizer(
    tmp_path: Path, setting: str, anew: dict[str, Any]
) -> None:
    """They replace those that were saved with the optimizer's state."""
    trainer(run := config(tmp_path, setting)).save(tmp_path / "checkpoints")
    values = {name: json.dumps(value) if isinstance(value, tuple) else value for name, value in anew.items()}
    changed = run.changed([*(f"train.{name}={value}" for name, value in values.items()), "train.reproducible=true"])
    for group in trainer(changed, resume=True).optimizer.param_groups:
        assert group.items() >= anew.items() and not group.get("batched")  # each matrix alone, where it is reproducible


def test_another_schedule_is_told_where_a_run_goes_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(data, tmp_path / "run")
    for steps in (8, 8, 16):
        assert pipeline.run(config(run, f"train.steps={steps}", "checkpoint.interval=0"), ("train",)) == 0
        output = capsys.readouterr().out
        assert ("another schedule" in output) == (steps == 16)
    rates = [line["lr"] for line in read_lines(run / "log.jsonl") if "lr" in line]
    change = f"the rate of the next step was 0.0003 and is {rates[8]}, train.steps was 8 and is 16\n"
    assert f"the learning rate has another schedule than before: {change}" in output


def test_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 145.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    progress = Progress(0, 0.0, 30, 1000, 5e11, 1e12)
    line = progress.line(10, 10.0, 2.5, 1e-3)
    assert line == "step 10/30  loss 2.5000  lr 1.00e-03  1,000 tokens/s  MFU 50.0 %  ETA 0:20"
    # Of 35 seconds 20 were of ten steps; the other 15 are 0.75 s for each of 20 steps.
    line = progress.line(20, 30.0, 2.5, 1e-3)
    assert line == "step 20/30  loss 2.5000  lr 1.00e-03  500 tokens/s  MFU 25.0 %  ETA 0:28"


@pytest.mark.parametrize("resume", [False, True])
def test_the_time_of_steps_is_without_evaluations_and_checkpoints(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 1 s here, an evaluation 100 s and a checkpoint 1,000 s; a run that goes on counts from there."""
    if resume:
        trainer(config(tmp_path, "train.steps=3")).fit(tmp_path / "checkpoints")
    one = trainer(config(tmp_path, "train.log_interval=1", "evaluate.interval=3", "checkpoint.interval=5"), resume)
    now, first, said = [0.0], one.step, list[str]()
    one.seconds = float(first)

    def taking(seconds: float, name: str) -> None:
        call = getattr(one, name)

        def timed(*args: Any) -> Any:
            now[0] += seconds
            return call(*args)

        monkeypatch.setattr(one, name, timed)

    for name, seconds in {"train_step": 1.0, "evaluate": 100.0, "save": 1000.0}.items():
        taking(seconds, name)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with closing(JsonLines(tmp_path / "log.jsonl", 0)) as lines:
        one.fit(tmp_path / "checkpoints", lines, said.append)
    times = [line["time_s"] for line in read_lines(tmp_path / "log.jsonl") if "time_s" in line]
    assert times == list(range(first + 1, 9)) and one.seconds == 8
    rates = [line.split("  ")[3] for line in said if "tokens/s" in line]
    assert rates == ["128 tokens/s"] * len(times)
