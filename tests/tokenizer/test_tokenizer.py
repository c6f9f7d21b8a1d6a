"""Byte-level BPE (lmsys/tokenizer): training, encoding, saving and loading.

Training begins with 256 tokens, the bytes, and merges the most frequent pair of neighbouring tokens into a new one.
The references are lmsys/tokenizer/naive.py, which counts all pairs anew for each merge, and the packages tiktoken and
tokenizers where they are installed. `small()` is a tokenizer of 700 tokens for tests that need one. Splitting has its
own file, test_pretokens.py.
"""

import json
import pickle
import random
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmsys.strict_json import parse_json
from lmsys.tokenizer import Tokenizer, naive, train
from lmsys.tokenizer.pretokens import PATTERN
from lmsys.tokenizer.training import learn_merges
from tests.support.texts import END, texts


@cache
def small() -> Tokenizer:
    """A tokenizer of 700 tokens, trained on this file and on the source files of lmsys/tokenizer."""
    room = Path(__file__).parents[1]
    return train([Path(__file__), *sorted((room.parent / "lmsys" / "tokenizer").glob("*.py"))], 700, [END, "<|end|>"])


@cache
def small_texts() -> str:
    """This file and some text in other scripts, which `small()` was not trained on."""
    return Path(__file__).read_text() + END + "naïve café, 中文 text.\n\n  It's we'll!" * 3


# Draws {word: how often it occurs}.
word_counts = st.dictionaries(
    st.text("abc ", min_size=1, max_size=9).map(str.encode) | st.binary(min_size=1, max_size=4),
    st.integers(1, 5),
    max_size=12,
)


def test_special_tokens_may_be_none_and_paths_may_be_text(tmp_path: Path) -> None:
    path, folder = str(Path(__file__)), str(tmp_path / "tokenizer")
    trained = train(path, 300, None)
    assert trained.special_tokens == []
    assert trained.fingerprint == train([path], 300).fingerprint == train([Path(path)], 300).fingerprint
    assert trained.fingerprint == Tokenizer(trained.vocab, trained.merges, None).fingerprint
    trained.save(folder)
    files = f"{folder}/vocab.json", f"{folder}/merges.txt"
    for loaded in (Tokenizer.load(folder, None), Tokenizer.from_files(*files, None)):
        assert loaded.fingerprint == trained.fingerprint


# In "aaa" the pair "aa" occurs at two places, but only one of them can be merged.
RUNS = {b"a" * n: n for n in range(2, 12)} | {b"ab" + b"a" * n + b"b": 3 * n for n in range(2, 7)}


@given(word_counts, st.integers(0, 30))
@example(RUNS, 25)
def test_incremental_training_equals_counting_anew(counts: dict[bytes, int], num_tokens: int) -> None:
    assert learn_merges(counts, num_tokens) == naive.learn_merges(counts, num_tokens)


@given(word_counts, st.integers(1, 30))
def test_next_merge_continues_a_training(counts: dict[bytes, int], num_tokens: int) -> None:
    merges = naive.learn_merges(counts, num_tokens)
    for number, merge in enumerate(merges):
        assert naive.next_merge(counts, merges[:number]) == merge
    if len(merges) < num_tokens:
        assert naive.next_merge(counts, merges) is None


def test_ties_go_to_the_greater_pair() -> None:
    """The pair that is last in the order of bytes is merged, of those that are equally frequent."""
    assert learn_merges({b"ab": 1, b"ac": 1, b"b": 9}, 1) == [(b"a", b"c")]
    assert learn_merges({b"ab": 1, b"zb": 1, b"zab": 1}, 2) == [(b"a", b"b"), (b"z", b"b")]


def test_a_word_of_twice_the_length_is_about_twice_the_work() -> None:
    """If each merge read the whole word, it would be four times the work.

    Work is the number of calls, but a C function of a string or bytes counts as many as that is long.
    """

    def work(length: int) -> int:
        word, total = bytes(random.Random(0).choices(b"abcdefghij", k=length)), 0

        def count(_: FrameType, event: str, function: Any) -> None:
            nonlocal total
            read = getattr(function, "__self__", None) if event == "c_call" else None
            total += len(read) if isinstance(read, str | bytes) else 1

        sys.setprofile(count)
        try:
            learn_merges({word: 1}, 300)
        finally:
            sys.setprofile(None)
        return total

    assert work(8000) < 2.5 * work(4000)


