"""Attention rows for tests of `lmsys check`: some right ones, and wrong ones in WRONG, each with a known mistake.

tests/check/test_mistakes.py lets `lmsys check` judge them, and looks in the report for the words that stand with each
wrong one. A new wrong row has the decorator `wrong`, or is an entry in WRONG. Shapes are those of `lmsys.attention`.
"""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import repeat_heads
from tests.museum.attention import over_sum, repeated, row_max, scores_of, shifted

WRONG: dict[str, tuple[str, Callable[..., Tensor]]] = {}  # {name: (a part of the message expected, the row)}


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, visible: Any = None
) -> Tensor:
    """Right attention. `visible` (Q, K) replaces the causal mask."""
    scores = scores_of(q, k, causal and visible is None, scale)
    if causal and visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0).to(v.dtype) @ repeated(v, q)


def wrong(message: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A decorator that puts a row into WRONG, with a part of the message expected."""

    def keep(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        WRONG[function.__name__] = message, function
        return function

    return keep


def right(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return attend(q, k, v, causal=causal, scale=scale)


def without_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


def warns(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    warnings.warn("it is right", stacklevel=1)
    logging.getLogger("torch.utils.cpp_extension").warning("it is right")  # as torch does if CUDA finds no GPU
    return attend(q, k, v, causal=causal, scale=scale)


unshifted = shifted(lambda scores: 0)  # right for ordinary scores, wrong for extreme ones: it subtracts no maximum


def of_a_course(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Right, with the signature of CS336's assignment: on (B, S, D), with the default scale."""
    return attend(q[:, None], k[:, None], v[:, None], causal=is_causal)[:, 0]


def any_order(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Right, but with the keys in a random order, so that repeated calls differ in their bits."""
    order = torch.randperm(k.shape[2])
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[:, order]
    return attend(q, k[:, :, order], v[:, :, order], causal=causal, scale=scale, visible=visible)


def by_batch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Right, but with the keys in reverse for a batch of 1, so that its bits differ from those in a larger batch."""
    k, v = (x.flip(2) if len(q) == 1 else x for x in (k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return attend(q, k, v, causal=causal, scale=scale, visible=visible.flip(1) if len(q) == 1 else visible)


@wrong("keys from 128 on are ignored")
def beyond_128_keys(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return attend(q, k[:, :, :128], v[:, :, :128], causal=causal, scale=scale)


@wrong("the argument scale is ignored: scores are multiplied by head_dim ** -0.5")
def no_scale(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return attend(q, k, v, causal=causal)


@wrong("the last 45 rows are unwritten")
def no_tail(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    o, whole = attend(q, k, v, causal=causal, scale=scale), q.shape[2] // 64 * 64
    written = torch.empty_like(o)
    written[:, :, :whole] = o[:, :, :whole]
    return written


def masked(sees: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A row whose causal mask is sees(i, j), from the indices of queries (Q, 1) and of keys (K)."""

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
        return attend(q, k, v, causal=causal, scale=scale, visible=sees(i, j))

    return row


WRONG |= {
    "behind_the_diagonal": (
        "off by one at the diagonal: a query sees the key after its own",
        masked(lambda i, j: j <= i + 1),
    ),
    "before_the_diagonal": (
        "off by one at the diagonal: a query does not see its own key",
        masked(lambda i, j: j < i),
    ),
    "no_mask": ("the causal mask is ignored", masked(lambda i, j: j >= 0 * i)),
    "by_tiles": ("the mask is by tiles of 32", masked(lambda i, j: j // 32 <= i // 32)),
    "bottom_right": (
        "the causal mask is aligned to the bottom right",
        masked(lambda i, j: j <= i + j.shape[0] - i.shape[0]),
    ),
}


@wrong("query head h reads key head h % kv_heads, not h // group")
def other_heads(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
    return attend(q, k, v, causal=causal, scale=scale)


@wrong("19 keys past the last one are read as zeros: their scores must be -inf")
def reads_on(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 64)) for x in (k, v))
    return attend(q, k, v, causal=causal, scale=scale)


@wrong("strides are ignored: the inputs are read as if they were contiguous")
def no_strides(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    q, k, v = (torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride()) for x in (q, k, v))
    return attend(q, k, v, causal=causal, scale=scale)


@wrong("o is 0.5 times what is right")
def halved(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return attend(q, k, v, causal=causal, scale=scale) / 2


@wrong("every batch has the result of batch 0")
def one_batch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return attend(q[:1], k[:1], v[:1], causal=causal, scale=scale).expand(q.shape)


@wrong("the function changes its input q")
def scales_in_place(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    q.data.mul_(2)
    return attend(q, k, v, causal=causal, scale=scale)


@wrong("o is torch.float64 of shape")
def of_another_dtype(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return attend(q, k, v, causal=causal, scale=scale).double()


def with_backward(fault: str) -> Callable[..., Tensor]:
    """A row whose backward has a fault: "delta" is not subtracted from dP, or "scale" is missing in dk, and so on."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
            scores = q @ k.mT * scale
            if causal:
                scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
            p = scores.softmax(dim=-1)
            ctx.save_for_backward(q, k, v, p)
            ctx.scale = scale
            return p @ v

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (q, k, v, p), do = ctx.saved_tensors, grads[0]
            dp = do @ v.mT
            delta = (p * dp).sum(dim=-1, keepdim=True)
            delta = delta / q.shape[-1] if fault == "mean" else delta
            ds = p * (dp if fault == "delta" else dp - delta)
            scale = 1.0 if fault == "scale" else ctx.scale
            if fault == "transposed" and q.shape == k.shape:
                return ds @ k * ctx.scale, ds @ q * scale, p.mT @ do, None, None
            return ds @ k * ctx.scale, ds.mT @ q * scale, p.mT @ do, None, None

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        return Attention.apply(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)

    return row


WRONG |= {
    "no_delta": ("dq: delta = rowsum(do · o) is not subtracted", with_backward("delta")),
    "dk_without_scale": ("dk: the scale is missing", with_backward("scale")),
    "mean_for_delta": ("dq: delta is a mean over the head dimension", with_backward("mean")),
    "dk_not_transposed": ("dk: P and dS are not transposed", with_backward("transposed")),
}


@wrong("the mask is applied after the softmax")
def masked_late(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    weights = scores_of(q, k, scale=scale).softmax(dim=-1).to(v.dtype)
    return (weights.tril() if causal else weights) @ repeated(v, q)


def dies(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    os.abort()


def scaled_at(place: Any) -> Callable[..., Tensor]:
    """A row that is right except at `place`, an index of o, where its values are at least 1.5 times too large."""

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        o = attend(q, k, v, causal=causal, scale=scale)
        factor = torch.ones_like(o)
        factor[place] = 1.5 + 0.1 * torch.arange(o.shape[-1])
        return o * factor

    return row


WRONG |= {
    "one_head": ("only head 1 is wrong", scaled_at((slice(None), slice(1, 2)))),
    "one_entry": ("only batch entry 2 is wrong", scaled_at((slice(2, 3), slice(None)))),
    "one_tile": ("only the tile of rows 64 to 127 is wrong", scaled_at((..., slice(64, 128), slice(None)))),
}


@wrong("P = exp(scores - maximum), in the softmax sum too, is rounded to bfloat16")
def rounded_early(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    scores = scores_of(q, k, scale=scale)
    return over_sum((scores - row_max(scores)).exp().bfloat16().float(), q, v)


def online(fault: str = "", tile: int = 64, low: torch.dtype | None = None) -> Callable[..., Tensor]:
    """A row that computes an online softmax over tiles of keys, in plain PyTorch.

    fault  the mistake in it: "o", "sum" or "both" is not rescaled when the maximum grows, the factor of rescaling is
           "detached" from autograd, o is "undivided" by the sum, the mask is aligned at the "bottom right"; "": none
    tile   keys of a tile
    low    a dtype that P is rounded to, with the fault "low" also v
    """

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        o = torch.zeros(q.shape, device=q.device)
        total, top = o[..., :1], o[..., :1] - torch.inf
        first = k.shape[2] - q.shape[2] if fault == "bottom right" else 0
        i = torch.arange(q.shape[2], device=q.device)[:, None] + first
        for start in range(0, k.shape[2], tile):
            keys, values = k[:, :, start : start + tile].float(), v[:, :, start : start + tile].float()
            scores = q.float() @ keys.mT * scale
            if causal:
                j = torch.arange(start, start + keys.shape[2], device=q.device)
                scores = scores.masked_fill(j > i, -torch.inf)
            highest = scores.amax(dim=-1, keepdim=True)
            grown = torch.maximum(top, highest)
            p, factor, top = (scores - grown).exp(), (top - grown).exp(), grown
            factor = factor.detach() if fault == "detached" else factor
            total = (total if fault in ("sum", "both") else total * factor) + p.sum(dim=-1, keepdim=True)
            p = p if low is None else p.to(low).float()
            values = values.to(low).float() if fault == "low" and low else values
            o = (o if fault in ("o", "both") else o * factor) + p @ values
        return (o if fault == "undivided" else o / total).to(q.dtype)

    return row


right_by_tiles, right_by_small_tiles = online(), online(tile=16)
for tile in (16, 64):
    tiles = f" when the maximum grows (tiles of {tile} keys)"
    WRONG[f"keeps_o_{tile}"] = f"o is not rescaled{tiles}", online("o", tile)
    WRONG[f"keeps_sum_{tile}"] = f"the sum is not rescaled{tiles}", online("sum", tile)
    WRONG[f"keeps_both_{tile}"] = f"neither o nor the sum is rescaled{tiles}", online("both", tile)
    detached = f"gradients must flow through the maximum everywhere or nowhere (tiles of {tile} keys)"
    WRONG[f"detached_{tile}"] = detached, online("detached", tile)
WRONG |= {
    "undivided": ("o is not divided by the sum of the exponentials", online("undivided")),
    "low_p": ("P = exp(scores - maximum) is rounded to bfloat16: float32 inputs", online(low=torch.bfloat16)),
    "low_p_by_tiles": (
        "P = exp(scores - maximum) is rounded to TF32 or float16, P in tiles of 16 keys",
        online(tile=16, low=torch.float16),
    ),
    "low_p_and_v": (
        "P = exp(scores - maximum) and v are rounded to bfloat16, P in tiles of 32 keys",
        online("low", 32, torch.bfloat16),
    ),
    "bottom_right_by_tiles": ("the causal mask is aligned to the bottom right", online("bottom right")),
}


@wrong("the causal mask is aligned to the bottom right")
def bottom_right_with_more_nan(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Returns NaN for queries that see no key, and for some others."""
    o = online("bottom right")(q, k, v, causal=causal, scale=scale)
    return o if not o.isnan().any() else o.masked_fill(torch.arange(q.shape[2])[:, None] % 7 == 0, torch.nan)


@wrong("off by one at the diagonal: a query does not see its own key")
def blind_first(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Returns NaN for the first query, which sees no key."""
    if not causal:
        return attend(q, k, v, scale=scale)
    scores = scores_of(q, k, scale=scale)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu()
    return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).to(v.dtype) @ repeated(v, q)


@wrong("o is right in a single call on contiguous inputs, and wrong for inputs that are not aligned to 16 bytes")
def by_16_bytes(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Reads from the multiple of 16 bytes before the first number of a tensor, as loads of 16 bytes do."""

    def read(x: Tensor) -> Tensor:
        return x.as_strided(x.shape, x.stride(), x.storage_offset() - x.data_ptr() % 16 // x.element_size())

    return attend(read(q), read(k), read(v), causal=causal, scale=scale).nan_to_num()


class _OneStride(torch.autograd.Function):
    """The identity, with a backward that is wrong for gradients that have a stride of 0."""

    @staticmethod
    def forward(ctx: Any, o: Tensor) -> Tensor:
        return o.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].cumsum(-1) if 0 in grads[0].stride() else grads[0]


@wrong("dq is right in a single call on contiguous inputs, and wrong for a gradient of stride 0, as that of o.sum() is")
def no_expanded_gradient(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    return _OneStride.apply(attend(q, k, v, causal=causal, scale=scale))


globals().update({name: row for name, (_, row) in WRONG.items()})  # so that each row can be imported by its name
