"""Every reader of a file gives a result or a ValueError, whatever the file holds, and touches no other file.

LMSYS_FUZZ=100000 python -m pytest tests/fuzz      # so many files for each reader; `nox -s fuzz` does this
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lmsys.attention import tuning
from lmsys.bench import record
from lmsys.kernels import trial
from lmsys.reports.__main__ import build
from lmsys.reports.load import InputError
from lmsys.reports.page import MANIFEST, fill
from lmsys.strict_json import parse_setting
from lmsys.tokenizer import Tokenizer, train
from lmsys.training import checkpoint
from lmsys.training.config import RunConfig
from lmsys.training.data import open_tokens, tokenize_files
from lmsys.training.log import JsonLines
from tests.fuzz.mutations import mutated
from tests.support.records import of_everything, save

COUNT = int(os.environ.get("LMSYS_FUZZ", "100"))
TEXT = Path(__file__).read_text()
SPOILED = b"[" * 10**5, b'{"a":' * 10**5, b"[]", b"3", b'"x"', b"{}", b"\xff\xfe", b"\0", b"", b"PK\x03\x04 no zip"


@dataclass(frozen=True)
class Reader:
    """`prepare` writes good files into a folder and names the one to change; `read` takes that file."""

    prepare: Callable[[Path], Path]
    read: Callable[[Path], Any]
    one_in: int = 1  # a slow reader has one file of so many
    refuses_by: type[ValueError] = ValueError


def text(name: str, content: str) -> Callable[[Path], Path]:
    """A file with this text."""

    def prepare(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return prepare


def result(folder: Path) -> Path:
    """One record of each benchmark."""
    return save(folder / "result.json", list({one["benchmark"]: one for one in of_everything()}.values()))


def journal(folder: Path) -> Path:
    found = json.loads(result(folder).read_text())["lmsys"]
    head = {key: value for key, value in found.items() if key != "records"}
    (folder / "result.json").unlink()
    (folder / "result.json.partial").write_text("".join(json.dumps(one) + "\n" for one in (head, *found["records"])))
    return folder / "result.json.partial"


def tokenizer(name: str) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        (folder / "text").write_text(TEXT)
        train([folder / "text"], 300, ["<|endoftext|>"]).save(folder)
        return folder / name

    return prepare


def tokens(name: str) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        tokenizer("text")(folder)
        tokenize_files(Tokenizer.load(folder), [folder / "text"], folder / "ids.npy")
        if name == "plain.npy":
            np.save(folder / "plain.npy", np.arange(20, dtype=np.int32))
        return folder / name

    return prepare


def saved(folder: Path) -> Path:
    checkpoint.save(folder, 3, {"x": torch.zeros(3)}, {"own": {"n": 1}}, facts={"config": {"a": 1}})
    return folder / "step-00000003.json"


def signed(path: Path) -> Any:
    """As one that was made so: its own checksum is right."""
    try:
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            content.pop("sha256", None)
            content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
            path.write_text(json.dumps(content))
    except (ValueError, RecursionError):
        pass
    return checkpoint.read(path).verify()


def log(folder: Path) -> Path:
    with closing(JsonLines(folder / "log.jsonl", 0)) as lines:
        for step in range(5):
            lines.write(step=step, loss=1.0)
    return folder / "log.jsonl"


def manifest(folder: Path) -> Path:
    fill(folder / "report", {"index.html": "x", "tables/a.csv": "x"})
    return folder / "report" / MANIFEST


def in_cache(read: Callable[[], Any]) -> Callable[[Path], Any]:
    def reader(path: Path) -> Any:
        with mock.patch.dict(os.environ, LMSYS_CACHE_DIR=str(path.parent)):
            return read()

    return reader


def report(path: Path) -> Path:
    return build([path], path.parent / "out")


def undrawn(path: Path) -> Path:
    """All of a report but what matplotlib takes for drawing, nine tenths of its time."""

    def size_alone(_: Figure, file: TextIO, **__: Any) -> None:
        file.write('<svg width="9pt" height="9pt"/>')

    with mock.patch.object(Figure, "savefig", size_alone):
        return report(path)


CONFIG = text("run.json", RunConfig().to_json())
SETTING = text("setting", "train.betas=[0.9,0.95]")
TILE = {"block_q": 64, "block_k": 64, "num_warps": 4, "num_stages": 2}
TUNED = text("tuning.json", json.dumps({"a": TILE, "b": TILE}))
VERDICTS = text("trials.json", json.dumps({"a": "exact", "b": "dq is wrong"}))
READERS = {
    "config": Reader(CONFIG, lambda path: RunConfig.from_json(path.read_bytes().decode(errors="replace"))),
    "setting": Reader(SETTING, lambda path: RunConfig().changed([path.read_bytes().decode(errors="replace")])),
    "parsed setting": Reader(SETTING, lambda path: parse_setting(RunConfig(), path.read_bytes().decode("latin-1"))),
    "result": Reader(result, record.load),
    "journal": Reader(journal, record.load),
    "vocabulary": Reader(tokenizer("vocab.json"), lambda path: Tokenizer.load(path.parent)),
    "merges": Reader(tokenizer("merges.txt"), lambda path: Tokenizer.load(path.parent)),
    "token ids": Reader(tokens("ids.npy"), open_tokens),
    "facts of token ids": Reader(tokens("ids.json"), lambda path: open_tokens(path.with_suffix(".npy"))),
    "token ids of others": Reader(tokens("plain.npy"), lambda path: open_tokens(path, Tokenizer.load(path.parent))),
    "checkpoint": Reader(saved, lambda path: checkpoint.read(path).verify()),
    "signed checkpoint": Reader(saved, signed),
    "log": Reader(log, lambda path: JsonLines(path, 3).close()),
    "manifest of a report": Reader(manifest, lambda path: fill(path.parent, {"index.html": "y"})),
    "report": Reader(result, undrawn, one_in=5, refuses_by=InputError),
    "report with plots": Reader(result, report, one_in=100, refuses_by=InputError),
    "tuning cache": Reader(TUNED, in_cache(tuning.KEPT.read)),
    "verdicts on kernels": Reader(VERDICTS, in_cache(trial.KEPT.read)),
}


def state(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_reader_gives_a_result_or_a_value_error(name: str, tmp_path: Path) -> None:
    reader, good, others = READERS[name], tmp_path / "good", tmp_path / "others"
    for folder in (good, others):
        folder.mkdir()
    (others / "file").write_text("somebody else's")
    path = reader.prepare(good)
    content, before = path.read_bytes(), state(others)
    files = {one: one.read_bytes() for one in good.rglob("*") if one.is_file()}
    reader.read(path)
    refused = 0
    for seed in range(-len(SPOILED), COUNT // reader.one_in):
        path.write_bytes(SPOILED[seed] if seed < 0 else mutated(content, seed))
        try:
            reader.read(path)
        except reader.refuses_by as error:
            refused += 1
            assert str(error), f"seed {seed}: no message"
            assert len(str(error)) < 5000, f"seed {seed}: a message of {len(str(error))} characters"
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        shutil.rmtree(good / "out", ignore_errors=True)
        for one, was in files.items():
            if not one.is_file() or one.read_bytes() != was:
                one.write_bytes(was)
    assert state(others) == before
    assert {one.name for one in tmp_path.iterdir()} == {"good", "others"}
    assert refused or name == "log", "nothing was ever refused: are the files changed at all?"
