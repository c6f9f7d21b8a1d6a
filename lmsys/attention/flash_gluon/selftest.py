"""A short test of every plan in `plans.py` on a Triton version that the kernels have not been tested on.

Before `flash_gluon` is used on such a version, `refused_when_tried` of `support.py` lets `run` run once, on a GPU. To
cover a new option of the kernels, add a field to `Shape`, which `run`, `check` and `draw` read.

Inputs are whole numbers for which every result is exact, so results are compared bit for bit. Two neighbouring keys are
a pair: they differ only in the last element, where queries are 0. A query attends to one pair: it gives each of the two
keys a weight of 1/2, or a weight of 1 to one key if the mask hides the other. All other weights are exactly 0, so all
results are small whole numbers or halves.

Legend: B batch, H query heads, Hkv key heads, Q queries, K keys, D head dimension.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.pattern import Pattern

SCALE = 8.0  # so large that the scores of different pairs are far apart: in float32 the lower one's weight is exactly 0
BITS = 9  # bits of the number of a pair of keys; the elements of its keys spell these bits as -1 and 1
WINDOW = 150  # its left edge lies in different tiles of keys for the consumers of one CTA
ROUNDS = 3  # each plan runs several times, since a missing wait does not fail every time
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shape:
    """The shape of q (B, H, Q, D), k and v (B, Hkv, K, D). K is at most 2 ** (BITS + 1)."""

    batch: int = 4
    heads: int = 8
    kv_heads: int = 4
    queries: int = 700
    keys: int = 700
    head_dim: int = 64
    causal: bool = False
    window: int | None = None  # keys that a query sees at most; it needs causal, and as many keys as queries


def run(capability: tuple[int, int]) -> None:
    """Raises ValueError where a result is not exact, on the first GPU of `capability`."""
    from lmsys.attention.flash_gluon.plans import BACKWARD, FORWARD, bounded_plans

    number = next(i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) == capability)
    device = torch.device("cuda", number)
    for (head_dim, causal), entries in FORWARD.items():
        plain = Shape(head_dim=head_dim, causal=causal)
        forwards = {plain: [plan for _, plan in entries]}
        if causal:
            forwards[replace(plain, window=WINDOW)] = bounded_plans(head_dim)
        for shape, plans in forwards.items():
            for (i, forward), seed in product(enumerate(plans), range(ROUNDS)):
                _, backward = BACKWARD[head_dim, causal][min(i, len(BACKWARD[head_dim, causal]) - 1)]
                # Every second run is in the deterministic mode.
                check(shape, DTYPES[i % 2], (forward, backward), (i + seed) % 2 == 1, seed, device)


def check(
    shape: Shape, dtype: torch.dtype, plans: tuple[Any, Any], deterministic: bool, seed: int, device: torch.device
) -> None:
    """Raises ValueError if a result is not exact. `plans`: a `ForwardPlan` and a `BackwardPlan`."""
    from lmsys.attention.flash_gluon import launch

    q, k, v, do, weights = (x.to(device) for x in draw(shape, seed))
    expected = truth(shape, q, k, v, do, weights)
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    pattern = None if shape.window is None else Pattern(causal=True, window=shape.window)
    o, lse = launch._forward(q, k, v, shape.causal, SCALE, plans[0], pattern)
    grads = launch._backward(q, k, v, o, lse, do, shape.causal, SCALE, deterministic, plans[1], pattern)
    for (name, right), result in zip(expected.items(), (o, *grads), strict=True):
        if not torch.equal(result, right.to(dtype)):
            raise ValueError(f"{name} is wrong where it is a whole number: {shape}, {dtype}, {plans}, {deterministic=}")


def draw(shape: Shape, seed: int) -> tuple[Tensor, ...]:
    """(q, k, v, do, weights): inputs of `shape`, and the softmax weights (B, H, Q, K) that they lead to, in float64."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.arange(shape.keys)
    code = ((keys[:, None] // 2 >> torch.arange(BITS)) & 1) * 2 - 1  # (K, BITS): the bits of each pair, as -1 and 1
    copies = (shape.head_dim - 1) // BITS
    k = torch.zeros(shape.keys, shape.head_dim, dtype=torch.float64)
    k[:, : copies * BITS] = code.repeat(1, copies).double()
    q_of = k.clone()  # for each key, a query that attends to the pair of that key
    k[:, -1] = 1.0 - 2.0 * (keys % 2)
    last = torch.full((shape.queries,), shape.keys - 1)  # the last key that a query sees
    last = torch.arange(shape.queries).minimum(last) if shape.causal else last
    first = torch.zeros_like(last) if shape.window is None else (last + 1 - shape.window).clamp(min=0)
    chance = torch.rand(shape.batch, shape.heads, shape.queries, generator=generator)
    key = (first + (chance * (last + 1 - first)).long()).minimum(last)  # (B, H, Q): a key of the pair it attends to
    visible = (keys >= first[:, None]) & (keys <= last[:, None])  # (Q, K)
    weights = ((keys // 2 == key[..., None] // 2) & visible).double()
    weights /= weights.sum(-1, keepdim=True)

    def whole(heads: int, length: int) -> Tensor:
        """(B, heads, length, D) of -1, 0 and 1."""
        return torch.randint(-1, 2, (shape.batch, heads, length, shape.head_dim), generator=generator).double()

    v = 2 * whole(shape.kv_heads, shape.keys)
    return q_of[key], k.expand_as(v).contiguous(), v, whole(shape.heads, shape.queries), weights


def truth(shape: Shape, q: Tensor, k: Tensor, v: Tensor, do: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The exact o, dq, dk and dv by name, in this order, in float64."""
    group = shape.heads // shape.kv_heads
    repeated_k, repeated_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    o = weights @ repeated_v
    ds = weights * (do @ repeated_v.mT - (do * o).sum(-1, keepdim=True)) * SCALE
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q, weights.mT @ do))
    return {"o": o, "dq": ds @ repeated_k, "dk": dk, "dv": dv}
