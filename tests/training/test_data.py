"""`lmsys.training.data`: token files, sources of tokens, and batches of windows for ranks and steps.

Laws hold for any division into files, ranks, micro-batches and epochs. A window is a training sequence: the inputs are
`context_length` tokens in a row, the targets are the tokens that follow each of them.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.tokenizer import Tokenizer, train
from lmsys.training.data import Batches, TokenFiles, fixed_windows, open_tokens, shards, tokenize_files
from tests.support.training_runs import Ids

END = "<|endoftext|>"
TEXT = Path(__file__).read_text() + END + "café 中文\n" * 50


@cache
def tokenizer() -> Tokenizer:
    """A tokenizer of 400 tokens, trained on this file."""
    return train([Path(__file__)], 400, [END])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of these tests are divided into several chunks, as large texts are."""
    monkeypatch.setattr("lmsys.tokenizer.chunks.SMALLEST", 500)


def positions(length: int) -> Ids:
    """A source of the ids 0, 1, 2, ..., so that each id is its position."""
    return Ids(np.arange(length))


@pytest.mark.parametrize(("processes", "kind"), [(1, str), (2, Path)])
def test_a_token_file_has_the_ids_that_encode_gives(tmp_path: Path, processes: int, kind: type) -> None:
    """Paths may be text."""
    (tmp_path / "a").write_text(TEXT)
    (tmp_path / "b").write_text("more of it")
    path = tokenize_files(
        tokenizer(),
        [kind(tmp_path / "a"), kind(tmp_path / "b")],
        kind(tmp_path / "new" / "ids.npy"),
        processes=processes,
    )
    ids = open_tokens(kind(path), tokenizer())
    assert isinstance(ids, np.memmap) and ids.dtype == np.uint16
    assert ids.tolist() == tokenizer().encode(TEXT) + tokenizer().encode("more of it")
    assert sorted(file.name for file in path.parent.iterdir()) == ["ids.json", "ids.npy"]


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(1, 4))
def test_shards_of_ranks_are_together_the_whole(
    tmp_path_factory: pytest.TempPathFactory, world_size: int, num_files: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    files = [folder / f"{index}.txt" for index in range(num_files)]
    for index, file in enumerate(files):
        file.write_text(TEXT[index * 100 : index * 1500 + 1000])
    output = folder / "ids.npy"
    for rank in range(world_size):
        tokenize_files(tokenizer(), files, output, rank=rank, world_size=world_size)
    source = TokenFiles(shards(output, world_size), tokenizer())
    expected = [number for file in files for number in tokenizer().encode(file.read_text())]
    assert source.read(0, len(source)).tolist() == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 30), st.integers(0, 30))
def test_reading_goes_across_files(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], start: int, size: int
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    every, paths = np.arange(sum(lengths), dtype=np.uint32), []
    for index, part in enumerate(np.split(every, np.cumsum(lengths)[:-1])):
        paths.append(folder / f"{index}.npy")
        np.save(paths[-1], part)
    source = TokenFiles(paths)
    assert len(source) == len(every)
    assert source.read(start, start + size).tolist() == every[start : start + size].tolist()


