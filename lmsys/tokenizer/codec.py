"""Text to token ids and back, byte-level BPE: every string of bytes has an encoding, and decoding gives it back.

A text is split into pre-tokens; each distinct one is merged once and kept, and a text's ids are then gathered from
those of its pre-tokens, which takes array operations only.

Files are as GPT-2's: JSON and lines of text, with a printable character for each byte.

Sources: Sennrich et al. 2016 (arXiv 1508.07909); Radford et al. 2019 (GPT-2), section 2.2 and the released encoder.py,
`bytes_to_unicode`.
"""

import hashlib
import heapq
import json
import threading
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
_LONG = 100  # bytes of a pre-token that is merged with a queue
_LAST = 1 << 62
_NO_RANK = repeat(_LAST)  # for what is no pair of any merge
_MOST_WORDS, _MOST_BYTES = 1 << 18, 1 << 25  # limits of the pre-tokens that are kept


class Tokenizer:
    """`vocab` (id -> bytes), `merges` in the order in which they are done, `special_tokens` (what has no place in the
    vocabulary gets the next ids). Special tokens are found in every text that is encoded.

    ValueError: ids other than 0 to V - 1, two ids of the same bytes, a byte without an id, a merge of or into what
    is no token, a special token that is a byte or made by a merge.
    """

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Iterable[str] | None = None,
    ):
        self.vocab, self.merges = dict(vocab), list(merges)
        self.special_tokens = list(dict.fromkeys(special_tokens or ()))
        known = set(self.vocab.values())
        for special in map(str.encode, self.special_tokens):
            if special not in known:
                self.vocab[len(self.vocab)] = special
        self._ids = {token: number for number, token in self.vocab.items()}
        self._check()
        self._special_ids = {special: self._ids[special] for special in map(str.encode, self.special_tokens)}
        self._pretokenizer = Pretokenizer(self.special_tokens)
        # Words are merged as texts in which each token is a character.
        chars = {bytes([byte]): chr(byte) for byte in range(256)}
        self._steps: list[tuple[str, str]] = []  # a pair of characters, and what they become
        for left, right in self.merges:
            char = chars.setdefault(left + right, chr(len(chars)))
            self._steps.append((chars[left] + chars[right], char))
        self._ranks = {pair: rank for rank, (pair, _) in enumerate(self._steps)}
        self._ids_of_chars = {char: self._ids[token] for token, char in chars.items()}
        self._lock = threading.Lock()
        self._forget()

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer that holds every id: uint16 up to 65,536 tokens, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, text: str | bytes) -> list[int]:
        """Ids of a text, or of bytes, which need not be UTF-8. ValueError for half of a surrogate pair."""
        return self.encode_array(_utf8(text) if isinstance(text, str) else text).tolist()

    def encode_array(self, text: bytes) -> np.ndarray:
        """Ids of UTF-8, in an array of `dtype`."""
        if not text:
            return np.zeros(0, self.dtype)
        with self._lock:
            return np.concatenate(list(map(self._encode, self._pretokenizer.blocks(text))))

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Ids of the texts joined, such as the lines of a file; holds a piece of them at a time.

        A piece ends where no pre-token crosses, so it grows for as long as there is no whitespace.
        """
        waiting, size, enough = [], 0, _PIECE
        for text in texts:
            waiting.append(text)
            size += len(text)
            if size >= enough:
                data = _utf8("".join(waiting))
                cut = self._late_cut(data)
                yield from self.encode_array(data[:cut]).tolist()
                waiting = [data[cut:].decode()]
                size = len(waiting[0])
                enough = max(_PIECE, 2 * size)  # where nothing could be cut, what is searched again has doubled
        yield from self.encode("".join(waiting))

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of the ids; U+FFFD for bytes that are not UTF-8, or as `bytes.decode` does by `errors`."""
        return self.decode_bytes(ids).decode(errors=errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """ValueError for an id outside the vocabulary, and for what is no whole number."""
        numbers = list(ids)
        if set(map(type, numbers)) - {int}:  # which is quick
            numbers = [values.whole("id", number) for number in numbers]
        try:
            return b"".join(map(self.vocab.__getitem__, numbers))
        except KeyError as error:
            raise ValueError(f"id {error} is not in the vocabulary: 0 to {self.vocab_size - 1}") from None

    def save(self, folder: str | Path) -> None:
        """vocab.json and merges.txt, as GPT-2's: other tokenizers read them too. Special tokens stand as they are.

        ValueError for one that an ordinary token is written as, and for a token that is neither a byte, made by a merge
        nor special: it would be read as special.
        """
        made = {left + right for left, right in self.merges}
        written: dict[str, int] = {}
        for number, token in sorted(self.vocab.items()):
            text = as_written(token)
            if token in self._special_ids:
                text = token.decode()
            elif len(token) > 1 and token not in made:
                raise ValueError(f"token {token!r} cannot be saved: no byte, made by no merge, and not special")
            if written.setdefault(text, number) != number:
                raise ValueError(f"special token {text!r} cannot be saved: an ordinary token is written so")
        content = json.dumps(written, ensure_ascii=False).encode()
        lines = [f"{_VERSION} {_stamp(len(self.merges), content)}"]
        for left, right in self.merges:
            lines.append(f"{as_written(left)} {as_written(right)}")
        vocab_name, merges_name = NAMES[0]
        with files.replacing(Path(folder) / merges_name) as file:
            file.write("\n".join([*lines, ""]).encode())
        with files.replacing(Path(folder) / vocab_name) as file:
            file.write(content)

    @classmethod
    def load(cls, folder: str | Path, special_tokens: Iterable[str] | None = None) -> Self:
        """Loads from a folder with vocab.json and merges.txt, or GPT-2's encoder.json and vocab.bpe.

        Tokens of the vocabulary that are no bytes and no merge makes are special; `special_tokens` are added.
        ValueError for a folder without such a pair, and for files that are not whole: `read_files` says how that is
        known.
        """
        for vocab, merges in NAMES:
            if (Path(folder) / vocab).is_file() and (Path(folder) / merges).is_file():
                return cls.from_files(Path(folder) / vocab, Path(folder) / merges, special_tokens)
        raise ValueError(f"{folder}: has neither {' nor '.join(' with '.join(pair) for pair in NAMES)}")

    @classmethod
    def from_files(cls, vocab: str | Path, merges: str | Path, special_tokens: Iterable[str] | None = None) -> Self:
        named = list(special_tokens or ())
        vocabulary, pairs, specials = read_files(Path(vocab), Path(merges), named)
        return cls(vocabulary, pairs, [*specials, *named])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of vocabulary, merges and special tokens: equal where every text is encoded alike."""
        vocab = [token.hex() for _, token in sorted(self.vocab.items())]
        merges = [[left.hex(), right.hex()] for left, right in self.merges]
        return hashlib.sha256(json.dumps([vocab, merges, sorted(self.special_tokens)]).encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.vocab, self.merges, self.special_tokens)

    def _check(self) -> None:
        strange = sorted(self.vocab.keys() - range(len(self.vocab)))
        missing = [byte for byte in range(256) if bytes([byte]) not in self._ids]
        twice, listed_twice = _repeated(self.vocab.values()), _repeated(self.merges)
        values.hold(
            (not strange, f"ids must be 0 to {len(self.vocab) - 1}; got {strange[:5]} in place of some"),
            (twice is None, f"two ids have the bytes {twice!r}"),
            (not missing, f"the vocabulary lacks {len(missing)} of the 256 bytes, such as {bytes(missing[:1])!r}"),
            (listed_twice is None, f"merge {listed_twice} is listed twice"),
        )
        made = {left + right for left, right in self.merges}
        for left, right in self.merges:
            for token in (left, right, left + right):
                wrong = ""
                if token not in self._ids:
                    wrong = f"{values.shortly(token)} is not in the vocabulary"
                elif len(token) > 1 and token not in made:
                    wrong = f"no merge makes {values.shortly(token)}"
                if wrong:
                    raise ValueError(f"merge {values.shortly((left, right))}: {wrong}")
        for special in self.special_tokens:
            is_ordinary = len(special.encode()) == 1 or special.encode() in made
            values.hold((not is_ordinary, f"special token {special!r} is an ordinary token of this vocabulary"))

    def _forget(self) -> None:
        """No word is known: words, the place of each one's ids in `_flat`, and how many they are."""
        self._words = Words()
        self._flat, self._places, self._lengths = array("I"), array("q"), array("i")

    def _encode(self, block: bytes) -> np.ndarray:
        if len(self._words) > _MOST_WORDS or self._words.num_bytes > _MOST_BYTES:
            self._forget()
        numbers = self._words.numbers(block, self._pretokenizer.starts(block))
        for word in self._words.list[len(self._places) :]:
            ids = self._merge(word)
            self._places.append(len(self._flat))
            self._lengths.append(len(ids))
            self._flat.extend(ids)
        places, lengths = np.asarray(self._places)[numbers], np.asarray(self._lengths)[numbers]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) + np.repeat(places - ends + lengths, lengths)  # of each id in `_flat`
        return np.asarray(self._flat)[places].astype(self.dtype)

    def _merge(self, word: bytes) -> Sequence[int]:
        """The ids of a pre-token: of the pairs that it has, the earliest merge is done everywhere, and so on."""
        if word in self._special_ids:
            return [self._special_ids[word]]
        text = word.decode("latin-1")
        text = self._merge_long(text) if len(text) > _LONG else self._merge_short(text)
        return [self._ids_of_chars[char] for char in text]

    def _merge_short(self, text: str) -> str:
        rank_of = self._ranks.get
        while len(text) > 1:
            rank = min(map(rank_of, map(add, text, text[1:]), _NO_RANK))
            if rank == _LAST:
                break
            text = text.replace(*self._steps[rank])
        return text

    def _merge_long(self, text: str) -> str:
        """Like `_merge_short`, with a queue of the merges to come: each pair of the text is looked up once."""
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

    def _late_cut(self, data: bytes) -> int:
        """A place to cut, near the end if there is one; 0 if there is none."""
        for after in (max(0, len(data) - 4096), len(data) // 2, 0):
            place = self._pretokenizer.cut(data, after)
            if place is not None:
                return place
        return 0


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is {text[error.start]!r}, half of a surrogate pair") from None


NAMES = ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")
_VERSION = "#version: 0.2"
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHAR_OF = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE_OF = {char: byte for byte, char in _CHAR_OF.items()}


def read_files(
    vocab: Path, merges: Path, named: Collection[str] = ()
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]], list[str]]:
    """Vocabulary, merges, and as special tokens what is neither a byte nor made by a merge.

    ValueError, with file and place, for what is not written like that, and for merges that were cut. Those are known by
    the first line, where it is ours; else by the vocabulary: what a merge made is two tokens of it put together. A
    special token hardly ever is: no ordinary token has letters beside signs, as <|endoftext|> has. One that is, such as
    </, is taken where it is `named`. A lost merge is not missed where another makes the same token.
    """
    head, *lines = files.read_text(merges).split("\n")  # splitlines would also split at characters that stand for bytes
    if not head.startswith("#version"):
        head, lines = "", [head, *lines]
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
    vocabulary, special_tokens = {}, []
    for text, number in sorted(written.items(), key=itemgetter(1)):
        if text in ordinary:
            vocabulary[number] = _bytes(text)
        else:
            vocabulary[number] = text.encode()
            special_tokens.append(text)
    stamp = head.rstrip("\r").removeprefix(f"{_VERSION} ")
    if stamp.startswith("merges: "):
        is_whole = stamp == _stamp(len(pairs), vocab.read_bytes())
        values.hold((is_whole, f"{merges}: cut, or not of the tokenizer that {vocab} is of: make both anew"))
    else:
        lost = [text for text in special_tokens if text not in named and _is_pair(text, written)]
        such = f"{len(lost):,} of the tokens in {vocab}, such as {values.shortly(''.join(lost[:1]))}"
        values.hold((not lost, f"{merges}: lacks the merges of {such}: it is cut; or name them as special tokens"))
    return vocabulary, pairs, special_tokens


def _repeated(entries: Iterable[Any]) -> Any:
    """One that stands there more than once, or None."""
    entry, count = max(Counter(entries).items(), key=itemgetter(1), default=(None, 0))
    return entry if count > 1 else None


def _is_pair(text: str, known: Container[str]) -> bool:
    return any(text[:place] in known and text[place:] in known for place in range(1, len(text)))


def _stamp(num_merges: int, vocab: bytes) -> str:
    """The words behind the version of a merges file of ours, by which a pair is known to be whole: others ignore it."""
    return f"merges: {num_merges} vocab: {hashlib.sha256(vocab).hexdigest()[:16]}"


def _read_merge(path: Path, number: int, line: str) -> tuple[str, str]:
    left, _, right = line.rstrip("\r").partition(" ")
    if not left or not right or not all(char in _BYTE_OF for char in left + right):
        raise ValueError(
            f"{path}, line {number}: {values.shortly(line)} is no merge; one is written as two tokens: 'Ġ t'"
        )
    return left, right


def as_written(token: bytes) -> str:
    """The token with a printable character for each byte."""
    return "".join(map(_CHAR_OF.__getitem__, token))


def _bytes(text: str) -> bytes:
    return bytes(map(_BYTE_OF.__getitem__, text))
