"""Texts that no call saw before: of each draw the lines of a corpus in another order, and what is right of them."""

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lmsys import draws
from lmsys.tokenizer import Tokenizer, naive
from lmsys.tokenizer.naive import Pair
from lmsys.tokenizer.training import count_pretokens
from lmsys.training.corpora import END_OF_TEXT

LEFT_OUT = 16  # one line of so many, in texts to train on: pre-tokens then have other counts in each
CHECKED_BYTES = 100_000  # of documents, and one more
MERGED_BYTES = 500_000  # of distinct pre-tokens, over all first merges by definition: about half a second
FIRST_MERGES = 30


class Texts:
    """A text in a file, drawn anew again and again from the lines of what it holds at first. Ends of documents go
    with their lines.

    path       of the file
    small      another file, which the definition can train on
    tokenizer  what encodes them
    partly     leaves lines out
    """

    def __init__(self, path: Path, small: Path, tokenizer: Tokenizer, partly: bool):
        self.path, self.small, self.tokenizer = path, small, tokenizer
        self._lines = path.read_bytes().split(b"\n")
        self._num_lines = len(self._lines) - (len(self._lines) // LEFT_OUT if partly else 0)
        self.end_of_text = tokenizer.encode(END_OF_TEXT)[0]

    def write(self, draw: int) -> None:
        """The text of a draw, into the file."""
        words = draws.philox(draw, 0, -(-len(self._lines) // 4))[: len(self._lines)]
        order = words.argsort(stable=True)[: self._num_lines].tolist()
        text = b"\n".join(map(self._lines.__getitem__, order))
        self.path.write_bytes(text)
        self.drawn = Drawn(draw, text, self)


class Drawn:
    """The text that was written last, and what is right of it, made once."""

    def __init__(self, draw: int, text: bytes, texts: Texts):
        self.draw, self.num_bytes, self._texts = draw, len(text), texts
        self.documents = text.split(END_OF_TEXT.encode())
        self._ids: dict[int, list[int]] = {}

    def chosen(self, key: int) -> list[int]:
        """The numbers of documents that the key says."""
        order, size = random.Random(key).sample(range(len(self.documents)), len(self.documents)), 0
        for count, number in enumerate(order, start=1):
            size += len(self.documents[number])
            if size >= CHECKED_BYTES:
                return order[:count]
        return order

    def difference(self, count: int, ids: Mapping[int, Sequence[int]]) -> str | None:
        """Says what is wrong with the number of documents, or with the ids of some."""
        if count != len(self.documents):
            return f"ids of {count:,} documents, by definition {len(self.documents):,}"
        for number, found in ids.items():
            if number not in self._ids:
                self._ids[number] = naive.encode(self.documents[number].decode(), self._texts.tokenizer)
            if said := first_difference("id", found, self._ids[number]):
                return f"document {number:,}: {said}"
        return None

    def difference_of_merges(self, merges: Sequence[Pair], num_merges: int, key: int | None) -> str | None:
        """Says what is wrong with the first merges, with their number, or with the one that a key says, of all."""
        first = self.first_merges[:num_merges]
        if said := first_difference("merge", merges[: len(first)], first):
            return said
        places = [len(merges)] if len(merges) < num_merges else []
        places += [random.Random(key).randrange(len(merges))] if merges and key is not None else []
        for place in places:
            right = naive.next_merge(self.counts, merges[:place])
            found = merges[place] if place < len(merges) else None
            if found != right:
                return f"merge {place:,} is {found}, by definition {right}"
        return None

    @cached_property
    def counts(self) -> dict[bytes, int]:
        return count_pretokens([self._texts.path], [END_OF_TEXT])

    @cached_property
    def first_merges(self) -> list[Pair]:
        count = MERGED_BYTES // sum(map(len, self.counts))
        return naive.learn_merges(self.counts, max(1, min(FIRST_MERGES, count)))


def first_difference(what: str, found: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """Says where the two differ first."""
    if list(found) == list(expected):
        return None
    for place, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return f"{what} {place:,} is {one}, by definition {other}"
    return f"{len(found):,} {what}s, by definition {len(expected):,}"
