"""Assignment 1, the model: what its adapters are asked, in the sizes of the course's tests.

Each function asks one adapter: it yields questions and whether they go beyond the handout.

Legend: B batch, S positions, M d_model, H heads, FF d_ff, V ids.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.course.checkout import adapter
from lmsys.course.tensors import Questions, asked, drawn

Weights = Mapping[str, Tensor]
B, S, M, H, FF, V, LAYERS, LONGEST, THETA = 4, 12, 64, 4, 128, 97, 2, 16, 10000.0


def linear() -> Questions:
    x, w = drawn("x", B, S, M), drawn("w", FF, M)
    yield asked("a linear layer", lambda: adapter("run_linear")(M, FF, w, x), x @ w.mT)


def embedding() -> Questions:
    table, ids = drawn("table", V, M), torch.arange(B * S).view(B, S) * 5 % V
    yield asked("rows by id", lambda: adapter("run_embedding")(V, M, table, ids), table[ids])


def silu() -> Questions:
    x = drawn("x", 2, 5)
    mistakes = {"it is the sigmoid alone: x is not multiplied": x.sigmoid(), "it is GELU": F.gelu(x)}
    yield asked("SiLU", lambda: adapter("run_silu")(x), F.silu(x), mistakes)


def softmax() -> Questions:
    run, x = adapter("run_softmax"), drawn("x", 3, 4, 5)
    for dim in (-1, 0):
        others = {f"it takes dimension {i}, not dim": x.softmax(i) for i in range(3) if i != dim % 3}
        mistakes = {"it is divided by the sum of all elements": x.flatten().softmax(0).view_as(x), **others}
        yield asked(f"softmax, {dim=}", partial(run, x, dim), x.softmax(dim), mistakes)
    nan = {"the maximum is not subtracted: exp overflows": torch.full_like(x, math.nan)}
    yield asked("softmax of x + 100", lambda: run(x + 100, -1), x.softmax(-1), nan)


def rotate(x: Tensor, positions: Tensor, halves: bool = False, sign: float = 1.0, power: float = 2.0) -> Tensor:
    """RoPE of x (..., S, D). halves: channel i turns with i + D / 2, in place of its neighbour."""
    half = x.shape[-1] // 2
    angles = sign * positions.double()[:, None] * THETA ** (-torch.arange(half).double() * power / x.shape[-1])
    pairs = x.double().unflatten(-1, (2, half) if halves else (half, 2)).movedim(-2 if halves else -1, 0)
    turned = torch.stack(
        (pairs[0] * angles.cos() - pairs[1] * angles.sin(), pairs[0] * angles.sin() + pairs[1] * angles.cos()),
        dim=-2 if halves else -1,
    )
    return turned.flatten(-2).to(x.dtype)


def rope() -> Questions:
    x = drawn("x", B, S, M)
    for about, positions in {"from 0 on": torch.arange(S), "from 3 on": torch.arange(S) + 3}.items():
        mistakes = {
            "channels turn in halves (i with i + d / 2), not in neighbours (2 i with 2 i + 1)": rotate(
                x, positions, halves=True
            ),
            "it turns in the other direction": rotate(x, positions, sign=-1.0),
            "the exponent of theta is k / d, not 2 k / d": rotate(x, positions, power=1.0),
            "the first position is 1": rotate(x, positions + 1),
            "token_positions are not used": rotate(x, torch.arange(S)),
            "x is not rotated": x,
        }
        run = partial(adapter("run_rope"), M, THETA, LONGEST, x, positions)
        yield asked(f"positions {about}", run, rotate(x, positions), mistakes)
    batched = torch.stack([torch.arange(S) + i for i in range(B)])
    expected = torch.stack([rotate(x[i], batched[i]) for i in range(B)])
    call = partial(adapter("run_rope"), M, THETA, LONGEST, x, batched)
    yield asked("positions of each sequence", call, expected, beyond=True)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    scores = (q @ k.mT).double() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v.double()).to(q.dtype)


def attention() -> Questions:
    run = adapter("run_scaled_dot_product_attention")
    for lead in ((B,), (2, 2)):
        q, k, v = drawn("q", *lead, S, M), drawn("k", *lead, LONGEST, M), drawn("v", *lead, LONGEST, M)
        mask = drawn("mask", *lead, S, LONGEST) > 0
        mask[..., :1] = True
        mask[..., -1:] = False  # so that no row of its opposite is empty
        mistakes = {
            "the mask is the opposite: True hides": attended(q, k, v, ~mask),
            "the mask is ignored": attended(q, k, v, None),
            "scores are not divided by the root of d_k": attended(q, k, v, mask, 1.0),
            "scores are divided by d_k, not by its root": attended(q, k, v, mask, 1 / M),
        }
        yield asked(f"{len(lead) + 2} dimensions", partial(run, q, k, v, mask), attended(q, k, v, mask), mistakes)
    yield asked("no mask", partial(run, q, k, v), attended(q, k, v, None), beyond=True)


CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def projections(about: str) -> list[Tensor]:
    return [drawn(f"{about} {name}", M, M) / 8 for name in "qkvo"]


def heads(x: Tensor, weights: Sequence[Tensor], rotated: str = "", mask: Tensor | None = CAUSAL) -> Tensor:
    """Multi-head attention, with RoPE of the projections that `rotated` names, of "q", "k" and "v"."""
    parts = [(x @ w.mT).unflatten(-1, (H, -1)).transpose(1, 2) for w in weights[:3]]
    turned = [
        rotate(part, torch.arange(S)) if name in rotated else part for name, part in zip("qkv", parts, strict=True)
    ]
    return attended(turned[0], turned[1], turned[2], mask).transpose(1, 2).flatten(-2) @ weights[3].mT


def _mistakes_of_heads(x: Tensor, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    q, k, v = ((x @ w.mT).reshape(B, H, S, -1) for w in weights[:3])
    return {
        "there is no causal mask": heads(x, weights, mask=None),
        "the mask hides the past, not the future": heads(x, weights, mask=CAUSAL.mT),
        "heads are cut by view alone, without a transpose: they mix positions": (
            attended(q, k, v, CAUSAL).transpose(1, 2).flatten(-2) @ weights[3].mT
        ),
    }


def multihead() -> Questions:
    x, weights = drawn("x", B, S, M), projections("attention")
    call = lambda: adapter("run_multihead_self_attention")(M, H, *weights, x)  # noqa: E731
    yield asked("causal, 4 heads", call, heads(x, weights), _mistakes_of_heads(x, weights))


def multihead_with_rope() -> Questions:
    run, x, weights = adapter("run_multihead_self_attention_with_rope"), drawn("x", B, S, M), projections("attention")
    mistakes = {
        "RoPE is not applied": heads(x, weights),
        "RoPE is applied to values, too": heads(x, weights, "qkv"),
        "RoPE is applied to queries alone": heads(x, weights, "q"),
        "there is no causal mask": heads(x, weights, "qk", mask=None),
    }
    expected, positions = heads(x, weights, "qk"), torch.arange(S)[None]
    call = partial(run, M, H, LONGEST, THETA, *weights, x)
    yield asked("causal, 4 heads, RoPE", partial(call, positions), expected, mistakes)
    yield asked("no positions given", call, expected, beyond=True)


def weights_of(layer: int) -> dict[str, Tensor]:
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj")
    weights = dict(zip((f"{name}.weight" for name in names), projections(f"layer {layer}"), strict=True))
    weights |= {f"ln{i}.weight": 1 + drawn(f"layer {layer} ln{i}", M) / 4 for i in (1, 2)}
    shapes = {"w1": (FF, M), "w2": (M, FF), "w3": (FF, M)}
    return weights | {f"ffn.{name}.weight": drawn(f"{name} {layer}", *shape) / 8 for name, shape in shapes.items()}


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def block_of(x: Tensor, weights: Weights, rotated: str = "qk", form: str = "pre") -> Tensor:
    projected = [weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output")]
    first, second, (w1, w2, w3) = (
        weights["ln1.weight"],
        weights["ln2.weight"],
        (weights[f"ffn.w{i}.weight"] for i in (1, 2, 3)),
    )
    attend, feed = (
        partial(heads, weights=projected, rotated=rotated),
        lambda x: (F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT,
    )
    if form == "post":
        x = normed(x + attend(x), first)
        return normed(x + feed(x), second)
    if form == "none":
        return feed(normed(attend(normed(x, first)), second))
    x = x + attend(normed(x, first))
    return x + feed(normed(x, second))


def block() -> Questions:
    x, weights = drawn("x", B, S, M), weights_of(0)
    mistakes = {
        "norms come behind the sublayers (post-norm), not before them": block_of(x, weights, form="post"),
        "there are no residual connections": block_of(x, weights, form="none"),
        "RoPE is not applied": block_of(x, weights, rotated=""),
    }
    call = lambda: adapter("run_transformer_block")(M, H, FF, LONGEST, THETA, weights, x)  # noqa: E731
    yield asked("a block", call, block_of(x, weights), mistakes)


def language_model() -> Questions:
    layers, ids = [weights_of(layer) for layer in range(LAYERS)], torch.arange(B * S).view(B, S) * 5 % V
    weights = {f"layers.{i}.{name}": w for i, layer in enumerate(layers) for name, w in layer.items()}
    weights |= {"token_embeddings.weight": drawn("ids", V, M), "lm_head.weight": drawn("head", V, M) / 8}
    weights["ln_final.weight"] = 1 + drawn("ln_final", M) / 4
    x = weights["token_embeddings.weight"][ids]
    for layer in layers:
        x = block_of(x, layer)
    logits = normed(x, weights["ln_final.weight"]) @ weights["lm_head.weight"].mT
    mistakes = {
        "it returns probabilities, not logits": logits.softmax(-1),
        "the last norm is missing": x @ weights["lm_head.weight"].mT,
    }
    run = partial(adapter("run_transformer_lm"), V, LONGEST, M, LAYERS, H, FF, THETA, weights)
    yield asked("logits", partial(run, ids), logits, mistakes)
    yield asked("a shorter input", partial(run, ids[:, : S // 2]), logits[:, : S // 2], mistakes={})
