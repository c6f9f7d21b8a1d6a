"""Converts text to token ids and back by byte-level BPE: any bytes can be encoded, and decoding gives them back.

A text is split into pre-tokens, such as " word" (see pretokens.py). Each distinct pre-token is merged once and its ids
are cached; a text's ids are gathered from this cache by array operations. Files have GPT-2's format: JSON and lines of
text, with a printable character for each byte.

training.py makes a `Tokenizer`, and the training pipeline loads it; `lmsys.training.data` encodes files with
`encode_array`, and users call the other methods. The ids must be those of `naive.encode`, the slow definition. If the
format of files changes, change `save` and `read_files` together.

Sources: Sennrich et al. 2016 (arXiv 1508.07909); Radford et al. 2019 (GPT-2), section 2.2 and the released encoder.py,
`bytes_to_unicode`.
"""

import hashlib
import heapq
import json
from array import array
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from operator import add, itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np

from lmsys import files, strict_json, values
from lmsys.tokenizer.pretokens import Pretokenizer, Words

_PIECE = 1 << 18  # characters that `encode_iterable` gathers before it encodes
_LONG = 100  # bytes: a longer pre-token is merged by `_merge_long`
_LAST = 1 << 62  # greater than the rank of any merge; a rank is the place of a merge in the list of merges
_NO_RANK = repeat(_LAST)  # the rank of pairs that no merge joins, as an argument of `map` in `_merge_short`
_MOST_WORDS, _MOST_BYTES = 1 << 18, 1 << 25  # larger caches are dropped: more pre-tokens, or more bytes of them


