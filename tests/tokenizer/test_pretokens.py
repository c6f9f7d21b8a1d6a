"""Splitting text into pre-tokens (lmsys/tokenizer/pretokens.py) and files into chunks (lmsys/tokenizer/chunks.py).

The reference is `naive.split`, which applies GPT-2's regular expression as it is written. Other tests are about the
places where a text may be cut into chunks, and about `Words`, which numbers the distinct pre-tokens.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmsys.tokenizer import naive
from lmsys.tokenizer import pretokens as module
from lmsys.tokenizer.chunks import Chunk, chunks, split, whole
from lmsys.tokenizer.pretokens import PAD, PATTERN, Pretokenizer, Words
from lmsys.tokenizer.training import count_pretokens
from tests.support.texts import pretokens, special_lists, texts


@example("'ll-", ["l-"])
@given(texts, special_lists)
def test_splitting_equals_the_pattern(text: str, specials: list[str]) -> None:
    assert pretokens(text.encode(), specials) == [word.encode() for word in naive.split(text, specials)]


def test_every_character_has_the_class_that_it_has_in_the_pattern() -> None:
    """Each character stands after a letter, a digit and a space. Of the rare planes every 97th is tested."""
    codes = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, sys.maxunicode + 1, 97)]
    text = "".join(f"a{char}1{char} {char}" for char in map(chr, codes))
    assert b"|".join(pretokens(text.encode(), [])).decode() == "|".join(regex.findall(PATTERN, text))


@given(st.binary(max_size=60), special_lists)
def test_splitting_loses_no_byte(data: bytes, specials: list[str]) -> None:
    assert b"".join(pretokens(data, specials)) == data


@settings(max_examples=300)
@example("aabaaaa 1", ["aab", "ba"])
@given(texts, special_lists)
def test_no_cut_changes_the_pretokens(text: str, specials: list[str]) -> None:
    data, splitter = text.encode(), Pretokenizer(specials)
    uncut = pretokens(data, specials)
    for after in range(len(data)):
        place = splitter.cut(data, after)
        if place is not None:
            assert after < place < len(data)
            assert pretokens(data[:place], specials) + pretokens(data[place:], specials) == uncut


def test_there_are_cuts_between_words_and_behind_special_tokens() -> None:
    splitter = Pretokenizer(["<|end|>"])
    assert [splitter.cut(b"ab cd ef<|end|>gh<|end|>..........", after) for after in (0, 2, 5, 15)] == [2, 5, 15, 24]
    assert Pretokenizer(["<|end|>"]).cut(b"a" * 100, 0) is None


def test_many_special_tokens_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are compared to find tokens that may overlap. To save days, no text is cut behind any of many tokens."""
    compared: list[bytes] = []
    monkeypatch.setattr(module, "_may_overlap", lambda token, other: compared.append(token))
    many = [f"<{number}>" for number in range(1000)]
    assert list(Pretokenizer(many).starts(b"a<1>b<10>" + bytes(PAD))) == [0, 1, 4, 5, 9]
    assert not compared and Pretokenizer(many[:9]) and len(compared) == 81


@given(st.lists(texts, max_size=6))
def test_words_are_numbered_once_and_found_again(lines: list[str]) -> None:
    words, splitter = Words(), Pretokenizer()
    for text in [*lines, *lines]:
        padded = text.encode() + bytes(PAD)
        starts = splitter.starts(padded)
        found = [words.list[number] for number in words.numbers(padded, starts).tolist()]
        assert found == pretokens(text.encode(), [])
    assert len(set(words.list)) == len(words) and words.num_bytes == sum(map(len, words.list))


def test_many_words_are_kept_apart() -> None:
    """Words differ in their length alone, or in one byte. They are so many that the hash table grows."""
    every = [bytes([65 + i % 7]) * (i % 23 + 1) + b"\x00" * (i % 3) + str(i // 100).encode() for i in range(30_000)]
    starts = np.cumsum([0, *map(len, every)])
    words = Words()
    for _ in range(2):
        numbers = words.numbers(b"".join(every) + bytes(PAD), starts)
        assert [words.list[number] for number in numbers.tolist()] == every
    assert sorted(words.list) == sorted(set(every))


@settings(max_examples=20)
@given(st.lists(texts, min_size=1, max_size=4), special_lists, st.integers(20, 200))
def test_chunks_of_files_change_no_count(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], specials: list[str], size: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    files = [folder / str(index) for index in range(len(lines))]
    for file, text in zip(files, lines, strict=True):
        file.write_bytes(text.encode() * 5)
    parts = [whole(file) for file in files]
    expected = Counter(word.encode() for text in lines for word in naive.split(text * 5, specials))
    for file_chunks in (
        list(chunks(parts, Pretokenizer(specials), size)),
        sum(split(parts, Pretokenizer(specials), 3), []),
    ):
        assert b"".join(chunk.read() for chunk in file_chunks) == b"".join(file.read_bytes() for file in files)
        found = Counter(word for chunk in file_chunks for word in pretokens(chunk.read(), specials))
        assert found == expected
    for token in specials:
        expected.pop(token.encode(), None)
    assert count_pretokens(files, specials) == expected


@given(st.integers(1, 9), st.lists(st.integers(1, 400), min_size=1, max_size=5))
@example(7, [1, 1, 400])  # 2,010 bytes: as a float, 7 times the even share is more than all of them
@settings(max_examples=10)
def test_readers_share_the_text_evenly(
    tmp_path_factory: pytest.TempPathFactory, count: int, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("text")
    for index, length in enumerate(lengths):
        (folder / str(index)).write_text("word " * length)
    parts = [whole(folder / str(index)) for index in range(len(lengths))]
    shares = [sum(chunk.size for chunk in share) for share in split(parts, Pretokenizer(), count)]
    total = sum(shares)
    # A share ends where one of its 64 pieces does, and a cut lies between words: late by a piece and a word at most.
    late = [sum(shares[:reader]) * count - total * reader for reader in range(1, count + 1)]
    assert total == sum(part.size for part in parts) and min(late) >= 0 and max(late) <= total / 64 + 6 * count


def test_a_chunk_that_became_shorter_is_reported(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abc")
    with pytest.raises(ValueError, match="became shorter"):
        Chunk(tmp_path / "text", 1, 9).read()
