"""Byte-pair encoding, written as it is defined, and therefore slow: the reference for other code.

Tests compare training.py, codec.py and pretokens.py with this file, the benchmark of tokenizers compares training.py
and codec.py with it, and `lmsys.course` students' code. A change here changes what is counted as right. A *word* is a
pre-token (see pretokens.py) as bytes.

Sources: Sennrich et al. 2016 (arXiv 1508.07909), section 3.2; Radford et al. 2019 (GPT-2), encoder.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import regex

from lmsys.tokenizer import codec, pretokens

Pair = tuple[bytes, bytes]


def split(text: str, special_tokens: Sequence[str] = ()) -> list[str]:
    """The pre-tokens and special tokens of a text, in order.

    The leftmost special token is found first; of several that begin at one place, the longest.
    """
    pieces, start = list[str](), 0
    while start < len(text):
        places = [(at, -len(token), token) for token in special_tokens if (at := text.find(token, start)) >= 0]
        at, _, token = min(places, default=(len(text), 0, ""))
        pieces += regex.findall(pretokens.PATTERN, text[start:at]) + ([token] if token else [])
        start = at + len(token)
    return pieces


def count_pairs(words: Mapping[bytes, Sequence[bytes]], counts: Mapping[bytes, int]) -> Counter[Pair]:
    """How often each pair of neighbours occurs. words: the tokens of each word; counts: how often the word occurs."""
    pairs: Counter[Pair] = Counter()
    for word, tokens in words.items():
        for pair in pairwise(tokens):
            pairs[pair] += counts[word]
    return pairs


def learn_merges(
    counts: Mapping[bytes, int],
    num_tokens: int,
    rank: Callable[[int, Pair], object] = lambda count, pair: (count, pair),
) -> list[Pair]:
    """The merges, in order, that make `num_tokens` tokens besides the 256 bytes; fewer when no pair is left.

    counts  how often each word (pre-token) occurs
    rank    the pair with the largest rank(count, pair) is merged. By default this is the most frequent pair, and of
            several the lexicographically greatest
    All pairs are counted anew for each merge.
    """
    words, merges = {word: [bytes([byte]) for byte in word] for word in counts}, list[Pair]()
    while len(merges) < num_tokens and (pairs := count_pairs(words, counts)):
        best = max(pairs, key=lambda pair: rank(pairs[pair], pair))  # type: ignore[arg-type, return-value]
        merges.append(best)
        words = {word: merge(tokens, best) for word, tokens in words.items()}
    return merges


def next_merge(counts: Mapping[bytes, int], merges: Sequence[Pair]) -> Pair | None:
    """The merge that is learned after `merges`; None where no pair is left."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    pairs = count_pairs({word: merge_all(word, ranks) for word in counts}, counts)
    return max(pairs, key=lambda pair: (pairs[pair], pair), default=None)


def merge_all(word: bytes, ranks: Mapping[Pair, int]) -> list[bytes]:
    """The tokens of a word: the pair with the lowest rank is merged, until no pair has a rank."""
    tokens = [bytes([byte]) for byte in word]
    while pairs := [pair for pair in pairwise(tokens) if pair in ranks]:
        tokens = merge(tokens, min(pairs, key=ranks.__getitem__))
    return tokens


def merge(tokens: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Replaces every occurrence of the pair by one token, from left to right."""
    out, i = [], 0
    while i < len(tokens):
        both = tuple(tokens[i : i + 2]) == pair
        out.append(tokens[i] + tokens[i + 1] if both else tokens[i])
        i += 1 + both
    return out


def encode(text: str, tokenizer: codec.Tokenizer) -> list[int]:
    """The ids of a text: in each pre-token the pair with the earliest merge is merged, until no merge applies."""
    ids = {token: number for number, token in tokenizer.vocab.items()}
    ranks = {pair: rank for rank, pair in enumerate(tokenizer.merges)}
    known = {token: [ids[token.encode()]] for token in tokenizer.special_tokens}
    result: list[int] = []
    for word in split(text, tokenizer.special_tokens):
        if word not in known:
            known[word] = [ids[token] for token in merge_all(word.encode(), ranks)]
        result += known[word]
    return result
