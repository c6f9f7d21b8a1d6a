"""Patterns of attention that hypothesis draws for a row, and what they mean, spelled out pair by pair."""

import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention import AttentionCase, Documents, Pattern
from lmsys.attention.pattern import OPTIONS
from tests.support.attention_rows import Row, cases

EXAMPLES: dict[str, Any] = {
    "window": 5,
    "offset": 3,
    "softcap": 2.0,
    **dict.fromkeys(("documents", "key_lengths", "mask"), True),
}


def taken(row: Row) -> list[str]:
    """The options that the row knows."""
    return [name for name in OPTIONS if row.why_not(row.case(causal=True, **{name: EXAMPLES[name]})) is None]


@st.composite
def patterned(draw: st.DrawFn, row: Row, **fixed: Any) -> AttentionCase:
    """A case of one or more options; `fixed` fields, of which an option is one, are not drawn."""
    case = draw(cases(row, **fixed))
    free = [name for name in taken(row) if name not in fixed]
    given = draw(st.sets(st.sampled_from(free), min_size=0 if case.options else 1)) if free else set()
    changes = dict.fromkeys(given & {"documents", "key_lengths", "mask"}, True)
    if "window" in given:
        changes |= {"causal": True, "window": draw(st.integers(1, case.queries + 3))}
    if "offset" in given:
        changes |= {"offset": draw(st.integers(1, case.keys + 3))}
    if "softcap" in given:
        changes |= {"softcap": draw(st.sampled_from([0.5, 3.0, 50.0]))}
    if "documents" in given or case.documents:
        changes |= {"queries": case.keys}
    case = replace(case, **changes)
    return replace(case, grad=row.why_not(replace(case, grad=True)) is None)


def make_pattern(case: AttentionCase, seed: int) -> Pattern:
    """The case's pattern with documents, lengths and a mask drawn by `seed`."""
    documents = lengths = None
    if case.documents:
        entries = (1, case.batch)[seed % 2]
        documents = Documents([document_lengths(case.keys, seed + entry) for entry in range(entries)], case.device)
    if case.key_lengths:
        chance = random.Random(seed)
        drawn = [chance.randint(0, case.keys) for _ in range(case.batch)]
        lengths = torch.tensor(drawn, dtype=(torch.int32, torch.int64)[seed % 2], device=case.device)
    mask = drawn_mask(case, seed) if case.mask else None
    return Pattern(case.causal, case.window, case.offset, documents, lengths, mask, case.softcap)


def document_lengths(tokens: int, seed: int) -> list[int]:
    """Lengths that add up to `tokens`: each of one token, or one over the whole, or any."""
    chance = random.Random(seed)
    longest = chance.choice([1, 3, 20, tokens])
    lengths: list[int] = []
    while left := tokens - sum(lengths):
        lengths.append(min(left, chance.randint(1, longest) if longest < tokens or lengths else tokens))
    return lengths


SHAPES = (  # of masks that broadcast to (B, H, Q, K)
    lambda case: (case.batch, case.heads, case.queries, case.keys),
    lambda case: (case.batch, 1, case.queries, case.keys),
    lambda case: (case.queries, case.keys),
    lambda case: (case.batch, 1, 1, case.keys),
    lambda case: (case.heads, case.queries, 1),
)


def drawn_mask(case: AttentionCase, seed: int) -> Tensor:
    """A mask of some shape and density; a query in four sees nothing where queries have rows of their own."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(SHAPES[seed % len(SHAPES)](case), generator=generator) < (0.1, 0.5, 0.9)[seed % 3]
    blind = torch.rand(*mask.shape[:-1], 1, generator=generator) < 0.25
    return (mask & ~blind).to(case.device)


def spelled(pattern: Pattern, case: AttentionCase) -> Tensor:
    """(B, H, Q, K): where a query sees a key, asked of each pair in the words of `attention`'s docstring."""
    shape = case.batch, case.heads, case.queries, case.keys
    mask = None if pattern.mask is None else pattern.mask.expand(shape).cpu()
    lengths = None if pattern.key_lengths is None else pattern.key_lengths.tolist()
    documents = pattern.documents and [
        [number for number, length in enumerate(row) for _ in range(length)] for row in pattern.documents.lengths
    ]

    def sees(b: int, i: int, j: int) -> bool:
        at = i + pattern.offset
        if pattern.causal and j > at:
            return False
        if pattern.window is not None and j <= at - pattern.window:
            return False
        if documents and (document := documents[b % len(documents)])[i] != document[j]:
            return False
        return lengths is None or j < lengths[b]

    found = [[[sees(b, i, j) for j in range(shape[3])] for i in range(shape[2])] for b in range(shape[0])]
    whole = torch.tensor(found)[:, None].expand(shape)
    return (whole if mask is None else whole & mask).to(case.device)
