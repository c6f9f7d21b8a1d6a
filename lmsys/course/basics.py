"""The questions about the model of CS336's assignment 1, in the sizes of the course's tests.

An *adapter* is a function of the course's tests/adapters.py that calls a student's code; the *handout* is the text of
the assignment. Each function without arguments asks one adapter, and yields pairs (question, True if it goes beyond the
handout); parts.py names these functions. Adapters get their arguments by place, in the order of tests/adapters.py.
Results are compared with formulas of torch. If a result equals that of a known mistake, the mistake is named: add one
to the `mistakes` of its question.

Legend: B batch, S positions, M d_model, H heads, FF d_ff, V ids.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys import draws
from lmsys.check import question, rotary
from lmsys.course.checkout import adapter

Questions = Iterator[tuple[question.Question, bool]]  # (question, True where it goes beyond the handout)
# The sizes of the legend, blocks of a model, the longest sequence, and the theta of rotary positions.
B, S, M, H, FF, V, LAYERS, LONGEST, THETA = 4, 12, 64, 4, 128, 97, 2, 16, 10000.0
ROOM = 1e-4  # tolerance: a share of the largest expected value, or of 1 if that is less, as in the course's tests


def drawn(about: str, *shape: int) -> Tensor:
    """A random tensor of this shape, nearly standard normal. The name `about` is its seed."""
    return draws.values(draws.key(0, about), 0, math.prod(shape)).view(shape)


def asked(
    about: str,
    call: Callable[[], Any],
    expected: Tensor,
    mistakes: Mapping[str, Tensor] | None = None,
    beyond: bool = False,
) -> tuple[question.Question, bool]:
    """(a question whose answer is a tensor, `beyond`), as the functions below yield it.

    call      asks the adapter
    expected  the right answer
    mistakes  by mistake, in words, the result that it gives
    beyond    the question goes beyond the handout
    """
    return question.Question(about, partial(_fault, call, expected, mistakes or {})), beyond


def _fault(call: Callable[[], Any], expected: Tensor, mistakes: Mapping[str, Tensor]) -> question.Fault | None:
    """The fault of the result, with the mistake if it is known; None if it is right."""
    x = call()
    if not isinstance(x, Tensor) or x.shape != expected.shape:
        kind = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__}"
        return question.Fault(f"  the result is {kind}; expected a tensor of shape {tuple(expected.shape)}")
    x = x.detach().double()
    at, known = question.worst(x, expected.double()), (words for words, other in mistakes.items() if _same(x, other))
    text = f"  at [{', '.join(map(str, at))}]: expected {expected[at].item():.6g}, got {x[at].item():.6g}"
    nan = x.isnan().any() and "elements are unwritten, as of torch.empty, or NaN"
    return None if _same(x, expected) else question.Fault(text, next(known, nan or None))


def _same(x: Tensor, y: Tensor) -> bool:
    """True if x has y's shape and, within the tolerance, y's values."""
    room = ROOM * max(1.0, float(y.nan_to_num().abs().max()))
    return x.shape == y.shape and torch.allclose(x, y.double(), rtol=0.0, atol=room, equal_nan=True)


def linear() -> Questions:
    x, w = drawn("x", B, S, M), drawn("w", FF, M)
    yield asked("a linear layer", partial(adapter("run_linear"), M, FF, w, x), x @ w.mT)


def embedding() -> Questions:
    table, ids = drawn("table", V, M), torch.arange(B * S).view(B, S) * 5 % V  # ids that all differ, out of order
    yield asked("rows by id", partial(adapter("run_embedding"), V, M, table, ids), table[ids])


def silu() -> Questions:
    x = drawn("x", 2, 5)
    yield asked(
        "SiLU",
        partial(adapter("run_silu"), x),
        F.silu(x),
        {"it is the sigmoid alone: x is not multiplied": x.sigmoid(), "it is GELU": F.gelu(x)},
    )


def softmax() -> Questions:
    run, x = adapter("run_softmax"), drawn("x", 3, 4, 5)
    for dim in (-1, 0):
        others = {f"it takes dimension {i}, not dim": x.softmax(i) for i in range(3) if i != dim % 3}
        mistakes = {"it is divided by the sum of all elements": x.flatten().softmax(0).view_as(x), **others}
        yield asked(f"softmax, {dim=}", partial(run, x, dim), x.softmax(dim), mistakes)
    yield asked(
        "softmax of x + 100",
        lambda: run(x + 100, -1),
        x.softmax(-1),
        {"the maximum is not subtracted: exp overflows": torch.full_like(x, math.nan)},
    )


def rotate(
    x: Tensor, positions: Tensor, pairs: str = rotary.NEIGHBOURS, sign: float = 1.0, theta: float = THETA
) -> Tensor:
    """RoPE of x (..., S, D), or a mistaken form of it.

    pairs  of channels that turn together, as `lmsys.check.rotary` names them
    sign   -1 turns in the other direction
    """
    angles = sign * rotary.angles_of(x.double(), {"positions": positions, "theta": theta})
    return rotary.turned(x.double(), angles, pairs).to(x.dtype)


def rope() -> Questions:
    x = drawn("x", B, S, M)
    for about, positions in {"from 0 on": torch.arange(S), "from 3 on": torch.arange(S) + 3}.items():
        yield asked(
            f"positions {about}",
            partial(adapter("run_rope"), M, THETA, LONGEST, x, positions),
            rotate(x, positions),
            {
                "channels turn in halves (i with i + d / 2), not in neighbours (2 i with 2 i + 1)": rotate(
                    x, positions, rotary.HALVES
                ),
                "it turns in the other direction": rotate(x, positions, sign=-1.0),
                "the exponent of theta is k / d, not 2 k / d": rotate(x, positions, theta=THETA**0.5),
                "the first position is 1": rotate(x, positions + 1),
                "token_positions are not used": rotate(x, torch.arange(S)),
                "x is not rotated": x,
            },
        )
    batched = torch.stack([torch.arange(S) + i for i in range(B)])
    yield asked(
        "positions of each sequence",
        partial(adapter("run_rope"), M, THETA, LONGEST, x, batched),
        torch.stack([rotate(x[i], batched[i]) for i in range(B)]),
        beyond=True,
    )


attended = F.scaled_dot_product_attention  # its mask is True where a query sees a key


def attention() -> Questions:
    run = adapter("run_scaled_dot_product_attention")
    for lead in ((B,), (2, 2)):
        q, k, v = drawn("q", *lead, S, M), drawn("k", *lead, LONGEST, M), drawn("v", *lead, LONGEST, M)
        mask = drawn("mask", *lead, S, LONGEST) > 0
        mask[..., :1] = True
        mask[..., -1:] = False  # so that no row of the opposite mask, below, is empty
        mistakes = {
            "the mask is the opposite: True hides": attended(q, k, v, ~mask),
            "the mask is ignored": attended(q, k, v),
            "scores are not divided by the root of d_k": attended(q, k, v, mask, scale=1.0),
            "scores are divided by d_k, not by its root": attended(q, k, v, mask, scale=1 / M),
        }
        yield asked(f"{len(lead) + 2} dimensions", partial(run, q, k, v, mask), attended(q, k, v, mask), mistakes)
    yield asked("no mask", partial(run, q, k, v), attended(q, k, v), beyond=True)


CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()  # True where a query sees a key


def projections(about: str) -> list[Tensor]:
    """The weights (M, M) of q, k, v and the output projection, in this order."""
    return [drawn(f"{about} {name}", M, M) / 8 for name in "qkvo"]  # 8 is the root of M


def heads(x: Tensor, weights: Sequence[Tensor], rotated: str = "", mask: Tensor | None = CAUSAL) -> Tensor:
    """Multi-head attention of x (B, S, M), by `weights` as `projections` returns them.

    rotated  letters of "qkv": these projections get RoPE; "": none
    """
    parts = [(x @ w.mT).unflatten(-1, (H, -1)).transpose(1, 2) for w in weights[:3]]
    turned = [
        rotate(part, torch.arange(S)) if name in rotated else part for name, part in zip("qkv", parts, strict=True)
    ]
    return attended(turned[0], turned[1], turned[2], mask).transpose(1, 2).flatten(-2) @ weights[3].mT


def multihead() -> Questions:
    x, weights = drawn("x", B, S, M), projections("attention")
    q, k, v = ((x @ w.mT).reshape(B, H, S, -1) for w in weights[:3])
    yield asked(
        "causal, 4 heads",
        partial(adapter("run_multihead_self_attention"), M, H, *weights, x),
        heads(x, weights),
        {
            "there is no causal mask": heads(x, weights, mask=None),
            "the mask hides the past, not the future": heads(x, weights, mask=CAUSAL.mT),
            "heads are cut by view alone, without a transpose: they mix positions": (
                attended(q, k, v, CAUSAL).transpose(1, 2).flatten(-2) @ weights[3].mT
            ),
        },
    )


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


PROJECTIONS = "q_proj", "k_proj", "v_proj", "output_proj"  # the course's names of attention's weights
SHAPES = {"w1": (FF, M), "w2": (M, FF), "w3": (FF, M)}  # of the feed-forward's weights


def weights_of(layer: int) -> dict[str, Tensor]:
    """A block's weights by the course's names."""
    return {
        **{f"attn.{name}.weight": w for name, w in zip(PROJECTIONS, projections(f"layer {layer}"), strict=True)},
        **{f"ln{i}.weight": 1 + drawn(f"layer {layer} ln{i}", M) / 4 for i in (1, 2)},
        **{f"ffn.{name}.weight": drawn(f"{name} {layer}", *shape) / 8 for name, shape in SHAPES.items()},
    }


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of x."""
    return F.rms_norm(x, (M,), weight, eps=1e-5)


