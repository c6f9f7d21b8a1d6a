"""The laws of masks, and of values of another head dimension than keys, held by every row that takes them."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmsys.attention import ATTENTION, AttentionCase, attention
from lmsys.attention.naive import naive
from lmsys.testing import Inputs, Oracle, make_inputs, run
from tests.support.attention_rows import Row, assert_agree, law

Outputs = dict[str, Tensor]
SHAPES: tuple[Callable[[AttentionCase], tuple[int, ...]], ...] = (  # of masks that broadcast to (B, H, Q, K)
    lambda case: (case.batch, case.heads, case.queries, case.keys),
    lambda case: (case.batch, 1, case.queries, case.keys),
    lambda case: (case.queries, case.keys),
    lambda case: (case.batch, 1, 1, case.keys),
    lambda case: (case.heads, case.queries, 1),
)


def drawn_mask(case: AttentionCase, seed: int) -> Tensor:
    """A mask of some shape and density; a query in four sees nothing where queries have rows of their own."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(SHAPES[seed % len(SHAPES)](case), generator=generator) < (0.1, 0.5, 0.9)[seed % 3]
    blind = torch.rand(*mask.shape[:-1], 1, generator=generator) < 0.25
    return (mask & ~blind).to(case.device)


def outputs_of(row: Callable[..., Tensor], case: AttentionCase, inputs: Inputs, mask: Tensor | None) -> Outputs:
    given = row if mask is None else partial(row, mask=mask)
    return run(given, inputs, causal=case.causal, grad=case.grad)