class Tokenizer:
    """Encodes text to ids and decodes ids.

    vocab           id -> bytes
    merges          pairs of tokens, in the order in which they are applied
    special_tokens  texts that become one token each wherever they occur; those that vocab lacks get the next ids
    special_ids     the id of each special token, by its bytes

    ValueError: ids other than 0 to V - 1 for V tokens; two ids with the same bytes; one of the 256 bytes without an id;
    a merge that is listed twice, whose parts or result are not in the vocabulary, or one of whose parts only a later
    merge makes; a special token that is no string, is a single byte, or is made by a merge.
    """

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Iterable[str] | None = None,
    ):
        self.vocab = dict(values.instance("vocab", vocab, Mapping))
        self.merges = values.several("merges", merges, tuple)
        self.special_tokens = list(
            dict.fromkeys(values.several("special_tokens", () if special_tokens is None else special_tokens, str))
        )
        self._ids = {token: number for number, token in self.vocab.items()}
        for special in map(str.encode, self.special_tokens):
            number = self._ids.setdefault(special, len(self.vocab))
            self.vocab[number] = special
        self._check()
        self.special_ids = {special: self._ids[special] for special in map(str.encode, self.special_tokens)}
        self._pretokenizer = Pretokenizer(self.special_tokens)
        # A pre-token is merged as a string in which each token is one character: `chars` has the character of a token.
        chars = {bytes([byte]): chr(byte) for byte in range(256)}
        self._steps: list[tuple[str, str]] = []  # (two characters, the one that replaces them)
        for left, right in self.merges:
            char = chars.setdefault(left + right, chr(len(chars)))
            self._steps.append((chars[left] + chars[right], char))
        self._ranks = {pair: rank for rank, (pair, _) in enumerate(self._steps)}
        self._ids_of_chars = {char: self._ids[token] for token, char in chars.items()}
        self._free: list[tuple[Words, array[int], array[int], array[int]]] = []  # idle caches: see `_encode`

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer that holds every id: uint16 up to 65,536 tokens, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, text: str | bytes) -> list[int]:
        """The ids of a text, or of bytes, which need not be UTF-8. ValueError for half of a surrogate pair."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str | bytes) -> np.ndarray:
        """The ids as `encode` returns them, in an array of `dtype`. ValueError, too, for another type of `text`."""
        data = _utf8(text) if isinstance(text, str) else text
        if not isinstance(data, bytes):  # not by `hold`, whose message would be formatted for every text
            raise ValueError(f"text={values.shortly(text)} must be a str or bytes")
        return np.concatenate([np.zeros(0, self.dtype), *map(self._encode, self._pretokenizer.blocks(data))])

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Yields the ids of the concatenated texts, such as the lines of a file; memory holds one piece at a time.

        A piece ends where no pre-token crosses. A text without whitespace has no such place: there the piece grows.
        """
        waiting, enough = "", _PIECE  # text that is not encoded yet; its length at which a part of it is encoded
        for text in values.instance("texts", texts, Iterable):
            waiting += values.instance("an entry of texts", text, str)
            if len(waiting) >= enough:
                data = _utf8(waiting)
                cut = self._pretokenizer.cut(data, len(data) // 2) or 0
                yield from self.encode_array(data[:cut]).tolist()
                waiting = data[cut:].decode()
                enough = max(_PIECE, 2 * len(waiting))  # if there was no place to cut, search again in twice as much
        yield from self.encode(waiting)

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD, or what `errors` of `bytes.decode` says."""
        return self.decode_bytes(ids).decode(errors=errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids. ValueError for an id outside the vocabulary, and for what is no whole number."""
        numbers = values.several("ids", ids)
        if set(map(type, numbers)) - {int}:  # a quick check, before the slow one
            numbers = [values.whole("id", number) for number in numbers]
        try:
            return b"".join(map(self.vocab.__getitem__, numbers))
        except KeyError as error:
            raise ValueError(f"id {error} is not in the vocabulary: 0 to {self.vocab_size - 1}") from None

    def save(self, folder: str | Path) -> None:
        """Writes vocab.json and merges.txt in GPT-2's format, which other tokenizers read too, into a folder.

        Special tokens are written as plain text. ValueError for a special token whose text stands for an ordinary token
        in the file, and for a token that is neither a byte, nor made by a merge, nor special: `load` would take it for
        a special token.
        """
        made = {left + right for left, right in self.merges}
        written: dict[str, int] = {}
        for number, token in sorted(self.vocab.items()):
            text = as_written(token)
            if token in self.special_ids:
                text = token.decode()
            elif len(token) > 1 and token not in made:
                raise ValueError(f"token {token!r} cannot be saved: no byte, made by no merge, and not special")
            if written.setdefault(text, number) != number:
                raise ValueError(f"special token {text!r} cannot be saved: an ordinary token is written so")
        content = json.dumps(written, ensure_ascii=False).encode()
        lines = [f"{_VERSION} {_stamp(len(self.merges), content)}"]
        lines += [f"{as_written(left)} {as_written(right)}" for left, right in self.merges]
        (vocab_name, merges_name), folder = NAMES[0], values.path("folder", folder)
        with files.replacing(folder / merges_name) as file:
            file.write("\n".join(lines + [""]).encode())
        with files.replacing(folder / vocab_name) as file:
            file.write(content)

    @classmethod
    def load(cls, folder: str | Path, special_tokens: Iterable[str] | None = None) -> Self:
        """Loads from a folder with vocab.json and merges.txt, or GPT-2's encoder.json and vocab.bpe.

        Tokens that are neither bytes nor made by a merge are special; `special_tokens` are added. These files do not
        say how a text is split: it is split by GPT-2's pattern. A vocabulary that was made with another one, which for
        example takes digits one by one, loads as well, but many texts then have other ids than its own tokenizer gives.

        ValueError for a folder without such a pair of files, and for damaged files (see `read_files`).
        """
        folder = values.path("folder", folder)
        for vocab, merges in NAMES:
            if (folder / vocab).is_file() and (folder / merges).is_file():
                return cls.from_files(folder / vocab, folder / merges, special_tokens)
        raise ValueError(f"{folder}: has neither {' nor '.join(' with '.join(pair) for pair in NAMES)}")

    @classmethod
    def from_files(cls, vocab: str | Path, merges: str | Path, special_tokens: Iterable[str] | None = None) -> Self:
        """As `load`, from the paths of the two files."""
        named = values.several("special_tokens", () if special_tokens is None else special_tokens, str)
        vocabulary, pairs, specials = read_files(values.path("vocab", vocab), values.path("merges", merges), named)
        return cls(vocabulary, pairs, specials + named)

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of vocabulary, merges and special tokens. Tokenizers with the same one encode every text alike."""
        vocab = [token.hex() for _, token in sorted(self.vocab.items())]
        merges = [[left.hex(), right.hex()] for left, right in self.merges]
        return hashlib.sha256(json.dumps([vocab, merges, sorted(self.special_tokens)]).encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the constructor's arguments, without the cache of pre-tokens."""
        return type(self), (self.vocab, self.merges, self.special_tokens)

    def _check(self) -> None:
        """Raises the ValueErrors that the docstring of the class lists."""
        strange = sorted(self.vocab.keys() - range(len(self.vocab)))
        missing = [byte for byte in range(256) if bytes([byte]) not in self._ids]
        twice, listed_twice = _repeated(self.vocab.values()), _repeated(self.merges)
        values.hold(
            (not strange, f"ids must be 0 to {len(self.vocab) - 1}; got {strange[:5]} in place of some"),
            (twice is None, f"two ids have the bytes {twice!r}"),
            (not missing, f"the vocabulary lacks {len(missing)} of the 256 bytes, such as {bytes(missing[:1])!r}"),
            (listed_twice is None, f"merge {listed_twice} is listed twice"),
        )
        made = set[bytes]()
        for merge in self.merges:
            for token in (*merge, b"".join(merge)):
                if token not in self._ids:
                    raise ValueError(f"merge {values.shortly(merge)}: {values.shortly(token)} is not in the vocabulary")
                if len(token) > 1 and token in merge and token not in made:
                    raise ValueError(f"merge {values.shortly(merge)}: no merge before it makes {values.shortly(token)}")
            made.add(b"".join(merge))
        values.hold(
            *(
                (
                    len(special.encode()) != 1 and special.encode() not in made,
                    f"special token {special!r} is an ordinary token of this vocabulary",
                )
                for special in self.special_tokens
            )
        )

    def _encode(self, block: bytes) -> np.ndarray:
        """The ids of a block of text, as `Pretokenizer.blocks` yields it, with padding at its end.

        A call takes a cache of pre-tokens and their ids out of `_free`, and puts it back when it ends. A thread that
        finds `_free` empty makes a new cache. So there is no lock that a fork could leave held, and a cache that an
        interrupt left half-written is not put back.
        """
        try:
            kept = self._free.pop()
        except IndexError:
            kept = Words(), array("I"), array("q"), array("i")
        words, flat, places, lengths = kept  # word i has lengths[i] ids, from flat[places[i]] on
        numbers = words.numbers(block, self._pretokenizer.starts(block))
        for word in words.list[len(places) :]:
            ids = self._merge(word)
            places.append(len(flat))
            lengths.append(len(ids))
            flat.extend(ids)
        lengths_here = np.asarray(lengths)[numbers]
        ends = np.cumsum(lengths_here)
        # `at` says where each id stands in `flat`.
        at = np.arange(ends[-1]) + np.repeat(np.asarray(places)[numbers] - ends + lengths_here, lengths_here)
        ids_of_block = np.asarray(flat)[at].astype(self.dtype)
        if len(words) <= _MOST_WORDS and words.num_bytes <= _MOST_BYTES:
            self._free.append(kept)
        return ids_of_block

    def _merge(self, word: bytes) -> Sequence[int]:
        """The ids of a pre-token. While any merge applies to it, the earliest one is applied at all places."""
        if word in self.special_ids:
            return [self.special_ids[word]]
        text = word.decode("latin-1")  # each byte becomes the character of its number, as in `chars` of the constructor
        text = self._merge_long(text) if len(text) > _LONG else self._merge_short(text)
        return [self._ids_of_chars[char] for char in text]

    def _merge_short(self, text: str) -> str:
        """Applies all merges to a text in which each character is a token; returns the merged text."""
        rank_of = self._ranks.get
        while len(text) > 1:
            rank = min(map(rank_of, map(add, text, text[1:]), _NO_RANK))
            if rank == _LAST:
                break
            text = text.replace(*self._steps[rank])  # (the pair, what it becomes)
        return text

    def _merge_long(self, text: str) -> str:
        """As `_merge_short`, with a heap of merges that may apply: pairs are looked up only when they are new."""
        queue = [self._ranks[pair] for pair in set(map(add, text, text[1:])) if pair in self._ranks]
        heapq.heapify(queue)
        while queue:
            pair, char = self._steps[heapq.heappop(queue)]
            parts = text.split(pair)
            if len(parts) > 1:
                text = char.join(parts)
                new = {char + char}  # the pairs that the new token may be in
                for before, after in pairwise(parts):
                    new.update((before[-1:] + char, char + after[:1]))
                for rank in map(self._ranks.get, new):
                    if rank is not None:
                        heapq.heappush(queue, rank)
        return text


def _utf8(text: str) -> bytes:
    """The text in UTF-8; ValueError for half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is {text[error.start]!r}, half of a surrogate pair") from None


NAMES = ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")  # pairs of files: ours, then those of GPT-2
_VERSION = "#version: 0.2"
# A file has these bytes as the characters with the same code points, and all other bytes as characters from 256 on.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHAR_OF = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE_OF = {char: byte for byte, char in _CHAR_OF.items()}


def read_files(
    vocab: Path, merges: Path, named: Collection[str] = ()
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]], list[str]]:
    """(vocabulary, merges, special tokens). A token that is neither a byte nor made by a merge is special.

    named  special tokens that the caller names

    ValueError, with file and place, for files of another form, and for a merges file that was cut short. The first line
    of a merges file that `save` has written says how many merges the file has. With any other file, a merge counts as
    lost if there is a token that no merge makes and that is the concatenation of two tokens. A special token such as
    <|endoftext|> is hardly ever such a concatenation, since ordinary tokens (but for 's and the like) do not have both
    letters and signs. A special token that is such a concatenation, such as </, must be `named`. A lost merge is not
    noticed if another merge makes the same token.
    """
    head, *lines = files.read_text(merges).split("\n")  # splitlines would also split at characters that stand for bytes
    if not head.startswith("#version"):
        head, lines = "", [head] + lines
    pairs, ordinary = [], set(_BYTE_OF)
    for number, line in enumerate(lines, start=1 + bool(head)):
        if line:
            left, right = _read_merge(merges, number, line)
            pairs.append((_bytes(left), _bytes(right)))
            ordinary.add(left + right)
    written = strict_json.read_json(vocab)
    values.hold(
        (
            isinstance(written, dict) and set(map(type, written.values())) <= {int},
            f'{vocab}: must be an object of token: id, as {{"!": 0, ...}}',
        )
    )
    twice = _repeated(written.values())
    values.hold((twice is None, f"{vocab}: id {twice} is given twice"))
    by_id = {number: text for text, number in sorted(written.items(), key=itemgetter(1))}
    vocabulary = {number: _bytes(text) if text in ordinary else text.encode() for number, text in by_id.items()}
    special_tokens = [text for text in by_id.values() if text not in ordinary]
    stamp = head.rstrip("\r").removeprefix(f"{_VERSION} ")
    if stamp.startswith("merges: "):
        values.hold(
            (
                stamp == _stamp(len(pairs), vocab.read_bytes()),
                f"{merges}: cut, or not of the tokenizer that {vocab} is of: make both anew",
            )
        )
    else:
        lost = [text for text in special_tokens if text not in named and _is_pair(text, written)]
        tokens = f"{len(lost):,} of the tokens in {vocab}, such as {values.shortly(''.join(lost[:1]))}"
        values.hold((not lost, f"{merges}: lacks the merges of {tokens}: it is cut; or name them as special tokens"))
    return vocabulary, pairs, special_tokens


def _repeated(entries: Iterable[Any]) -> Any:
    """The entry that occurs most often, if more than once; else None."""
    entry, count = max(Counter(entries).items(), key=itemgetter(1), default=(None, 0))
    return entry if count > 1 else None


def _is_pair(text: str, known: Container[str]) -> bool:
    """True where text is two known tokens put together."""
    return any(text[:place] in known and text[place:] in known for place in range(1, len(text)))


def _stamp(num_merges: int, vocab: bytes) -> str:
    """The end of the first line of our merges files. It shows that both files are complete; other readers ignore it."""
    return f"merges: {num_merges} vocab: {hashlib.sha256(vocab).hexdigest()[:16]}"


def _read_merge(path: Path, number: int, line: str) -> tuple[str, str]:
    """The two tokens of a line of a merges file, as they are written. ValueError, with its number, for another line."""
    left, _, right = line.rstrip("\r").partition(" ")
    if not left or not right or not all(char in _BYTE_OF for char in left + right):
        raise ValueError(
            f"{path}, line {number}: {values.shortly(line)} is no merge; one is written as two tokens: 'Ġ t'"
        )
    return left, right


def as_written(token: bytes) -> str:
    """The token as it stands in files: a printable character for each byte."""
    return "".join(map(_CHAR_OF.__getitem__, token))


def _bytes(text: str) -> bytes:
    """The token that `as_written` has written."""
    return bytes(map(_BYTE_OF.__getitem__, text))
