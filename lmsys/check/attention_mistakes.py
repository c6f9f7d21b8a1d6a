"""Mistakes that people make in attention kernels, tried one after another to explain a wrong result.

`check/attention.py` calls `explain`. Each mistake is the formula of attention with that mistake in it, in float64. The
first one whose result equals the kernel's, within the error that a right kernel may have, is named. If none does, the
places that are wrong are described. To add a mistake, add an exhibit (an implementation that makes it) to
`tests/museum/`, and an entry, the plainest first, to the table that fits:

    mistakes      another formula of the forward; another scale or mask is an entry of `_scales` or `_masks`
    of_backwards  the backward alone
    _elsewhere    wrong places in memory
    OF_ONLINE     an online softmax, which takes the keys tile by tile
    _roundings    a narrow dtype within the computation

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, S queries or keys, D head dimension; o result,
do its gradient, P = softmax(scale q kᵀ), dP = do vᵀ, delta = rowsum(do · o), dS = P (dP - delta).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import AttentionCase, repeat_heads
from lmsys.testing import Inputs

TILES = (16, 32, 64, 128, 256)  # rows or columns of a tile that a kernel may have
ONLINE_TILES = (8, *TILES, 48, 96, 192)  # tile sizes of an online softmax, in keys
# A rounding is named if it leaves less than this share of an error unexplained. No rounding explains all of it: the
# kernel's tiles and order of sums are unknown, and a number halfway between two others may be rounded either way.
UNEXPLAINED = 0.25


@dataclass(frozen=True)
class Formula:
    """softmax(scale q kᵀ, masked) v, with fields for what a mistaken kernel does otherwise.

    visible  (indices of queries, of keys) -> True where the query sees the key
    read     (keys or values (B, Hkv, K, D), H) -> (B, H, K, D), as the kernel reads them for each query head
    hidden   the score of a key that is not visible
    axis     the axis of (B, H, Q, K) that the softmax runs over
    """

    scale: float
    visible: Callable[[Tensor, Tensor], Tensor]
    read: Callable[[Tensor, int], Tensor] = repeat_heads
    hidden: float = -math.inf
    axis: int = -1

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scores(q, k).softmax(dim=self.axis).nan_to_num(0.0) @ self.read(v, q.shape[1])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, Q, K), masked."""
        scores = q @ self.read(k, q.shape[1]).mT * self.scale
        i, j = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        return scores.masked_fill(~self.visible(i[:, None], j), self.hidden)


def online(
    right: Formula,
    tile: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kept: str = "",
    detached: str = "",
    divided: bool = True,
    rounded: str = "",
    near: Callable[[Tensor], Tensor] = torch.clone,
) -> Tensor:
    """o (B, H, Q, D) by an online softmax: tile by tile of keys, with sums rescaled when the maximum of a row grows.

    tile      keys in a tile
    kept      what is not rescaled, which is a mistake: "o", "sum" or both
    detached  the one value that the backward treats as constant, which is a mistake: "factor", by which sums are
              rescaled, or "maximum", in P
    divided   False, which is a mistake: o is not divided by the sum at the end
    rounded   names what is rounded: "scores" (q kᵀ), "P" (as it is multiplied by v), "sum" (P as it is summed)
    near      the function that rounds what `rounded` names
    """
    scores, v = right.scores(q, k), repeat_heads(v, q.shape[1])
    scores = near(scores / right.scale) * right.scale if "scores" in rounded else scores
    top = torch.full_like(scores[..., :1], -1e300)  # the maximum so far; finite, as -inf - -inf is NaN
    o = total = torch.zeros_like(top)
    for part, values in zip(scores.split(tile, dim=-1), v.split(tile, dim=-2), strict=True):
        new_top = torch.maximum(top, part.amax(dim=-1, keepdim=True))
        factor = (top - new_top).exp().detach() if detached == "factor" else (top - new_top).exp()
        p = (part - (new_top.detach() if detached == "maximum" else new_top)).exp()
        o = (o if "o" in kept else o * factor) + (near(p) if "P" in rounded else p) @ values
        added = (near(p) if "sum" in rounded else p).sum(dim=-1, keepdim=True)
        top, total = new_top, (total if "sum" in kept else total * factor) + added
    return o / total if divided else o


