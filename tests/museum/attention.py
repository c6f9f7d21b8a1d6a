"""Attention in the museum of published faults: each fault is a few lines around a right formula.

`lmsys check` must refuse each fault, and must not accuse the right implementations, which HONEST lists. A new fault is
a function with the decorator `exhibit(kind, where it was published, what users saw, a part of the mistake's name)`;
without a name the check need only refuse it. Faults of a backward are made by `backward`.

Legend: B batch, H query heads, Hkv key heads, Q queries, K keys, D head dimension.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.attention import ATTENTION
from lmsys.registry import Entry
from tests.museum.exhibit import exhibit

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "mine.py"
HONEST = [ATTENTION[name] for name in ("naive", "vectorized", "flash_torch", "sdpa", "sdpa_math", "sdpa_flash")]
HONEST.append(Entry("my_attention", f"{EXAMPLE}:my_attention"))

Options = dict[str, Any]  # {"causal": ..., "scale": ...}


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """k or v (B, Hkv, K, D) repeated for q's heads: (B, H, K, D)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def scores_of(
    q: Tensor, k: Tensor, causal: bool = False, scale: float | None = None, hidden: float = -math.inf
) -> Tensor:
    """The scores (B, H, Q, K) in float32, with the value `hidden` for keys that a query must not see."""
    scores = q.float() @ repeated(k, q).float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~seen, hidden) if causal else scores


def over_sum(weights: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """o (B, H, Q, D) from weights (B, H, Q, K) that do not sum to 1 yet."""
    return (weights / weights.sum(dim=-1, keepdim=True)).to(v.dtype) @ repeated(v, q)


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, **hidden: float
) -> Tensor:
    """Right attention, o (B, H, Q, D). `hidden=x`: another score for hidden keys, as in `scores_of`."""
    return scores_of(q, k, causal, scale, **hidden).softmax(dim=-1).to(v.dtype) @ repeated(v, q)


def row_max(scores: Tensor) -> Tensor:
    """(B, H, Q, 1): the largest score of each query."""
    return scores.amax(dim=-1, keepdim=True).detach()


def shifted(shift: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    """An implementation that subtracts shift(scores) from the scores, instead of their maximum."""

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        scores = scores_of(q, k, causal, scale)
        return over_sum((scores - shift(scores)).exp(), q, v)

    return row


def named(name: str, function: Any) -> Any:
    """The function, renamed so that it can be imported from this module by its name, as `exhibit` asks."""
    function.__name__, function.__module__ = name, __name__
    return function


# The maximum of a query's scores.

no_max = exhibit(
    "attention",
    "pytorch/executorch#18407",
    "Phi-4-mini, whose scores reach 151, printed garbage",
    "no maximum is subtracted",
)(named("no_max", shifted(lambda scores: 0)))

fixed_max = exhibit(
    "attention",
    "HabanaAI/vllm-fork#275",
    "a model whose scores reach 2,000 printed exclamation marks; exp(score - 10) stood in the kernel",
    "a fixed number, about 10",
)(named("fixed_max", shifted(lambda scores: 10)))

finite_sentinel = exhibit(
    "attention",
    "flashinfer-ai/flashinfer#4267",
    "rows whose scores are all below -50,000 came out as zeros",
    "the running maximum starts at about -5",
)(named("finite_sentinel", shifted(lambda scores: row_max(scores).clamp(min=-5e4))))

first_as_max = exhibit(
    "attention",
    "ROCm/AMDMIGraphX#1290",
    "the first score of a row was subtracted, not the largest",
)(named("first_as_max", shifted(lambda scores: scores[..., :1].detach())))

masked_in_max = exhibit(
    "attention",
    "chiendb97/oasr#101",
    "the row maximum was taken over masked places, too",
    "masked keys count in the maximum",
)(named("masked_in_max", shifted(lambda scores: row_max(scores.masked_fill(scores == -math.inf, 0.0)))))


@exhibit(
    "attention",
    "jax-ml/jax#27224",
    "a Pallas kernel was right only at multiples of its block: padding took part",
    "count in the maximum",
)
def oob_zero(q, k, v, *, causal=False, scale=None):
    """Keys that pad the last tile of 64 count as zeros in the maximum, and are masked only afterwards."""
    scores = scores_of(q, k, causal, scale)
    top = row_max(F.pad(scores, (0, -k.shape[2] % 64)))
    return over_sum((scores - top).exp(), q, v)


# Masks.


@exhibit(
    "attention",
    "jax-ml/jax#27224",
    "lengths that no block divides gave other numbers",
    "keys past the last one are read as zeros",
)
def oob_read(q, k, v, *, causal=False, scale=None):
    padding = (0, 0, 0, -k.shape[2] % 64)
    return attend(q, F.pad(k, padding), F.pad(v, padding), causal, scale)


@exhibit(
    "attention",
    "TransformerLensOrg/TransformerLens#318",
    "a model attended to the future: masked scores were -1e5",
    "masked scores are set to about -1",
)
def finite_mask(q, k, v, *, causal=False, scale=None):
    return attend(q, k, v, causal, scale, hidden=-1e5)


@exhibit(
    "attention",
    "awslabs/gluonts#1401",
    "masked places took part: they were filled with 1e-9, not with -1e9",
    "masked scores are set to 0",
)
def tiny_mask(q, k, v, *, causal=False, scale=None):
    return attend(q, k, v, causal, scale, hidden=1e-9)


@exhibit(
    "attention",
    "Dao-AILab/flash-attention#282",
    "other results once there were more keys than queries",
    "aligned to the bottom right",
)
def bottom_right(q, k, v, *, causal=False, scale=None):
    """The contract here is SDPA's mask, aligned at the top left. flash-attention has since chosen the other one."""
    scores = scores_of(q, k, False, scale)
    if causal:
        queries, keys = scores.shape[-2:]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0).to(v.dtype) @ repeated(v, q)


