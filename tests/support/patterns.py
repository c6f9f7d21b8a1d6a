"""Patterns of attention (masks, windows, documents and so on) that hypothesis draws for a row of the attention table.

`patterned` draws a case with options, and `make_pattern` the tensors of its pattern. `spelled` says pair by pair which
keys a query sees; tests compare results with this slow, independent definition. A new option is added to EXAMPLES,
`patterned`, `make_pattern` and `spelled`.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention import AttentionCase, Documents, Pattern
from lmsys.attention.contract import DTYPES
from lmsys.attention.pattern import OPTIONS
from tests.support.attention_rows import Row, cases

FLAGS = "bias", "alibi", "sinks", "return_lse"  # options that hide no key, and are True in a case
EXAMPLES: dict[str, Any] = {  # {option: a value that it can have in a case}
    "window": 5,
    "offset": 3,
    "softcap": 2.0,
    "prefix": 4,
    **dict.fromkeys(("documents", "key_lengths", "mask", *FLAGS), True),
}


def options_of(row: Row) -> list[str]:
    """The options that the row supports."""
    return [name for name in OPTIONS if row.why_not(row.case(causal=True, **{name: EXAMPLES[name]})) is None]


@st.composite
def patterned(draw: st.DrawFn, row: Row, **fixed: Any) -> AttentionCase:
    """A case with one or more options that the row supports. The fields in `fixed`, perhaps options, are not drawn."""
    case = draw(cases(row, **fixed))
    free = [name for name in options_of(row) if name not in fixed]
    given = draw(st.sets(st.sampled_from(free), min_size=0 if case.options else 1)) if free else set()
    changes = dict.fromkeys(given & {"documents", "key_lengths", "mask", *FLAGS}, True)
    if "prefix" in given and case.window is None and fixed.get("causal", True):
        changes |= {"causal": True, "prefix": draw(st.integers(1, case.keys + 3))}
    elif "window" in given:
        changes |= {"causal": True, "window": draw(st.integers(1, case.queries + 3))}
        sides = draw(st.tuples(*2 * [st.integers(0, case.queries + 3)]))
        two_sided = replace(case, causal=fixed.get("causal", draw(st.booleans())), window=sides)
        if row.why_not(two_sided) is None and draw(st.booleans()):
            changes |= {"causal": two_sided.causal, "window": sides}
    if "offset" in given:
        offset = st.integers(1 - case.queries, case.keys + 3).filter(bool)
        if row.why_not(replace(case, offset=True)) is None:
            offset = st.just(True) | offset
        changes |= {"offset": draw(offset)}
    if "softcap" in given:
        changes |= {"softcap": draw(st.sampled_from([0.5, 3.0, 50.0]))}
    if ("documents" in given or case.documents) and draw(st.booleans()):
        changes |= {"queries": case.keys}
    case = replace(case, **changes)
    return replace(case, grad=row.why_not(replace(case, grad=True)) is None)


def make_pattern(case: AttentionCase, seed: int) -> Pattern:
    """The case's pattern, with tensors drawn by `seed`: documents, lengths, offsets, a mask, a bias and so on."""
    documents = lengths = None
    chance = random.Random(seed)
    if case.documents:
        entries = (1, case.batch)[seed % 2]
        of_keys = [document_lengths(case.keys, seed + entry) for entry in range(entries)]  # lengths by batch entry
        documents = Documents(of_keys, case.device)
        if case.queries != case.keys:
            # At most as many documents as queries: the last keys become one document.
            of_keys = [
                row[: case.queries - 1] + [sum(row[case.queries - 1 :])] * (len(row) >= case.queries) for row in of_keys
            ]
            of_queries = [divided(case.queries, len(row), chance) for row in of_keys]
            documents = Documents(of_queries, case.device, Documents(of_keys, case.device))
    if case.key_lengths:
        drawn = [chance.randint(0, case.keys) for _ in range(case.batch)]
        lengths = torch.tensor(drawn, dtype=(torch.int32, torch.int64)[seed % 2], device=case.device)
    offset: int | Tensor = case.offset
    if case.offset is True:
        drawn = [chance.randint(-case.queries, case.keys) for _ in range(case.batch)]
        offset = torch.tensor(drawn, dtype=(torch.int64, torch.int32)[seed % 2], device=case.device)
    mask = drawn_mask(case, seed) if case.mask else None
    bias = drawn_bias(case, seed) if case.bias else None
    by_head = torch.randn(case.batch, case.heads, generator=torch.Generator().manual_seed(seed)).to(case.device)
    alibi, sinks = by_head[:1].abs() if case.alibi else None, by_head if case.sinks else None
    tensors = {"bias": bias, "alibi": alibi, "sinks": sinks}
    numbers = case.causal, case.window, offset, documents, lengths, mask, case.softcap, case.prefix
    return Pattern(*numbers, **tensors, return_lse=case.return_lse)


