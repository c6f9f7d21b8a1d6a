"""The judge of a timed forward's few rows: it refuses no honest float32, and takes no coarser arithmetic for it."""

import torch
from torch import Tensor

from benchmarks.attention.spots import Spots
from lmsys.attention.contract import AttentionCase
from lmsys.extremes.attention import AttentionDraws
from lmsys.measure.compare import Kept
from lmsys.testing import make_inputs

CASE = AttentionCase(1, 2, 2, 64, 64, 32, "float32", True, False, "cpu")
NUM_CALLS = 100
TF32_BITS = 13  # of a float32's 23 that TF32 drops


def quick(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPUs do it: base 2, with an error of 2 units in the last place in the exponents and in exp2 itself."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 * 1.4426950408889634)
    scores = _off(scores).masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    p = _off(torch.exp2(scores - scores.amax(dim=-1, keepdim=True)))
    return p @ v / p.sum(dim=-1, keepdim=True)


def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float32 of inputs as TF32 has them."""
    return quick(*((x.view(torch.int32) >> TF32_BITS << TF32_BITS).view(torch.float32) for x in (q, k, v)))


def _off(x: Tensor) -> Tensor:
    return x * (1 + (torch.rand_like(x) - 0.5) * 4 * torch.finfo(torch.float32).eps)


def test_honest_float32_is_right_and_coarser_is_wrong_in_every_call() -> None:
    """Coarser arithmetic may be exact on extreme inputs, of equal scores."""
    inputs, ratios, extreme = make_inputs(CASE, 0), dict[str, list[float]](), list[float]()
    draws = AttentionDraws(inputs.tensors, 0, CASE.causal)
    spots = Spots(CASE, draws, inputs)
    torch.manual_seed(0)
    for key in range(NUM_CALLS):
        draws.fill(key)
        for row in (quick, coarse):
            result = spots.keep(False, row(inputs.q, inputs.k, inputs.v), key)
            judged = spots.judge(False, Kept(0, 0, key, result), rms=False)["o"]
            if draws.extreme is None:
                ratios.setdefault(row.__name__, []).append(judged)
            elif row is quick:
                extreme.append(judged)
    assert max(ratios["quick"]) <= 0.5, max(ratios["quick"])  # far from the limit, as thousands of calls are judged
    assert min(ratios["coarse"]) > 2, min(ratios["coarse"])
    assert max(extreme) <= 0.5, max(extreme)
