"""NaN or infinity in one vector of attention's inputs: which results it may change, and a check that no other does."""

from collections.abc import Callable

import torch
from torch import Tensor

from lmsys.attention import AttentionCase, Pattern
from lmsys.testing import Inputs, Oracle, make_inputs
from tests.support.patterns import spelled

NAN, INF = float("nan"), float("inf")
LIKE = {"o": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}  # results have a vector for each of q, or of k


def reached_by(name: str, at: tuple[int, int, int], sees: Tensor, case: AttentionCase) -> dict[str, Tensor]:
    """True for the vectors of q (B, H, Q) and k (B, Hkv, K) whose results vector `at` of tensor `name` may change.

    `sees` (B, H, Q, K) is True where a query sees a key.
    """
    batch, head, place = at
    queries = torch.zeros(case.batch, case.heads, case.queries, dtype=torch.bool, device=sees.device)
    if name in ("k", "v"):
        group = case.heads // case.kv_heads
        heads = slice(head * group, (head + 1) * group)
        queries[batch, heads] = sees[batch, heads, :, place]
    else:
        queries[batch, head, place] = True
    keys = (sees & queries.unsqueeze(-1)).any(dim=2).unflatten(1, (case.kv_heads, -1)).any(dim=2)
    return {"q": queries, "k": keys}


def assert_reaches_only_what_sees_it(
    answer: Callable[[Inputs], dict[str, Tensor]], case: AttentionCase, pattern: Pattern, seed: int
) -> None:
    """AssertionError if a bad value in one vector of q, k, v or do changes results that may not see it.

    A NaN must also reach all results that see it.

    answer  the results by name: o, with `return_lse` lse, and with gradients dq, dk and dv
    """
    sees = spelled(pattern, case)
    inputs, dirty = make_inputs(case, seed), make_inputs(case, seed)
    oracle, clean = Oracle(case, inputs, pattern=pattern), answer(inputs)
    name = ("k", "v", "q", "do")[seed % 4] if case.grad else ("k", "v", "q")[seed % 3]
    tensor = dirty.tensors[name]
    at = tuple(seed // 4 % n for n in tensor.shape[:3])
    value = (NAN, INF, -INF)[seed // 16 % 3]
    tensor[at][seed % tensor.shape[-1]] = value
    vectors = reached_by(name, at, sees, case)
    sighted = {"q": sees.any(dim=-1), "k": torch.tensor(True)}  # a query that sees no key may give 0
    for output, x in answer(dirty).items():
        reached = vectors[LIKE[output]]
        # Equal values differ by 0, also two of -inf.
        change = (x - clean[output]).double().masked_fill(x == clean[output], 0)[~reached].abs()
        assert not (change > 2 * oracle.budget[output]).any() and bool(change.isfinite().all()), (output, name, value)
        if value is NAN and (output not in ("o", "lse") or name != "do"):
            assert not x[reached & sighted[LIKE[output]]].unsqueeze(-1).flatten(1).isfinite().all(dim=-1).any(), (
                f"{output} hides that {name} has NaN"
            )
