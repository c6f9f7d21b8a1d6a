"""A `lmsys train` that is refused (exit code 2) leaves the folder of an earlier training as it is, byte for byte.

New options that must be refused are added to REFUSED. The fixture `trained` makes a training and the files that options
name.
"""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lmsys.parallel.group import WorkerError
from lmsys.training import pipeline
from lmsys.training.__main__ import main
from lmsys.training.loop import Trainer
from tests.support.files import tree
from tests.support.training_runs import SETTINGS, config, corpus, read_lines

REFUSED = (  # options after those of `ended`
    "--set train.stepz=3",
    "--set trian.steps=3",
    "--set train.steps=few",
    "--set train.steps=1.5",
    "--set train.lr=nan",
    "--set train.lr",
    "--set train.lr=1e38",
    "--set train.optimizer=muon --set train.matrix_lr=1e38",
    "--steps 0",
    "--steps 2",  # fewer than its warm-up
    "--keep 0",
    "--max-seconds 0",
    "--size huge",
    "--config missing.json",
    "--config broken.json",
    "--config list.json",
    "--set train.seed=-1",
    "--set train.seed=7",
    "--set generate.seed=x",
    "--set generate.temperature=-1",
    f"--set generate.prompt={'?' * 40}",
    "--set train.batch_size=6 --set train.micro_batch_size=4",
    "--set train.batch_size=16",
    "--set train.device=tpu",
    "--ranks 1 --set train.device=tpu",
    "--set train.eps=0",
    "--set train.graph=true",
    "--set train.precision=fp8",
    "--set data.packing=documents",
    "--set model.num_heads=3",
    "--set model.num_heads=1",
    "--set model.num_layers=3",
    "--set model.d_ff=64",
    "--set model.vocab_size=290",
    "--set model.vocab_size=310",
    "--set model.context_length=8",
    "--set model.attention=flash_gluon",
    "--set model.attention=nobodys",
    "--strategy buckted",
    "--strategy torch_ddp",
    "--strategy mine.py:Missing",
    "--corpus missing.txt",
    "--corpus other.txt",
    "--corpus short.txt",
    "--corpus empty.txt",
    "--corpus binary.txt",
    "--set data.valid=missing.txt",
    "--set data.valid=other.txt",
    "--set data.tokenizer=missing",
    "--set data.tokenizer=tokenizer",
    "--ranks 0",
    "train --set model.d_ff=64",
    "evaluate --set model.num_heads=1",
    "generate --set model.num_heads=1",
    "sing",
    "--output=",
    "--output text.txt",
    "--output foreign",
)
# {options: a part of the message}
TOLD = {
    "train --set model.d_ff=64": "saved with model.d_ff=32; this run has 64",
    # The weights have the same shapes with any number of heads.
    "evaluate --set model.num_heads=1": "saved with model.num_heads=2; this run has 1",
    "generate --set model.num_heads=1": "saved with model.num_heads=2; this run has 1",
    "--ranks 1 --set train.device=tpu": "train.device='tpu' must be cpu, or cuda where there is a CUDA device",
    "--set train.eps=0": "train: eps=0.0 must be more than 0",
    "--output=": "the config: output='' must be a path: not empty, and without a null byte",
    "--corpus missing.txt": "must be stdlib, tinystories or the path of a text file",
    "--corpus other.txt": "run: holds a training on other text: name another --output for this",
    "--set train.lr=1e38": "train: lr=1e+38 must be at least 0 and at most 1,000,000,000",
    "--set train.optimizer=muon --set train.matrix_lr=1e38": "train: matrix_lr=1e+38 must be at least 0 and at most 1",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training in `run`, and with other files, which no refused command may change."""
    folder = tmp_path_factory.mktemp("trained")
    assert pipeline.run(config(folder / "run", f"data.corpus={corpus(folder)}"), pipeline.STEPS) == 0
    (folder / "other.txt").write_text("other words of another text " * 50)
    (folder / "short.txt").write_text("a few")
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(b"\xff\xfe words " * 100)
    (folder / "broken.json").write_text('{"train": {"steps": 3}')
    (folder / "list.json").write_text("[]")
    (folder / "mine.py").write_text("class Mine: ...")
    (folder / "foreign" / "log.jsonl").mkdir(parents=True)
    return folder


def ended(folder: Path, *options: str) -> int:
    """The exit code of `lmsys train` with these options, on the folder's run and text."""
    settings = [f"output={folder / 'run'}", f"data.corpus={folder / 'text.txt'}", *SETTINGS]
    try:
        return main([*(part for setting in settings for part in ("--set", setting)), *options])
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize("command", REFUSED)
def test_a_refused_command_leaves_the_training_as_it_is(
    command: str, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    before = tree(trained)
    code, printed = ended(trained, *command.split()), capsys.readouterr().err
    assert code == 2 and printed.strip().splitlines()[-1].startswith("lmsys train: "), printed
    assert tree(trained) == before and TOLD.get(command, "") in printed


def test_a_text_that_is_too_short_does_not_replace_tokens(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer is given, so that only the tokens would change."""
    options = "--set", f"data.tokenizer={trained / 'run' / 'tokenizer'}", "--set", f"output={tmp_path / 'run'}"
    assert ended(trained, *options) == 0
    (tmp_path / "words.txt").write_text("the cat sat on a mat")
    before = tree(tmp_path)
    assert ended(trained, *options, "--set", f"data.valid={tmp_path / 'words.txt'}") == 2
    assert "its text for validation has " in capsys.readouterr().err and tree(tmp_path) == before


def test_a_right_command_changes_the_training_which_no_other_may_do_meanwhile(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on as if there had been no others. The text has another path here."""
    for name in ("run", "text.txt"):
        (shutil.copytree if name == "run" else shutil.copy)(trained / name, tmp_path / name)
    before, fit, refused = tree(tmp_path), Trainer.fit, list[str]()

    def fit_beside(trainer: Trainer, *rest: Any, **more: Any) -> Any:
        begun = tree(tmp_path)
        for command in ("", *pipeline.WRITERS):
            assert ended(tmp_path, *command.split()) == 2 and tree(tmp_path) == begun, command
            assert f"log.jsonl: process {os.getpid()} is writing it; wait" in capsys.readouterr().err
            refused.append(command)
        return fit(trainer, *rest, **more)

    monkeypatch.setattr(Trainer, "fit", fit_beside)
    for steps in (9, 10):  # the folder is free again after the first
        assert ended(tmp_path, "--steps", str(steps)) == 0 and len(refused) == (steps - 8) * 4
        assert (tmp_path / f"run/checkpoints/step-{steps:08}.json").is_file()
    assert {name for name, state in tree(tmp_path).items() if before.get(name) != state} >= {"run/log.jsonl"}
    assert [line["step"] for line in read_lines(tmp_path / "run/log.jsonl") if "loss" in line] == list(range(1, 11))


def test_a_lost_connection_of_a_rank_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = "Traceback (most recent call last):\n  ...\nConnectionError: http://host/a.txt: refused, in 3 tries"
    error = WorkerError(1, "ConnectionError", f"rank 1 failed in 'tokenizer':\n{trace}")
    monkeypatch.setattr("lmsys.training.__main__.start", Mock(side_effect=error))
    assert main([]) == 1
    line = "rank 1 failed in 'tokenizer': ConnectionError: http://host/a.txt: refused, in 3 tries"
    assert capsys.readouterr().err == f"lmsys train: {line}\n"
