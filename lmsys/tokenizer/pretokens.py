"""`Pretokenizer` splits text into pre-tokens by GPT-2's pattern; `Words` gives a number to each distinct pre-token.

A byte-level tokenizer merges bytes only within a pre-token, such as " word". ASCII is split by array operations on the
kinds of its bytes, in a tenth of the pattern's time; text around other characters goes through the pattern itself.
codec.py and training.py call both classes. Other modules, such as chunks.py, use only `Pretokenizer`: its `cut` finds
where text may be cut. If you change PATTERN, change also `starts`, `_CUT` and `_wide_pieces`, which follow its rules.

Source: Radford et al. 2019 (GPT-2), section 2.2 and the released encoder.py.
Legend: N bytes, P pre-tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product, starmap

import numpy as np
import regex

# GPT-2's pattern of a pre-token.
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PAD = 16  # zero bytes behind a text, so that wide reads at its end stay inside of the memory

_BLOCK = 1 << 18  # bytes of a block of `Pretokenizer.blocks`
_PRETOKEN = regex.compile(PATTERN)
SPACE, LETTER, NUMBER, OTHER, WIDE, SPECIAL = range(6)  # kinds of bytes; WIDE: beyond ASCII, SPECIAL: of special tokens
_WHITESPACE = b" \t\n\v\f\r"
_KINDS = bytes(
    WIDE if byte > 127
    else SPACE if byte in _WHITESPACE
    else LETTER if chr(byte).isalpha()
    else NUMBER if chr(byte).isdigit()
    else OTHER
    for byte in range(256)
)  # fmt: skip
_APOSTROPHE, _SPACE = ord("'"), ord(" ")
_ENDS_ONE = np.isin(np.arange(256), list(b"stmd"))  # 's 't 'm 'd
_ENDS_TWO = [first << 8 | second for first, second in (b"re", b"ve", b"ll")]  # 're 've 'll
_FEW = 200  # if there are more special tokens, pairs of them are not tested for overlaps, which would take long
_NEAR = 64  # bytes: pieces that go through the pattern are joined if they lie closer together
# The last bytes, in UTF-8, of whitespace beyond ASCII: 85 and A0 behind C2; 80 to 8A, 9F, A8, A9 and AF behind E1, E2
# or E3 and another byte. Other characters end in them, too; there the text is not cut, which does no harm.
_MAY_END_WHITESPACE = rb"\x80-\x8a\x85\x9f\xa0\xa8\xa9\xaf"
# A place where text may be cut: before ASCII whitespace that follows something else.
_CUT = re.compile(rb"[^ \t\n\v\f\r" + _MAY_END_WHITESPACE + rb"](?=[ \t\n\v\f\r])")


class Pretokenizer:
    """Splits UTF-8 text into pre-tokens and special tokens.

    Special tokens are found before pre-tokens, the leftmost first, and of several that begin at one place the longest.
    Bytes that are no UTF-8 count as neither letter, number nor space.

    context  the length in bytes of the longest special token, or 1 if there is none: `cut` looks this far on both sides
             of a place for a special token that crosses it
    """

    def __init__(self, special_tokens: Iterable[str] = ()):
        self._specials = sorted({token.encode() for token in special_tokens}, key=lambda token: (-len(token), token))
        if b"" in self._specials:
            raise ValueError("a special token must have at least one character; got ''")
        escaped = list(map(re.escape, self._specials))
        self._pattern = re.compile(b"(" + b"|".join(escaped) + b")") if escaped else None
        # If no two special tokens can overlap, text may also be cut where one ends.
        apart = 0 < len(escaped) <= _FEW and not any(starmap(_may_overlap, product(self._specials, repeat=2)))
        self.context = max(map(len, self._specials), default=1)
        self._cut = re.compile(b"|".join([_CUT.pattern] + escaped)) if apart else _CUT

    def starts(self, padded: bytes) -> np.ndarray:
        """Where each pre-token begins, and last where the text ends: (P + 1) int64. padded: the text and PAD zeros."""
        n = len(padded) - PAD
        if n == 0:
            return np.zeros(1, np.int64)
        bytes_ = np.frombuffer(padded, np.uint8)
        kinds = np.frombuffer(bytearray(padded.translate(_KINDS)), np.uint8)
        specials = [match.span() for match in self._pattern.finditer(padded, 0, n)] if self._pattern else []
        for start, end in specials:
            kinds[start:end] = SPECIAL
        begins = np.ones(n + 1, bool)
        np.not_equal(kinds[1:n], kinds[: n - 1], out=begins[1:n])
        begins[[start for start, _ in specials]] = True
        # Of several whitespace characters before a word the last is split off: " " begins the word's pre-token, any
        # other is a pre-token of its own.
        before_word = begins[1:n] & (kinds[: n - 1] == SPACE) & (kinds[1:n] <= OTHER)
        begins[: n - 1] |= before_word
        begins[1:n] ^= before_word & (bytes_[: n - 1] == _SPACE)
        # Where a pre-token begins with an apostrophe, 's 't 'm 'd 're 've 'll are pre-tokens.
        at = np.flatnonzero((bytes_[:n] == _APOSTROPHE) & begins[:n])
        at = at[kinds[at + 1] == LETTER]  # in a special token it would be SPECIAL
        next_byte, two = bytes_[at + 1], bytes_[at + 2]
        is_two = np.isin(next_byte.astype(np.uint16) << 8 | two, _ENDS_TWO) & (kinds[at + 2] == LETTER)
        ends = _ENDS_ONE[next_byte] | is_two
        begins[at[ends] + 1] = False
        begins[at[ends] + 2 + is_two[ends]] = True
        if not padded.isascii():
            # surrogateescape decodes each byte that is not UTF-8 to one character, and encodes that to the byte again.
            for start, end in _wide_pieces(kinds[:n]):
                words = _PRETOKEN.findall(padded[start:end].decode(errors="surrogateescape"))
                lengths = [len(word.encode(errors="surrogateescape")) for word in words]
                begins[start:end] = False
                begins[start + np.cumsum([0, *lengths])] = True
        return np.flatnonzero(begins)

    def divide(self, text: bytes) -> list[bytes]:
        """Splits a text at its special tokens: [text, special token, text, ...]. The first and the last may be b""."""
        return self._pattern.split(text) if self._pattern else [text]

    def blocks(self, text: bytes) -> Iterator[bytes]:
        """The text in blocks that fit into a CPU's caches, cut where no pre-token crosses, each with PAD zeros."""
        start = 0
        while start < len(text):
            stop = self.cut(text, start + _BLOCK) or len(text)
            yield text[start:stop] + bytes(PAD)
            start = stop

    def cut(self, data: bytes, after: int) -> int | None:
        """The first place behind `after` that no pre-token or special token crosses; None: there is none.

        At such a place whitespace follows something else, or a special token ends. Splitting the two sides one by one
        gives the same pre-tokens as splitting the whole. The place depends only on the bytes of `data` from
        `context` before `after` on. It is never in the last `context` - 1 bytes, where the end of a special token may
        be missing.
        """
        for match in self._cut.finditer(data, max(0, after - 1), max(0, len(data) - self.context + 1)):
            place = match.end()
            if place > after and not any(  # if no special token begins before the place and ends after it
                data.find(special, max(0, place - len(special) + 1), place + len(special) - 1) >= 0
                for special in self._specials
            ):
                return place
        return None