def defined(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Each query's mean of the values that it sees, weighted by exp(scale · q kᵀ); zeros where it sees none."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    sees = torch.ones(scores.shape, dtype=torch.bool, device=q.device)
    sees = sees.tril() if causal else sees
    sees = sees if mask is None else sees & mask
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp() * sees
    return weights @ v / weights.sum(-1, keepdim=True).masked_fill(~sees.any(-1, keepdim=True), 1)


def assert_right(row: Row, case: AttentionCase, inputs: Inputs, mask: Tensor | None) -> None:
    found = outputs_of(row.call, case, inputs, mask)
    ratios = Oracle(case, inputs, mask=mask).error_ratios(found)
    assert max(ratios.values()) <= 1, ratios
    assert found["o"].shape == inputs.do.shape and found["o"].dtype == inputs.q.dtype


@law(masked=True, only=("naive",))
def test_the_oracle_is_the_mean_of_what_is_seen(row: Row, case: AttentionCase, seed: int) -> None:
    """In float64, from the definition, so that a mistake of `naive` is not its own measure."""
    inputs, mask = make_inputs(case, seed, "float64"), drawn_mask(case, seed)
    found, expected = (outputs_of(one, case, inputs, mask) for one in (row.call, defined))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@law(masked=True)
def test_a_masked_row_matches_the_oracle(row: Row, case: AttentionCase, seed: int) -> None:
    """o and every gradient, by masks of every shape that broadcasts, with and without the causal one."""
    inputs, mask = make_inputs(case, seed, transposed=seed % 2 == 0), drawn_mask(case, seed)
    assert_right(row, case, inputs, mask)


@law(masked=True)
def test_a_query_that_sees_nothing_gives_zeros_and_gradients_of_zero(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed, std=8.0)
    mask = torch.rand(case.queries, case.keys, device=case.device) < 0.5
    blind = seed % case.queries
    mask[blind] = False
    mask[:, seed % case.keys] = False
    found = outputs_of(row.call, case, inputs, mask)
    assert all(bool(x.isfinite().all()) for x in found.values())
    assert not found["o"][:, :, blind].any()
    if case.grad:
        assert not found["dq"][:, :, blind].any()
        assert not found["dk"][:, :, seed % case.keys].any() and not found["dv"][:, :, seed % case.keys].any()


@law(masked=True, causal=False)
def test_the_mask_that_spells_causal_is_causal(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed)
    spelt = torch.ones(case.queries, case.keys, dtype=torch.bool, device=case.device).tril()
    causal = replace(case, causal=True, masked=False)
    assert_agree(
        outputs_of(row.call, case, inputs, spelt),
        outputs_of(naive, causal, inputs, None),
        *2 * [Oracle(causal, inputs)],
    )


@law(masked=True)
def test_a_mask_of_true_alone_changes_nothing(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed)
    everything = torch.ones(SHAPES[seed % len(SHAPES)](case), dtype=torch.bool, device=case.device)
    found = outputs_of(row.call, case, inputs, everything)
    assert_agree(found, outputs_of(row.call, case, inputs, None), *2 * [Oracle(case, inputs)])


@law(masked=True)
def test_a_mask_that_broadcasts_is_the_whole_one(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, mask = make_inputs(case, seed), drawn_mask(case, seed)
    whole = mask.expand(case.batch, case.heads, case.queries, case.keys).contiguous()
    found = [outputs_of(row.call, case, inputs, one)["o"] for one in (mask, whole)]
    assert torch.equal(*found)


@law(value_dim=24)
def test_values_may_have_another_head_dimension(row: Row, case: AttentionCase, seed: int) -> None:
    assert_right(row, case, make_inputs(case, seed), None)


@law(value_dim=8, masked=True)
def test_values_of_another_head_dimension_under_a_mask(row: Row, case: AttentionCase, seed: int) -> None:
    assert_right(row, case, make_inputs(case, seed), drawn_mask(case, seed))


TAKE_MASKS = ["naive", "vectorized", "sdpa", "sdpa_math", "sdpa_flash"]  # of those that run on a CPU


@pytest.mark.parametrize("impl", ["auto", *TAKE_MASKS])
@pytest.mark.parametrize("shape", [(3, 8, 16), (2, 4, 8, 16), (2, 3, 4, 8, 16)])
def test_a_mask_fits_inputs_of_any_rank(impl: str, shape: tuple[int, ...]) -> None:
    """(B, Q, K) for (B, S, D), as CS336 calls it, else (..., H, Q, K), or what broadcasts to it."""
    q, k, v = torch.randn(3, *shape)
    whole = torch.rand(*shape[:-1], shape[-2]) < 0.5
    flat = [x.reshape(-1, 1, *shape[-2:]) for x in (q, k, v)]
    expected = naive(*flat, causal=True, mask=whole.reshape(-1, 1, *whole.shape[-2:])).reshape(shape)
    torch.testing.assert_close(attention(q, k, v, causal=True, mask=whole, impl=impl), expected)
    for mask in (whole[0], whole[..., :1, :], torch.tensor(True)):
        spelt = mask.expand_as(whole)
        expected = attention(q, k, v, mask=spelt, impl="naive")
        torch.testing.assert_close(attention(q, k, v, mask=mask, impl=impl), expected)


def test_the_rows_that_take_masks_are_these() -> None:
    case = AttentionCase(1, 2, 2, 8, 8, 16, "float32")
    rows = [name for name, row in ATTENTION.items() if row.target.startswith("lmsys.") and row.why_not(case) is None]
    for changes in ({"masked": True}, {"value_dim": 24}):
        reasons = {name: ATTENTION[name].why_not(replace(case, **changes)) for name in rows}
        takes = [name for name, reason in reasons.items() if reason is None]
        assert takes == (TAKE_MASKS if "masked" in changes else TAKE_MASKS[:-1])
        assert all(
            "mask" in reason or "head dimension of k, 16; got 24" in reason for reason in reasons.values() if reason
        )


Q = torch.zeros(2, 4, 8, 16)
BAD = {
    "no tensor": ([[True]], "mask must be a dense torch.Tensor, or None; got builtins.list"),
    "numbers": (torch.zeros(8, 8), "mask must be boolean, True where a query sees a key; got torch.float32"),
    "other device": (torch.ones(8, 8, dtype=torch.bool, device="meta"), "on the device of q, cpu; got meta"),
    "other length": (torch.ones(8, 9, dtype=torch.bool), "to the scores' shape (2, 4, 8, 8); got (8, 9)"),
    "key heads": (torch.ones(2, 2, 8, 8, dtype=torch.bool), "shape (2, 4, 8, 8); got (2, 2, 8, 8)"),
    "more dimensions": (torch.ones(1, 2, 4, 8, 8, dtype=torch.bool), "shape (2, 4, 8, 8); got (1, 2, 4, 8, 8)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks_are_refused_with_the_value_at_fault(name: str) -> None:
    mask, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(Q, Q[:, :2], Q[:, :2], mask=mask)


def test_a_named_row_that_cannot_says_why() -> None:
    mask = torch.ones(8, 8, dtype=torch.bool)
    said = r"'flash_torch' cannot run q .* under a mask in float32 on cpu: knows no mask but the causal one"
    with pytest.raises(ValueError, match=said):
        attention(Q, Q, Q, mask=mask, impl="flash_torch")
    said = r"'flash_torch' cannot run q .* of head dimension 4 in .*: needs v of the head dimension of k, 16; got 4"
    with pytest.raises(ValueError, match=said):
        attention(Q, Q, Q[..., :4], impl="flash_torch")


OWN = "from lmsys.attention.naive import naive\n\ndef {name}(q, k, v, *, causal, scale{more}):\n    return {call}\n"


def test_rows_of_others_are_given_a_mask_only_where_they_take_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where there is one: a row `f(q, k, v, *, causal, scale)` goes on working."""
    plain, masked = tmp_path / "plain.py", tmp_path / "masked.py"
    call = "naive(q, k, v, causal=causal, scale=scale"
    plain.write_text(OWN.format(name="plain", more="", call=call + ")"))
    masked.write_text(OWN.format(name="masked", more=", mask=None", call=call + ", mask=mask)"))
    rows = ATTENTION.select([f"{plain}:plain", f"{masked}:masked"])
    monkeypatch.setattr(ATTENTION, "_all", {row.name: row for row in rows} | dict(ATTENTION))
    q, mask = torch.randn(2, 4, 8, 16), torch.rand(8, 8) < 0.5
    assert torch.equal(attention(q, q, q, impl="plain"), attention(q, q, q, impl="masked"))
    assert torch.equal(attention(q, q, q, mask=mask, impl="masked"), attention(q, q, q, mask=mask, impl="naive"))
    with pytest.raises(ValueError, match=r"'plain' cannot run a mask: .*plain.py:plain has no parameter `mask`"):
        attention(q, q, q, mask=mask, impl="plain")
