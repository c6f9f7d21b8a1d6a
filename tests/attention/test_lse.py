"""`return_lse`, biases and sinks: partial results merge by their log-sum-exp, and all gradients are right."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.attention import AttentionCase, Documents, Pattern, attention, flash_torch, merge
from lmsys.attention.naive import naive
from lmsys.testing import Oracle, error_ratio, make_inputs, run
from tests.attention.test_patterns import defined
from tests.support.attention_rows import Row, assert_agree, law
from tests.support.patterns import make_pattern, patterned

lawful = partial(law, of=patterned, only=())


def test_a_log_sum_exp_may_be_rounded_where_all_keys_are_far_away() -> None:
    """Under ALiBi, queries far past the last key have scores of minus hundreds, and a log-sum-exp that float32 rounds.

    A backward from a log-sum-exp that is off by half a unit in the last place must pass, by 64 units it must fail.
    """
    case = AttentionCase(1, 2, 2, 700, 700, 64, "float32", causal=True, grad=True)
    pattern, inputs = Pattern(True, alibi=torch.ones(1, 2), key_lengths=torch.tensor([99])), make_inputs(case, 0)
    oracle, (q, k, v) = Oracle(case, inputs, pattern=pattern), inputs.leaves(False)
    o, lse = flash_torch.flash_forward(q, k, v, True, 0.125, pattern=pattern)
    for ulps, right in ((0.5, True), (64, False)):
        rounded = (lse.double() * (1 + ulps * 2.0**-23 * torch.randn_like(lse).sign().double())).float()
        gradients = flash_torch.flash_backward(q, k, v, o, rounded, inputs.do, True, 0.125, pattern=pattern)
        ratios = oracle.error_ratios({"o": o} | dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
        assert (max(ratios.values()) <= 1) == right, ratios


def with_gradients(attend: Any, tensors: dict[str, Tensor], pattern: Pattern) -> dict[str, Tensor]:
    """o, and the gradients of q, k, v and the pattern's own tensors among `tensors`."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if name != "do"}
    given = replace(pattern, **{name: x for name, x in leaves.items() if name not in "qkv"})
    o = attend(leaves["q"], leaves["k"], leaves["v"], pattern=given)
    gradients = torch.autograd.grad(o, list(leaves.values()), tensors["do"])
    return dict(zip(leaves, gradients, strict=True)) | {"o": o.detach()}


def assert_gradients_are_those_of_the_definition(row: Row, case: AttentionCase, seed: int, learns: str) -> None:
    pattern, inputs = make_pattern(case, seed), make_inputs(case, seed)
    tensors = inputs.tensors | {learns: getattr(pattern, learns)}
    found = with_gradients(row.call, tensors, pattern)
    expected = with_gradients(partial(defined, case=case), {name: x.double() for name, x in tensors.items()}, pattern)
    plain = with_gradients(naive, tensors, pattern)
    x = found[learns]
    assert x.dtype == tensors[learns].dtype and x.shape == expected[learns].shape
    # A sum of dS may cancel to 0. So a flash backward is allowed the error that `lmsys.testing` allows dq for this,
    # without the factors scale and k.
    oracle = Oracle(case, inputs, pattern=pattern)
    more = oracle._recomputing()["dq"] / (case.head_dim**-0.5 * inputs.k.abs().max().item())
    summed = case.batch * case.heads * case.queries * case.keys / x.numel()
    error, ratio = (x - expected[learns]).abs().max().item(), error_ratio(x, expected[learns], plain[learns])
    assert ratio <= 1 or error <= error / ratio + more * summed**0.5, (error, ratio, more)


@lawful(bias=True, grad=True, return_lse=False, dtype="float32")
def test_a_bias_of_any_shape_has_the_gradient_of_the_definition(row: Row, case: AttentionCase, seed: int) -> None:
    assert_gradients_are_those_of_the_definition(row, case, seed, "bias")


@lawful(sinks=True, grad=True, return_lse=False, dtype="float32")
def test_sinks_have_the_gradient_of_the_definition(row: Row, case: AttentionCase, seed: int) -> None:
    assert_gradients_are_those_of_the_definition(row, case, seed, "sinks")