def block_of(x: Tensor, weights: Mapping[str, Tensor], rotated: str = "qk", form: str = "pre") -> Tensor:
    """A Transformer block, with weights by the course's names, and `rotated` as in `heads`.

    form  "pre" or "post" norm, or "none": pre-norm without residual connections
    """
    attend = partial(heads, weights=[weights[f"attn.{name}.weight"] for name in PROJECTIONS], rotated=rotated)
    w1, w2, w3 = (weights[f"ffn.w{i}.weight"] for i in (1, 2, 3))

    def feed(x: Tensor) -> Tensor:
        return (F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT

    if form == "post":
        x = normed(x + attend(x), weights["ln1.weight"])
        return normed(x + feed(x), weights["ln2.weight"])
    kept = 0 if form == "none" else 1
    x = kept * x + attend(normed(x, weights["ln1.weight"]))
    return kept * x + feed(normed(x, weights["ln2.weight"]))


def block() -> Questions:
    x, weights = drawn("x", B, S, M), weights_of(0)
    yield asked(
        "a block",
        partial(adapter("run_transformer_block"), M, H, FF, LONGEST, THETA, weights, x),
        block_of(x, weights),
        {
            "norms come behind the sublayers (post-norm), not before them": block_of(x, weights, form="post"),
            "there are no residual connections": block_of(x, weights, form="none"),
            "RoPE is not applied": block_of(x, weights, rotated=""),
        },
    )


def language_model() -> Questions:
    layers, ids = list(map(weights_of, range(LAYERS))), torch.arange(B * S).view(B, S) * 5 % V
    table, head, gain = drawn("ids", V, M), drawn("head", V, M) / 8, 1 + drawn("ln_final", M) / 4
    weights = {
        "token_embeddings.weight": table,
        **{f"layers.{i}.{name}": w for i, layer in enumerate(layers) for name, w in layer.items()},
        "ln_final.weight": gain,
        "lm_head.weight": head,
    }
    x = reduce(block_of, layers, table[ids])
    logits = normed(x, gain) @ head.mT
    mistakes = {
        "it returns probabilities, not logits": logits.softmax(-1),
        "the last norm is missing": x @ head.mT,
    }
    run = partial(adapter("run_transformer_lm"), V, LONGEST, M, LAYERS, H, FF, THETA, weights)
    yield asked("logits", partial(run, ids), logits, mistakes)
    yield asked("a shorter input", partial(run, ids[:, : S // 2]), logits[:, : S // 2])
