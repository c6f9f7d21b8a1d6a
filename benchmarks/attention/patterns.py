"""Attention patterns of benchmark cases: which keys each query sees, by windows, packed documents and cache lengths.

`benchmarks.bench_attention` uses this file. `make` makes a case's pattern from plain values, `visible` counts the pairs
of a query and a key that the query sees, `made_before_calls` times the making of masks, and `name_of` names cases. A
new option is a name in OPTIONS, a parameter of `make`, and a field of `bench_attention.AttentionTest` with its `Axis`;
`name_of` may give it a shorter form in ids.

Documents that share a sequence have one of two kinds of lengths. `equal16`: 16 documents (or any other number) of one
length. `mixed`: many short and a few long ones. Their lengths are lognormal: the median is a 64th of the sequence (256
of 16,384 tokens), and the logarithm has a standard deviation of 1.3. Lengths of caches (`key_lengths`) are uniform from
one key to all. Both are drawn with a seed made from the sizes, so that a case is the same on every machine.
"""

import random
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from statistics import median
from typing import Any

import torch

from lmsys import registry, traits, values
from lmsys.attention import Documents, Pattern
from lmsys.measure import clock, compare

# Axes of the benchmark, in the order of the fields of `bench_attention.AttentionTest`.
OPTIONS = "window", "offset", "documents", "key_lengths", "softcap"
MEDIAN, SIGMA = 64, 1.3  # mixed documents: the sequence's length over their median; standard deviation of log(length)


def lengths_of(documents: str, tokens: int) -> list[int]:
    """The number of tokens of each document, in the order of the sequence.

    documents  `mixed`, or `equal` and a number; the module's docstring explains them
    tokens     length of the sequence
    """
    if documents != "mixed":
        number = min(int(documents.removeprefix("equal")), tokens)
        return [tokens * (at + 1) // number - tokens * at // number for at in range(number)]
    chance, lengths, left = random.Random(f"documents {tokens}"), list[int](), tokens
    while left:
        lengths.append(max(1, min(left, round(tokens / MEDIAN * chance.lognormvariate(0, SIGMA)))))
        left -= lengths[-1]
    return lengths


@lru_cache(maxsize=64)
def make(
    batch: int,
    queries: int,
    keys: int,
    device: str,
    causal: bool,
    window: int | None = None,
    documents: str = "",
    key_lengths: bool = False,
    softcap: float | None = None,
    offset: int = 0,
) -> Pattern:
    """The pattern of a case on its device; documents are the same in each batch entry.

    window       keys that a causal query sees at most; None: no window
    documents    `mixed`, or `equal` and a number; "": the sequence is one document
    key_lengths  True: each batch entry has a number of keys of its own, as caches have
    softcap      the cap of scores; None: no cap
    offset       position of query 0 among the keys
    """
    packed = Documents(lengths_of(documents, keys), device) if documents else None
    lengths = None
    if key_lengths:
        chance = random.Random(f"key lengths {batch} {keys}")
        lengths = torch.tensor([chance.randint(1, keys) for _ in range(batch)], dtype=torch.int32, device=device)
    return Pattern(
        causal=causal, window=window, offset=offset, documents=packed, key_lengths=lengths, softcap=softcap
    ).simplest(queries, keys)  # drops options that hide nothing at these lengths


def visible(batch: int, queries: int, keys: int, **options: Any) -> tuple[float, float]:
    """(visible pairs of a query and a key, keys that some query sees) of one head, on average over the batch.

    options  as in `make`, with `causal`

    ValueError for sizes that no run has: a forged result file may name them, and they would take all memory.
    """
    # So many positions take some GiB.
    values.hold((batch * max(queries, keys) <= 2**26, f"{batch} x {queries} x {keys} is too large for a pattern"))
    bounds = make(batch, queries, keys, "cpu", **options).bounds(queries, keys, torch.device("cpu"))
    pairs, seen_by = ((interval.end - interval.first).clamp(min=0).long() for interval in (bounds, bounds.of_keys))
    return pairs.sum(1).double().mean().item(), (seen_by > 0).sum(1).double().mean().item()


def made_before_calls(
    entry: registry.Entry, pattern: Pattern, queries: int, keys: int, device: str
) -> dict[str, float | None]:
    """Seconds to make the documents and the mask that a row reads besides q, k and v, by field of the record.

    documents_s  to make `Documents` with their `cu_seqlens`; left out without documents
    mask_s       to make the row's mask from the window and the documents, by the function that its trait `mask` names;
                 left out if the row has no such trait, or the case has neither option; None if making it failed
    """
    seconds = dict[str, float | None]()
    if pattern.documents is not None:
        lengths = pattern.documents.lengths
        seconds["documents_s"] = _seconds(lambda: Documents(lengths, device).cu_seqlens(len(lengths)), device)
    if (target := traits.AttentionTraits.of(entry).mask) and pattern.options.keys() & {"window", "documents"}:
        make_mask = partial(registry.load_target(target), pattern, queries, keys, torch.device(device))
        seconds["mask_s"] = compare.attempt(lambda: _seconds(make_mask, device))[0]
    return seconds


def _seconds(make: Callable[[], Any], device: str) -> float:
    """The median seconds of three calls, each until the device has finished, after a call that does not count."""
    made = partial(clock.in_turn, make, partial(clock.synchronize, device))
    return median(clock.timed(clock.CpuClock(), made, 4)[1:])


def name_of(options: Mapping[str, Any]) -> str:
    """The options of a case, as its id has them: `window1024-documents_mixed`."""
    named = {"window": "window{}", "offset": "offset{}", "documents": "documents_{}", "softcap": "softcap{:g}"}
    return "-".join(named.get(name, name).format(value) for name, value in options.items())
