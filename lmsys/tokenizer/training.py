"""Learns byte-pair encoding from text: counts pre-tokens in parallel, then merges pairs of tokens, one after another.

The training pipeline, benchmarks and users call `train`. Its merges must be those of `naive.learn_merges`, the slow
definition: a change of one of the two is a change of both.

Sources: Sennrich et al. 2016 (arXiv 1508.07909), section 3.2, on bytes as in GPT-2; ties as in CS336, assignment 1.
"""

import heapq
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from operator import add
from pathlib import Path

import numpy as np

from lmsys import values
from lmsys.tokenizer import chunks, codec, pretokens

_NUM_BYTES = 256  # tokens before the first merge: one for each value of a byte


def train(
    files: str | Path | Sequence[str | Path | chunks.Chunk],
    vocab_size: int,
    special_tokens: Sequence[str] | None = None,
    processes: int = 1,
) -> codec.Tokenizer:
    """A tokenizer of `vocab_size` tokens: the bytes (ids 0 to 255), the merges in their order, the special tokens.

    files      a path, or several paths or chunks of files
    processes  how many processes count pre-tokens; the result does not depend on this number

    There are fewer tokens if no pair is left to merge. Memory holds the distinct pre-tokens and a chunk of text for
    each process, whatever the files' size.
    ValueError: a vocabulary smaller than bytes and special tokens, files that are absent, empty or not UTF-8.
    """
    files = [files] if isinstance(files, str | Path) else values.several("files", files)
    special_tokens = list(
        dict.fromkeys(values.several("special_tokens", () if special_tokens is None else special_tokens, str))
    )
    smallest = _NUM_BYTES + len(special_tokens)
    values.hold(
        (
            values.whole("vocab_size", vocab_size) >= smallest,
            f"{vocab_size=} must be at least {smallest}: {_NUM_BYTES} bytes and {len(special_tokens)} special tokens",
        )
    )
    if not (counts := count_pretokens(files, special_tokens, processes)):
        raise ValueError(chunks.no_text(map(chunks.whole, files)))
    merges = learn_merges(counts, vocab_size - smallest)
    vocab = [*(bytes([byte]) for byte in range(_NUM_BYTES)), *(left + right for left, right in merges)]
    return codec.Tokenizer(dict(enumerate(vocab)), merges, special_tokens)  # which gives special tokens the next ids


def count_pretokens(
    files: Sequence[str | Path | chunks.Chunk], special_tokens: Sequence[str] = (), processes: int = 1
) -> dict[bytes, int]:
    """How often each pre-token occurs in the files, without special tokens. processes: as in `train`."""
    counts: defaultdict[bytes, int] = defaultdict(int)
    for words, numbers in chunks.each_chunk(
        partial(_count, pretokens.Pretokenizer(special_tokens)), files, special_tokens, processes
    ):
        for word, count in zip(words, numbers, strict=True):
            counts[word] += count
    for token in special_tokens:
        counts.pop(token.encode(), None)
    return dict(counts)


def _count(pretokenizer: pretokens.Pretokenizer, chunk: chunks.Chunk) -> tuple[list[bytes], list[int]]:
    """(the distinct pre-tokens of a chunk, how often each occurs)."""
    words, counts = pretokens.Words(), np.zeros(0, np.int64)
    for block in pretokenizer.blocks(chunk.read()):
        numbers = words.numbers(block, pretokenizer.starts(block))
        # Words that are new in this block get a place at the end of the counts.
        counts = np.pad(counts, (0, len(words) - len(counts))) + np.bincount(numbers, minlength=len(words))
    return words.list, counts.tolist()


def learn_merges(counts: Mapping[bytes, int], num_tokens: int) -> list[tuple[bytes, bytes]]:
    """The merges, in order, that make `num_tokens` tokens besides the 256 bytes; fewer when no pair is left.

    counts  how often each word (pre-token) occurs

    The most frequent pair is merged, and of several the lexicographically greatest (left, right). No two merges make
    the same token, which `codec.Tokenizer` would refuse. Proof: take a token that has been made, and any place where
    its bytes stand and no token reaches across their ends. The same merges have been applied to these bytes as where
    the token was made first, in the same order. So they are this token already, and no pair is left to make it again.
    """
    merges = iter(_Learner(counts).step, None)  # ends where `step` returns None
    return list(islice(merges, num_tokens))


