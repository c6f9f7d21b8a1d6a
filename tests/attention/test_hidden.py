"""Keys that an option hides from a query never change its result or its gradient, even if they hold NaN or infinity.

A law is a test that every row of the table must pass: see `tests/support/attention_rows.py`. A `Pattern` is `bounded`
if an option other than `causal` hides keys; its `simplest` form has no option that hides nothing in this shape, such as
a window as long as the sequence. `attention` calls rows with that form.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.attention import AttentionCase, Documents, Pattern, attention
from lmsys.testing import Inputs, Oracle, make_inputs
from tests.support.attention_rows import Row, law, results_of, skip_unless_it_runs
from tests.support.hidden import INF, NAN, assert_reaches_only_what_sees_it
from tests.support.patterns import make_pattern, patterned
from tests.support.variants import few_by_default


def answer(impl: str, inputs: Inputs, case: AttentionCase, pattern: Pattern) -> dict[str, Tensor]:
    """The results of `attention` by name: o, with `return_lse` lse, and with gradients dq, dk and dv."""
    # In a pattern these are (1, H), and (H,) for `attention`.
    options = pattern.options | {name: x[0] for name, x in pattern.options.items() if name in ("alibi", "sinks")}
    return results_of(partial(attention, causal=pattern.causal, **options, impl=impl), inputs, case.grad)


@law(of=patterned)
def test_a_bad_value_reaches_only_queries_that_see_it(row: Row, case: AttentionCase, seed: int) -> None:
    """NaN or infinity is put into one vector of q, k, v or do: all other results stay within their error budget."""
    pattern = make_pattern(case, seed)
    # Rows take a negative offset, and sinks of each batch entry; `attention` takes neither.
    offset = pattern.offset if isinstance(pattern.offset, Tensor) else abs(pattern.offset)
    pattern = replace(pattern, offset=offset, sinks=None if pattern.sinks is None else pattern.sinks[:1])
    pattern = pattern.simplest(case.queries, case.keys)
    if not pattern.bounded:
        return  # `causal` alone promises less
    assert_reaches_only_what_sees_it(lambda inputs: answer(row.name, inputs, case, pattern), case, pattern, seed)


# Options that are combined with key_lengths: one that adds to scores, and some that hide keys.
ADDED = "", "sinks", "bias", "alibi"
HIDES: tuple[dict[str, Any], ...] = {}, {"causal": True, "prefix": 12}, {"window": (3, 1)}
BESIDE = [*product(("naive", "vectorized", "flash_torch"), ADDED, HIDES)]
INTERPRETED = [*product(("flash_triton",), ("sinks", "alibi", ""), HIDES)]  # it knows no bias


@pytest.mark.parametrize(("impl", "added", "hides"), [*BESIDE, *few_by_default(INTERPRETED, one_in=6)])
def test_nan_beyond_key_lengths_reaches_no_result_under_other_options(
    impl: str, added: str, hides: dict[str, Any]
) -> None:
    """9 queries at the ends of caches: o, the log-sum-exp, and the gradients of q, k, v and of a bias or sinks.

    Batch 2, 4 query heads and 2 key heads, room for 40 keys, of which 17 and 33 are in use; head dimension 16.
    """
    torch.manual_seed(0)
    made = {"sinks": torch.randn(4), "alibi": torch.rand(4), "bias": torch.randn(1, 4, 1, 40)}
    lengths, tensors = torch.tensor([17, 33]), [torch.randn(2, 4, 9, 16), *torch.randn(2, 2, 2, 40, 16)]

    def results_with(behind: float, seen: float = 0) -> list[Tensor]:
        """Results and gradients. behind: values of keys beyond key_lengths; seen: is added to one key that is seen."""
        leaves = [x.clone() for x in tensors]
        leaves[1][0, 1, 15] += seen
        for x in leaves[1:]:
            x[0, :, 17:], x[1, :, 33:] = behind, behind
        trained = [made[added].clone()] if added in ("sinks", "bias") else []
        leaves = [x.requires_grad_() for x in (*leaves, *trained)]
        options = hides | {"key_lengths": lengths, "offset": "end", "return_lse": True}
        options |= {added: trained[0] if trained else made[added]} if added else {}
        results = attention(*leaves[:3], **options, impl=impl)
        loss = results[0].square().sum() + results[1].sin().sum()
        return [*(x.detach() for x in results), *torch.autograd.grad(loss, leaves)]

    torch.testing.assert_close(results_with(NAN), results_with(0.0))
    if added == "sinks" and "window" not in hides:  # heads 2 and 3 read the key head whose key 15 is NaN
        found = results_with(0.0, seen=NAN)[-1]
        assert bool(found[:2].isfinite().all()) and bool(found[2:].isnan().all())
    if added == "bias":
        found = results_with(0.0, seen=NAN)[-1]
        assert bool(found[:, :2].isfinite().all()) and bool(found[:, 2:, :, 15].isnan().all())
        assert bool(found[..., 33:].isfinite().all())


@law(causal=True)
def test_keys_that_no_causal_query_sees_may_be_anything(row: Row, case: AttentionCase, seed: int) -> None:
    if case.keys <= case.queries:
        return
    inputs, dirty = make_inputs(case, seed), make_inputs(case, seed)
    for x in (dirty.k, dirty.v):
        x[:, :, case.queries :] = (NAN, INF)[seed % 2]
    oracle, plain = Oracle(case, inputs), Pattern(True)
    for name, x in answer(row.name, dirty, case, plain).items():
        assert oracle.error_ratios({name: x})[name] <= 1, name


@pytest.mark.parametrize("impl", ["auto", "naive", "vectorized", "flash_torch", "flash_triton", "sdpa"])
def test_a_cache_of_uninitialised_memory_decodes(impl: str) -> None:
    """In tests the memory of `torch.empty` is filled with NaN."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, 1, 16), (torch.empty(2, 2, 64, 16) for _ in range(2))
    lengths = torch.tensor([5, 33])
    for entry, length in enumerate(lengths.tolist()):
        for x in (k, v):
            x[entry, :, :length] = torch.randn(2, length, 16)
    found = attention(q, k, v, key_lengths=lengths, impl=impl)
    for entry, length in enumerate(lengths.tolist()):
        cut = (x[entry : entry + 1, :, :length] for x in (k, v))
        torch.testing.assert_close(found[entry : entry + 1], attention(q[entry : entry + 1], *cut, impl="naive"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_flash_triton_computes_every_tile_with_nan_again(device: str) -> None:
    """`flash_triton` finds NaN in its sums, and then computes these tiles again, several in each program.

    The number of tiles is no multiple of that here, so the last program computes fewer.
    """
    pytest.importorskip("triton")
    tokens = 190 if device == "cpu" else 1990
    case = AttentionCase(1, 6, 6, tokens, tokens, 16, "float32", causal=True, grad=True, device=device)
    pattern, inputs = Pattern(True, window=9, documents=Documents([70, tokens - 70], device)), make_inputs(case, 0)
    inputs.q[0, 1, 20, 3] = inputs.do[0, 5, tokens - 1, 5] = inputs.do[0, 0, 69, 0] = inputs.k[0, 5, 71, 2] = NAN
    found, right = (answer(impl, inputs, case, pattern) for impl in ("flash_triton", "vectorized"))
    torch.testing.assert_close(found, right, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tiles_of_another_row_are_computed_again_where_they_hold_nan(device: str) -> None:
    """As `flash_gluon` has its results mended: head 0 is spoilt by NaN in hidden vectors, head 1 has none.

    The results of head 1 are zeros here, which must stay: only tiles with NaN are computed, if the flag is set.
    """
    flash_triton = pytest.importorskip("lmsys.attention.flash_triton")
    if device == "cpu" and not flash_triton.INTERPRETED:
        pytest.skip("on a CPU this needs Triton's interpreter: TRITON_INTERPRET=1")
    tokens = 150 if device == "cpu" else 2990
    case = AttentionCase(2, 2, 2, tokens, tokens, 16, "float32", causal=True, grad=True, device=device)
    pattern, inputs = Pattern(True, window=9, documents=Documents([70, tokens - 70], device)), make_inputs(case, 0)
    inputs.q[0, 0, 20, 3] = inputs.do[1, 0, tokens - 1, 5] = inputs.do[0, 0, 69, 0] = inputs.v[1, 0, 71, 2] = NAN
    q, k, v, do = (x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    right = {name: x.detach() for name, x in answer("vectorized", inputs, case, pattern).items()}
    lse = attention(q, k, v, causal=True, window=9, documents=pattern.documents, return_lse=True, impl="vectorized")[1]
    padding, bounds = (0, -tokens % flash_triton.ROW_PADDING), pattern.bounds(tokens, tokens, q.device)
    lse2 = torch.nn.functional.pad(lse / math.log(2), padding, value=INF).flatten()
    delta = torch.nn.functional.pad((right["o"] * do).sum(-1), padding).flatten()
    for flag in (1, 0):
        found = {name: torch.zeros_like(q) for name in ("o", "dq", "dk", "dv")}
        for x in found.values():
            x[:, 0] = NAN
        (o, *grads), spoilt = found.values(), torch.tensor([flag], device=device)
        flash_triton.mend_forward((q, k, v, o), torch.zeros_like(lse), spoilt, 0.25, pattern, bounds)
        vectors = lse, lse2, delta, spoilt
        flash_triton.mend_backward((q, k, v, right["o"], do, *grads), vectors, 0.25, pattern, bounds)
        for name, x in found.items():
            expected = right[name][:, 0] if flag else torch.full_like(x[:, 0], NAN)
            torch.testing.assert_close(x[:, 0], expected, equal_nan=True, rtol=1e-4, atol=1e-5, msg=name)
            assert not x[:, 1].any(), name


def skip_unless_it_knows_windows(impl: str, device: str) -> None:
    row, dtype = Row(impl, device), "float32" if device == "cpu" else "bfloat16"
    skip_unless_it_runs(row, row.case(causal=True, window=3, grad=True, dtype=dtype))


def results_and_second_derivatives(impl: str, behind: float, device: str) -> list[Tensor]:
    """o, the gradients of q, k and v, and those of a sum of squares of the last queries' gradients.

    behind: a number in the first key and value, which these queries do not see
    """
    torch.manual_seed(0)
    dtype, head_dim = (torch.float32, 16) if device == "cpu" else (torch.bfloat16, 64)
    *leaves, do = torch.randn(4, 1, 1, 12, head_dim, device=device, dtype=dtype)
    for x in leaves[1:]:
        x[0, 0, 0] = behind
    leaves = [x.requires_grad_() for x in leaves]
    o = attention(*leaves, causal=True, window=3, impl=impl)
    gradients = torch.autograd.grad(o, leaves, do, create_graph=True)
    second = torch.autograd.grad(gradients[0][0, 0, 8:].square().sum(), leaves)
    return [o.detach(), *(x.detach() for x in gradients), *second]


@pytest.mark.parametrize(
    ("impl", "device"),
    [*product(("vectorized", "flash_torch", "flash_triton", "sdpa_math"), ("cpu",))]
    + [pytest.param(impl, "cuda", marks=pytest.mark.gpu) for impl in ("flash_triton", "flash_gluon", "sdpa_math")],
)
def test_second_derivatives_keep_nan_in_hidden_keys_out(impl: str, device: str) -> None:
    """Only the first three queries and keys see the first key, or are seen by queries that do."""
    skip_unless_it_knows_windows(impl, device)
    dirty, clean = (results_and_second_derivatives(impl, x, device) for x in (NAN, 0.0))
    for x, y in zip(dirty, clean, strict=True):
        torch.testing.assert_close(x[:, :, 3:], y[:, :, 3:], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["flash_gluon", "flash_triton"])
def test_a_graph_computes_spoilt_tiles_again_when_it_is_replayed(impl: str) -> None:
    """Captured with finite inputs, replayed with NaN in the first of two documents, and with finite inputs again."""
    skip_unless_it_knows_windows(impl, "cuda")
    case = AttentionCase(1, 2, 2, 400, 400, 64, "bfloat16", causal=True, grad=True, device="cuda")
    inputs, options = make_inputs(case, 0), {"causal": True, "documents": Documents([190, 210], "cuda"), "impl": impl}
    q, k, v = inputs.leaves(True)

    def compute() -> tuple[Tensor, ...]:
        o = attention(q, k, v, **options)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), inputs.do)

    with torch.cuda.stream(torch.cuda.Stream()):
        right = [x[:, :, 190:].clone() for x in compute()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = compute()
    for value in (0.5, NAN, 0.5):
        with torch.no_grad():
            q[0, 0, 3], k[0, 1, 5], v[0, 0, 7] = value, value, value
        graph.replay()
        for x, y in zip(results, right, strict=True):
            torch.testing.assert_close(x[:, :, 190:], y, rtol=2e-2, atol=2e-2)
        assert results[0][:, :, :190].isnan().any() == (value is NAN)
