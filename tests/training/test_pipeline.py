"""The steps of `lmsys train`: mistakes are named before any work is done, and a step that was killed is done again.

The steps make a tokenizer and tokens, train, evaluate and generate. A setting that no training can have is added to
REFUSED, with its message.
"""

import resource
import signal
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lmsys.attention.contract import DTYPE_NAMES
from lmsys.model import TransformerLM
from lmsys.model.linear import matmul_dtype
from lmsys.tokenizer import Tokenizer, train
from lmsys.training import pipeline
from lmsys.training.__main__ import main, parser, read_config
from lmsys.training.checkpoint import newest
from lmsys.training.config import MATMUL_DTYPES
from lmsys.training.corpora import END_OF_TEXT
from lmsys.training.data import TokenFiles
from lmsys.training.run_context import RunContext
from tests.support.training_runs import SETTINGS, config, copy_of, corpus, start, trainer


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test fail if a tokenizer is trained."""
    monkeypatch.setattr(pipeline, "train", None)


def error_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: str) -> str:
    """The only line that `lmsys train OPTIONS` prints to stderr, with the exit code 2."""
    settings = [f"output={tmp_path / 'run'}", f"data.corpus={corpus(tmp_path)}", *SETTINGS]
    assert main([*(part for setting in settings for part in ("--set", setting)), *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("lmsys train: ") and printed.count("\n") == 1
    return printed


@pytest.mark.parametrize("step", [*pipeline.WRITERS, None])
@pytest.mark.parametrize(
    "place",
    [
        "file",
        "file/below",
        pytest.param("/proc/run", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux")),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_an_output_that_cannot_be_written_is_named(
    tmp_path: Path, step: str | None, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    line = error_line(capsys, tmp_path, *([step] if step else []), "--set", f"output={tmp_path / place}")
    assert f"output: files cannot be written in {tmp_path / place}: " in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", [*pipeline.FOLDERS, *pipeline.FILES])
@pytest.mark.usefixtures("no_training")
def test_what_stands_where_a_run_writes_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.mkdir() if name in pipeline.FILES else path.write_text("mine")
    assert f"{path}: must be a " in error_line(capsys, tmp_path)
    assert path.is_dir() == (name in pipeline.FILES)


NO_NULL = r"'a\x00b' must be a path: not empty, and without a null byte"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (rb'{"output": "a\u0000b"}', f"the config: output={NO_NULL}"),
        (rb'{"data": {"folder": "a\u0000b"}}', f"data: folder={NO_NULL}"),
        (rb'{"data": {"corpus": "a\u0000b"}}', f"data: corpus={NO_NULL}"),
        (rb'{"data": {"valid": "a\u0000b"}}', f"data: valid={NO_NULL}"),
        (rb'{"data": {"tokenizer": "a\u0000b"}}', f"data: tokenizer={NO_NULL}"),
        (b'{"output": "\xe9"}', "c.json: not UTF-8: "),
    ],
)
def test_a_path_with_a_null_byte_and_a_config_that_is_no_text_are_named(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.json").write_bytes(content)
    assert message in error_line(capsys, tmp_path, "--config", str(tmp_path / "c.json"))


def test_a_strategy_that_does_not_load_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("1 / 0")
    line = error_line(capsys, tmp_path, "train", "--strategy", f"{tmp_path / 'mine.py'}:Mine")
    assert f"'{tmp_path / 'mine.py'}' does not load: ZeroDivisionError: division by zero" in line


REFUSED = {
    "train.graph=true": "train.graph=true: CUDA graphs need train.device=cuda, not cpu",
    "train.fused=true": "train.fused=true with strategy 'bucketed': fused blocks are kernels for a CUDA device",
    "train.strategy=buckted": "unknown strategy 'buckted'; did you mean bucketed?",
    "train.strategy=torch_fsdp2": "strategy 'torch_fsdp2': ",
    "train.strategy=torch_ddp": "strategy 'torch_ddp' needs a process group: start it by --ranks 1 or torchrun",
    "train.sharded_optimizer=true train.strategy=zero1": "strategy 'zero1' shards its optimizer itself",
    "train.reproducible=true train.strategy=copy_engine": "strategy 'copy_engine' with train.reproducible: ",
    "model.checkpoint_blocks=fit": "model.checkpoint_blocks=fit needs train.memory_gib on a CPU",
    "model.attention=flash_gluon": "model.attention='flash_gluon' cannot train with train.precision='fp32' on cpu: ",
    "data.packing=documents model.attention=naive_compiled": "cannot train with data.packing='documents': ",
}


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (5, 2), (39, 19), (40, 20), (400, 20)])
def test_few_steps_have_a_shorter_warm_up(steps: int, warmup: int) -> None:
    assert read_config(parser().parse_args(["--steps", str(steps)])).train.warmup == warmup
    with pytest.raises(ValueError, match=f"must be less than steps={steps}"):
        read_config(parser().parse_args(["--steps", str(steps), "--set", f"train.warmup_steps={steps}"]))


@pytest.mark.parametrize("settings", REFUSED)
@pytest.mark.usefixtures("no_training")
def test_a_training_that_cannot_run_here_is_refused_before_any_data_is_made(
    settings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for setting in settings.split() for part in ("--set", setting)]
    assert REFUSED[settings] in error_line(capsys, tmp_path, *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_prompt_that_is_too_long_is_named_before_the_training(
    has_tokenizer: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named as soon as a tokenizer can count its tokens: if one is given, before the corpus is read."""
    monkeypatch.setattr(pipeline, "make_tokens", None)
    options = "--set", f"generate.prompt={'?' * 40}"
    if has_tokenizer:
        train([corpus(tmp_path)], 300, [END_OF_TEXT]).save(tmp_path / "tokenizer")
        options += "--set", f"data.tokenizer={tmp_path / 'tokenizer'}", "--corpus", "none"
    line = error_line(capsys, tmp_path, *options)
    assert f"generate.prompt='{'?' * 40}' is 40 tokens; model.context_length is 16" in line


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_model_is_evaluated_and_read_in_the_precision_of_its_training(
    precision: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention row that trains in bfloat16 may refuse float32."""
    run = config(copy_of(data, tmp_path / "run"), f"train.precision={precision}")
    assert pipeline.run(run, ("train",)) == 0
    seen: list[str] = []

    def attend(model: TransformerLM, x: Tensor, documents: Any = None) -> Any:
        seen.append(DTYPE_NAMES[matmul_dtype(x)])
        return chosen(model, x, documents)

    chosen = TransformerLM._attend
    monkeypatch.setattr(TransformerLM, "_attend", attend)
    for step in ("evaluate", "generate"):
        seen.clear()
        assert pipeline.run(run, (step,)) == 0
        assert set(seen) == {MATMUL_DTYPES[precision]}, step


@pytest.mark.parametrize(("encoding", "written"), [("ascii", b"na\\xefve \\u4e2d\n"), ("utf-8", "naïve 中\n".encode())])
def test_a_sample_is_printed_whatever_the_terminal_can_show(
    encoding: str, written: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(terminal := BytesIO(), encoding))
    for rank in range(2):
        RunContext(config(tmp_path), rank, 2).say("naïve 中")
    assert terminal.getvalue() == written


@pytest.mark.parametrize(
    ("saved", "asked", "message"),
    [
        ("model.num_heads=2", "model.num_heads=1", "saved with model.num_heads=2; this run has 1"),
        ("model.rope_theta=10", "model.rope_theta=100", "saved with model.rope_theta=10.0; this run has 100.0"),
        ("model.d_ff=32", "model.d_ff=64", "saved with model.d_ff=32; this run has 64"),
        ("data.packing=documents", "data.packing=none", "saved with packing='documents'; this run has None"),
        ("train.optimizer=muon", "train.optimizer=adamw", "saved with train.optimizer='muon'; this run has None"),
        ("train.optimizer=adamw", "train.optimizer=muon", "saved with train.optimizer=None; this run has 'muon'"),
    ],
)
def test_a_checkpoint_is_not_taken_for_another_training(saved: str, asked: str, message: str, tmp_path: Path) -> None:
    """The other model's tensors may have equal shapes: the loss would be wrong without an error."""
    trainer(config(tmp_path, saved)).save(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=message):
        trainer(config(tmp_path, asked), resume=True)


def test_data_for_another_machine_can_be_made_here(tmp_path: Path) -> None:
    """A machine without a GPU makes tokens for one that has some."""
    run = config(tmp_path / "run", f"data.corpus={corpus(tmp_path)}", "train.graph=true", "train.fused=true")
    assert pipeline.run(run, ("tokenizer",)) == 0
    assert (run.folder / "tokenizer" / "made.json").is_file()


def test_a_text_that_gives_fewer_tokens_than_the_model_has_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends with a sample, although most ids that the model knows are no tokens of the tokenizer."""
    run = config(tmp_path / "run", f"data.corpus={corpus(tmp_path)}", "model.vocab_size=3000", "train.steps=3")
    assert pipeline.run(run.changed(["generate.max_new_tokens=15"]), pipeline.STEPS) == 0
    assert Tokenizer.load(run.folder / "tokenizer").vocab_size < 400
    assert "sample of step 3:\n" in capsys.readouterr().out


@pytest.mark.parametrize("valid", [None, 16, 400])
@pytest.mark.usefixtures("no_training")
def test_a_text_that_no_tokenizer_makes_long_enough_is_refused_at_the_start(
    valid: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text has at most one token for each byte. Of 319 bytes 14 are for validation; a sequence takes 17 tokens."""
    text, options = tmp_path / "short.txt", list[str]()
    text.write_text(("a " * 160)[: 16 if valid == 400 else 319])
    if valid:
        (tmp_path / "valid.txt").write_text("b " * (valid // 2))
        options = ["--set", f"data.valid={tmp_path / 'valid.txt'}"]
    part, size = {None: ("for validation", 14), 16: ("for validation", 16), 400: ("to train on", 16)}[valid]
    line = error_line(capsys, tmp_path, "--corpus", str(text), *options)
    assert f"corpus '{text}': its text {part} has {size} bytes, and a sequence takes 17 tokens: name a longer" in line
    assert not (tmp_path / "run").exists()


def test_a_text_whose_tokens_are_too_few_is_refused_before_a_step_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("the same words again " * 40)
    line = error_line(capsys, tmp_path, "--corpus", str(tmp_path / "short.txt"))
    assert "its text for validation has 8 tokens, and a sequence takes 17" in line
    assert not (tmp_path / "run" / "tokens").exists()


def test_a_run_whose_lines_nobody_reads_on_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """As behind `lmsys train | head`; the same command goes on from there."""
    often = "--set", "train.log_interval=1", "--set", "checkpoint.interval=0"
    started = start(tmp_path / "run", "--corpus", str(corpus(tmp_path)), "--steps", "1000", *often)
    assert started.stdout is not None
    while "training:" not in started.stdout.readline():
        pass
    started.stdout.close()
    assert started.wait() == 128 + signal.SIGTERM
    saved = newest(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved.step < 1000


@pytest.mark.parametrize("ranks", [(), ("--ranks", "1")], ids=len)
def test_a_disk_that_is_full_is_a_line(
    tmp_path: Path, ranks: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """No file may become larger here than 100 bytes; a tokenizer is."""
    settings = [f"output={tmp_path / 'run'}", f"data.corpus={corpus(tmp_path)}", *SETTINGS]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        assert main([*(part for setting in settings for part in ("--set", setting)), *ranks, "tokenizer"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    printed = capsys.readouterr().err
    assert printed.startswith("lmsys train: ") and "File too large" in printed and printed.count("\n") == 1


@pytest.mark.parametrize("ranks", [(), ("--ranks", "1")], ids=len)
def test_a_folder_in_the_place_of_a_file_is_a_line(
    tmp_path: Path, ranks: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"output={tmp_path / 'run'}", f"data.corpus={corpus(tmp_path)}", *SETTINGS]
    (tmp_path / "run" / "tokenizer" / "vocab.json").mkdir(parents=True)
    assert main([*(part for setting in settings for part in ("--set", setting)), *ranks, "tokenizer"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("lmsys train: ") and "vocab.json" in printed and printed.count("\n") == 1


def test_a_missing_file_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a fault of the program, whose place the reader needs."""
    monkeypatch.setitem(pipeline.FUNCTIONS, "tokenizer", lambda _: (tmp_path / "missing").open())
    with pytest.raises(FileNotFoundError):
        main(["--set", f"output={tmp_path / 'run'}", "--set", f"data.corpus={corpus(tmp_path)}", "tokenizer"])


@pytest.mark.parametrize("step", pipeline.DATA_STEPS)
def test_a_step_that_ended_in_the_middle_is_done_again(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was making another tokenizer, or other tokens, and has replaced half of the files."""
    run = config(tmp_path / "run", f"data.corpus={corpus(tmp_path)}")
    (tmp_path / "other.txt").write_text("other words of another text " * 50)
    other = run.changed([f"data.corpus={tmp_path / 'other.txt'}"])
    assert pipeline.run(run, pipeline.DATA_STEPS) == 0
    made = sorted((path.name, path.read_bytes()) for path in run.folder.rglob("*") if path.is_file())
    calls, replace = [], Path.replace

    def full(*given: Path) -> Path:
        calls.append(given)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return replace(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            pipeline.run(other, (step,))
    if step == "tokenizer":
        with pytest.raises(ValueError, match="merges.txt: cut, or not of the tokenizer .* make both anew"):
            Tokenizer.load(run.folder / "tokenizer")
    assert pipeline.run(run, pipeline.DATA_STEPS) == 0
    assert sorted((path.name, path.read_bytes()) for path in run.folder.rglob("*") if path.is_file()) == made


def test_a_text_that_was_changed_is_read_again(tmp_path: Path) -> None:
    """Also where it has as many bytes as before."""
    text = corpus(tmp_path)
    run = config(tmp_path / "run", f"data.corpus={text}")
    for words in (text.read_text(), text.read_text().replace("cat", "dog")):
        text.write_text(words)
        assert pipeline.run(run, pipeline.DATA_STEPS) == 0
        tokenizer = Tokenizer.load(run.folder / "tokenizer")
        ids = TokenFiles([run.folder / "tokens" / "train.npy"], tokenizer)
        assert words.startswith(tokenizer.decode(ids.read(0, len(ids)).tolist()))


@pytest.mark.parametrize("setting", ["data.corpus", "data.valid"])
def test_tokens_of_another_text_are_named(
    setting: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss would be printed as that of the text that is asked for."""
    text = data / "text.txt"
    run = config(copy_of(data, tmp_path / "run"), f"data.corpus={text}")
    assert pipeline.run(run, ("train",)) == 0
    assert "has the tokens of" not in capsys.readouterr().out
    before = repr(str(text)) if setting == "data.corpus" else "None"
    for step in ("train", "evaluate"):
        assert pipeline.run(run.changed([f"{setting}=other.txt"]), (step,)) == 0
        assert f"has the tokens of {setting}={before}, not of 'other.txt'; the step" in capsys.readouterr().out


def test_a_training_that_goes_on_with_other_text_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a given tokenizer nothing else differs: with one of its own the run is refused."""
    text, other = data / "text.txt", tmp_path / "other.txt"
    other.write_text(text.read_text().replace("cat", "dog"))
    run = config(tmp_path / "run", f"data.corpus={text}", f"data.tokenizer={data / 'tokenizer'}")
    assert pipeline.run(run, pipeline.WRITERS) == 0
    assert "in place of" not in capsys.readouterr().out
    assert pipeline.run(run.changed([f"data.corpus={other}"]), pipeline.WRITERS) == 0
    printed = capsys.readouterr().out
    assert f"in place of the tokens of data.corpus={str(text)!r}, also for a training that goes on here" in printed
