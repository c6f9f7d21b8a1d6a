"""Attention on extreme inputs: one call has inputs of every kind, and the outputs of each kind are judged alone.

The kinds of extreme inputs are KINDS of `lmsys.extremes.attention`, such as "all scores far below zero".
`check/attention.py` calls `failure` for an implementation of attention, here called `row`. A *unit* is a pair of batch
entry and key head; each unit has inputs of one kind. If the implementation is wrong, `range_mistake` finds out in which
range of scores it is right. From the ends of this range follows what it does wrong with the maximum that a softmax
subtracts. Kinds of inputs are added in `lmsys.extremes.attention`, HEADS at a time, so that they fill whole batch
entries; a new mistake goes to `range_mistake`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from lmsys import values
from lmsys.attention.contract import DTYPES, AttentionCase
from lmsys.check import cases, question
from lmsys.extremes.attention import KINDS, Unit, plant, unit_tensors
from lmsys.testing import Oracle, Spot, make_inputs, pick

HEADS = 2  # key heads of a batch entry, each with one kind of extreme inputs
# The number of queries and that of keys, by device: no multiple of a tile. It is smaller on a CPU, where kernels run in
# slow interpreters, with small tiles.
LENGTH = {"cuda": 161, "cpu": 97}
WHOLE = 256  # a length that is a multiple of most tiles
# Sizes of the case "many equal keys". A sum of ones stops growing at 2,048 in float16 and at 256 in bfloat16. This case
# has more keys than that. So a row that keeps the sum of its exponentials in such a dtype is wrong in it.
EQUAL_QUERIES, EQUAL_KEYS = 32, 4133
# exp(x) overflows float32 above LARGEST, is denormal below SMALLEST, and 0 below DENORMAL.
SMALLEST, LARGEST = math.log(torch.finfo(torch.float32).tiny), math.log(torch.finfo(torch.float32).max)
DENORMAL = math.log(2.0**-149)
RESOLUTION = 2.0  # the step between the scores near 0 that `score_range` tries
Wrong = tuple[Unit, str, float, Oracle]  # the unit, its first wrong tensor, its error over its budget, and the oracle


def case_of_kinds(case: AttentionCase, length: int | None = None) -> AttentionCase:
    """A small case with one unit for each kind, and the dtype, head dimension, mask and grouping of `case`.

    length  the number of queries and that of keys; None: LENGTH
    """
    length = length or LENGTH[case.device]
    return replace(
        case,
        batch=len(KINDS) // HEADS,
        heads=HEADS if case.heads == case.kv_heads else 2 * HEADS,
        kv_heads=HEADS,
        queries=length,
        keys=length,
    )


def failure(
    row: cases.Row, case: AttentionCase, grad: bool, seed: int, rms: bool = False, named: bool = True
) -> question.Fault | None:
    """The fault of the row on extreme inputs; None if all units are right.

    case   has a unit for each kind, as `case_of_kinds` makes it, or a single unit (one batch entry, one key head) with
           many keys, as `check/attention.py` makes it: this unit gets the kind "equal", whose keys are all equal
    grad   True: gradients are asked for and judged, too
    rms    True: errors are also judged in root mean square, see `Oracle.judge`
    named  True: the mistake is searched for
    """
    kinds = ["equal"] if case.batch * case.kv_heads == 1 else list(KINDS)
    units = {kind: divmod(number, case.kv_heads) for number, kind in enumerate(kinds)}
    inputs = make_inputs(case, seed)
    for kind, unit in units.items():
        plant(kind, *unit_tensors(inputs.tensors, unit), case.causal)
    outputs, fault = cases.answer(row, cases.Task(about="", case=case), inputs, grad)
    if not outputs:
        return fault
    wrong: dict[str, Wrong] = {}
    for kind, unit in units.items():
        spot = Spot((unit,), extreme=True)
        oracle = Oracle(case, inputs, scale=case.scale, grad="dq" in outputs, spot=spot)
        ratios = oracle.judge({name: pick(x, spot, case.kv_heads) for name, x in outputs.items()}, rms)
        if name := next((name for name, ratio in ratios.items() if not ratio <= 1), None):
            wrong[kind] = unit, name, ratios[name], oracle
    return _fault(row, case, outputs, wrong, grad, named) if wrong else fault


def _fault(
    row: cases.Row,
    case: AttentionCase,
    outputs: Mapping[str, torch.Tensor],
    wrong: Mapping[str, Wrong],
    grad: bool,
    named: bool,
) -> question.Fault:
    """The fault of a row that is `wrong` on some kinds.

    It describes the first of these kinds whose o is wrong, or if no o is wrong, the first of them.
    """
    kind = next((kind for kind, (_, name, *_) in wrong.items() if name == "o"), next(iter(wrong)))
    unit, name, ratio, oracle = wrong[kind]
    given = pick(outputs[name], Spot((unit,)), case.kv_heads)
    expected = oracle.reference[name]
    # at: (0, query head within the unit, row, column). place: (batch entry, head, row, column) in the whole tensor.
    at = question.worst(given, expected)
    place = ", ".join(map(str, (unit[0], unit[1] * given.shape[1] + at[1], *at[2:])))
    right = (given.double() - expected).abs() <= oracle.budget[name]
    mistake = range_mistake(row, case, grad and name != "o") if named else None
    lines = [
        f"  {KINDS[kind]}: {name}[{place}]: expected {expected[at].item():.6g}, got {given[at].item():.6g};"
        f" the largest error is {question.times_allowed(ratio)}",
        f"  wrong in {100 * (~right).float().mean().item():.3g} % of the elements there",
        f"  likely mistake: {mistake}" if mistake else "  no known mistake gives this result",
    ]
    if others := [KINDS[other] for other in wrong if other != kind]:
        lines.append(f"  wrong too: {'; '.join(others)}")
    return question.Fault("\n".join(lines), mistake, ratio if math.isfinite(ratio) else None, backward=name != "o")


def range_mistake(row: cases.Row, case: AttentionCase, grad: bool = False) -> str | None:
    """The mistake that follows from the range of scores in which the row is right, in words.

    None if that range has no end, or if the row raises an exception or is wrong at ordinary scores.
    """
    try:
        least, most, _ = score_range(row, replace(case, causal=False), keys=WHOLE, grad=grad)
        least_of_tail, _, _ = score_range(row, replace(case, causal=False), keys=LENGTH[case.device], grad=grad)
        least_masked, _, leaks = score_range(row, replace(case, causal=True), keys=WHOLE, grad=grad)
    except Exception:
        return None  # the row is wrong in another way, which has no name here
    # fixed: the number that is subtracted, if a fixed number takes the maximum's place. The scores of a query are all
    # equal, so the sum of its exponentials is WHOLE * exp(score - fixed). It overflows from the score `most` on, so
    # log(WHOLE) + most - fixed = LARGEST.
    fixed = most - (LARGEST - math.log(WHOLE))
    # start: the score at which a running maximum starts, if it does not start at -inf. For lower scores it stays the
    # maximum, and they are lost if exp(score - start) is 0: where score - start is below SMALLEST if the GPU flushes
    # denormals to zero, and below DENORMAL if not. The GPU may do either, so the middle of these two is taken. A start
    # that is no further from 0 than the two are from each other counts as 0.
    start = least - (SMALLEST + DENORMAL) / 2
    about = f"{start:.4g}" if abs(start) > SMALLEST - DENORMAL else "0"
    has_least, has_most = math.isfinite(least), math.isfinite(most)
    return next(
        values.sentences_of(
            (
                has_least and has_most and abs(fixed) < 2 * RESOLUTION,
                "no maximum is subtracted before the exponential",
            ),
            (has_least and has_most, f"a fixed number, about {fixed:.3g}, is subtracted in place of the row maximum"),
            (has_most, f"exp overflows for scores above about {most:.4g}: it must be taken of score - row maximum"),
            (has_least, f"the running maximum starts at about {about}, not at -inf: rows of lower scores are lost"),
            (
                math.isfinite(least_of_tail),
                "keys that pad the last tile count in the maximum, with a score of 0, not -inf",
            ),
            (
                leaks,
                f"masked scores are set to about {least_masked:.4g}, not to -inf: in rows whose visible scores are"
                " lower, masked keys get the weight",
            ),
            (math.isfinite(least_masked), "masked keys count in the maximum, which must be that of visible keys"),
        ),
        None,
    )


def score_range(row: cases.Row, case: AttentionCase, keys: int, grad: bool) -> tuple[float, float, bool]:
    """(least, most, leaks): the row is right between these scores, if all keys of a query have the same score.

    `least` and `most` are the scores nearest to 0, below and above it, at which the row is wrong; -inf and inf if there
    is none. `leaks` is True if wrong results have values of keys that the query must not see. ValueError if the row is
    wrong at ordinary scores.

    keys  how many keys there are; more with a causal mask, if the queries need them
    grad  True: a gradient that is not finite is wrong, too
    """
    # The scores that are tried, on both sides of 0: up to 256 in steps of RESOLUTION, from there on powers of two. In
    # float16 they end at 2**12: with the default scale 1 / √D the product q kᵀ, which is score / scale, is then at most
    # 2**12 · √D. Up to D = 128 this is below 65,504, float16's largest number.
    far = 2.0 ** torch.arange(8, 13 if case.dtype == "float16" else 20)
    near = torch.arange(0.0, 256.0, RESOLUTION)
    scores = torch.cat([-far.flip(0), -near.flip(0)[:-1], near, far])
    lost, leaks = _lost_and_leaks(row, case, keys, grad, scores)
    values.hold((not lost[scores.abs() < 16].any(), "it is wrong at ordinary scores"))
    below, above = scores[lost & (scores < 0)], scores[lost & (scores > 0)]
    most = above.min().item() if len(above) else math.inf
    if not len(below):
        return -math.inf, most, False
    least = below.max().item()
    if least <= -256:  # from there on only powers of two were tried: now try scores between two of them
        between = torch.linspace(least, least / 2, 256)
        lost, leaks = _lost_and_leaks(row, case, keys, grad, between)
        least = between[lost].max().item()
    return least, most, bool(leaks.any())


def _lost_and_leaks(
    row: cases.Row, case: AttentionCase, keys: int, grad: bool, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lost, leaks), boolean, (len(scores),) each, with an entry for each query.

    A query is lost if its o is wrong; with `grad` also if its gradient is not finite. It leaks if its o is too large.
    All keys of query i have the score scores[i], so o is the mean of the values that the query sees. Values grow with
    the number of the key: with a causal mask, o is too large if it has values of masked keys.
    """
    dtype, scale = DTYPES[case.dtype], case.head_dim**-0.5 if case.scale is None else case.scale
    keys = max(keys, len(scores) + 1) if case.causal else keys  # so that no query sees all keys
    q = torch.zeros(1, 1, len(scores), case.head_dim, dtype=dtype)
    k, v = (torch.zeros(1, 1, keys, case.head_dim, dtype=dtype) for _ in range(2))
    q[..., 0], k[..., 0] = scores.to(dtype), 1 / scale
    v += (torch.arange(keys) / keys).to(dtype)[:, None]
    seen = v[0, 0, :, 0].double().cumsum(0) / torch.arange(1, keys + 1)  # the mean up to each key
    expected = seen[: len(scores)] if case.causal else seen[-1:].expand(len(scores))
    q, k, v = (x.to(case.device).requires_grad_(grad) for x in (q, k, v))
    with torch.set_grad_enabled(grad):
        o = row(q, k, v, causal=case.causal, scale=case.scale)
    off = o.detach().double().cpu()[0, 0] - expected[:, None]
    lost = ~(off.abs() < 0.2).all(dim=-1)  # values lie between 0 and 1, and roundings far below 0.2; a NaN is lost
    if grad:
        lost = lost | ~torch.autograd.grad(o, q, torch.ones_like(o))[0].cpu()[0, 0].isfinite().all(dim=-1)
    return lost, (off > 0.2).all(dim=-1)