def test_ids_of_large_vocabularies_are_uint32(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    vocab = {i: bytes([i]) for i in range(256)} | {i: b"\x00%d" % i for i in range(256, 65_537)}
    ids = open_tokens(tokenize_files(Tokenizer(vocab, []), [tmp_path / "a"], tmp_path / "ids.npy"))
    assert ids.dtype == np.uint32 and ids.tolist() == [97, 98]


def test_token_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(TEXT)
    path = tokenize_files(tokenizer(), [tmp_path / "a"], tmp_path / "ids.npy")
    other = Tokenizer(tokenizer().vocab, tokenizer().merges, [END, "<|pad|>"])
    with pytest.raises(ValueError, match="made with another tokenizer, of 400 tokens; this one has 401"):
        open_tokens(path, other)
    (tmp_path / "torn.npy").write_bytes(path.read_bytes()[:-10])
    for name in ("torn.npy", "gone.npy"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read as an array of token ids"):
            open_tokens(tmp_path / name)
    (tmp_path / "ids.json").write_text(json.dumps(json.loads((tmp_path / "ids.json").read_text()) | {"tokens": 7}))
    with pytest.raises(ValueError, match=r"ids.json says 7: make it anew"):
        open_tokens(path)
    with pytest.raises(ValueError, match="no paths of token files"):
        TokenFiles([])


@pytest.mark.parametrize(
    ("ids", "with_facts", "message"),
    [
        ([1, 2, 400], False, "id 400 is not in this vocabulary of 400"),
        ([3, -1, 2], False, "id -1 is less than 0"),
        ([3, -1, 2], True, "id -1 is less than 0"),
        ([[0, 0], [0, 0]], False, "must be one row of whole numbers"),
        ([0.0, 0.0], False, "must be one row of whole numbers"),
        ([{}], False, "cannot be read as an array of token ids"),
    ],
)
def test_an_array_that_is_no_row_of_this_tokenizers_ids_is_refused(
    tmp_path: Path, ids: list[Any], with_facts: bool, message: str
) -> None:
    np.save(tmp_path / "ids.npy", np.array(ids), allow_pickle=True)
    if with_facts:
        facts = {"tokens": len(ids), "vocab_size": 400, "tokenizer": tokenizer().fingerprint}
        (tmp_path / "ids.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=f"ids.npy: .*{message}"):
        open_tokens(tmp_path / "ids.npy", tokenizer())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("length", [2**62, 2**70])
def test_a_header_of_too_many_ids_is_refused(tmp_path: Path, length: int) -> None:
    with (tmp_path / "ids.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (length,)})
    with pytest.raises(ValueError, match="ids.npy: cannot be read as an array of token ids"):
        open_tokens(tmp_path / "ids.npy")


def test_an_archive_of_arrays_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "ids.npy").open("wb") as file:
        np.savez(file, a=np.arange(3), b=np.arange(3))
    with pytest.raises(ValueError, match="ids.npy: must be an array, a .npy; it is an archive of several"):
        open_tokens(tmp_path / "ids.npy")


def test_a_failed_tokenization_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(TEXT.encode() + b" \xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        tokenize_files(tokenizer(), [tmp_path / "a"], tmp_path / "out" / "ids.npy")
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "a").write_text("good")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        tokenize_files(tokenizer(), [tmp_path / "a"], tmp_path / "out" / "ids.npy")
    assert not list((tmp_path / "out").iterdir())


def test_bad_tokenization_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="there is no text in .*empty"):
        tokenize_files(tokenizer(), [tmp_path / "empty"], tmp_path / "ids.npy")
    with pytest.raises(ValueError, match="rank=2 must be at least 0 and at most 1"):
        tokenize_files(tokenizer(), [tmp_path / "empty"], tmp_path / "ids.npy", rank=2, world_size=2)


@pytest.mark.parametrize(("text", "output"), [("a.json", "a.npy"), ("a.npy", "a.npy"), ("a.txt", "b.json")])
def test_tokens_are_not_written_over_their_text_or_each_other(tmp_path: Path, text: str, output: str) -> None:
    """The facts about NAME.npy are in NAME.json, which is removed before the text is read."""
    (tmp_path / text).write_text(TEXT)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=f"output='.*{output}' must be another NAME.npy"):
        tokenize_files(tokenizer(), [tmp_path / "link" / text], tmp_path / output)
    assert (tmp_path / text).read_text() == TEXT


# context length, batch size, ranks, micro-batches of a step, tokens
sizes = st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(8, 200))


