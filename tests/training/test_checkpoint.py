"""`lmsys.training.checkpoint`: what is saved is loaded, damaged checkpoints are skipped, a failed save changes nothing.

A checkpoint is a manifest (step-N.json), a file with what all ranks share, and a file for each rank: so one of a single
rank has 3 files. "shared" and "rank-N" are the names of its parts. `saved.own(rank)` reads the part of a rank.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmsys import files
from lmsys.config import ModelConfig
from lmsys.training import checkpoint
from lmsys.training.checkpoint import SaveError, newest, read, save
from lmsys.training.training_state import rng_state, set_rng_state

CONFIG = ModelConfig(16, 32, 2, 2, vocab_size=40, context_length=8, attention="naive")
STATE = {"x": torch.arange(5.0), "n": 3, "deep": {"list": [1, "two", None, (3.5, True)]}}


def test_random_numbers_go_on_from_where_they_were_saved(tmp_path: Path) -> None:
    """tests/training/test_training.py tests this for a whole training."""
    save(tmp_path, 1, STATE, {"rng": rng_state()})
    expected = torch.rand(3)
    torch.rand(7)  # other numbers are drawn in between
    set_rng_state(newest(tmp_path).own(0)["rng"])
    assert torch.equal(torch.rand(3), expected)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    manifest = save(tmp_path / "new", 7, STATE, {"own": 1}, facts={"model": {"d": 16}, "seeds": (1, 2)})
    saved = newest(tmp_path / "new")
    assert saved.manifest == manifest and (saved.step, saved.world_size) == (7, 1)
    assert repr(saved.shared()) == repr(STATE) and saved.own(0) == {"own": 1}
    saved.require(model={"d": 16}, seeds=(1, 2))
    with pytest.raises(ValueError, match=r"saved with model.d=16; this run has 32"):
        saved.require(model={"d": 32})
    with pytest.raises(ValueError, match="saved with tokenizer=None; this run has 'abc'"):
        saved.require(tokenizer="abc")
    with pytest.raises(ValueError, match="saved by 1 ranks, has no part of rank=1"):
        saved.own(1)


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path) is None and newest(tmp_path / "gone") is None


TEARS = {  # ways to damage a file
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-99] + b"\x55" + path.read_bytes()[-98:]),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("part", ["shared", "rank-0", "manifest"])
@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, part: str, tear: str) -> None:
    for step in (1, 2):
        save(tmp_path, step, {**STATE, "step": step}, {"rng": rng_state()})
    saved = newest(tmp_path)
    assert saved.step == 2
    TEARS[tear](saved.manifest if part == "manifest" else tmp_path / saved.files[part]["file"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        earlier = newest(tmp_path)
    assert earlier.step == 1 and earlier.shared()["step"] == 1
    if (part, tear) != ("manifest", "gone"):
        assert len(caught) == 1 and "checkpoint passed over" in str(caught[0].message)
        if part != "manifest":
            with pytest.raises(ValueError):
                saved.shared() if part == "shared" else saved.own(0)


def sign_anew(manifest: Path, **changes: Any) -> None:
    """Changes a manifest, and gives it the right checksum."""
    content = json.loads(manifest.read_text()) | changes
    del content["sha256"]
    manifest.write_text(json.dumps({**content, "sha256": files.digest_of(content)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "1"}, "must be an object with 'step', a whole number"),
        ({"files": []}, "must be an object with 'files', an object"),
        ({"files": {"shared": 3}}, "files.shared: must be an object with file, bytes and sha256; got 3"),
        (
            {"files": {"shared": {"file": "../x", "bytes": 1, "sha256": ""}}},
            "files.shared: must be a file beside the manifest; got '../x'",
        ),
        ({"files": {}}, "names no file of 'shared'"),
        ({"format": 2}, "format 2 is not the 1 of this version"),
    ],
)
def test_a_wrong_manifest_with_a_right_checksum_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    manifest = save(tmp_path, 1, STATE)
    sign_anew(manifest, **changes)
    with pytest.raises(ValueError, match=f"{manifest}: {message}"):
        read(manifest).shared()


class Code:
    """An object that runs code when it is unpickled: it touches `trace`."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_code_is_never_unpickled(tmp_path: Path) -> None:
    save(tmp_path / "saved", 1, {"x": Code(tmp_path / "it ran")})
    saved = newest(tmp_path / "saved")
    part = saved.files["shared"]["file"]
    with pytest.raises(ValueError, match=f"{part}: must hold tensors and plain values alone; .* gives UnpicklingError"):
        saved.shared()
    assert not (tmp_path / "it ran").exists()
    torch.load(tmp_path / "saved" / part, weights_only=False)
    assert (tmp_path / "it ran").exists(), "the code does nothing: the test is wrong"