def drawn_bias(case: AttentionCase, seed: int) -> Tensor:
    """A bias of one of SHAPES, in the case's dtype or in float32, by the seed."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(SHAPES[seed % len(SHAPES)](case), generator=generator)
    return bias.to(case.device, DTYPES[case.dtype] if seed % 2 else torch.float32)


def divided(tokens: int, parts: int, chance: random.Random) -> list[int]:
    """`parts` lengths, each at least 1, that add up to `tokens`."""
    edges = [0, *sorted(chance.sample(range(1, tokens), parts - 1)), tokens]
    return [end - start for start, end in zip(edges, edges[1:], strict=False)]


def document_lengths(tokens: int, seed: int) -> list[int]:
    """Lengths of documents that add up to `tokens`: all of them 1, at most 3 or at most 20, or a single document."""
    chance = random.Random(seed)
    longest = chance.choice([1, 3, 20, tokens])
    lengths: list[int] = []
    while left := tokens - sum(lengths):
        lengths.append(min(left, chance.randint(1, longest) if longest < tokens or lengths else tokens))
    return lengths


SHAPES = (  # shapes that broadcast to (B, H, Q, K), for masks and biases
    lambda case: (case.batch, case.heads, case.queries, case.keys),
    lambda case: (case.batch, 1, case.queries, case.keys),
    lambda case: (case.queries, case.keys),
    lambda case: (case.batch, 1, 1, case.keys),
    lambda case: (case.heads, case.queries, 1),
)


def drawn_mask(case: AttentionCase, seed: int) -> Tensor:
    """A mask of one of SHAPES, with one of three densities, by the seed. One row of the mask in four sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(SHAPES[seed % len(SHAPES)](case), generator=generator) < (0.1, 0.5, 0.9)[seed % 3]
    blind = torch.rand(*mask.shape[:-1], 1, generator=generator) < 0.25
    return (mask & ~blind).to(case.device)


def spelled(pattern: Pattern, case: AttentionCase) -> Tensor:
    """(B, H, Q, K), boolean: True where a query sees a key, decided for each pair as `attention`'s docstring says."""
    shape = case.batch, case.heads, case.queries, case.keys
    at, query_document = places(pattern, case)  # (B, Q, 1)
    key, key_document, start = torch.arange(case.keys), 0, 0
    sees = torch.ones(case.batch, case.queries, case.keys, dtype=torch.bool)
    if (packed := pattern.documents) is not None:
        of_keys = [packed.keys.lengths[b % packed.batch] for b in range(case.batch)]
        numbered = torch.tensor([[document_of(j, lengths) for j in range(case.keys)] for lengths in of_keys])
        key_document, start = numbered[:, None].unbind(-1)  # (B, 1, K)
    sees &= query_document == key_document
    if pattern.key_lengths is not None:
        sees &= key < pattern.key_lengths.cpu()[:, None, None]
    if isinstance(pattern.window, tuple):
        left, right = pattern.window
        sees &= (at - left <= key) & (key <= at + right)
    elif pattern.window is not None:
        sees &= key > at - pattern.window
    if pattern.causal:
        sees &= (key <= at) | (key < start + (pattern.prefix or 0))
    whole = sees[:, None].expand(shape)
    return (whole if pattern.mask is None else whole & pattern.mask.expand(shape).cpu()).to(case.device)


def places(pattern: Pattern, case: AttentionCase) -> tuple[Tensor, Tensor]:
    """(the position of each query among the keys, the number of its document), both (B, Q, 1).

    A query stands at the end of its document's keys, moved by the offset.
    """
    offsets = pattern.offset.tolist() if isinstance(pattern.offset, Tensor) else [pattern.offset] * case.batch
    rows = []
    for b, offset in enumerate(offsets):
        for i in range(case.queries):
            at, number, packed = i, 0, pattern.documents
            if packed is not None:
                of_queries, of_keys = packed.lengths[b % packed.batch], packed.keys.lengths[b % packed.batch]
                number, first = document_of(i, of_queries)
                at = sum(of_keys[: number + 1]) - (first + of_queries[number] - i)
            rows.append((at + int(offset), number))
    at, numbers = torch.tensor(rows).view(case.batch, case.queries, 2, 1).unbind(2)
    return at, numbers


def document_of(token: int, lengths: Sequence[int]) -> tuple[int, int]:
    """(number of the document that a token belongs to, the document's first token)."""
    start = 0
    for number, length in enumerate(lengths):
        if token < start + length:
            return number, start
        start += length
    raise AssertionError(f"{token=} is beyond {lengths=}")