def _may_overlap(token: bytes, other: bytes) -> bool:
    """True if two different occurrences of the tokens can overlap in some text."""
    return (token != other and other in token) or any(
        token.endswith(other[:size]) for size in range(1, min(len(token), len(other)))
    )


def _wide_pieces(kinds: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of the pieces with characters beyond ASCII, each from one safe cut to another.

    kinds  the kind of each byte of a text: SPACE to SPECIAL
    A safe cut is before a space that follows other ASCII, or at either end of a special token. Pieces that lie closer
    than _NEAR are joined, unless a special token lies between them.
    """
    before, after = kinds[:-1], kinds[1:]
    safe = (after == SPACE) & (before != SPACE) & (before <= OTHER)
    border = (after == SPECIAL) != (before == SPECIAL)
    cuts = np.concatenate([[0], 1 + np.flatnonzero(safe | border), [len(kinds)]])
    pieces = np.unique(np.searchsorted(cuts, np.flatnonzero(kinds == WIDE), "right"))
    starts, ends = cuts[pieces - 1], cuts[pieces]
    if len(pieces) > 1:
        crossed = np.searchsorted(1 + np.flatnonzero(border), [ends[:-1], starts[1:] + 1])
        apart = (starts[1:] - ends[:-1] > _NEAR) | (crossed[0] != crossed[1])
        starts, ends = starts[np.append(True, apart)], ends[np.append(apart, True)]
    yield from zip(starts.tolist(), ends.tolist(), strict=True)


_LONGEST = 15  # bytes of the longest word in the table, at most PAD; the sixteenth byte of a word's key is its length
# By the length of a word: masks of its first eight bytes and of the next seven, and the length in the highest byte.
_LOW = np.array([(1 << 8 * min(length, 8)) - 1 for length in range(17)], np.uint64)
_HIGH = np.array([(1 << 8 * min(max(length - 8, 0), 7)) - 1 for length in range(17)], np.uint64)
_LENGTH = np.arange(17, dtype=np.uint64) << np.uint64(56)
_MIX_LOW, _MIX_HIGH = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # factors of the hash


class Words:
    """Numbers for distinct pre-tokens ("words"): a hash table whose look-ups are array operations.

    list       the words, as bytes, by number
    num_bytes  the sum of their lengths

    A word of at most 15 bytes is two integers, which are compared whole, so that no two words are confused. The few
    longer words are keys of a dict. A word has one slot of the table: `_low` and `_high` are its two integers,
    `_number` is its number, or -1 in a free slot.
    """

    def __init__(self) -> None:
        self.list: list[bytes] = []
        self.num_bytes = 0
        self._long: dict[bytes, int] = {}
        self._resize(12)

    def __len__(self) -> int:
        return len(self.list)

    def numbers(self, padded: bytes, starts: np.ndarray) -> np.ndarray:
        """The number of each pre-token, (P) int32; new words get the next numbers.

        padded  a block of text with PAD zeros
        starts  the result of `Pretokenizer.starts` for the block, (P + 1)
        """
        begins, lengths = starts[:-1], np.minimum(np.diff(starts), _LONGEST + 1)
        low, high = _keys(padded, begins, lengths)
        slots = self._slots(low, high)
        known = self._number[slots]
        differs = (self._low[slots] != low) | (self._high[slots] != high)
        long = lengths > _LONGEST
        misses = np.flatnonzero(differs & ~long)
        if len(misses):
            known[misses] = self._insert(padded, starts, misses, low[misses], high[misses])
        for i in np.flatnonzero(long).tolist():
            word = padded[starts[i] : starts[i + 1]]
            number = self._long.setdefault(word, len(self.list))
            if number == len(self.list):
                self.list.append(word)
                self.num_bytes += len(word)
            known[i] = number
        return known

    def _insert(
        self, padded: bytes, starts: np.ndarray, which: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        """The numbers of some pre-tokens, whose keys are not in their first slots; new words get the next numbers.

        which      the indices of the pre-tokens among those of the block
        low, high  their keys
        """

        def added(new: np.ndarray) -> np.ndarray:
            """Adds the words `which[new]`; returns their numbers."""
            begins, ends = starts[which[new]], starts[which[new] + 1]
            self.list += [padded[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
            self.num_bytes += int((ends - begins).sum())
            return np.arange(len(self.list) - len(new), len(self.list))

        count = len(self.list) + len(which)
        if 2 * count > len(self._number):  # at least half of the slots stay free
            short = np.flatnonzero(self._number >= 0)
            keys, number = (self._low[short], self._high[short]), self._number[short]
            self._resize((4 * count - 1).bit_length())
            self._place(*keys, number.__getitem__)  # the words keep their numbers
        return self._place(low, high, added)

    def _place(self, low: np.ndarray, high: np.ndarray, numbered: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The numbers of keys. A key tries one slot after another until it finds one that holds it, or a free one.

        numbered  called with the indices of keys that are new in the table; returns their numbers
        """
        slots, open_ = self._slots(low, high), np.arange(len(low))
        while len(open_):
            at = slots[open_]
            free = self._number[at] < 0
            self._number[at[free]] = open_[free]  # if several claim a slot, the last written has it
            claims = open_[free][self._number[at[free]] == open_[free]]
            self._low[slots[claims]], self._high[slots[claims]] = low[claims], high[claims]
            self._number[slots[claims]] = numbered(claims)
            open_ = open_[(self._low[at] != low[open_]) | (self._high[at] != high[open_])]
            slots[open_] = (slots[open_] + 1) & (len(self._number) - 1)
        return self._number[slots]

    def _slots(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """The first slot of each key."""
        return ((low ^ high * _MIX_HIGH) * _MIX_LOW >> self._shift).view(np.int64)

    def _resize(self, bits: int) -> None:
        """Replaces the table by an empty one with 2**bits slots."""
        self._shift = np.uint64(64 - bits)
        self._low, self._high = (np.zeros(1 << bits, np.uint64) for _ in range(2))
        self._number = np.full(1 << bits, -1, np.int32)


def _keys(padded: bytes, begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the first eight bytes of each word, the next seven with its length on top): (P) uint64 each, zero-padded."""
    # Eight bytes from each place on: shape, dtype, buffer, offset, strides.
    eights = np.ndarray((len(padded) - 7,), "<u8", padded, 0, (1,))
    low = eights[begins] & _LOW[lengths]
    high = _LENGTH[lengths]
    beyond = np.flatnonzero(lengths > 8)
    high[beyond] |= eights[begins[beyond] + 8] & _HIGH[lengths[beyond]]
    return low, high