@given(sizes, st.integers(0, 5))
def test_an_epoch_takes_every_window_once_on_some_rank(sizes: tuple[int, ...], seed: int) -> None:
    context, batch, world_size, accumulation, length = sizes
    ranks = [
        Batches(positions(length), context, batch, seed, rank, world_size, accumulation) for rank in range(world_size)
    ]  # fmt: skip
    num_windows, global_batch = ranks[0].num_windows, ranks[0].global_batch
    starts = []
    for step in range(-(-2 * num_windows // global_batch)):
        for micro in range(accumulation):
            for batches in ranks:
                inputs, targets = batches.batch(step, micro)
                assert inputs.shape == targets.shape == (batch, context) and inputs.dtype == np.int64
                assert (targets == inputs + 1).all() and (np.diff(inputs) == 1).all()
                starts += inputs[:, 0].tolist()
    for epoch in range(2):
        in_epoch = sorted(starts[epoch * num_windows : (epoch + 1) * num_windows])
        assert len(set(in_epoch)) == num_windows and (np.diff(in_epoch) == context).all()
        assert in_epoch[0] >= 0 and in_epoch[-1] + context < length


@given(sizes, st.integers(0, 5), st.integers(0, 20))
def test_one_rank_that_accumulates_has_the_same_global_batch(sizes: tuple[int, ...], seed: int, step: int) -> None:
    context, batch, world_size, accumulation, length = sizes
    together = [
        Batches(positions(length), context, batch, seed, rank, world_size, accumulation).batch(step, micro)[0]
        for micro in range(accumulation)
        for rank in range(world_size)
    ]
    alone = Batches(positions(length), context, batch, seed, accumulation=world_size * accumulation)
    for micro, expected in enumerate(together):
        assert (alone.batch(step, micro)[0] == expected).all()


def test_every_epoch_has_an_order_of_its_own() -> None:
    batches = Batches(positions(1000), 8, 31)
    first, second = (batches.batch(step * 4)[0][:, 0] // 8 for step in range(2))  # 124 windows, 4 batches
    assert batches.num_windows == 124 and (first != second).any()


def test_batches_are_a_function_of_seed_and_step() -> None:
    first, again, other = (Batches(positions(1000), 8, 4, seed) for seed in (0, 0, 1))
    later = [first.batch(step)[0] for step in range(5)][4]
    assert (again.batch(4)[0] == later).all() and (other.batch(4)[0] != later).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 0}, "context_length=0 must be at least 1"),
        ({"batch_size": -1}, "batch_size=-1 must be at least 1"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"rank": 1}, "rank=1 must be at least 0 and at most 0"),
        ({"context_length": 10}, "10 tokens are too few: one window of context_length=10 needs 11"),
    ],
)
def test_bad_settings_of_batches_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(**{"source": positions(10), "context_length": 4, "batch_size": 1, **changes})


@pytest.mark.parametrize(
    ("step", "micro", "message"),
    [
        (-1, 0, "step=-1 must be at least 0"),
        (0, 2, "micro=2 must be at least 0 and at most 1"),
        ("0", 0, "step='0' must be a whole number"),
    ],
)
def test_a_batch_of_a_wrong_step_or_micro_batch_is_refused(step: Any, micro: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(positions(10), 4, 1, accumulation=2).batch(step, micro)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(10, 90))
def test_fixed_windows_are_spread_over_the_source(context: int, count: int, length: int) -> None:
    """They do not overlap, and the distances between them differ by one window at most."""
    inputs, targets = fixed_windows(positions(length), context, count)
    num_windows = (length - 1) // context
    assert len(inputs) == min(count, num_windows) and (targets == inputs + 1).all()
    starts = inputs[:, 0]
    assert (starts % context == 0).all() and (np.diff(starts) >= context).all()
    gaps = np.diff([*(starts // context), num_windows])
    assert gaps.max() - gaps.min() <= 1


def test_fixed_windows_need_enough_tokens() -> None:
    with pytest.raises(ValueError, match="10 tokens are too few: one window of context_length=10 needs 11"):
        fixed_windows(positions(10), 10, 1)