def test_keys_of_a_json_object_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is a JSON object of 50,000 keys: comparing every two would be slow. Equal keys are still found."""

    class Key(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Key.compared += 1
            return str.__eq__(self, other)

    def loads(text: str, object_pairs_hook: Any, **_: Any) -> Any:
        return object_pairs_hook([(Key(key), 1) for key in text.split()])

    monkeypatch.setattr(json, "loads", loads)
    parse_json(" ".join(map(str, range(500))))
    assert Key.compared <= 500
    with pytest.raises(ValueError, match="'b' is given twice in one object"):
        parse_json("a b c b c")


def test_one_and_two_processes_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmsys.tokenizer.chunks.SMALLEST", 1000)
    file = tmp_path / "text"
    file.write_text(small_texts())
    by_one_process = train([file], 500, [END], 1)
    by_two_processes = train([file], 500, [END], 2)
    assert (
        by_one_process.vocab == by_two_processes.vocab
        and by_one_process.merges == by_two_processes.merges
        and by_one_process.vocab_size == 500
    )


@settings(max_examples=200)
@given(texts)
def test_encoding_equals_the_naive_one_and_decodes_to_the_text(text: str) -> None:
    tokenizer = small()
    assert tokenizer.encode(text) == naive.encode(text, tokenizer)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text("abcde_ ", min_size=100, max_size=400))
def test_the_code_for_long_words_equals_the_code_for_short_ones(text: str) -> None:
    tokenizer = small()
    assert tokenizer._merge_long(text) == tokenizer._merge_short(text)


@given(st.binary(max_size=80))
def test_any_bytes_are_decoded_to_themselves(data: bytes) -> None:
    assert small().decode_bytes(small().encode(data)) == data


# Lines that end within a word, so that a word is spread over several.
broken_words = st.lists(
    st.sampled_from(["re", "turn", " ret", "urn self", "the", " ", "\n", "def", " test_"]), max_size=12
)


@given(st.lists(texts, max_size=8) | broken_words, st.integers(1, 40))
def test_encode_iterable_equals_encode_of_the_whole(lines: list[str], size: int) -> None:
    tokenizer = small()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmsys.tokenizer.codec._PIECE", size)
        patch.setattr("lmsys.tokenizer.pretokens._BLOCK", size)
        assert list(tokenizer.encode_iterable(lines)) == tokenizer.encode("".join(lines))


def test_encode_iterable_yields_before_its_text_ends() -> None:
    def lines():  # type: ignore[no-untyped-def]
        while True:
            yield "a line of text\n" * 1000

    ids = small().encode_iterable(lines())
    first = [next(ids) for _ in range(100_000)]
    assert small().decode(first).startswith("a line of text\n" * 1000)


def test_a_full_cache_of_words_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer keeps the ids of words, and drops them if there are too many, or too many bytes of them."""
    expected = small().encode(small_texts())
    for name in ("_MOST_WORDS", "_MOST_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(f"lmsys.tokenizer.codec.{name}", 100)
            patch.setattr("lmsys.tokenizer.pretokens._BLOCK", 500)
            tokenizer = pickle.loads(pickle.dumps(small()))
            assert tokenizer.encode(small_texts()) == expected
            assert all(len(words) <= 100 and len(words) < len(small()._free[0][0]) for words, *_ in tokenizer._free)


def test_an_interrupted_encode_leaves_nothing_wrong_behind() -> None:
    """As Ctrl-C in a notebook: what was half-written of the words that are kept gave later texts wrong ids."""
    text, expected = small_texts()[:60], small().encode(small_texts()[:60])
    left, before = 0, sys.gettrace()

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        """Raises KeyboardInterrupt at line number `left` that the tokenizer's modules run."""
        nonlocal left
        left -= event == "line"
        if event == "line" and not left:
            raise KeyboardInterrupt
        return interrupt if "tokenizer" in frame.f_code.co_filename else None

    for number in range(1, 10**6):
        tokenizer, left = pickle.loads(pickle.dumps(small())), number
        sys.settrace(interrupt)
        try:
            tokenizer.encode(text)
            break  # it runs fewer lines
        except KeyboardInterrupt:
            sys.settrace(before)
            assert tokenizer.encode(text) == expected, f"interrupted at line number {number}"
        finally:
            sys.settrace(before)
    assert number > 100


def test_a_thread_within_encode_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was forked meanwhile, such as a DataLoader's, would wait for ever for a lock of that thread."""
    tokenizer, inside, go_on = pickle.loads(pickle.dumps(small())), threading.Event(), threading.Event()
    merge = tokenizer._merge

    def slow(word: bytes) -> Any:
        if threading.current_thread() is not threading.main_thread() and not inside.is_set():
            inside.set()
            assert go_on.wait(60)
        return merge(word)

    monkeypatch.setattr(tokenizer, "_merge", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(tokenizer.encode, small_texts())
        assert inside.wait(60)
        try:
            assert threads.submit(tokenizer.encode, small_texts()).result(20) == small().encode(small_texts())
        finally:
            go_on.set()
        assert first.result() == small().encode(small_texts())


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="character 2 is .*surrogate"):
        small().encode("ab\ud800")


@pytest.mark.parametrize("text", [3, None, ["a"], bytearray(b"a"), memoryview(b"a")])
def test_other_types_than_str_and_bytes_are_refused(text: Any) -> None:
    """And a tokenizer that has refused one works as before."""
    tokenizer = small()
    with pytest.raises(ValueError, match=r"text=.* must be a str or bytes"):
        tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode("aba")) == "aba"
    assert tokenizer.encode_array("aba").tolist() == tokenizer.encode_array(b"aba").tolist() == tokenizer.encode("aba")