def test_a_file_that_holds_no_state_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is right, since the file was saved like this."""
    for content, message in (
        ([1], r"must hold a dictionary; got a list"),
        ({"x": 1}, r"must have 'model'; got \['x'\]"),
    ):
        saved = read(save(tmp_path, 1, content))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{saved.files['shared']['file']}: {message}"):
            saved.shared("model")
    monkeypatch.setattr(checkpoint.torch, "save", lambda _, file: file.write(b"no pickle"))
    saved = read(save(tmp_path, 1, STATE))
    with pytest.raises(ValueError, match=f"{saved.files['rank-0']['file']}: must hold tensors and plain values alone"):
        saved.own(0)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 4))
@example([5, 5], 4)
@settings(max_examples=20)
def test_the_newest_are_kept(tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: int) -> None:
    """A step may be saved again: its newest state is kept."""
    folder, expected = tmp_path_factory.mktemp("kept"), dict[int, int]()
    for number, step in enumerate(steps):
        save(folder, step, {"number": number}, keep=keep)
        expected[step] = number
        for old in sorted(other for other in expected if other <= step)[:-keep]:
            del expected[old]
        kept = {saved.step: saved.shared()["number"] for saved in map(read, folder.glob("*.json"))}
        assert kept == expected
        assert len(list(folder.iterdir())) == 3 * len(expected)  # no file of a removed checkpoint is left


@pytest.mark.filterwarnings("error")
def test_what_no_save_has_written_is_left_alone(tmp_path: Path) -> None:
    """This holds for files of any name that begins like a checkpoint's, and for folders that are named as its files.

    Files that a killed save left (`killed`) are removed. Those of step 1 stay, since its manifest cannot be read,
    and may name them.
    """
    folders = ["step-00000000.json", "step-00000003-shared-01234567.pt"]
    names = ["step-best.pt", "step-00000001-mine.pt", "step-mine.tmp", "step-00000001.json", "step-00000001.pt"]
    names += ["step-00000002.json.tmp", "step-00000002-shared-best.pt", "step-00000001-shared-0123abcd.pt", "notes.txt"]
    killed = [
        "step-00000002-shared-0123abcd.pt",
        "step-00000009-rank-11-0123abcd.pt",
        "step-00000002.json.0123abcd.tmp",
    ]
    for name in folders:
        (tmp_path / name).mkdir()
    for name in (*names, *killed):
        (tmp_path / name).write_text("mine")  # no manifest, no tensors
    for step in (2, 3, 4):
        save(tmp_path, step, STATE, keep=1)
    saved = newest(tmp_path)
    assert saved.step == 4 and all((tmp_path / name).read_text() == "mine" for name in names)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*folders, *names, saved.manifest.name, *(entry["file"] for entry in saved.files.values())}


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    save(tmp_path, 1, STATE)
    before, true_save = sorted(path.name for path in tmp_path.iterdir()), torch.save

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = SimpleNamespace(write=full, flush=lambda: None)
    patches = {
        "fsync": (checkpoint.os, "fsync", full),
        "replace": (Path, "replace", full),
        "write": (checkpoint.torch, "save", lambda state, _: true_save(state, file)),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*patches[call])
        with pytest.raises(SaveError, match="No space left on device; earlier checkpoints stand"):
            save(tmp_path, 2, STATE)
    saved = newest(tmp_path)
    assert saved.step == 1 and repr(saved.shared()) == repr(STATE)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".tmp") == before
    save(tmp_path, 2, STATE)
    assert len(list(tmp_path.iterdir())) == 6


def save_on_ranks(folder: Path, step: int, world_size: int, **options: Any) -> list[Any]:
    """Saves on a thread for each rank, which have parts of their own; returns paths, or exceptions, by rank."""
    barrier, slots = threading.Barrier(world_size, timeout=20), [None] * world_size

    def run(rank: int) -> Any:
        def gather(mine: Any) -> list[Any]:
            slots[rank] = mine
            barrier.wait()
            gathered = list(slots)
            barrier.wait()
            return gathered

        of_rank = {"rank": rank, "world_size": world_size, "gather": gather}
        try:
            return save(folder, step, {"shared": rank}, {"mine": rank}, **of_rank, **options)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))


def test_every_rank_saves_its_own_part(tmp_path: Path) -> None:
    assert save_on_ranks(tmp_path, 3, 3) == [tmp_path / "step-00000003.json"] * 3
    saved = newest(tmp_path)
    assert saved.world_size == 3 and saved.shared() == {"shared": 0}
    assert [saved.own(rank) for rank in range(3)] == [{"mine": rank} for rank in range(3)]


def test_when_one_rank_fails_all_raise_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, STATE)
    true_save = torch.save

    def fails_on_rank_2(state: Any, file: Any) -> None:
        if state == {"mine": 2}:
            raise OSError(28, "No space left on device")
        true_save(state, file)

    monkeypatch.setattr(checkpoint.torch, "save", fails_on_rank_2)
    for failed in save_on_ranks(tmp_path, 3, 3):
        assert isinstance(failed, SaveError) and "No space left" in str(failed)
    assert len(list(tmp_path.iterdir())) == 3


def test_files_that_cannot_be_removed_are_left_to_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 removes them, and its error would leave the other ranks waiting for it."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix != ".tmp":
            raise PermissionError(13, "Permission denied")

    save_on_ranks(tmp_path, 1, 2, keep=1)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="left: PermissionError: .*Permission denied"):
        patch.setattr(Path, "unlink", refuse)
        assert save_on_ranks(tmp_path, 2, 2, keep=1) == [tmp_path / "step-00000002.json"] * 2
    assert save_on_ranks(tmp_path, 3, 2, keep=1) == [tmp_path / "step-00000003.json"] * 2
    assert len(list(tmp_path.iterdir())) == 4


SAVER = """
import sys, torch
from pathlib import Path
from lmsys.training.checkpoint import save
step = 0
while True:
    step += 1
    save(Path(sys.argv[1]), step, {"step": step, "x": torch.full((200_000,), step)}, {"n": step}, keep=2)
    print(step, flush=True)
