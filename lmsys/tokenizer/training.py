"""Byte-pair encoding learned from text: pre-tokens are counted in parallel, then the most frequent pair is merged.

Sources: Sennrich et al. 2016 (arXiv 1508.07909), section 3.2, on bytes as in GPT-2; ties as in CS336, assignment 1.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from operator import add
from pathlib import Path

import numpy as np

from lmsys.tokenizer.chunks import Chunk, no_text, whole
from lmsys.tokenizer.codec import Tokenizer
from lmsys.tokenizer.pretokens import Pretokenizer
from lmsys.tokenizer.words import Words
from lmsys.tokenizer.workers import each_chunk

_NUM_BYTES = 256


def train(
    files: str | Path | Sequence[str | Path | Chunk],
    vocab_size: int,
    special_tokens: Sequence[str] | None = None,
    processes: int = 1,
) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens: the bytes (ids 0 to 255), the merges in their order, the special tokens.

    `files` is a path, or several. There are fewer tokens when the text is used up before. The result does not depend on
    `processes`. Memory holds the distinct pre-tokens, a chunk of text for each process, and no more, whatever the
    files' size.
    ValueError: a vocabulary smaller than bytes and special tokens, files that are absent, empty or not UTF-8.
    """
    files = [files] if isinstance(files, str | Path) else files
    special_tokens = special_tokens or ()
    smallest = _NUM_BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise ValueError(
            f"{vocab_size=} must be at least {smallest}: {_NUM_BYTES} bytes and {len(special_tokens)} special tokens"
        )
    counts = count_pretokens(files, special_tokens, processes)
    if not counts:
        raise no_text(map(whole, files))
    merges = learn_merges(counts, vocab_size - smallest)
    vocab = [bytes([byte]) for byte in range(_NUM_BYTES)]
    vocab += dict.fromkeys(left + right for left, right in merges)
    vocab += [token.encode() for token in special_tokens]
    return Tokenizer(dict(enumerate(vocab)), merges, special_tokens)


def count_pretokens(
    files: Sequence[str | Path | Chunk], special_tokens: Sequence[str] = (), processes: int = 1
) -> dict[bytes, int]:
    """How often each pre-token stands in the files; special tokens are none."""
    counts: defaultdict[bytes, int] = defaultdict(int)
    count_in = partial(_count, Pretokenizer(special_tokens))
    for text, lengths, found in each_chunk(count_in, files, special_tokens, processes):
        start = 0
        for length, count in zip(lengths.tolist(), found.tolist(), strict=True):
            counts[text[start : start + length]] += count
            start += length
    for token in special_tokens:
        counts.pop(token.encode(), None)
    return dict(counts)


def _count(pretokenizer: Pretokenizer, chunk: Chunk) -> tuple[bytes, np.ndarray, np.ndarray]:
    """The distinct pre-tokens of a chunk, in one string of bytes, with their lengths and counts."""
    words, counts = Words(), np.zeros(0, np.int64)
    for block in pretokenizer.blocks(chunk.read()):
        numbers = words.numbers(block, pretokenizer.starts(block))
        counts = np.pad(counts, (0, len(words) - len(counts))) + np.bincount(numbers, minlength=len(words))
    return b"".join(words.list), np.fromiter(map(len, words.list), np.int64, len(words)), counts


def learn_merges(counts: Mapping[bytes, int], num_tokens: int) -> list[tuple[bytes, bytes]]:
    """The merges, in order, that make `num_tokens` tokens beside the bytes out of words and their counts.

    The most frequent pair is merged, of several the lexicographically greater (left, right). There are fewer when no
    pair is left.
    """
    learner = _Learner(counts)
    merges: list[tuple[bytes, bytes]] = []
    while len(learner.tokens) < _NUM_BYTES + num_tokens and (merge := learner.step()):
        merges.append(merge)
    return merges


class _Learner:
    """Words as strings with a character for each token, so that a merge is `split` and `join`.

    pairs   how often each pair, a string of two characters, occurs
    homes   the words where it may still occur: those that have had it
    queue   a heap of (-count, order of the pair, pair); an entry whose count has fallen since is put back with the new
    """

    def __init__(self, counts: Mapping[bytes, int]):
        self.tokens = {bytes([byte]): chr(byte) for byte in range(_NUM_BYTES)}
        self.bytes_of = {char: token for token, char in self.tokens.items()}
        self.order = {char: _descending(token) for token, char in self.tokens.items()}
        self.words = [word.decode("latin-1") for word in counts]
        self.counts = list(counts.values())
        self.pairs: defaultdict[str, int] = defaultdict(int)
        self.homes: defaultdict[str, list[int]] = defaultdict(list)
        for number, (word, count) in enumerate(zip(self.words, self.counts, strict=True)):
            for pair in map(add, word, word[1:]):
                self.pairs[pair] += count
                self.homes[pair].append(number)
        self.queue = [self._entry(pair, count) for pair, count in self.pairs.items()]
        heapq.heapify(self.queue)

    def step(self) -> tuple[bytes, bytes] | None:
        """Merge the next pair; None when none is left."""
        while self.queue:
            count, _, pair = heapq.heappop(self.queue)
            now = self.pairs.get(pair, 0)
            if now == -count:
                return self._merge(pair)
            if 0 < now < -count:
                heapq.heappush(self.queue, self._entry(pair, now))
        return None

    def _entry(self, pair: str, count: int) -> tuple[int, tuple[str, str], str]:
        return -count, (self.order[pair[0]], self.order[pair[1]]), pair

    def _merge(self, pair: str) -> tuple[bytes, bytes]:
        merge = self.bytes_of[pair[0]], self.bytes_of[pair[1]]
        char = self._token(merge[0] + merge[1])
        before: defaultdict[str, int] = defaultdict(int)  # how often each token stands in front of the pair
        behind: defaultdict[str, int] = defaultdict(int)
        doubled = 0  # how often the pair stands behind itself
        words, counts, homes = self.words, self.counts, self.homes
        for number in homes.pop(pair):
            parts = words[number].split(pair)
            if len(parts) == 1:
                continue  # gone by another merge, or done already: a word is listed once for each occurrence
            words[number], count = char.join(parts), counts[number]
            if parts[0]:
                before[parts[0][-1]] += count
                homes[parts[0][-1] + char].append(number)
            if parts[-1]:
                behind[parts[-1][0]] += count
                homes[char + parts[-1][0]].append(number)
            for part in parts[1:-1]:
                if part:
                    behind[part[0]] += count
                    before[part[-1]] += count
                    homes[char + part[0]].append(number)
                    homes[part[-1] + char].append(number)
                else:
                    doubled += count
                    homes[char + char].append(number)
        changes = [(left + pair[0], left + char, count) for left, count in before.items()]
        changes += [(pair[1] + right, char + right, count) for right, count in behind.items()]
        changes += [(pair[1] + pair[0], char + char, doubled)] if doubled else []
        for old, new, count in changes:
            self.pairs[old] -= count
            self.pairs[new] += count
        for _, new, _ in changes:
            heapq.heappush(self.queue, self._entry(new, self.pairs[new]))
        del self.pairs[pair]
        return merge

    def _token(self, token: bytes) -> str:
        char = self.tokens.setdefault(token, chr(len(self.tokens)))
        self.bytes_of[char], self.order[char] = token, _descending(token)
        return char


def _descending(token: bytes) -> str:
    """A string that sorts first for the token that sorts last: a heap gives the smallest."""
    return "".join(chr(255 - byte) for byte in token) + chr(256)
