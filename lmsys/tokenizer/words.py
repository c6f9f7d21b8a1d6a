"""Distinct pre-tokens, numbered: a hash table whose look-ups are array operations.

A pre-token of at most 15 bytes is two integers, so that keys are compared as they are and none is ever confused; the
few longer ones are keys of a dict.

Legend: P pre-tokens of a text, W distinct ones so far, T slots of the table.
"""

import numpy as np

from lmsys.tokenizer.pretokens import PAD

_LONGEST = 15  # bytes of a key: its length stands in the sixteenth
_LOW = np.array([(1 << 8 * min(length, 8)) - 1 for length in range(17)], np.uint64)
_HIGH = np.array([(1 << 8 * min(max(length - 8, 0), 7)) - 1 for length in range(17)], np.uint64)
_LENGTH = np.arange(17, dtype=np.uint64) << np.uint64(56)
_MIX_LOW, _MIX_HIGH = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class Words:
    """`list` holds the words, as bytes, in the order of their numbers; `num_bytes` is how long they are together."""

    def __init__(self) -> None:
        self.list: list[bytes] = []
        self.num_bytes = 0
        self._long: dict[bytes, int] = {}
        self._resize(12)

    def __len__(self) -> int:
        return len(self.list)

    def numbers(self, padded: bytes, starts: np.ndarray) -> np.ndarray:
        """The number of each pre-token that begins at `starts` (P + 1), the last being the end: (P), int32.

        Words not met before get the next numbers.
        """
        begins, lengths = starts[:-1], np.minimum(np.diff(starts), _LONGEST + 1)
        low, high = _keys(padded, begins, lengths)
        slots = self._slots(low, high)
        found = self._number[slots]
        wrong = (self._low[slots] != low) | (self._high[slots] != high)
        long = lengths > _LONGEST
        misses = np.flatnonzero(wrong & ~long)
        if len(misses):
            found[misses] = self._insert(padded, starts, misses, low[misses], high[misses])
        for i in np.flatnonzero(long).tolist():
            word = padded[starts[i] : starts[i + 1]]
            number = self._long.get(word)
            if number is None:
                number = self._long[word] = len(self.list)
                self.list.append(word)
                self.num_bytes += len(word)
            found[i] = number
        return found

    def _insert(
        self, padded: bytes, starts: np.ndarray, which: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        """The numbers of pre-tokens that are not in their first slots: they go on to the next until all are placed."""
        self._reserve(len(self.list) + len(which))
        slots, found = self._slots(low, high), np.empty(len(which), np.int32)
        open_ = np.arange(len(which))
        while len(open_):
            at = slots[open_]
            free = self._number[at] < 0
            self._number[at[free]] = open_[free]  # if several claim a slot, the last written has it
            claims = open_[free][self._number[at[free]] == open_[free]]
            self._low[slots[claims]], self._high[slots[claims]] = low[claims], high[claims]
            self._number[slots[claims]] = np.arange(len(self.list), len(self.list) + len(claims))
            begins, ends = starts[which[claims]], starts[which[claims] + 1]
            self.list += [padded[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
            self.num_bytes += int((ends - begins).sum())
            same = (self._low[at] == low[open_]) & (self._high[at] == high[open_])
            found[open_[same]] = self._number[at[same]]
            open_ = open_[~same]
            slots[open_] = (slots[open_] + 1) & (len(self._number) - 1)
        return found

    def _slots(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        mixed = (low ^ high * _MIX_HIGH) * _MIX_LOW
        return (mixed >> self._shift).view(np.int64)

    def _reserve(self, count: int) -> None:
        """Room for so many words with every second slot free."""
        if 2 * count <= len(self._number):
            return
        short = np.flatnonzero(self._number >= 0)
        low, high, number = self._low[short], self._high[short], self._number[short]
        self._resize((4 * count - 1).bit_length())
        slots = self._slots(low, high)
        while len(slots):
            free = self._number[slots] < 0
            self._number[slots[free]] = number[free]
            placed = self._number[slots] == number
            self._low[slots[placed]], self._high[slots[placed]] = low[placed], high[placed]
            slots, low, high, number = (x[~placed] for x in (slots, low, high, number))
            slots = (slots + 1) & (len(self._number) - 1)

    def _resize(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._low, self._high = (np.zeros(1 << bits, np.uint64) for _ in range(2))
        self._number = np.full(1 << bits, -1, np.int32)


def _keys(padded: bytes, begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first eight bytes, and the next seven with the length on top: (P) each, uint64; zero for no bytes."""
    eights = np.ndarray((len(padded) - 7,), "<u8", padded, 0, (1,))  # eight bytes from each place on
    low = eights[begins] & _LOW[lengths]
    high = _LENGTH[lengths]
    beyond = np.flatnonzero(lengths > 8)
    high[beyond] |= eights[begins[beyond] + 8] & _HIGH[lengths[beyond]]
    return low, high


assert PAD >= _LONGEST