"""


def test_killed_at_any_moment_the_newest_is_whole(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, tmp_path], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    random = Random(0)
    for _ in range(random.randrange(3, 9)):
        printed = process.stdout.readline()
    time.sleep(random.uniform(0, 0.02))
    process.kill()
    printed = (process.stdout.read().split() or [printed])[-1]
    process.wait()
    process.stdout.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing looks damaged: a checkpoint that is not complete has no manifest
        saved = newest(tmp_path)
    assert saved.step >= int(printed)
    state = saved.shared()
    assert state["step"] == saved.step and bool((state["x"] == saved.step).all()) and saved.own(0) == {"n": saved.step}
    save(tmp_path, saved.step + 1, STATE, keep=1)
    assert len(list(tmp_path.iterdir())) == 3  # files of the killed save are removed


def test_wrong_arguments_and_a_wrong_manifest_are_refused(tmp_path: Path) -> None:
    for step, keep in ((-1, None), (1, 0)):
        with pytest.raises(ValueError, match="must be at least"):
            save(tmp_path, step, STATE, keep=keep)
    with pytest.raises(SaveError, match="step-00000001.json: could not be saved: ValueError: Out of range float"):
        save(tmp_path, 1, STATE, facts={"best": math.inf})  # which JSON lacks: it could not be read again
    (tmp_path / "step-00000001.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="must be an object with 'sha256', a string"):
        read(tmp_path / "step-00000001.json")
