"""Extreme inputs of attention: scores far from zero, sinks, one-hot rows, outlier channels.

A *unit* is a pair of batch entry and key head, with the query heads of that key head. Inputs are drawn normal, but in
some draws one unit's q, k and v become one of KINDS. Benchmarks draw by `AttentionDraws`; `lmsys verify` draws a unit
of a timed call again by `drawn_unit`, to judge it; `lmsys check` writes all kinds by `plant`. Values are changed by
assignment, by copies and by powers of two, so that any machine makes the same bits again. A new kind is an entry of
KINDS and a branch of `plant`. It needs a new `lmsys.draws.VERSION`, as any change of these values does, since old
result files are judged by inputs that are drawn again.

Sources: sinks, Xiao et al. 2024 (arXiv 2309.17453); outlier channels, Dettmers et al. 2022 (arXiv 2208.07339), of keys
Liu et al. 2024 (arXiv 2402.02750); growth of attention's logits, Dehghani et al. 2023 (arXiv 2302.05442), section 3.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

import random
from collections.abc import Iterable, Mapping

import torch

from lmsys import draws, extremes
from lmsys.attention.contract import DTYPES, AttentionCase

KINDS = {
    "low": "all scores far below zero",
    "lowest": "q · k near -1e6 for all keys (float16: -3e4), about the size of masks",
    "high": "all scores far above zero",
    "equal": "all keys equal",
    "sink": "key 0 far above all others",
    "first": "softmax rows with nearly all weight on one of the first keys",
    "last": "softmax rows with nearly all weight on one of the last keys",
    "diagonal": "softmax rows with nearly all weight on the query's own key",
    "climb": "scores that rise from tile to tile",
    "outlier": "channels of outliers in keys and values",
}
SHARE = 1 / 16  # about this share of all units drawn is extreme; less if a draw has more than 16 units
FAR, FARTHEST = 12, {torch.float16: 15}  # |q · k| is 2**FAR; for "lowest" 2**15 in float16, 2**20 in other dtypes
SHARP = 2.0**5  # a query that is SHARP times a key has nearly all weight on that key
SINK = 2.0**11  # q · k for key 0 of "sink"
STEP_KEYS, STEPS, STEP = 16, 32, 2.0**5  # "climb": q · k rises by STEP after each STEP_KEYS keys, STEPS - 1 times
FIRST_KEYS, TAIL = 8, 64  # the most keys that "first" and "last" choose from
KEY_OUTLIER, VALUE_OUTLIER = 2.0**4, 2.0**5  # factors of the outlier channels

Unit = tuple[int, int]  # (batch entry, key head)


def plant(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """Writes `kind`, a key of KINDS, into a unit that was drawn normal, in place: q (G, Q, D), k and v (K, D)."""
    queries, keys = q.shape[-2], len(k)
    if kind in ("low", "lowest", "high"):
        exponent = FARTHEST.get(q.dtype, 20) if kind == "lowest" else FAR  # half of it goes to q, the rest to k
        q.zero_()
        q[..., 0], k[:, 0] = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2) * (1 if kind == "high" else -1)
    elif kind == "equal":
        k.copy_(k[:1].clone().expand_as(k))
    elif kind == "sink":
        k[:, 0], k[0, 1:] = 0.0, 0.0
        q[..., 0], k[0, 0] = SINK / 2**4, 2.0**4  # their product is SINK
    elif kind in ("first", "diagonal"):
        position = torch.arange(queries, device=q.device)
        q.copy_(SHARP * k[position % min(FIRST_KEYS, keys) if kind == "first" else position.clamp(max=keys - 1)])
    elif kind == "last":
        begin = keys - (keys % TAIL or min(TAIL, keys))  # of the last tile of TAIL keys, whole or not
        start = begin if causal else 0  # causal queries before `begin` see none of the last keys
        position = torch.arange(start, max(start, queries), device=q.device)
        q[:, start:] = SHARP * k[position.clamp(max=keys - 1) if causal else begin + position % (keys - begin)]
    elif kind == "climb":
        steps = (torch.arange(keys, device=k.device) // STEP_KEYS).clamp(max=STEPS - 1)
        q.zero_()
        q[..., 0], k[:, 0] = STEP, steps.to(k.dtype)
    else:  # "outlier"
        k[:, 0] *= KEY_OUTLIER
        v[:, -1] *= VALUE_OUTLIER


def planted(case_units: int, kv_heads: int, seed: int, draw: int) -> tuple[Unit, str] | None:
    """(the extreme unit of a draw, its kind), or None if the draw has none. It depends on the arguments alone.

    case_units  the number of units in a draw, batch times key heads
    """
    chance = random.Random(f"{seed} {draw} extreme")
    is_extreme = chance.random() < SHARE * case_units
    return (divmod(chance.randrange(case_units), kv_heads), chance.choice(list(KINDS))) if is_extreme else None


def unit_tensors(tensors: Mapping[str, torch.Tensor], unit: Unit) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a unit's q (G, Q, D), k and v (K, D)."""
    batch, head = unit
    q, k, v = (tensors[name].data[batch] for name in ("q", "k", "v"))
    return q.unflatten(0, (len(k), -1))[head], k[head], v[head]


class AttentionDraws(draws.Draws):
    """`Draws` of q (B, H, Q, D), k, v and do, some of which have an extreme unit, as `planted` says.

    extreme  (unit, kind) of the draw that the tensors hold, or None
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], seed: int, causal: bool):
        super().__init__(tensors, seed)
        self.causal = causal
        self.extreme: tuple[Unit, str] | None = None

    def fill(self, draw: int, names: Iterable[str] | None = None) -> None:
        """As `Draws.fill`; then the draw's extreme unit, if it has one, is written if q is among the names."""
        names = list(self.tensors) if names is None else list(names)
        super().fill(draw, names)
        if "q" in names:
            batch, kv_heads = self.tensors["k"].shape[:2]
            self.extreme = planted(batch * kv_heads, kv_heads, self.seed, draw)
            if self.extreme is not None:
                plant(self.extreme[1], *unit_tensors(self.tensors, self.extreme[0]), self.causal)


def drawn_unit(
    case: AttentionCase, seed: int, draw: int, unit: Unit, causal: bool, generator: str = draws.VERSION
) -> dict[str, torch.Tensor]:
    """The tensors of one unit of a draw, made on a CPU: q and do (1, G, Q, D), k and v (1, 1, K, D), by name.

    unit       (batch entry, key head)
    generator  the `lmsys.draws.VERSION` that made the draw; before version 2 no unit was extreme
    """
    group = case.heads // case.kv_heads
    shapes = {"q": (group, case.queries), "k": (1, case.keys), "v": (1, case.keys), "do": (group, case.queries)}
    tensors = {}
    for name, (heads, length) in shapes.items():
        count = heads * length * case.head_dim
        part = draws.part(seed, draw, name, (unit[0] * case.kv_heads + unit[1]) * count, count, DTYPES[case.dtype])
        tensors[name] = part.view(1, heads, length, case.head_dim)
    if (extreme := extreme_of(case, seed, draw, generator)) is not None and extreme[0] == unit:
        plant(extreme[1], *unit_tensors(tensors, (0, 0)), causal)
    return tensors


def extreme_of(case: AttentionCase, seed: int, draw: int, generator: str = draws.VERSION) -> tuple[Unit, str] | None:
    """(the extreme unit, its kind) of a draw of the case's inputs, or None if it has none."""
    return planted(case.batch * case.kv_heads, case.kv_heads, seed, draw) if extremes.has_extremes(generator) else None