def test_decoding_replaces_bytes_that_are_not_utf8_and_refuses_unknown_ids() -> None:
    assert small().decode([0xC3]) == "\ufffd" and small().decode_bytes([0xC3, 0xA9]) == "é".encode()
    with pytest.raises(ValueError, match="id 700 is not in the vocabulary: 0 to 699"):
        small().decode([700])


def test_the_dtype_holds_every_id() -> None:
    assert small().dtype == np.uint16 and small().encode_array(b"ab").dtype == np.uint16
    vocab = dict(small().vocab) | {number: b"\x00%d" % number for number in range(700, 65_537)}
    assert Tokenizer(vocab, small().merges, small().special_tokens).dtype == np.uint32


@given(st.text("abc <|endof>'s", max_size=40))
def test_special_tokens_that_overlap(text: str) -> None:
    specials = ["<|end|>", "<|end", "nd|>", END, "s<|", "'s<"]
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], specials)
    assert tokenizer.vocab_size == 262 and tokenizer.encode(text) == naive.encode(text, tokenizer)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.integers(1, 9)), min_size=1, max_size=20))
def test_tokens_of_any_bytes_are_saved_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, words: list[tuple[bytes, int]]
) -> None:
    merges = learn_merges(dict(words), 20)
    merged = dict.fromkeys(left + right for left, right in merges)
    vocab = dict(enumerate([*(bytes([byte]) for byte in range(256)), *merged]))
    folder = tmp_path_factory.mktemp("saved")
    saved = Tokenizer(vocab, merges, ["<|é ß|>"])
    saved.save(folder / "new")
    loaded = Tokenizer.load(folder / "new")
    assert loaded.vocab == saved.vocab and loaded.merges == merges and loaded.special_tokens == ["<|é ß|>"]
    assert loaded.fingerprint == saved.fingerprint
    assert Tokenizer.load(folder / "new", ["<|pad|>"]).encode("<|pad|>") == [saved.vocab_size]


