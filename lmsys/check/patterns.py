"""Mistakes that people make in attention kernels, tried one after another to explain a wrong result.

Each is the formula with that mistake in it, in float64. The one whose result is that of the kernel, within the budget
that a right one would have, is named; where none is, the places that are wrong are.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import AttentionCase, repeat_heads
from lmsys.testing import Inputs

TILES = (16, 32, 64, 128, 256)
MOST = 0.99  # of the elements
GRADIENTS = ("dq", "dk", "dv")
Outputs = Mapping[str, Tensor]
Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Formula:
    """softmax(scale q kᵀ, masked) v, with what a kernel may do otherwise.

    visible       from the indices of queries and keys: whether the key is seen
    heads         from a query head: the key head that it reads
    first_keys    the number of keys that are read; None for all
    zeros_behind  the number of keys of zeros that are read behind the last one
    hidden        the score of a key that is not visible
    axis          the softmax's, of (B, H, Q, K)
    """

    scale: float
    visible: Callable[[Tensor, Tensor], Tensor]
    heads: Callable[[int], int]
    first_keys: int | None = None
    zeros_behind: int = 0
    hidden: float = -math.inf
    axis: int = -1

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, [self.heads(head) for head in range(q.shape[1])]] for x in (k, v))
        if self.first_keys is not None:
            k, v = k[:, :, : self.first_keys], v[:, :, : self.first_keys]
        if self.zeros_behind:
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, self.zeros_behind)) for x in (k, v))
        scores = q @ k.mT * self.scale
        i, j = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(~self.visible(i[:, None], j), self.hidden)
        return scores.softmax(dim=self.axis).nan_to_num(0.0) @ v


def right(case: AttentionCase) -> Formula:
    group = case.heads // case.kv_heads
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    causal = (lambda i, j: j <= i) if case.causal else (lambda i, j: j >= 0)
    return Formula(scale, causal, lambda head: head // group)


def mistakes(case: AttentionCase) -> Iterator[tuple[str, Formula]]:
    """(in words, the formula with it), the plainest first."""
    good = right(case)

    def with_(**changes: Any) -> Formula:
        return replace(good, **changes)

    usual = case.head_dim**-0.5
    if case.scale is not None:
        yield "scale is ignored: it is always head_dim ** -0.5", with_(scale=usual)
        yield "scale comes on top of head_dim ** -0.5", with_(scale=case.scale * usual)
    yield "there is no scale: scores are q kᵀ", with_(scale=1.0)
    yield "scores are divided by head_dim, not by its root", with_(scale=1 / case.head_dim)
    yield "scores are multiplied by the root of head_dim", with_(scale=case.head_dim**0.5)
    for padded in (32, 64, 128, 256):
        if padded > case.head_dim:
            yield f"the scale is that of a head dimension padded to {padded}", with_(scale=padded**-0.5)
    yield "the softmax runs over queries, not over keys", with_(axis=-2)
    yield "exp2 is taken of scores that were not multiplied by log2(e)", with_(scale=good.scale * math.log(2))
    if case.causal:
        yield "the causal mask is ignored", with_(visible=lambda i, j: j >= 0)
        yield "masked scores are set to 0, not to minus infinity", with_(hidden=0.0)
        yield "off by one at the diagonal: a query does not see its own key", with_(visible=lambda i, j: j < i)
        yield "off by one at the diagonal: a query sees the key behind its own", with_(visible=lambda i, j: j <= i + 1)
        yield "the mask is turned around: a query sees the keys from its own on", with_(visible=lambda i, j: j >= i)
        for tile in TILES:
            if tile < max(case.queries, case.keys):
                told = f"the mask is by tiles of {tile}: a query sees all keys of its own tile"
                yield told, with_(visible=lambda i, j, t=tile: j // t <= i // t)
                told = f"tiles of {tile} on the diagonal are left out"
                yield told, with_(visible=lambda i, j, t=tile: j // t < i // t)
                told = f"the mask is applied within tiles of {tile} alone"
                yield told, with_(visible=lambda i, j, t=tile: j % t <= i % t)
        if case.queries != case.keys:
            more = case.keys - case.queries
            told = "the causal mask begins at the last key, not at the first (bottom right, not top left)"
            yield told, with_(visible=lambda i, j: j <= i + more)
    else:
        yield "it is causal where it must not be", with_(visible=lambda i, j: j <= i)
    for keys in sorted({case.queries, *range(16, case.keys, 16), *(case.keys // t * t for t in TILES), case.keys - 1}):
        if 0 < keys < case.keys:
            yield f"keys from {keys} on are ignored", with_(first_keys=keys)
    for more in sorted({-case.keys % tile for tile in TILES} - {0}):
        yield f"{more} keys behind the last one are read as zeros", with_(zeros_behind=more)
    if case.heads != case.kv_heads:
        yield "query head h reads key head h % kv_heads, not h // group", with_(heads=lambda head: head % case.kv_heads)
    if case.kv_heads > 1:
        yield "every query head reads key head 0", with_(heads=lambda head: 0)


def outputs_of(formula: Formula, inputs: Inputs) -> dict[str, Tensor]:
    """o, dq, dk, dv of the formula, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o = formula.forward(q, k, v)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do.double())
    return {"o": o.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


def of_backwards(case: AttentionCase, inputs: Inputs, name: str) -> Iterator[tuple[str, Tensor]]:
    """(in words, what `name`, a gradient, would then be) of mistakes that only a backward can make."""
    good = right(case)
    q, k, v, do = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    keys, values = (repeat_heads(x, case.heads) for x in (k, v))
    i, j = torch.arange(case.queries, device=q.device)[:, None], torch.arange(case.keys, device=q.device)
    scores = q @ keys.mT * good.scale
    seen = scores.masked_fill(~good.visible(i, j), -math.inf)
    p, dp = seen.softmax(dim=-1), do @ values.mT
    delta = (p * dp).sum(dim=-1, keepdim=True)
    ds = p * (dp - delta)

    def gradient(p: Tensor, ds: Tensor, scale: float = good.scale, do: Tensor = do) -> Tensor:
        """(B, H, S, D): for dk and dv of each query head."""
        return {"dq": lambda: ds @ keys * scale, "dk": lambda: ds.mT @ q * scale, "dv": lambda: p.mT @ do}[name]()

    def summed(*args: Any) -> Tensor:
        found = gradient(*args)
        return found if name == "dq" else found.unflatten(1, (case.kv_heads, -1)).sum(dim=2)

    yield "the scale is missing", summed(p, ds, 1.0)
    yield "the scale is applied twice", summed(p, ds, good.scale**2)
    yield "delta, the row sum of do · o, is not subtracted", summed(p, p * dp)
    yield "delta is added where it is to be subtracted", summed(p, p * (dp + delta))
    yield "dP is not multiplied by P", summed(p, dp - delta)
    lse = seen.logsumexp(dim=-1, keepdim=True)
    for base, factor in (
        ("2, and is read as one in base e", 1 / math.log(2)),
        ("e, and is read as one in base 2", math.log(2)),
    ):
        otherwise = (seen - lse * factor).exp()
        yield f"the log-sum-exp is in base {base}", summed(otherwise, otherwise * (dp - delta))
    ones = torch.ones_like(do)
    by_ones = ones @ values.mT
    along = p * (by_ones - (p * by_ones).sum(dim=-1, keepdim=True))
    yield "do is ignored: ones stand for it", summed(p, along, good.scale, ones)
    if case.causal:
        unmasked, all_seen = (scores - seen.logsumexp(dim=-1, keepdim=True)).exp(), scores.softmax(dim=-1)
        yield "the causal mask is ignored", summed(unmasked, unmasked * (dp - delta))
        yield "the causal mask is ignored, in the sum as well", summed(all_seen, all_seen * (dp - delta))
    if case.heads != case.kv_heads and name != "dq":
        by_head = gradient(p, ds).unflatten(1, (case.kv_heads, -1))
        yield "only the last query head of a group counts", by_head[:, :, -1]
        yield "only the first query head of a group counts", by_head[:, :, 0]
        yield "the group's gradients are averaged, not summed", by_head.mean(dim=2)


def explain(case: AttentionCase, inputs: Inputs, found: Outputs, name: str, budget: float) -> str | None:
    """The mistake that makes `found[name]` what it is, in words; None where no known one does."""
    output = found[name].double()

    def is_(expected: Tensor, times: float = 1.0) -> bool:
        return bool(expected.isfinite().all()) and bool(((output - expected).abs() <= times * budget).all())

    if (told := _rows_of("unwritten", output.isnan())) is not None:
        return told
    if name != "o":
        for mistake, gradient in of_backwards(case, inputs, name):
            if is_(gradient):
                return f"in {name} {mistake}"
    for mistake, formula in mistakes(case):
        larger = max(1.0, abs(formula.scale / right(case).scale))  # scores, and by so much their errors
        if is_(outputs_of(formula, inputs)[name], larger):
            return mistake
    good = outputs_of(right(case), inputs)[name]
    if (told := _copies(good, is_)) is not None:
        return told
    if name == "o" and inputs.q.dtype == torch.float32 and (told := _roundings(case, inputs, output, budget)):
        return told
    factor = float((output * good).sum() / good.square().sum())
    if math.isfinite(factor) and abs(factor - 1) > 1e-6 and is_(factor * good):
        return f"it is {factor:.4g} times what is right"
    memory = {"o": inputs.q, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}[name]
    if not memory.is_contiguous() and is_(_as_in_memory(case, inputs, name)):
        return "strides are ignored: the inputs are read as if they were contiguous"
    return _rows_of("zeros", output == 0) or _only(~((output - good).abs() <= budget))


def _roundings(case: AttentionCase, inputs: Inputs, output: Tensor, budget: float) -> str | None:
    """The place where a result in float32 was rounded on its way. Tiles and sums differ: most elements must agree."""
    formula = right(case)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    keys, values = (repeat_heads(x, case.heads) for x in (k, v))
    i, j = torch.arange(case.queries, device=q.device)[:, None], torch.arange(case.keys, device=q.device)

    def result(scores: Tensor, of_p: Round = exactly, of_sum: Round = exactly, of_v: Round = exactly) -> Tensor:
        scores = scores.double().masked_fill(~formula.visible(i, j), -math.inf)
        p = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        return of_p(p) @ of_v(values).double() / of_sum(p).sum(dim=-1, keepdim=True)

    def product(q: Tensor, k: Tensor) -> Tensor:
        return q.double() @ k.double().mT * formula.scale

    for kind, dtype in (("TF32 or float16", None), ("bfloat16", torch.bfloat16)):
        near = partial(_nearest, dtype=dtype)
        rounded = product(near(q), near(keys))
        tried = {
            f"q and k are rounded to {kind}": result(rounded),
            f"q, k, v and P are rounded to {kind}": result(rounded, near, exactly, near),
            f"P is rounded to {kind} before it is summed": result(product(q, keys), near, near),
            f"P and v are rounded to {kind}": result(product(q, keys), near, exactly, near),
            f"P is rounded to {kind}": result(product(q, keys), near),
            f"q, k and q kᵀ are rounded to {kind}": result(near(rounded / formula.scale) * formula.scale),
        }
        for mistake, expected in tried.items():
            if ((output - expected).abs() <= budget).double().mean() > MOST:
                return mistake
    return None


def exactly(x: Tensor) -> Tensor:
    return x


def _nearest(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x rounded to `dtype`, in float64; None: to ten bits behind the point, which TF32 and float16 have."""
    if dtype is not None:
        return x.to(dtype).double()
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()


def _only(wrong: Tensor) -> str | None:
    """The one batch entry, head or tile that is wrong, or is right, where the mask (B, H, S, D) says so."""
    for axis, name in enumerate(("batch entry", "head")):
        others = [dim for dim in range(4) if dim != axis]
        at, size = wrong.amax(dim=others).nonzero().flatten().tolist(), wrong.shape[axis]
        if len(at) == 1 < size:
            return f"only {name} {at[0]} is wrong"
        if len(at) == size - 1 > 0:
            return f"only {name} {({*range(size)} - {*at}).pop()} is right"
    rows = wrong.amax(dim=(0, 1, 3)).nonzero().flatten().tolist()
    for tile in TILES if rows else ():
        if wrong.shape[2] > tile and rows[0] // tile == rows[-1] // tile:
            return f"only the tile of rows {rows[0] // tile * tile} to {rows[0] // tile * tile + tile - 1} is wrong"
    return None


def _rows_of(kind: str, at: Tensor) -> str | None:
    """The rows that a mask (B, H, S, D) holds, where it holds whole rows alone."""
    rows = at.all(dim=-1)  # (B, H, S)
    if not rows.any() or not bool((at.any(dim=-1) == rows).all()):
        return None
    in_all, size = rows.all(dim=0).all(dim=0).nonzero().flatten().tolist(), rows.shape[-1]
    if len(in_all) == size:
        return f"all of it is {kind}"
    if bool((rows == rows[:1, :1]).all()) and in_all == list(range(in_all[0], size)):
        return f"the last {len(in_all)} rows are {kind}"
    return f"{int(rows.sum())} of {rows.numel()} rows are {kind}"


def _copies(good: Tensor, is_: Callable[[Tensor], bool]) -> str | None:
    if good.shape[0] > 1 and is_(good[:1].expand_as(good)):
        return "every batch has the result of batch 0"
    if good.shape[1] > 1 and is_(good[:, :1].expand_as(good)):
        return "every head has the result of head 0"
    if good.shape[0] == good.shape[1] > 1 and is_(good.transpose(0, 1)):
        return "batches and heads are exchanged"
    return None


def _as_in_memory(case: AttentionCase, inputs: Inputs, name: str) -> Tensor:
    q, k, v, do = (
        torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride()) for x in inputs.tensors.values()
    )
    return outputs_of(right(case), Inputs(q, k, v, do, inputs.seed))[name]
