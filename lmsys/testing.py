"""Inputs of attention, a float64 reference (the *oracle*), and the one rule that says when a result is right.

Tests, `lmsys check`, the bench before it times a row, and `lmsys verify` use this rule. There are three more rules
elsewhere: `lmsys.course` has the tolerances of its handouts, some modules of `lmsys.check` add to a budget, and
ERROR_RTOL and BUDGET_RTOL in benchmarks/models.py say how far errors and budgets may differ when `lmsys verify`
recomputes them. A *row* is an implementation, here of attention. The *budget* of a tensor is the error that is allowed.
`make_inputs` draws inputs, `run` calls a row, and `Oracle(...).error_ratios` judges the row's outputs: it returns each
error over its budget, so 1 or less is right. `ratio_of` judges tensors other than attention's, and `curve_ratios`
trainings. To change a bound, change the function that its paragraph names; `lmsys verify` may then refuse older
results, if the bound is smaller.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension; U (batch, key
head) pairs that are checked, each with its G query heads; o output; do, dq, dk, dv gradients; P softmax of the scores;
lse log-sum-exp of a query's scores; dP = do vᵀ; delta = Σ_d o do; dS = P (dP - delta); eps and eps32 the machine
epsilons (distances from 1 to the next number) of the dtype t that is judged and of float32; "slack" more budget.

The bound (`_budget`, `Oracle.__init__`). The reference is `naive` in float64, on inputs that are already rounded to the
dtype t of the row. A tensor x (o, dq, dk, dv) is right if

    max|x - ref| <= 2 max|naive_t - ref| + 2 max|(ref + 0.3 - 0.3) - ref| + 4 eps max(1, max|ref|)

where naive_t (`naive` in t), the middle term and eps are of the dtype t. So a row may have twice the error of plain
PyTorch in that dtype, and a few roundings: those of the last two terms. The log-sum-exp is judged as float32. A float64
result is judged as float32, too, since the reference is no more exact than such a result. The budget of a float32 o has
eps32 / 2 max √n |ref| more slack, where n is the number of keys that a query sees: a sum that adds their products one
after another is rounded n times, each time by at most eps32 / 2. If a query sees a key of large weight early, the error
of o is that of one such sum, and the error of plain PyTorch may by chance be far smaller.

Flash backwards (`_recomputing`) make errors that naive does not make. The budget allows for them; they matter in
float32, not in bfloat16. A flash backward recomputes P as exp(score - lse), so the budget of dv has 4 eps32 max|lse|
max|dv| more slack. In dS = P (dP - delta) the difference may cancel wholly, such as for a query that sees one key. So
the budget of dq has 4 eps32 scale max‖do‖ max‖v‖ max|k| more slack; the norms are of rows, and their product bounds dP.
The budget of dk has as much slack with q in place of k, times sqrt(max(1, G Q / K)) for its sum over queries.

Root mean square (`_rms_budgets`). In bfloat16 the bound above lets an error of 1 % pass. So a row that takes no float32
inputs must also meet rms(x - ref) <= 2 rms(mixed - ref) + 4 eps32 max(1, max|ref|), where `mixed` is `naive` with
float32 scores and accumulation, in which only P, dS, and the o that the backward reads are rounded to t.

Spots. A `Spot` is the part of a timed call's outputs that is judged. In a spot every row must meet a root-mean-square
bound (except in float32), with 3 rms(naive_t - ref) in place of 2 rms(mixed - ref), since a row might be less exact in
timed calls than in its check. On the few elements of a spot naive_t may by chance be almost exact. So the budget of o
has 4 eps32 max|lse| max|o| more slack in a spot, as the budget of dv has above (`_exponent`).

Extreme inputs (`lmsys.extremes`) are ones that a normal distribution does not give: |lse| may be thousands, and q
hundreds. The budget of an extreme spot adds what every flash backward then loses, to first order
(`_bounds_of_gradients`, `_bound_of_o`):

- P_ij is off by 4 eps32 max(1, |lse_i|) of itself. Within a row all of P may be off in the same direction, which
  changes dq by that share of itself.
- delta_i is off by 2 eps √Σ_d (o_id do_id)², since o is rounded to t.
- dP_ij - delta_i, which are sums of D products in float32, is off by 4 eps32 ‖do_i‖ ‖v_j‖. Only dk needs this, if all
  queries see the same key.
- Roundings of different queries are independent, so their sums in dk and dv grow as a root. But equal scores round
  alike, so in dv all of P may be off by eps / 2 in one direction.
- P and o are rounded to t, each by at most eps / 2 of itself, so o is off by eps / 2 (|o_id| + √Σ_j (P_ij v_jd)²). If
  o has an outlier channel, or few keys have all weight, the root mean square is that of a few such roundings, and plain
  PyTorch may by chance make almost none.
- A row that divides the keys of few queries among programs, as flash-decoding does, weighs the result of each part by
  exp(lse of the part - lse), with both in float32. Each is off by half a spacing, so a weight, and with it o, is off by
  at most eps32 |lse|.

Under ALiBi |lse| may be hundreds, if all keys that a query sees are far away. So a backward in float32 under ALiBi gets
the additions to dq, dk and dv, too.

Trainings (`curve_ratios`). Two trainings of one model on the same batches, with different kernels or strategies, count
as equal if their losses over the first 100 steps are at most 1e-3 apart in float32 (0.03 in bfloat16), and the norms of
their first gradients, at the same weights, differ by at most 1e-3 (5e-3) of the norm. Losses alone would not show a
gradient that is off by a factor, since AdamW makes almost the same steps with it.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import DTYPES, FEW_QUERIES, AttentionCase, keywords_of, only_o, repeat_heads
from lmsys.attention.naive import log_sum_exp, masked_scores, naive, with_sinks
from lmsys.attention.pattern import PLAIN, Pattern

MAX_SCORES = 2**31  # of a case with more scores, only a sample of heads is checked, drawn by the seed
MAX_ELEMENTS = 2**27  # of q or k in that sample: each float64 tensor of the reference then takes at most 1 GiB
CURVE_STEPS = 100  # the losses of this many first steps of two trainings are compared
CURVE_BUDGET = {"float32": 1e-3, "bfloat16": 0.03}  # nats
NORM_BUDGET = {"float32": 1e-3, "bfloat16": 5e-3}  # relative error of the norm
# Layouts of inputs in memory: (layout, names of the tensors that have it, description). A new layout needs a case in
# `_laid_out`. `lmsys.check.cases` asks rows for all entries.
MEMORY = {
    "transposed": ("transposed", ("q", "k", "v", "do"), "inputs transposed in memory"),
    "unaligned": ("unaligned", ("q", "k", "v", "do"), "inputs that are not aligned to 16 bytes"),
    "unaligned gradient": ("unaligned", ("do",), "a gradient that is not aligned to 16 bytes"),
    "expanded": ("expanded", ("k", "v"), "keys and values that are expanded, of stride 0"),
    "constant gradient": ("constant", ("do",), "a gradient of stride 0, as that of o.sum() is"),
}
# In root mean square, a spot's error may be this many times plain PyTorch's: more than the 2 of whole outputs, since a
# spot has few elements, whose mean varies more.
SPOT_TIMES = 3
BLOCK_SCORES = {"cuda": 2**26, "cpu": 2**21}  # by device: this many scores are computed at once, to bound the memory


@dataclass(frozen=True)
class Spot:
    """A part of a call's outputs, which alone is judged. Benchmarks and `lmsys.check.extremes` make such parts.

    units    (batch, key head) pairs, each with its query heads
    rows     query rows; None: all
    extreme  True: its inputs are extreme ones, which get a larger budget (see the module's docstring)
    """

    units: tuple[tuple[int, int], ...]
    rows: slice | None = None
    extreme: bool = False


@dataclass
class Inputs:
    """The inputs q (B, H, Q, D) and k, v (B, Hkv, K, D), and the gradient do of the output, of q's shape.

    They are drawn in the dtype that is tested. v and do may have another width than D (`AttentionCase.value_dim`).

    seed  by which the values were last drawn
    std   the standard deviation of q and k; that of v and do is 1
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    seed: int
    std: float = 1.0
    _leaves: dict[bool, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v, "do": self.do}

    def leaves(self, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v for a row, which require gradients if `grad`.

        They are the same three objects at every call, so that a row that caches answers is found out.
        """
        if grad not in self._leaves:
            q, k, v = (x.detach().requires_grad_(grad) for x in (self.q, self.k, self.v))
            self._leaves.setdefault(grad, (q, k, v))  # another thread may have come first: all get its objects
        return self._leaves[grad]

    def others(self) -> "Inputs":
        """Inputs of the same shapes with other values."""
        return replace(self, **{name: torch.empty_like(x) for name, x in self.tensors.items()}).redraw_(self.seed + 1)

    def alone(self, element: int) -> "Inputs":
        """Copies of one element of the batch, as a batch of 1."""
        return replace(self, **{name: x[element : element + 1].clone() for name, x in self.tensors.items()})

    def redraw_(self, seed: int) -> "Inputs":
        """Draws new values in place. Autograd does not see it: storage, layout and version stay the same."""
        self.seed = seed
        generator = torch.Generator(self.q.device).manual_seed(seed)
        for x in (self.q, self.k, self.v, self.do):  # only the first element of a dimension of stride 0 exists
            x.data[tuple(slice(None if stride else 1) for stride in x.stride())].normal_(
                std=self.std if x is self.q or x is self.k else 1.0, generator=generator
            )
        return self


def pick(x: Tensor, spot: Spot, kv_heads: int) -> Tensor:
    """A copy of the spot's part of an output x: of o or dq (U, G, rows, D); of dk or dv whole heads, (U, 1, K, D)."""
    units = x.detach().unflatten(1, (kv_heads, -1))
    return torch.stack([units[unit][:, spot.rows or slice(None)] for unit in spot.units])


def make_inputs(
    case: AttentionCase,
    seed: int,
    dtype: str | None = None,
    *,
    std: float = 1.0,
    memory: str = "",
) -> Inputs:
    """Standard normal inputs of `case` on its device, in `dtype` (default: the case's); v and do are value_dim wide.

    `std` is that of q and k: logits have about std². `memory` is one of MEMORY.
    """
    layout, names, _ = MEMORY[memory] if memory else ("", (), "")
    of_queries, of_keys = (case.batch, case.heads, case.queries), (case.batch, case.kv_heads, case.keys)
    value_dim = case.value_dim or case.head_dim
    shapes = {
        "q": (*of_queries, case.head_dim),
        "do": (*of_queries, value_dim),
        "k": (*of_keys, case.head_dim),
        "v": (*of_keys, value_dim),
    }
    tensors = {
        name: _laid_out(layout if name in names else "", *shape, dtype=DTYPES[dtype or case.dtype], device=case.device)
        for name, shape in shapes.items()
    }
    return Inputs(**tensors, seed=seed, std=std).redraw_(seed)


def _laid_out(layout: str, batch: int, heads: int, length: int, width: int, **options: Any) -> Tensor:
    """An unwritten tensor (B, H, S, D) with one of the layouts of MEMORY; "" is contiguous."""
    if layout == "transposed":
        return torch.empty(batch, length, heads, width, **options).transpose(1, 2)
    if layout == "unaligned":  # as a slice of a projection that is one column wider
        rows = torch.empty(batch, length, heads * width + 1, **options)[..., 1:]
        return rows.unflatten(-1, (heads, width)).transpose(1, 2)
    return torch.empty(
        {"expanded": (1, 1, length, width), "constant": (1, 1, 1, 1)}.get(layout, (batch, heads, length, width)),
        **options,
    ).expand(batch, heads, length, width)


def run(
    row: Callable[..., Tensor],
    inputs: Inputs,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
    grad: bool = True,
    lse: bool = False,
) -> dict[str, Tensor]:
    """Calls a row and returns its outputs by name: "o", with `grad` also "dq", "dk", "dv", with `lse` also "lse".

    pattern  used in place of `causal`; if it has `return_lse`, "lse" is the one that the row returns
    lse      True: without `return_lse`, "lse" is the log-sum-exp that the row's autograd Function saved (`saved_lse`)
    """
    q, k, v = inputs.leaves(grad)
    pattern = pattern or PLAIN[causal]
    with torch.set_grad_enabled(grad):
        result = row(q, k, v, scale=scale, **keywords_of(row, pattern))
    results = result if pattern.return_lse else (only_o(result),)
    outputs = dict(zip(("o", "lse"), (x.detach() for x in results), strict=False))
    if lse and not pattern.return_lse:
        outputs["lse"] = saved_lse(result, q)
    if grad:
        upstream = (inputs.do, _dlse(inputs.do, results[-1]))[: len(results)]
        outputs |= zip(("dq", "dk", "dv"), torch.autograd.grad(results, (q, k, v), upstream), strict=True)
    return outputs


def _dlse(do: Tensor, lse: Tensor) -> Tensor:
    """The gradient that a log-sum-exp which a row returns gets from upstream, (B, H, Q): the first column of do."""
    return do[..., 0].to(lse.dtype)


def saved_lse(o: Tensor, q: Tensor) -> Tensor:
    """The one tensor of shape q.shape[:-1] that o's autograd Function saved. AssertionError unless there is one."""
    assert o.grad_fn is not None, "o has no grad_fn: run it with inputs that require gradients"
    saved = [x for x in o.grad_fn.saved_tensors if x is not None and x.shape == q.shape[:-1]]
    assert len(saved) == 1, f"{o.grad_fn} saved {len(saved)} tensors of shape {tuple(q.shape[:-1])}, not one"
    return saved[0]


class Oracle:
    """The reference and the budget for `inputs`: judges outputs of rows on these inputs.

    The constructor computes both, in blocks of query rows, so that they fit into memory at any length. `reference` and
    `budget` have the keys "o", "lse" and, with `grad`, "dq", "dk", "dv". References are float64 and of the sampled
    heads only: o and dq (U, G, Q, D), lse (U, G, Q), dk and dv (U, 1, K, D). A budget is the largest error that is
    right.

    scale    of the scores; None: D ** -0.5
    grad     None: as in the case
    spot     only these heads and query rows are judged; references of dk and dv are what these rows add to them
    pattern  used in place of the case's `causal`. The log-sum-exp of a query that sees nothing is -inf
    """

    def __init__(
        self,
        case: AttentionCase,
        inputs: Inputs,
        scale: float | None = None,
        grad: bool | None = None,
        spot: Spot | None = None,
        pattern: Pattern | None = None,
    ):
        self.scale = scale
        self.grad = case.grad if grad is None else grad
        self.dtype = torch.float32 if inputs.q.dtype == torch.float64 else inputs.q.dtype
        self._kv_heads = case.kv_heads
        self._batch, self._head = map(list, zip(*(spot.units if spot else _sample(case, inputs.seed)), strict=True))
        self._rows = spot.rows if spot and spot.rows else slice(0, case.queries)
        self._q, self._k, self._v, self._do = map(self._pick, (inputs.q, inputs.k, inputs.v, inputs.do))
        self._q, self._do = (x[:, :, self._rows] for x in (self._q, self._do))
        pattern = pattern or PLAIN[case.causal]
        self._returns_lse = pattern.return_lse
        self._pattern = self._picked(replace(pattern, return_lse=False), case)
        self.reference = self._run(compute=torch.float64, rounded=torch.float64, attend=naive)
        plain = self._run(compute=self.dtype, rounded=self.dtype, attend=naive)
        self.budget = {
            name: _budget(ref, plain[name], self.dtype) for name, ref in self.reference.items() if name != "lse"
        }
        self.budget["lse"] = _budget(_finite(self.reference["lse"]), _finite(plain["lse"]), torch.float32)
        if spot:
            self.budget["o"] += self._exponent("o")
        elif self.dtype == torch.float32:  # a sum over the keys that a query sees: P > 0
            self.budget["o"] += (torch.finfo(torch.float32).eps / 2) * max(
                _norm_max((p > 0).sum(dim=-1, keepdim=True).sqrt() * self.reference["o"][units, :, rows])
                for units, rows, *_, p in self._probabilities()
            )
        if self.grad:
            for name, more in self._recomputing().items():
                self.budget[name] += more
        self._bounds: dict[str, Tensor] = {}
        # Under ALiBi |lse| may be hundreds: see the module's docstring.
        if self.grad and ((self._pattern.alibi is not None and self.dtype == torch.float32) or (spot and spot.extreme)):
            self._bounds = self._bounds_of_gradients()
        if spot and spot.extreme:
            self._bounds["o"] = self._bound_of_o(merges=case.queries <= FEW_QUERIES)
        for name, bound in self._bounds.items():
            self.budget[name] += _norm_max(bound)
        self._spot_budget = self._rms_budgets(plain, SPOT_TIMES) if spot and self.dtype != torch.float32 else {}

    def error_ratios(self, outputs: dict[str, Tensor], rms: bool = False) -> dict[str, float]:
        """The error over its budget of each of the row's outputs, by name; 1 or less is right.

        outputs  of `run`: whole tensors, in the shapes that the row gave them
        rms      True: the root-mean-square bound is also checked, and the larger ratio counts

        The ratio is inf for an output that holds NaN or inf.
        """
        ratios = self.judge({name: self._pick(x) for name, x in outputs.items()}, rms)
        finite = {name: bool((_finite(x) if name == "lse" else x).isfinite().all()) for name, x in outputs.items()}
        return {name: ratio if finite[name] else math.inf for name, ratio in ratios.items()}

    def judge(self, picked: dict[str, Tensor], rms: bool = False) -> dict[str, float]:
        """`error_ratios` of outputs that hold only the sampled heads, or the spot, as `pick` gives them."""
        ratios = {}
        for name, output in picked.items():
            reference = self.reference[name]
            output = output.reshape(reference.shape).double()
            error = (output - reference).masked_fill(output == reference, 0)  # -inf - -inf would be NaN
            ratio = _norm_max(error) / self.budget[name]
            if rms and name != "lse" and self.dtype != torch.float32:
                ratio = max(ratio, norm_rms(error) / self._rms_budget[name])
            if name in self._spot_budget:
                ratio = max(ratio, norm_rms(error) / self._spot_budget[name])
            ratios[name] = ratio if math.isfinite(ratio) else math.inf
        return ratios

    @cached_property
    def _rms_budget(self) -> dict[str, float]:
        """The budget of each tensor but lse in root mean square, for a row that takes no float32 inputs."""
        mixed = self._run(compute=torch.float32, rounded=self.dtype, attend=partial(_mixed, dtype=self.dtype))
        return self._rms_budgets(mixed, times=2)

    def _rms_budgets(self, plain: dict[str, Tensor], times: float) -> dict[str, float]:
        """The budget of each tensor but lse in root mean square: that of `rms_budget`, and what `_bounds` add to it."""
        budgets = {x: rms_budget(self.reference[x], plain[x], times) for x in plain.keys() - {"lse"}}
        return budgets | {x: budgets[x] + norm_rms(bound) for x, bound in self._bounds.items()}

    def _recomputing(self) -> dict[str, float]:
        """Additions to the budgets of dq, dk, dv for flash backwards: they recompute P from the log-sum-exp."""
        (_, group, queries, head_dim), keys = self._q.shape, self._k.shape[2]
        four_eps32 = 4 * torch.finfo(torch.float32).eps
        summed = max(1.0, group * queries / keys) ** 0.5
        # A gradient of lse is a column of do (`_dlse`), which adds at most the norm of do to dP.
        dp = _norm_max(self._do.float().norm(dim=-1)) * (_norm_max(self._v.float().norm(dim=-1)) + self._returns_lse)
        ds = dp * (head_dim**-0.5 if self.scale is None else abs(self.scale))
        return {
            "dq": four_eps32 * ds * _norm_max(self._k),
            "dk": four_eps32 * ds * _norm_max(self._q) * summed,
            "dv": self._exponent("dv"),
        }

    def _bound_of_o(self, merges: bool) -> Tensor:
        """A bound of the error in each element of o (U, G, Q, D): P and o are rounded.

        merges  the row combines results of parts of the keys, whose weights are rounded, too
        """
        bound, eps32 = self.reference["o"].abs(), torch.finfo(torch.float32).eps
        weights = eps32 * _finite(self.reference["lse"]).abs().unsqueeze(-1) * bound if merges else 0.0
        for units, rows, _, _, _, v, p in self._probabilities():
            bound[units, :, rows] += (p.square() @ v.square()).sqrt()
        return torch.finfo(self.dtype).eps / 2 * bound + weights

    def _bounds_of_gradients(self) -> dict[str, Tensor]:
        """Bounds of the errors, by P and delta, in each element of dq (U, G, Q, D), dk and dv (U, 1, K, D)."""
        eps, four_eps32 = torch.finfo(self.dtype).eps, 4 * torch.finfo(torch.float32).eps
        bounds = {name: torch.zeros_like(self.reference[name]) for name in ("dq", "dk", "dv")}
        scale = self._q.shape[-1] ** -0.5 if self.scale is None else abs(self.scale)
        for units, rows, keys, q, k, v, p in self._probabilities():
            do = self._do[units, :, rows].double()
            lse = _finite(self.reference["lse"][units, :, rows]).abs().clamp(min=1).unsqueeze(-1)
            o, dp = self.reference["o"][units, :, rows], do @ v.mT
            off_p = four_eps32 * lse * p * (dp - (o * do).sum(dim=-1, keepdim=True)).abs()  # of dS, by P
            off_delta = 2 * eps * (o * do).square().sum(dim=-1, keepdim=True).sqrt()
            off_dots = four_eps32 * do.norm(dim=-1, keepdim=True) * v.norm(dim=-1).unsqueeze(-2) * p  # of P (dP-delta)
            alike = four_eps32 * lse * self.reference["dq"][units, :, rows].abs() / scale + off_delta * (p @ k).abs()
            bounds["dq"][units, :, rows] = (alike + (off_p.square() @ k.square()).sqrt()) * scale
            squares = (off_p.square() + (p * off_delta).square() + off_dots.square()).mT @ q.square()
            bounds["dk"][units, :, keys] += squares.sum(dim=1, keepdim=True)
            bounds["dv"][units, :, keys] += ((four_eps32 * lse * p).square().mT @ do.square()).sum(dim=1, keepdim=True)
        bounds["dk"] = bounds["dk"].sqrt() * scale
        bounds["dv"] = bounds["dv"].sqrt() + eps / 2 * self.reference["dv"].abs()
        return bounds

    def _probabilities(self) -> Iterator[tuple[slice, slice, slice, Tensor, Tensor, Tensor, Tensor]]:
        """Yields for each block its slices (units, rows, keys) and, in float64, its q, k, v and P.

        Their shapes are q (U, G, rows, D), k and v (U, 1, keys, D), P (U, G, rows, keys).
        """
        for units, rows, keys, pattern, first_query in self._blocks():
            q, (k, v) = self._q[units, :, rows].double(), (x[units, :, keys].double() for x in (self._k, self._v))
            # `blind` is True for queries that see no key: their P is 0. None: there is no such query.
            scores, blind = masked_scores(q, k, pattern, self.scale, first_query)
            p = scores.softmax(dim=-1)
            yield units, rows, keys, q, k, v, p if blind is None else p.masked_fill(blind, 0)

    def _exponent(self, name: str) -> float:
        """The addition to a budget for errors of 4 eps32 in exponents as large as the log-sum-exp."""
        lse = _norm_max(_finite(self.reference["lse"]))
        return 4 * torch.finfo(torch.float32).eps * lse * _norm_max(self.reference[name])

    def _pick(self, x: Tensor) -> Tensor:
        """The sampled heads of x (B, H, ...) -> (U, G, ...), or of keys and values (B, Hkv, ...) -> (U, 1, ...)."""
        return x.detach().unflatten(1, (self._kv_heads, -1))[self._batch, self._head]  # (U, G, ...)

    def _picked(self, pattern: Pattern, case: AttentionCase) -> Pattern:
        """The pattern for the sampled heads, with each (batch, key head) pair as an entry of the batch."""
        heads, scores = (case.batch, case.heads), (case.batch, case.heads, case.queries, case.keys)
        shapes = {"mask": scores, "bias": scores, "alibi": heads, "sinks": heads}
        given: dict[str, Any] = {name: x for name, x in pattern.options.items() if name in shapes}
        others = replace(pattern, mask=None, bias=None, alibi=None, sinks=None).of_entries(self._batch)
        return replace(others, **{name: self._pick(x.expand(shapes[name])) for name, x in given.items()})  # (U, G, ...)

    def _run(self, compute: torch.dtype, rounded: torch.dtype, attend: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The outputs of `attend` by name, in float64, computed block by block.

        compute  the dtype of the computation
        rounded  the dtype that o and the gradients are rounded to; lse is not rounded
        """
        double = partial(torch.zeros_like, dtype=torch.float64)
        out = {"o": double(self._do), "lse": double(self._q[..., 0])}
        if self.grad:
            out |= {"dq": double(self._q), "dk": double(self._k), "dv": double(self._v)}
        for units, rows, keys, pattern, first_query in self._blocks():
            block = self._q[units, :, rows], self._k[units, :, keys], self._v[units, :, keys]
            q, k, v = (x.to(compute).detach().requires_grad_(self.grad) for x in block)
            with torch.set_grad_enabled(self.grad):
                o = attend(q, k, v, scale=self.scale, pattern=pattern, first_query=first_query)
            out["o"][units, :, rows] = o.detach().to(rounded).double()
            with torch.set_grad_enabled(self.grad and self._returns_lse):
                lse = log_sum_exp(q, k, pattern, self.scale, first_query)
            out["lse"][units, :, rows] = lse.detach().double()
            if self.grad:
                do = self._do[units, :, rows].to(compute)
                results, upstream = ((o, lse), (do, _dlse(do, lse))) if self._returns_lse else ((o,), (do,))
                dq, dk, dv = torch.autograd.grad(results, (q, k, v), upstream)
                out["dq"][units, :, rows] = dq.to(rounded).double()
                out["dk"][units, :, keys] += dk.double()
                out["dv"][units, :, keys] += dv.double()
        for name in out.keys() & {"dk", "dv"}:
            out[name] = out[name].to(rounded).double()
        return out

    def _blocks(self) -> Iterator[tuple[slice, slice, slice, Pattern, int]]:
        """Yields (units, query rows, the keys that these can see, the pattern of the units, the first query's place).

        A block has at most BLOCK_SCORES scores, or a single row.
        """
        (num_units, group, queries, _), num_keys = self._q.shape, self._k.shape[2]
        limit, pattern, given = BLOCK_SCORES[self._q.device.type], self._pattern, self._pattern.options.keys()
        num_rows = min(queries, max(1, limit // (group * num_keys)))
        at_once = max(1, limit // (group * num_rows * num_keys))
        for unit, row in itertools.product(range(0, num_units, at_once), range(0, queries, num_rows)):
            end, keys = min(row + num_rows, queries), num_keys
            if pattern.causal and isinstance(pattern.offset, int) and not {"documents", "prefix"} & given:
                keys = max(1, min(num_keys, self._rows.start + end + pattern.offset))
            units = range(unit, min(unit + at_once, num_units))
            of_units = pattern.of_entries(list(units))
            yield slice(units.start, units.stop), slice(row, end), slice(0, keys), of_units, self._rows.start + row


def _sample(case: AttentionCase, seed: int) -> list[tuple[int, int]]:
    """All (batch, key head) pairs of a case, or as many as MAX_SCORES and MAX_ELEMENTS allow, drawn by `seed`."""
    group = case.heads // case.kv_heads
    elements = max(group * case.queries, case.keys) * case.head_dim
    total = case.batch * case.kv_heads
    count = min(total, max(1, min(MAX_SCORES // (group * case.queries * case.keys), MAX_ELEMENTS // elements)))
    return [divmod(unit, case.kv_heads) for unit in sorted(random.Random(seed).sample(range(total), count))]


def error_ratio(output: Tensor, reference: Tensor, plain: Tensor) -> float:
    """The error of `output` against a float64 `reference`, over the budget of the module's docstring.

    plain  the result of plain PyTorch; its dtype is the one that is judged

    1 or less is right; inf if `output` holds NaN or inf.
    """
    ratio = _norm_max(output.detach().double() - reference) / _budget(reference, plain.detach().double(), plain.dtype)
    return ratio if math.isfinite(ratio) else math.inf


def larger_error(reference: Tensor, plain: Tensor, other: Tensor) -> Tensor:
    """For each element, the value of `plain` or of `other`, whichever has the larger error.

    As `plain` of `ratio_of` this gives a function that is commonly written in two ways the budget of both.
    """
    return torch.where((other - reference).abs() > (plain - reference).abs(), other, plain)


def log_sum_exp_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each token, logits (N, V) -> (N,), as a difference of log-sum-exp and target logit.

    It is often written so in place of F.cross_entropy. If logits are large, both terms are rounded.
    """
    return logits.logsumexp(dim=-1) - logits.gather(1, targets[:, None])[:, 0]


def ratio_of(
    output: Tensor, reference: Tensor, plain: Tensor, dtype: torch.dtype, mean: bool = True, times: float = 2
) -> float:
    """The error over its budget of `output`, a tensor that no `Oracle` judges; 1 or less is right.

    The budget of `error_ratio` has absolute terms, and gradients are small. So all tensors are first divided by a power
    of two near the reference's largest value. All but scalars are also judged in root mean square, as attention rows
    that take no float32 inputs are.

    plain  the result of plain PyTorch, whose error, when it is rounded to `dtype`, makes the budget
    mean   False: no root mean square, as for results that plain PyTorch computes exactly
    times  how many times plain PyTorch's error is allowed in root mean square
    """
    _, exponent = math.frexp(reference.abs().max().item())
    output, reference, plain = (x.double() / 2.0**exponent for x in (output, reference, plain))
    ratio = error_ratio(output, reference, plain.to(dtype))
    of_mean = norm_rms(output - reference) / rms_budget(reference, plain, times)
    return max(ratio, of_mean) if output.dim() and mean else ratio


def curve_ratios(
    losses: Sequence[float], reference: Sequence[float], norm: float, reference_norm: float, dtype: str
) -> dict[str, float]:
    """{description: error over its budget} for the worst loss of a training in `dtype`, and for its first gradient.

    losses, reference     of the training and of the reference, by step; those of the first CURVE_STEPS steps that both
                          have are compared
    norm, reference_norm  of the first gradient

    1 or less is right; inf if a number is not finite.
    """
    differences = [a - b for a, b in zip(losses[:CURVE_STEPS], reference, strict=False)]
    apart = [abs(x) if math.isfinite(x) else math.inf for x in differences]
    step = apart.index(max(apart))
    off = abs(norm / reference_norm - 1)
    return {
        f"the loss of step {step + 1}, off by {apart[step]:.2g},": apart[step] / CURVE_BUDGET[dtype],
        f"the first gradient's norm, off by {100 * off:.2g} %,": off / NORM_BUDGET[dtype]
        if math.isfinite(off)
        else math.inf,
    }


def rms_budget(reference: Tensor, plain: Tensor, times: float = 2) -> float:
    """The error in root mean square that is right: `times` that of `plain`, plain PyTorch's result, and 4 eps32."""
    return times * norm_rms(plain - reference) + 4 * torch.finfo(torch.float32).eps * max(1.0, _norm_max(reference))


def norm_rms(x: Tensor) -> float:
    """The root mean square of x."""
    return x.square().mean().sqrt().item()


def _finite(lse: Tensor) -> Tensor:
    """A log-sum-exp with 0 in place of the -inf of queries that see nothing."""
    return lse.masked_fill(lse == -math.inf, 0)


def _budget(ref: Tensor, plain: Tensor, dtype: torch.dtype) -> float:
    """The largest error that is right: the first bound of the module's docstring."""
    rounded = ref.to(dtype)
    floor = 4 * torch.finfo(dtype).eps * max(1.0, _norm_max(ref))
    budget = 2 * _norm_max(plain - ref) + 2 * _norm_max((rounded + 0.3 - 0.3) - rounded) + floor
    assert math.isfinite(budget), f"naive overflows {dtype} on these inputs, so it cannot say what an error may be"
    return budget


def _norm_max(x: Tensor) -> float:
    return x.abs().max().item()


def _mixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    pattern: Pattern,
    first_query: int,
    dtype: torch.dtype,
) -> Tensor:
    """Attention as `naive` computes it, but with the roundings of `_Mixed`."""
    scores, blind = masked_scores(q, k, pattern, scale, first_query)
    v = repeat_heads(v, q.shape[1])
    v = (
        v if pattern.sinks is None else torch.nn.functional.pad(v, (0, 0, 0, 1))
    )  # a key more, whose value is 0: the sink of `with_sinks`
    o = _Mixed.apply(with_sinks(scores, pattern), v, dtype)
    return o if blind is None else o.masked_fill(blind, 0)


class _Mixed(torch.autograd.Function):
    """softmax(scores) v in float32 with P, dS and the o that the backward sees rounded to `dtype`."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        p = torch.softmax(scores, dim=-1)
        o = p.to(dtype).to(v.dtype) @ v
        ctx.dtype = dtype
        ctx.save_for_backward(p, v, o.to(dtype))
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (p, v, o), do = ctx.saved_tensors, grads[0]
        ds = p * (do @ v.mT - (o * do).sum(dim=-1, keepdim=True))
        return ds.to(ctx.dtype).to(p.dtype), p.to(ctx.dtype).to(p.dtype).mT @ do, None