def test_files_named_as_gpt2s_are_loaded(tmp_path: Path) -> None:
    """Reads the older names, encoder.json and vocab.bpe, and ids in GPT-2's order, which is not that of the bytes."""
    small().save(tmp_path)
    shift = {number: (number + 300) % 700 for number in range(700)}
    Tokenizer({shift[n]: token for n, token in small().vocab.items()}, small().merges, [END, "<|end|>"]).save(tmp_path)
    (tmp_path / "vocab.json").rename(tmp_path / "encoder.json")
    (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode(small_texts()) == [shift[number] for number in small().encode(small_texts())]


def as_gpt2s(merges: Path) -> str:
    """The text of a merges file that this project has saved, with the first line of GPT-2's, which has no count."""
    return "\n".join(["#version: 0.2", *merges.read_text().split("\n")[1:]])


@given(st.data())
def test_a_merges_file_that_is_cut_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A file may begin with a count of its merges, as ours does, or not, as GPT-2's."""
    folder = tmp_path_factory.mktemp("cut")
    small().save(folder)
    merges = folder / "merges.txt"
    for text in (merges.read_text(), as_gpt2s(merges)):
        merges.write_text(text)
        assert Tokenizer.load(folder).fingerprint == small().fingerprint
        merges.write_text(text[: data.draw(st.integers(0, len(text) - 2))])  # at -1, no merge would be lost
        with pytest.raises(ValueError):
            Tokenizer.load(folder)


def test_lost_merges_are_not_taken_for_special_tokens(tmp_path: Path) -> None:
    """A token that no merge makes is special, or its merge is lost. Our first line, or the caller, says which."""
    small().save(tmp_path)
    merges = tmp_path / "merges.txt"
    gpt2s = as_gpt2s(merges)
    for text, lost in ((gpt2s[: gpt2s[:-1].rindex("\n", 0)], 1), ("", len(small().merges)), ("#version: 0.2 m", 442)):
        merges.write_text(text)
        with pytest.raises(ValueError, match=f"merges.txt: lacks the merges of {lost} of the tokens in .*it is cut"):
            Tokenizer.load(tmp_path)
    Tokenizer({i: bytes([i]) for i in range(256)}, [], ["</", "<s>", END]).save(tmp_path)
    assert Tokenizer.load(tmp_path).special_tokens == ["</", "<s>", END]  # as the first line says
    merges.write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match="of 1 of the tokens in .*vocab.json, such as '</': .* name them as special"):
        Tokenizer.load(tmp_path)
    assert Tokenizer.load(tmp_path, ["</"]).special_tokens == ["</", "<s>", END]


def test_encoding_equals_tiktoken() -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed: pip install tiktoken")
    tokenizer = small()
    ranks = {
        token: number
        for number, token in tokenizer.vocab.items()
        if token.decode(errors="replace") not in (END, "<|end|>")
    }
    specials = {token: tokenizer.encode(token)[0] for token in tokenizer.special_tokens}
    theirs = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)

    @settings(max_examples=300)
    @given(texts)
    def is_equal(text: str) -> None:
        assert tokenizer.encode(text) == theirs.encode(text, allowed_special="all")

    is_equal()
    assert tokenizer.encode(small_texts()) == theirs.encode(small_texts(), allowed_special="all")