@lawful(return_lse=True, causal=False, window=None, prefix=None, documents=False, alibi=False, sinks=False, offset=0)
def test_keys_in_two_parts_merge_to_the_whole(row: Row, case: AttentionCase, seed: int) -> None:
    """Values, log-sum-exp and gradients are those of the whole, also if one part or both are hidden from a query."""
    inputs, pattern = make_inputs(case, seed), make_pattern(case, seed)
    cut = 1 + seed % max(1, case.keys - 1)
    if case.keys == 1 or row.why_not(replace(case, keys=cut)) or row.why_not(replace(case, keys=case.keys - cut)):
        return
    scores = case.batch, case.heads, case.queries, case.keys

    def merged(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, pattern: Pattern) -> Any:
        halves = []
        for keys, behind in ((slice(0, cut), 0), (slice(cut, None), cut)):
            tensors = {
                name: x.expand(scores)[..., keys] for name, x in pattern.options.items() if name in ("mask", "bias")
            }
            if pattern.key_lengths is not None:
                tensors["key_lengths"] = (pattern.key_lengths - behind).clamp(min=0)
            halves += row.call(q, k[:, :, keys], v[:, :, keys], scale=scale, pattern=replace(pattern, **tensors))
        return merge(*halves)

    found = run(merged, inputs, pattern=pattern, grad=case.grad)
    expected = row.run(case, inputs, pattern=pattern)
    assert_agree(found, expected, *2 * [Oracle(case, inputs, pattern=pattern)])


def test_queries_that_see_nothing_in_both_parts_merge_to_zeros() -> None:
    o, blind = torch.randn(2, 3, 4, requires_grad=True), torch.full((2, 3), -torch.inf, requires_grad=True)
    merged, lse = merge(o, blind, o, blind)
    assert not merged.any() and bool((lse == -torch.inf).all())
    gradients = torch.autograd.grad(merged.sum() + lse.exp().sum(), (o, blind))
    assert all(bool(x.isfinite().all()) for x in gradients)
    seen = torch.randn(2, 3)
    torch.testing.assert_close(merge(o, seen, o + 1, blind), (o, seen))


def test_merge_refuses_shapes_that_do_not_fit_together() -> None:
    o, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    message = (
        "o1, lse1, o2, lse2 must be (..., Q, Dv), (..., Q), and again; got shapes [(2, 3, 4), (2, 3), (2, 3, 4), (2,)]"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        merge(o, lse, o, lse[:, 0])


HIDES = {
    "documents": Documents([[8], [2, 6], [1, 7]]), "key_lengths": torch.tensor([8, 3, 5]), "softcap": 2.0, "window": 4
}  # fmt: skip


@pytest.mark.parametrize("impl", ["auto", "naive", "vectorized", "flash_torch"])
@pytest.mark.parametrize("shape", [(3, 8, 16), (3, 4, 8, 16), (1, 3, 4, 8, 16)])
@pytest.mark.parametrize("others", [{}, HIDES], ids=["alone", "with others"])
def test_options_fit_inputs_of_any_rank(impl: str, shape: tuple[int, ...], others: dict[str, Any]) -> None:
    """Documents and lengths are given for each batch entry; all leading dimensions together are the batch."""
    q, k, v = torch.randn(3, *shape)
    heads = shape[-3] if len(shape) > 3 else 1
    options = {"bias": torch.randn(*shape[:-1], 8), "alibi": torch.rand(heads), "sinks": torch.randn(heads)}
    o, lse = attention(q, k, v, causal=True, impl=impl, return_lse=True, **options, **others)
    flat = [x.reshape(-1, heads, 8, 16) for x in (q, k, v)]
    per_head = {name: options[name][None] for name in ("alibi", "sinks")}
    pattern = Pattern(True, bias=options["bias"].reshape(-1, heads, 8, 8), **per_head, **others, return_lse=True)
    expected, expected_lse = naive(*flat, pattern=pattern)
    torch.testing.assert_close((o, lse), (expected.reshape(shape), expected_lse.reshape(shape[:-1])))