@exhibit("attention", "pytorch/pytorch#195910", "queries saw the future within groups of four rows, on one backend")
def mask_of_four_rows(q, k, v, *, causal=False, scale=None):
    scores = scores_of(q, k, False, scale)
    if causal:
        i, j = (torch.arange(size, device=q.device) for size in scores.shape[-2:])
        scores = scores.masked_fill(j > (i // 4 * 4 + 3)[:, None], -math.inf)
    return scores.softmax(dim=-1).to(v.dtype) @ repeated(v, q)


# Heads and the scale.


@exhibit("attention", "apple/axlearn#842", "grouped heads were tiled, not repeated", "h % kv_heads")
def tiled_heads(q, k, v, *, causal=False, scale=None):
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
    return attend(q, k, v, causal, scale)


@exhibit(
    "attention",
    "BobMcDear/attorch#14",
    "a division of strides gave head 0 to all heads",
    "every query head reads key head 0",
)
def head_zero(q, k, v, *, causal=False, scale=None):
    return attend(q, k[:, :1], v[:, :1], causal, scale)


@exhibit("attention", "flashinfer-ai/flashinfer#3800", "only the first entry of a batch was right", "batch")
def batch_zero(q, k, v, *, causal=False, scale=None):
    return attend(q[:1], k[:1], v[:1], causal, scale).expand(len(q), -1, -1, -1).contiguous()


@exhibit(
    "attention",
    "AI-Hypercomputer/maxtext#1370",
    "scores were divided by D ** -0.5: training worked, with other numbers",
    "scores are multiplied by the root of head_dim",
)
def inverse_scale(q, k, v, *, causal=False, scale=None):
    return attend(q, k, v, causal, q.shape[-1] ** 0.5 if scale is None else scale)


BAKED: dict[Any, Any] = {}  # {shapes, dtype and causal: scale of the first call}


@exhibit(
    "attention",
    "pytorch/pytorch#184122",
    "a compiled kernel was kept by shape and dtype, and the first call's scale with it",
    "scale is ignored",
)
def scale_of_first_call(q, k, v, *, causal=False, scale=None):
    scale = BAKED.setdefault((q.shape, k.shape, q.dtype, causal), scale)
    return attend(q, k, v, causal, scale)


@exhibit(
    "attention",
    "intel/ipex-llm#12619",
    "a head dimension that was padded to a power of two gave its own scale",
    "padded to 128",
)
def scale_of_padded_heads(q, k, v, *, causal=False, scale=None):
    """The scale is that of the head dimension padded to 128."""
    q, k = (F.pad(x, (0, -x.shape[-1] % 128)) for x in (q, k))
    return attend(q, k, v, causal, scale)


# Precision.


@exhibit(
    "attention",
    "philipturner/metal-flash-attention#8",
    "large activations gave infinity: q kᵀ was float16, and scaled behind that",
    "q kᵀ are rounded to TF32 or float16",
)
def half_scores(q, k, v, *, causal=False, scale=None):
    scores = (q.half() @ repeated(k, q).half().mT).to(q.dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~seen, -math.inf) if causal else scores
    return scores.float().softmax(dim=-1).to(v.dtype) @ repeated(v, q)


@exhibit(
    "attention", "huggingface/candle#3727", "weights of long rows did not sum to 1: their sum stood still in float16"
)
def half_sum(q, k, v, *, causal=False, scale=None):
    """The weights are added key by key to a sum of 16 bits."""
    scores = scores_of(q, k, causal, scale)
    weights = (scores - row_max(scores)).exp()
    narrow = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float16
    total = torch.zeros_like(weights[..., :1], dtype=narrow)
    for key in range(weights.shape[-1]):
        total = total + weights[..., key : key + 1].to(narrow)
    return (weights / total.float()).to(v.dtype) @ repeated(v, q)


@exhibit(
    "attention",
    "labmlai/annotated_deep_learning_paper_implementations#146",
    "the softmax ran over queries; samples looked hardly worse",
    "runs over queries",
)
def softmax_over_queries(q, k, v, *, causal=False, scale=None):
    return scores_of(q, k, causal, scale).softmax(dim=-2).nan_to_num(0.0).to(v.dtype) @ repeated(v, q)


# Memory.


@exhibit("attention", "flagos-ai/FlagAttention#45", "values were read by the strides of keys")
def strides_of_keys(q, k, v, *, causal=False, scale=None):
    """Reads v by k's strides. The results are wrong only if one of k and v is contiguous and the other is not."""
    length = k.shape[2]
    storage = v.transpose(1, 2).reshape(-1) if v.is_contiguous() == k.is_contiguous() and length % 2 else v.reshape(-1)
    return attend(q, k, torch.as_strided(storage.contiguous(), v.shape, v.contiguous().stride()), causal, scale)


MADE: set[Any] = set()  # shapes, dtypes and strides for which `contiguous_once` has been called


@exhibit(
    "attention",
    "Dao-AILab/flash-attention#2886",
    "inputs were made contiguous when a kernel was compiled, and not from then on",
)
def contiguous_once(q, k, v, *, causal=False, scale=None):
    if (key := (q.shape, k.shape, q.dtype, causal, q.stride())) not in MADE:
        MADE.add(key)
        q, k, v = (x.contiguous() for x in (q, k, v))
    if not q.is_contiguous():
        q = torch.as_strided(q, q.shape, torch.empty(q.shape, device="meta").stride())
    return attend(q, k, v, causal, scale)


@exhibit("attention", "Dao-AILab/flash-attention#2611", "offsets above 2 ** 31 wrapped; here those of 16 bits do")
def wrapped_offset(q, k, v, *, causal=False, scale=None):
    o = attend(q, k, v, causal, scale)
    offset = (torch.arange(q.shape[2], device=q.device) * q.shape[1] * q.shape[-1]).to(torch.int16).long()
    return o * (offset >= 0)[:, None]


# Partial results.


@exhibit("attention", "sgl-project/sglang#33064", "parts were merged by log-sum-exps in base 2, read as base e")
def merged_in_base_two(q, k, v, *, causal=False, scale=None):
    parts = []
    for keys in (slice(0, k.shape[2] // 2), slice(k.shape[2] // 2, None)):
        scores = scores_of(q, k, causal, scale)[..., keys]
        lse = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0)).exp()
        parts.append((weights.to(v.dtype) @ repeated(v, q)[:, :, keys], lse / math.log(2)))
    share = torch.cat([lse for _, lse in parts], dim=-1).softmax(dim=-1).to(v.dtype)
    return parts[0][0] * share[..., :1] + parts[1][0] * share[..., 1:]


@exhibit(
    "attention",
    "facebookresearch/xformers#785",
    "the last keys were left out where no block divides them",
    "are ignored",
)
def last_tile_dropped(q, k, v, *, causal=False, scale=None):
    whole = max(1, k.shape[2] // 64) * 64
    return attend(q, k[:, :, :whole], v[:, :, :whole], causal, scale)


# Backward passes.


class Explicit(torch.autograd.Function):
    """Attention with an explicit backward; alter(p, dp, delta, do, lse, scores) replaces some of these tensors.

    `alter` returns {name: new value}. It may also return "queries", the number of queries over which dk is summed, and
    "group", a function like `summed`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, alter: Callable[..., Any]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.options, ctx.alter = options, alter
        return attend(q, k, v, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        scores, do = scores_of(q, k, **ctx.options), grads[0].float()
        p = scores.softmax(dim=-1)
        dp = do @ repeated(v, q).float().mT
        parts = {"p": p, "dp": dp, "delta": (p * dp).sum(dim=-1, keepdim=True), "do": do}
        parts["lse"] = scores.logsumexp(dim=-1, keepdim=True)
        parts["scores"] = scores
        parts |= ctx.alter(**parts)
        scale = ctx.options["scale"] or q.shape[-1] ** -0.5
        ds = parts["p"] * (parts["dp"] - parts["delta"]) * scale
        first = parts.get("queries", q.shape[2])
        by_head = ds[:, :, :first].mT @ q[:, :, :first].float(), parts["p"].mT @ parts["do"]
        dk, dv = (parts.get("group", summed)(x, k.shape[1]) for x in by_head)
        dq = ds @ repeated(k, q).float()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def summed(x: Tensor, kv_heads: int) -> Tensor:
    """Gradients by query head (B, H, K, D), summed to those by key head (B, Hkv, K, D)."""
    return x.unflatten(1, (kv_heads, -1)).sum(dim=2)


def backward(alter: Callable[..., Any]) -> Callable[..., Tensor]:
    """An implementation whose backward `alter` changes: see `Explicit`."""

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        return Explicit.apply(q, k, v, {"causal": causal, "scale": scale}, alter)

    return row


honest_backward = named("honest_backward", backward(lambda **parts: {}))
HONEST.append(Entry("honest_backward", f"{__name__}:honest_backward"))

no_delta = exhibit(
    "attention",
    "Dao-AILab/flash-attention#2481",
    "delta was made of another call's do: dv was right, dq and dk were not",
    "is not subtracted",
)(named("no_delta", backward(lambda delta, **_: {"delta": torch.zeros_like(delta)})))

half_of_delta = exhibit(
    "attention",
    "triton-lang/triton#2020",
    "delta was made for the first half of each block alone",
)(
    named(
        "half_of_delta",
        backward(lambda delta, **_: {"delta": delta * (torch.arange(delta.shape[2]) % 64 < 32)[:, None].to(delta)}),
    )
)

base_two = exhibit(
    "attention",
    "flashinfer-ai/flashinfer#2114",
    "a log-sum-exp in base 2 was taken for one in base e",
    "the saved log2-sum-exp is read as a natural",
)(named("base_two", backward(lambda scores, lse, **_: {"p": (scores - lse / math.log(2)).exp()})))

one_head_of_group = exhibit(
    "attention",
    "marin-community/levanter#449",
    "gradients of grouped keys came from one query head",
    "query head of a group counts",
)(
    named(
        "one_head_of_group",
        backward(lambda **_: {"group": lambda x, kv_heads: x.unflatten(1, (kv_heads, -1))[:, :, -1]}),
    )
)

lost_update = exhibit(
    "attention",
    "Dao-AILab/flash-attention#359",
    "two blocks added to dk at once, and one update was lost",
)(named("lost_update", backward(lambda p, **_: {"queries": p.shape[2] - 16})))