class _Learner:
    """Learns merges: all words stand in one linked list of tokens, so that a merge costs only what it changes.

    Each token is one character: a byte is chr(byte), and later tokens are the characters from chr(256) on. A pair is a
    string of two characters. An empty string stands between words. A place is an index into `chars`, `counts`,
    `before` and `behind`.

    bytes_of        the bytes of the token that each character stands for
    order           the sort key of each character's token, see `_descending`
    chars           the token that begins at a place; "" where none does
    counts          how often the word at a place occurs
    before, behind  for the token at a place, the places of its left (before) and right (behind) neighbour
    pairs           how often each pair occurs
    homes           for each pair the places where it begins, or did so earlier
    queue           a heap of (-count, order of the pair, pair); an entry whose count has fallen since is put back with
                    the new count
    """

    def __init__(self, counts: Mapping[bytes, int]):
        self.bytes_of = {chr(byte): bytes([byte]) for byte in range(_NUM_BYTES)}
        self.order = {char: _descending(token) for char, token in self.bytes_of.items()}
        self.chars, self.counts = [""], array("q", [0])
        self.pairs: defaultdict[str, int] = defaultdict(int)
        self.homes: defaultdict[str, array[int]] = defaultdict(partial(array, "q"))  # takes less memory than lists
        for word, count in counts.items():
            text, start = word.decode("latin-1"), len(self.chars)  # latin-1 makes chr(byte) of each byte
            for place, pair in enumerate(map(add, text, text[1:]), start):
                self.pairs[pair] += count
                self.homes[pair].append(place)
            self.chars += [*text, ""]
            self.counts.extend([count] * (len(text) + 1))
        self.before = array("q", range(-1, len(self.chars) - 1))
        self.behind = array("q", range(1, len(self.chars) + 1))
        self.queue = [self._entry(pair, count) for pair, count in self.pairs.items()]
        heapq.heapify(self.queue)

    def step(self) -> tuple[bytes, bytes] | None:
        """Merges the most frequent pair, and returns it; None when no pair is left."""
        while self.queue:
            count, _, pair = heapq.heappop(self.queue)
            current = self.pairs.get(pair, 0)
            if current == -count:
                return self._merge(pair)
            if 0 < current < -count:  # a count that has risen has an entry of its own
                heapq.heappush(self.queue, self._entry(pair, current))
        return None

    def _entry(self, pair: str, count: int) -> tuple[int, tuple[str, str], str]:
        """An entry of `queue`."""
        return -count, (self.order[pair[0]], self.order[pair[1]]), pair

    def _merge(self, pair: str) -> tuple[bytes, bytes]:
        """Replaces the pair by a new token at all of its places, and counts the pairs that change."""
        first, second = pair[0], pair[1]
        merge = self.bytes_of[first], self.bytes_of[second]
        token, char = merge[0] + merge[1], chr(len(self.bytes_of))
        self.bytes_of[char], self.order[char] = token, _descending(token)
        # How often each token stands in front of the pair, and behind it.
        lefts, rights = defaultdict[str, int](int), defaultdict[str, int](int)
        chars, counts, homes, before, behind = self.chars, self.counts, self.homes, self.before, self.behind
        for place in sorted(homes.pop(pair)):  # from left to right: in a run such as aaaa the pairs overlap
            other = behind[place]
            if chars[place] != first or chars[other] != second:
                continue  # an earlier merge has taken one of the two
            previous, following = before[place], behind[other]
            chars[place], chars[other] = char, ""
            behind[place], before[following] = following, place
            if left := chars[previous]:
                lefts[left] += counts[place]
                homes[left + char].append(previous)
            if right := chars[following]:
                rights[right] += counts[place]
                homes[char + right].append(place)
        changes = [(left + first, left + char, count) for left, count in lefts.items()]
        changes += [(second + right, char + right, count) for right, count in rights.items()]
        for old, new, count in changes:
            self.pairs[old] -= count
            self.pairs[new] += count
        for _, new, _ in changes:
            if count := self.pairs[new]:  # it may be 0 again in a run of equal tokens, such as aaaa
                heapq.heappush(self.queue, self._entry(new, count))
        del self.pairs[pair]
        return merge


def _descending(token: bytes) -> str:
    """A key that sorts tokens in descending order: a heap gives its smallest entry, and the greatest token is wanted.

    The key ends with chr(256), which is greater than the character of any byte: so a token sorts before its prefixes.
    """
    return "".join(chr(255 - byte) for byte in token) + chr(256)