@settings(max_examples=30)
@given(st.lists(st.text("abcdef ", min_size=3, max_size=12), min_size=1, max_size=30))
def test_merges_equal_hugging_faces_until_there_is_a_tie(lines: list[str]) -> None:
    """Hugging Face's training chooses another than ours, of pairs that are equally frequent."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install tokenizers")
    counts = Counter(word.encode() for line in lines for word in regex.findall(PATTERN, line))
    ours = learn_merges(counts, 20)
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=276, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(lines, trainer)
    text_merges = json.loads(theirs.to_str())["model"]["merges"]
    their_merges = [tuple(token.replace("Ġ", " ").encode() for token in pair) for pair in text_merges]
    for index, (our, their) in enumerate(zip(ours, their_merges, strict=False)):
        if our != their:
            words = {word: [bytes([byte]) for byte in word] for word in counts}
            for pair in ours[:index]:
                words = {word: naive.merge(tokens, pair) for word, tokens in words.items()}
            pairs = naive.count_pairs(words, counts)
            assert pairs[our] == pairs[their] == max(pairs.values()), "they differ, and it is no tie"
            break


BYTES = {i: bytes([i]) for i in range(256)}


@pytest.mark.parametrize(
    ("vocab", "merges", "specials", "message"),
    [
        ({**BYTES, 300: b"ab"}, [], [], "ids must be 0 to 256; got .300."),
        ({**BYTES, 256: b"a"}, [], [], "two ids have the bytes b'a'"),
        ({0: b"a"}, [], [], "lacks 255 of the 256 bytes"),
        (BYTES, [(b"a", b"b")], [], "b'ab' is not in the vocabulary"),
        (
            {**BYTES, 256: b"aa", 257: b"aab"},
            [(b"aa", b"b"), (b"a", b"a")],
            [],
            r"merge \(b'aa', b'b'\): no merge before it makes b'aa'",
        ),
        ({**BYTES, 256: b"ab"}, [(b"a", b"b")] * 2, [], r"merge \(b'a', b'b'\) is listed twice"),
        (BYTES, [], [3], r"special_tokens\[0\]=3 must be of type str"),
        (BYTES, [], {"<|a|>", "<|b|>"}, "special_tokens={'<.*'} must be a list or tuple: a set has no order"),
        ({**BYTES, 256: b"ab"}, [(b"a", b"b")], ["ab"], "special token 'ab' is an ordinary token"),
        (BYTES, [], ["a"], "special token 'a' is an ordinary token"),
        (BYTES, [], [""], "must have at least one character"),
    ],
)
def test_bad_vocabularies_merges_and_special_tokens_are_refused(vocab, merges, specials, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        Tokenizer(vocab, merges, specials)


def test_bad_training_input_is_refused(tmp_path: Path) -> None:
    text, empty, latin = (tmp_path / name for name in ("text", "empty", "latin"))
    text.write_text("some text")
    empty.write_text("")
    latin.write_bytes("ab é".encode("latin-1"))
    for files, size, message in (
        ([text], 256, "vocab_size=256 must be at least 257: 256 bytes and 1 special"),
        ([tmp_path / "gone"], 300, "gone: there is no such file"),
        ([empty], 300, "there is no text in .*empty"),
        ([], 300, "no files are given"),
        ([latin], 300, "latin is not UTF-8 text: .* at byte 3"),
    ):
        with pytest.raises(ValueError, match=message):
            train(files, size, [END])
    with pytest.raises(ValueError, match="processes=0 must be at least 1"):
        train([text], 300, [END], 0)
    with pytest.raises(ValueError, match="special token 'a' is an ordinary token of this vocabulary"):
        train([text], 300, ["a"])
    assert train([text], 5000).vocab_size < 300  # the text is used up
    assert train([text], 260, [END, END]).fingerprint == train([text], 260, [END]).fingerprint  # once is enough


def test_bad_files_are_refused(tmp_path: Path) -> None:
    small().save(tmp_path)
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    good = vocab.read_text(), merges.read_text()
    for file, content, message in (
        (vocab, "[", "not JSON"),
        (vocab, '{"a": "b"}', "must be an object of token: id"),
        (vocab, '{"a": 1, "b": 1}', "id 1 is given twice"),
        (merges, "#version\nab\n", "line 2: 'ab' is no merge"),
        (merges, "a\x01 b\n", "line 1"),
        (merges, good[1][: good[1].rindex("\n", 0, -1) + 1], "merges.txt: cut, or not of the tokenizer"),
        (vocab, good[0].replace("{", "{ "), "merges.txt: cut, or not of the tokenizer"),
        (vocab, "[" * 10_000, "nested too deep"),
        (vocab, r'{"a": "\ud800"}', "is half of a character"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(tmp_path)
        vocab.write_text(good[0])
        merges.write_text(good[1])
    vocab.unlink()
    with pytest.raises(ValueError, match="has neither vocab.json with merges.txt nor encoder.json with vocab.bpe"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="token b'xy' cannot be saved: no byte"):
        Tokenizer({**BYTES, 256: b"xy"}, []).save(tmp_path)
    with pytest.raises(ValueError, match="special token 'Ġa' cannot be saved"):
        Tokenizer({**BYTES, 256: b" a"}, [(b" ", b"a")], ["Ġa"]).save(tmp_path)