OF_ONLINE: dict[str, dict[str, Any]] = {  # mistakes in an online softmax, as options of `online`
    "o is not rescaled when the maximum grows": {"kept": "o"},
    "the sum is not rescaled when the maximum grows": {"kept": "sum"},
    "neither o nor the sum is rescaled when the maximum grows": {"kept": "o, sum"},
    "o is never divided by the sum, and not rescaled when the maximum grows": {"kept": "o", "divided": False},
    "exp(m_old - m_new) is detached: gradients must flow through the maximum everywhere or nowhere": {
        "detached": "factor"
    },
    "the maximum is detached in exp(s - m), but not in exp(m_old - m_new): detach it in both or in neither": {
        "detached": "maximum"
    },
}


def right(case: AttentionCase) -> Formula:
    """The formula without a mistake."""
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    return Formula(scale, (lambda i, j: j <= i) if case.causal else (lambda i, j: j >= 0))  # j >= 0: all keys


def mistakes(case: AttentionCase) -> dict[str, Formula]:
    """The formula with each mistake of a forward, by the mistake in words, the plainest first."""
    # Numbers of keys after which a mistaken kernel may stop: as many as queries, whole tiles, or all but one.
    ends = {case.queries, *range(16, case.keys, 16), *(case.keys // t * t for t in TILES), case.keys - 1}
    changes: dict[str, dict[str, Any]] = {
        **{words: {"scale": scale} for words, scale in _scales(case).items()},
        "the softmax runs over queries, not over keys": {"axis": -2},
        **{words: {"visible": visible} for words, visible in _masks(case).items()},
        **({"masked scores are set to 0, not to -inf": {"hidden": 0.0}} if case.causal else {}),
        **{
            f"keys from {keys} on are ignored": {"read": lambda x, heads, n=keys: repeat_heads(x[:, :, :n], heads)}
            for keys in sorted(ends & set(range(1, case.keys)))
        },
        **{
            f"{more} keys past the last one are read as zeros: their scores must be -inf": {
                "read": lambda x, heads, n=more: repeat_heads(torch.nn.functional.pad(x, (0, 0, 0, n)), heads)
            }
            for more in sorted({-case.keys % tile for tile in TILES} - {0})
        },
    }
    if case.heads != case.kv_heads:
        changes["query head h reads key head h % kv_heads, not h // group"] = {
            "read": lambda x, heads: x.repeat(1, heads // x.shape[1], 1, 1)
        }
    if case.kv_heads > 1:
        changes["every query head reads key head 0"] = {"read": lambda x, heads: x[:, :1].expand(-1, heads, -1, -1)}
    return {words: replace(right(case), **change) for words, change in changes.items()}


def _scales(case: AttentionCase) -> dict[str, Any]:
    """Wrong scales, by the mistake in words."""
    usual, scale = case.head_dim**-0.5, right(case).scale
    with_argument = {
        "the argument scale is ignored: scores are multiplied by head_dim ** -0.5": usual,
        "scores are multiplied by scale and by head_dim ** -0.5: scale must replace head_dim ** -0.5": scale * usual,
    }
    return (with_argument if case.scale is not None else {}) | {
        "there is no scale: scores are q kᵀ": 1.0,
        "scores are divided by head_dim, not by its root": 1 / case.head_dim,
        "scores are multiplied by the root of head_dim, not divided by it": case.head_dim**0.5,
        **{
            f"the scale is that of a head dimension padded to {size}": size**-0.5
            for size in (32, 64, 128, 256)
            if size > case.head_dim
        },
        "exp2 is taken of scores that were not multiplied by log2(e)": scale * math.log(2),
    }


def _masks(case: AttentionCase) -> dict[str, Any]:
    """Wrong masks, as values of `Formula.visible`, by the mistake in words."""
    if not case.causal:
        return {"a causal mask is applied where none is asked for": lambda i, j: j <= i}
    masks: dict[str, Any] = {
        "the causal mask is ignored": lambda i, j: j >= 0,
        "off by one at the diagonal: a query does not see its own key": lambda i, j: j < i,
        "off by one at the diagonal: a query sees the key after its own": lambda i, j: j <= i + 1,
        "the causal mask is transposed: query i sees keys j >= i, not j <= i": lambda i, j: j >= i,
    }
    for tile in [tile for tile in TILES if tile < max(case.queries, case.keys)]:
        masks |= {
            f"the mask is by tiles of {tile}: a query sees all keys of its own tile": (
                lambda i, j, t=tile: j // t <= i // t
            ),
            f"tiles of {tile} on the diagonal are left out": lambda i, j, t=tile: j // t < i // t,
            f"the causal mask is j % {tile} <= i % {tile}, not j <= i": lambda i, j, t=tile: j % t <= i % t,
        }
    if case.queries != case.keys:
        masks |= {
            "the causal mask is aligned to the bottom right; the contract is the top left: query i sees keys j <= i": (
                lambda i, j: j <= i + case.keys - case.queries
            )
        }
    return masks


def outputs_of(forward: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """o = forward(q, k, v), and its gradients dq, dk, dv for `inputs.do`, by name, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o = forward(q, k, v)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), inputs.do.double())
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


def of_backwards(case: AttentionCase, inputs: Inputs, name: str) -> dict[str, Tensor]:
    """The gradient `name` with each mistake that only a backward can make, by the mistake in words.

    name  "dq", "dk" or "dv"
    """
    formula = right(case)
    scale = formula.scale
    q, k, v, do = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    keys, values = (repeat_heads(x, case.heads) for x in (k, v))
    seen = formula.scores(q, k)
    p, dp, lse = seen.softmax(dim=-1), do @ values.mT, seen.logsumexp(dim=-1, keepdim=True)
    delta = (p * dp).sum(dim=-1, keepdim=True)
    rows, ones = torch.arange(case.queries, device=q.device)[:, None], torch.ones_like(do)
    dp_of_ones = ones @ values.mT

    def by_head(p: Tensor, ds: Tensor, scale: float = scale, do: Tensor = do) -> Tensor:
        """The gradient `name` by query head, (B, H, S, D), from P, dS, the scale and do."""
        return {"dq": lambda: ds @ keys * scale, "dk": lambda: ds.mT @ q * scale, "dv": lambda: p.mT @ do}[name]()

    def summed(*args: Any) -> Tensor:
        """As `by_head`; but dk and dv are by key head, summed over the query heads of its group."""
        gradient = by_head(*args)
        return gradient if name == "dq" else gradient.unflatten(1, (case.kv_heads, -1)).sum(dim=2)

    def with_p(p: Tensor) -> Tensor:
        """The gradient `name` of a backward that recomputes P mistakenly, as this `p`."""
        return summed(p, p * (dp - delta))

    gradients = {
        "the scale is missing": summed(p, p * (dp - delta), 1.0),
        "the scale is applied twice": summed(p, p * (dp - delta), scale**2),
        "delta = rowsum(do · o) is not subtracted: dS must be P (dP - delta)": summed(p, p * dp),
        "delta = rowsum(do · o) is added: dS must be P (dP - delta), not P (dP + delta)": summed(p, p * (dp + delta)),
        "delta is a mean over the head dimension, not the sum": summed(p, p * (dp - delta / case.head_dim)),
        "dP is not multiplied by P": summed(p, dp - delta),
        "the saved log2-sum-exp is read as a natural log-sum-exp": with_p((seen - lse / math.log(2)).exp()),
        "the saved natural log-sum-exp is read as a log2-sum-exp": with_p((seen - lse * math.log(2)).exp()),
        "do is ignored: the backward uses ones in its place": summed(
            p, p * (dp_of_ones - (p * dp_of_ones).sum(dim=-1, keepdim=True)), scale, ones
        ),
        **{
            f"delta is computed only for the first half of each tile of {tile} rows": summed(
                p, p * (dp - delta * (rows % tile < tile // 2))
            )
            for tile in TILES
            if tile < 2 * case.queries
        },
    }
    if case.queries == case.keys and name != "dq":
        gradients["P and dS are not transposed"] = summed(p.mT, (p * (dp - delta)).mT)
    if case.causal:
        scores = right(replace(case, causal=False)).scores(q, k)
        gradients |= {
            "the causal mask is ignored": with_p((scores - lse).exp()),
            "P is recomputed without the causal mask: masked keys count in its row sum, too": with_p(
                scores.softmax(dim=-1)
            ),
        }
    if case.heads != case.kv_heads and name != "dq":
        grouped = by_head(p, p * (dp - delta)).unflatten(1, (case.kv_heads, -1))
        gradients |= {
            "only the last query head of a group counts": grouped[:, :, -1],
            "only the first query head of a group counts": grouped[:, :, 0],
            "the group's gradients are averaged, not summed": grouped.mean(dim=2),
        }
    return gradients


def explain(case: AttentionCase, inputs: Inputs, outputs: Mapping[str, Tensor], name: str, budget: float) -> str | None:
    """The known mistake that gives the wrong `outputs[name]`, in words; else the factor or the places of the error.

    None if none of these describes it.

    outputs  the kernel's results, by name
    name     "o", "dq", "dk" or "dv"
    budget   the largest difference to a mistake's result at which the two count as equal
    """
    output, good = outputs[name].double(), outputs_of(right(case).forward, inputs)[name]
    unusable, output = ~output.isfinite(), output.nan_to_num(0.0)

    def equals(expected: Tensor, times: float = 1.0) -> bool:
        """True if the output equals `expected` within `times` the budget, where the output is finite.

        If the output is finite only in a part, `expected` must differ from the right result in this part: otherwise any
        formula, even the right one, would explain it.
        """
        alike = ((output - expected).abs() <= times * budget) | unusable
        shows = not unusable.any() or bool(((good - expected).abs() > budget)[~unusable].any())
        return bool(expected.isfinite().all()) and bool(alike.all()) and shows

    backwards = {} if name == "o" else of_backwards(case, inputs, name)
    tried = {f"{name}: {words}": gradient for words, gradient in backwards.items()}
    for mistake, expected in (tried | _elsewhere(case, inputs, good, name)).items():
        if not torch.equal(expected, good) and equals(expected):
            return mistake
    for mistake, formula in mistakes(case).items():
        larger = max(1.0, abs(formula.scale / right(case).scale))  # rounding errors grow with the scores
        if equals(outputs_of(formula.forward, inputs)[name], larger):
            return mistake
    for mistake, expected in _of_online_softmax(case, inputs, name).items():
        if equals(expected, max(1.0, float(expected.abs().max() / good.abs().max()))):
            return mistake
    if name == "o" and inputs.q.dtype == torch.float32 and not unusable.any():
        errors = {mistake: float((output - x).norm()) for mistake, x in _roundings(case, inputs).items()}
        nearest = min(errors, key=errors.__getitem__)
        if errors[nearest] < UNEXPLAINED * float((output - good).norm()):
            return nearest
    if unusable.any():
        return _rows_of("unwritten, or NaN", unusable)
    factor = float((output * good).sum() / good.square().sum())
    if math.isfinite(factor) and abs(factor - 1) > 1e-6 and equals(factor * good):
        return f"{name} is {factor:.4g} times what is right"
    return _rows_of("zeros", output == 0) or _only(~((output - good).abs() <= budget))


def _only(wrong: Tensor) -> str | None:
    """The batch entry, head or tile of rows that alone is wrong, in words; None if there is none.

    `wrong` is a mask (B, H, S, D).
    """
    for dim, name in ((0, "batch entry"), (1, "head")):
        at = wrong.transpose(0, dim).flatten(1).any(dim=1).nonzero().flatten().tolist()
        if len(at) == 1 < wrong.shape[dim]:
            return f"only {name} {at[0]} is wrong"
    rows = wrong.any(dim=3).flatten(0, 1).any(dim=0).nonzero().flatten().tolist()
    for tile in [tile for tile in TILES if rows and tile < wrong.shape[2]]:
        if rows[0] // tile == rows[-1] // tile:
            first = rows[0] // tile * tile
            return f"only the tile of rows {first} to {first + tile - 1} is wrong"
    return None


def _elsewhere(case: AttentionCase, inputs: Inputs, good: Tensor, name: str) -> dict[str, Tensor]:
    """The output `name` of a kernel that reads or writes the wrong places in memory, by the mistake in words.

    good  the right output
    """
    # The memory of each input, read by the strides of a contiguous tensor of its shape (a tensor on "meta" gives the
    # strides and takes no memory).
    q, k, v, do = (
        torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride()) for x in inputs.tensors.values()
    )
    return {
        "every batch has the result of batch 0": good[:1].expand_as(good),
        "every head has the result of head 0": good[:, :1].expand_as(good),
        "strides are ignored: the inputs are read as if they were contiguous": outputs_of(
            right(case).forward, Inputs(q, k, v, do, inputs.seed)
        )[name],
    } | ({"batches and heads are exchanged": good.transpose(0, 1)} if good.shape[0] == good.shape[1] else {})


def _of_online_softmax(case: AttentionCase, inputs: Inputs, name: str) -> dict[str, Tensor]:
    """The output `name` of an online softmax with each of its mistakes, by the mistake in words."""
    # Mistakes that show without a second tile.
    whole: dict[str, Callable[..., Tensor]] = {
        "o is not divided by the sum of the exponentials": partial(online, right(case), case.keys, divided=False),
        "the mask is applied after the softmax: the weights that stay do not sum to 1": (
            lambda q, k, v: (
                right(replace(case, causal=False)).scores(q, k).softmax(dim=-1).tril() @ repeat_heads(v, case.heads)
            )
        ),
    }
    tiled = {
        f"{words} (tiles of {tile} keys)": partial(online, right(case), tile, **options)
        for tile in ONLINE_TILES
        if tile < case.keys
        for words, options in OF_ONLINE.items()
    }
    return {words: outputs_of(forward, inputs)[name] for words, forward in (whole | tiled).items()}


def _roundings(case: AttentionCase, inputs: Inputs) -> dict[str, Tensor]:
    """o (B, H, Q, D), computed in float64 but for one kind of rounding, by that rounding in words.

    P = exp(scores - maximum) is also rounded tile by tile: then `maximum` is that of the tiles so far.
    """
    made, (q, k, v) = dict[str, Tensor](), (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    for kind, dtype in (("TF32 or float16", None), ("bfloat16", torch.bfloat16)):
        near = partial(_nearest, dtype=dtype)
        near_q, near_k, near_v = near(q), near(k), near(v)
        places = {  # {words, with {} for the rounding: (q, k and v, some of them rounded; `rounded` of `online`)}
            "q and k are {}": ((near_q, near_k, v), ""),
            "q, k, v and P = exp(scores - maximum) are {}": ((near_q, near_k, near_v), "P"),
            "P = exp(scores - maximum) and v are {}": ((q, k, near_v), "P"),
            "P = exp(scores - maximum), in the softmax sum too, is {}": ((q, k, v), "P, sum"),
            "P = exp(scores - maximum) is {}": ((q, k, v), "P"),
            "q, k and q kᵀ are {}": ((near_q, near_k, v), "scores"),
        }
        for tile in (case.keys, *(tile for tile in TILES if tile < case.keys)):
            by_tiles = f", P in tiles of {tile} keys, each with the maximum so far" if tile < case.keys else ""
            for words, (of_given, rounded) in places.items():
                if "P" in rounded or not by_tiles:
                    made[
                        words.format(f"rounded to {kind}{by_tiles}: float32 inputs need float32 products")
                        + ' (in Triton tl.dot with input_precision="ieee")'
                    ] = online(right(case), tile, *(x.double() for x in of_given), rounded=rounded, near=near)
    return made


def _nearest(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x rounded to `dtype`, as float64. dtype None: rounded to ten bits of mantissa, which TF32 and float16 have."""
    bits = (x.float().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF  # rounds away 13 of 23 bits of mantissa
    return (bits.view(torch.float32) if dtype is None else x.to(dtype)).double()


def _rows_of(kind: str, at: Tensor) -> str | None:
    """The rows where a mask (B, H, S, D) is True, in words with their `kind`; None unless these are whole rows."""
    rows = at.all(dim=-1)  # (B, H, S)
    if not rows.any() or not torch.equal(at.any(dim=-1), rows):
        return None
    size, count = rows.shape[-1], int(rows[0, 0].sum())
    if bool((rows == (torch.arange(size, device=rows.device) >= size - count)).all()):
        return f"all rows are {kind}" if count == size else f"the last {count} rows are {kind}"
    return f"{int(rows.sum())} of {rows.numel()} rows are {kind}"
