"""Laws of patterns, and of values with another head dimension than keys: every row that takes these must pass them.

A law is a test that `law` (`tests/support/attention_rows.py`) calls for each row, an implementation, with drawn cases.
A pattern is a set of options, such as a window and a bias. Further tests are about bad options, and rows of users'
files.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.attention import ATTENTION, AttentionCase, Documents, Pattern, attention
from lmsys.attention.naive import naive
from lmsys.testing import Inputs, Oracle, make_inputs, run
from tests.support.attention_rows import Row, assert_agree, assert_within_budget, law
from tests.support.patterns import EXAMPLES, document_lengths, drawn_mask, make_pattern, patterned, places, spelled

Outputs = dict[str, Tensor]
OURS = (
    "naive",
    "flash_torch",
    "flash_triton",
    "flash_gluon",
    "flash_cuda",
)  # these must meet all laws, other rows only those of the oracle
lawful = partial(law, of=patterned, only=OURS)


def defined(
    q: Tensor, k: Tensor, v: Tensor, *, case: AttentionCase, causal: bool = False, pattern: Pattern | None = None,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Attention by its definition: each query's mean of the values that it sees, weighted by exp(scale · q kᵀ)."""
    pattern = pattern or Pattern(causal)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if pattern.softcap is not None:
        scores = pattern.softcap * (scores / pattern.softcap).tanh()
    if pattern.bias is not None:
        scores = scores + pattern.bias
    if pattern.alibi is not None:
        at, _ = places(pattern, case)
        away = (at[:, None] - torch.arange(case.keys)).abs().to(q.device)
        scores = scores - pattern.alibi.double()[..., None, None] * away
    top = scores.amax(-1, keepdim=True).detach()
    if pattern.sinks is not None:  # if all keys are far away, scores may be 800 below the sinks
        top = top.maximum(pattern.sinks.detach()[..., None, None])
    weights = (scores - top).exp() * spelled(pattern, case)
    total = weights.sum(-1, keepdim=True)
    if pattern.sinks is not None:
        total = total + (pattern.sinks[..., None, None] - top).exp()
    blind = total == 0
    o = weights @ v / total.masked_fill(blind, 1)
    lse = (top + total.masked_fill(blind, 1).log()).masked_fill(blind, -torch.inf).squeeze(-1)
    return (o, lse) if pattern.return_lse else o


def assert_right(row: Row, case: AttentionCase, inputs: Inputs, pattern: Pattern) -> None:
    """AssertionError unless the oracle accepts all results of the row."""
    found = row.run(case, inputs, pattern=pattern)
    assert_within_budget(Oracle(case, inputs, pattern=pattern).error_ratios(found))
    assert found["o"].shape == inputs.do.shape and found["o"].dtype == inputs.q.dtype


def parts(inputs: Inputs, queries: slice, keys: slice, batch: slice = slice(None)) -> Inputs:
    """The inputs of these queries, keys and batch entries alone."""
    q, do = (x[batch, :, queries] for x in (inputs.q, inputs.do))
    k, v = (x[batch, :, keys] for x in (inputs.k, inputs.v))
    return replace(inputs, q=q, k=k, v=v, do=do)


@lawful(only=("naive", "vectorized"))
def test_queries_see_what_the_options_say(row: Row, case: AttentionCase, seed: int) -> None:
    """In float64, against `defined`: `naive` is the oracle of other tests, and so cannot be judged by itself."""
    inputs, pattern = make_inputs(case, seed, "float64"), make_pattern(case, seed)
    sees = spelled(pattern, case)
    found = run(row.call, inputs, pattern=pattern, grad=case.grad)
    expected = run(partial(defined, case=case), inputs, pattern=pattern, grad=case.grad)
    torch.testing.assert_close(found, expected)
    blind = ~sees.any(-1)
    for x in (found["o"], found["dq"]):
        assert not x[blind].any()
    unseen = ~sees.unflatten(1, (case.kv_heads, -1)).any(dim=(2, 3))
    for x in (found["dk"], found["dv"]):
        assert not x[unseen].any()


@lawful(only=())
def test_a_row_under_a_pattern_matches_the_oracle(row: Row, case: AttentionCase, seed: int) -> None:
    """o, every gradient and the saved log-sum-exp, for any options together, on views."""
    assert_right(row, case, make_inputs(case, seed, memory="" if seed % 2 else "transposed"), make_pattern(case, seed))


@lawful(only=(), mask=True)
def test_a_query_that_sees_nothing_gives_zeros_and_gradients_of_zero(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, pattern = make_inputs(case, seed, std=8.0), make_pattern(case, seed)
    mask = pattern.mask.expand(case.batch, case.heads, case.queries, case.keys).clone()
    mask[:, :, blind := seed % case.queries] = False
    mask[..., unseen := seed % case.keys] = False
    found = row.run(case, inputs, pattern=replace(pattern, mask=mask))
    assert all(bool(x.isfinite().all()) for x in found.values())
    assert not found["o"][:, :, blind].any()
    if case.grad:
        assert not found["dq"][:, :, blind].any()
        assert not found["dk"][:, :, unseen].any() and not found["dv"][:, :, unseen].any()


@lawful(key_lengths=True)
def test_an_empty_cache_gives_zeros_and_gradients_of_zero(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, pattern = make_inputs(case, seed, std=8.0), make_pattern(case, seed)
    pattern.key_lengths[0] = 0
    found = row.run(case, inputs, pattern=pattern)
    assert not found["o"][0].any() and not any(found[name][0].any() for name in found.keys() & {"dq", "dk", "dv"})
    assert all(bool(x.isfinite().all()) for name, x in found.items() if name != "lse")


@lawful()
def test_a_pattern_equals_the_mask_of_what_it_hides(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, pattern = make_inputs(case, seed), make_pattern(case, seed)
    kept = ("softcap", "bias", "alibi", "sinks", "return_lse")
    spelt = Pattern(mask=spelled(pattern, case), **{name: getattr(pattern, name) for name in kept})
    if pattern.alibi is not None:  # it depends on positions, which a mask does not give
        spelt = replace(spelt, offset=pattern.offset, documents=pattern.documents)
    found = row.run(case, inputs, pattern=pattern)
    if not pattern.return_lse:
        found.pop("lse", None)
    expected = run(naive, inputs, pattern=spelt, grad=case.grad)
    assert_agree(found, expected, *2 * [Oracle(case, inputs, pattern=pattern)])


@lawful(documents=True, offset=0, key_lengths=False, mask=False, square=True)
def test_packed_documents_equal_documents_alone(row: Row, case: AttentionCase, seed: int) -> None:
    """o, the gradients and the log-sum-exp of packed documents are those of calls with one document each."""
    inputs, lengths = make_inputs(case, seed), document_lengths(case.keys, seed)
    lengths = lengths[:6] + [sum(lengths[6:])] * (len(lengths) > 6)  # at most seven, since each is a call of the row
    pattern = Pattern(case.causal, case.window, documents=Documents(lengths, case.device), softcap=case.softcap)
    packed, start = row.run(case, inputs, pattern=pattern), 0
    for length in lengths:
        own = slice(start, start := start + length)
        alone = replace(case, queries=length, keys=length, documents=False)
        document, unpacked = parts(inputs, own, own), replace(pattern, documents=None)
        found = row.run(alone, document, pattern=unpacked)
        oracles = 2 * [Oracle(alone, document, pattern=unpacked)]
        assert_agree({name: packed[name][:, :, own] for name in found}, found, *oracles)


@lawful(causal=True, window=1, documents=False, mask=False)
def test_a_window_as_long_as_the_sequence_is_causal(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, pattern = make_inputs(case, seed), make_pattern(case, seed)
    last = case.queries + int(torch.as_tensor(pattern.offset).max())  # the first position behind all queries
    wide = replace(pattern, window=max(1, last + seed % 2))
    causal = replace(pattern, window=None)
    found, expected = (row.run(case, inputs, pattern=each) for each in (wide, causal))
    assert_agree(found, expected, *2 * [Oracle(case, inputs, pattern=causal)])


@lawful(causal=True, window=1, documents=False, key_lengths=False, mask=False, sinks=False, offset=0, square=True)
def test_a_window_of_one_is_the_value_at_its_place(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed)
    o = row.run(case, inputs, pattern=make_pattern(case, seed))["o"]
    expected = inputs.v.repeat_interleave(case.heads // case.kv_heads, dim=1)
    torch.testing.assert_close(o, expected, rtol=2 * torch.finfo(o.dtype).eps, atol=0)


@lawful(key_lengths=True, batch=2, documents=False, mask=False, bias=False)
def test_key_lengths_equal_shorter_caches(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, pattern = make_inputs(case, seed), make_pattern(case, seed)
    whole = row.run(case, inputs, pattern=pattern)
    for entry, length in enumerate(pattern.key_lengths.tolist()):
        if not length:
            continue
        own = slice(entry, entry + 1)
        cut = parts(inputs, slice(None), slice(length), own)
        short = replace(pattern.of_entries([entry]), key_lengths=None)
        alone = replace(case, batch=1, keys=length, key_lengths=False)
        found = row.run(alone, cut, pattern=short)
        picked = {name: x[own, :, :length] if name in ("dk", "dv") else x[own] for name, x in whole.items()}
        assert_agree(picked, found, *2 * [Oracle(alone, cut, pattern=short)])


@lawful(causal=True, offset=1, documents=False, key_lengths=False, mask=False, square=True)
def test_decoding_equals_the_last_queries_of_a_whole_forward(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, last = make_inputs(case, seed), 1 + seed % min(case.queries, 16)
    whole = Pattern(True, case.window, softcap=case.softcap)
    decoding = replace(whole, offset=case.keys - last)
    forward, few = replace(case, grad=False), replace(case, grad=False, queries=last)
    expected = row.run(forward, inputs, pattern=whole)["o"][:, :, -last:]
    decoded = parts(inputs, slice(case.keys - last, None), slice(None))
    found = row.run(few, decoded, pattern=decoding)["o"]
    assert_agree({"o": found}, {"o": expected}, *2 * [Oracle(few, decoded, pattern=decoding)])


@law(value_dim=24)
def test_values_may_have_another_head_dimension(row: Row, case: AttentionCase, seed: int) -> None:
    assert_right(row, case, make_inputs(case, seed), Pattern(case.causal))


@law(value_dim=8, mask=True)
def test_values_of_another_head_dimension_under_a_mask(row: Row, case: AttentionCase, seed: int) -> None:
    assert_right(row, case, make_inputs(case, seed), make_pattern(case, seed))


TAKE_MASKS = ["naive", "vectorized", "sdpa", "sdpa_math", "sdpa_flash"]  # of those that run on a CPU


@pytest.mark.parametrize("impl", ["auto", *TAKE_MASKS])
@pytest.mark.parametrize("shape", [(3, 8, 16), (2, 4, 8, 16), (2, 3, 4, 8, 16)])
def test_a_mask_fits_inputs_of_any_rank(impl: str, shape: tuple[int, ...]) -> None:
    """It broadcasts to (B, Q, K) for inputs (B, S, D), as CS336 passes them, and else to (..., H, Q, K)."""
    q, k, v = torch.randn(3, *shape)
    whole = torch.rand(*shape[:-1], shape[-2]) < 0.5
    flat = [x.reshape(-1, 1, *shape[-2:]) for x in (q, k, v)]
    spelt = Pattern(True, mask=whole.reshape(-1, 1, *whole.shape[-2:]))
    expected = naive(*flat, pattern=spelt).reshape(shape)
    torch.testing.assert_close(attention(q, k, v, causal=True, mask=whole, impl=impl), expected)
    for mask in (whole[0], whole[..., :1, :], torch.tensor(True)):
        spelt = mask.expand_as(whole)
        expected = attention(q, k, v, mask=spelt, impl="naive")
        torch.testing.assert_close(attention(q, k, v, mask=mask, impl=impl), expected)


def test_options_are_supported_by_the_listed_rows() -> None:
    case = AttentionCase(1, 2, 2, 8, 8, 16, "float32", causal=True)
    rows = [name for name, row in ATTENTION.items() if row.target.startswith("lmsys.") and row.why_not(case) is None]
    values = {"window": 2, "documents": True, "softcap": 2.0, "mask": True, "value_dim": 24}
    for option, value in values.items():
        reasons = {name: ATTENTION[name].why_not(replace(case, **{option: value})) for name in rows}
        takes = [name for name, reason in reasons.items() if reason is None]
        assert takes == [name for name in TAKES[option] if name in rows], option
        words = "head dimension of k, 16; got 24" if option == "value_dim" else option
        assert all(words in reason for reason in reasons.values() if reason)


FLASH = ["flash_torch", "flash_triton_torch_bwd", "flash_triton"]
INTERVALS = ["naive", "vectorized", *FLASH]
TAKES = {  # {option: the rows that support it}
    "window": [*INTERVALS, *TAKE_MASKS[2:], "flex"],
    "documents": [*INTERVALS, *TAKE_MASKS[2:], "flex"],
    "softcap": [*INTERVALS, "flex"],
    "mask": TAKE_MASKS,
    "value_dim": TAKE_MASKS[:-1],
}


@pytest.mark.parametrize(("name", "known"), [("flash_gluon", ("window", "documents")), ("flash_cuda", ("window",))])
def test_rows_refuse_the_options_that_they_do_not_know(name: str, known: tuple[str, ...]) -> None:
    """The reason names the option, also on a machine without a GPU."""
    case = AttentionCase(1, 2, 2, 64, 64, 64, "bfloat16", causal=True, device="cuda", capability=(9, 0))
    for option, value in EXAMPLES.items():
        reason = ATTENTION[name].why_not(replace(case, **{option: value}))
        assert (f"knows no {option}" in str(reason)) == (option not in known)


Q = torch.zeros(2, 4, 8, 16)
WHOLE = torch.ones(8, 8, dtype=torch.bool)
NO_WINDOW = "window=3 needs causal=True: it counts the keys up to a query's own position"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "mask: row": ({"mask": WHOLE, "impl": "naive_compiled"}, "under mask in float32 on cpu: knows no mask"),
    "window and softcap: row": (
        {"causal": True, "window": 3, "softcap": 2, "impl": "naive_compiled"},
        "under window 3, softcap 2.0 in float32 on cpu: knows no window and no softcap",
    ),
    "mask: no tensor": ({"mask": [[True]]}, "mask must be a dense torch.Tensor, or None; got builtins.list"),
    "mask: numbers": ({"mask": torch.zeros(8, 8)}, "mask must be boolean, True where a query sees a key; got torch.fl"),
    "mask: device": ({"mask": torch.ones(8, 8, dtype=torch.bool, device="meta")}, "on the device of q, cpu; got meta"),
    "mask: length": ({"mask": torch.ones(8, 9, dtype=torch.bool)}, "to the scores' shape (2, 4, 8, 8); got (8, 9)"),
    "mask: key heads": ({"mask": torch.ones(2, 2, 8, 8, dtype=torch.bool)}, "(2, 4, 8, 8); got (2, 2, 8, 8)"),
    "mask: dimensions": ({"mask": torch.ones(1, 2, 4, 8, 8, dtype=torch.bool)}, "got (1, 2, 4, 8, 8)"),
    "window: 0": ({"window": 0, "causal": True}, "window=0 must be at least 1"),
    "window: half": ({"window": 2.5, "causal": True}, "window=2.5 must be a whole number"),
    "window: not causal": ({"window": 3}, NO_WINDOW),
    "softcap: 0": ({"softcap": 0.0}, "softcap=0.0 must be more than 0"),
    "softcap: nan": ({"softcap": float("nan")}, "softcap=nan must be a finite number"),
    "softcap: text": ({"softcap": "30"}, "softcap='30' must be a finite number"),
    "offset: negative": ({"offset": -1}, "offset=-1 must be at least 0"),
    "offset: tensor of three": ({"offset": torch.tensor([1, 2, 3])}, "for each batch entry, of shape (2,); got (3,)"),
    "offset: False": ({"offset": False}, "offset=False must be a whole number"),
    "offset: half": ({"offset": 0.5}, "offset=0.5 must be a whole number"),
    "documents: lengths": (
        {"documents": [4, 4]},
        "documents must be lmsys.attention.Documents, made once, as by Docum",
    ),
    "documents: sum": ({"documents": Documents([4, 5])}, "they have 9 tokens, for 8 queries and 8 keys"),
    "documents: batch": ({"documents": Documents([[8]] * 3)}, "of 1 or 2 batch entries, as q is; got 3"),
    "documents: device": ({"documents": Documents([8], "meta")}, "documents must be on the device of q, cpu; got meta"),
    "lengths: list": ({"key_lengths": [8, 8]}, "key_lengths must be a torch.Tensor of int32 or int64; got list"),
    "lengths: dtype": ({"key_lengths": torch.ones(2)}, "of int32 or int64; got torch.float32"),
    "lengths: shape": ({"key_lengths": torch.tensor([8])}, "one for each batch entry, of shape (2,); got (1,)"),
    "lengths: negative": ({"key_lengths": torch.tensor([3, -1])}, "key_lengths=-1 must be at least 0 and at most 8"),
    "lengths: beyond": ({"key_lengths": torch.tensor([9, 3])}, "key_lengths=9 must be at least 0 and at most 8"),
    "lengths: device": ({"key_lengths": torch.ones(2, dtype=torch.int32, device="meta")}, "of q, cpu; got meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_with_the_value_at_fault(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(Q, Q[:, :2], Q[:, :2], **options)


BAD_DOCUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: Documents([]), "documents are made of their lengths, as in Documents([3, 5]), or one list of len"),
    "number": (lambda: Documents(8), "for each batch entry; got 8"),
    "empty": (lambda: Documents([3, 0]), "length of a document=0 must be at least 1"),
    "2**33 tokens": (
        lambda: Documents([2**33]),
        "length of a document=8589934592 must be at least 1 and at most 2,147",
    ),
    "10**30 tokens": (lambda: Documents([10**30]), "and at most 2,147,483,647"),
    "2**31 tokens": (lambda: Documents([2**31 - 1, 1]), "tokens of a batch entry=2147483648 must be at most 2,147,483"),
    "half": (lambda: Documents([3, 0.5]), "length of a document=0.5 must be a whole number"),
    "sums": (lambda: Documents([[3, 5], [7]]), "fill all batch entries alike; their lengths add up to [8, 7]"),
    "mixed": (lambda: Documents([[3, 5], 8]), "documents of a batch entry must be a list of lengths; got 8"),
    "keys: a list": (lambda: Documents([3], keys=[4]), "keys=[4] must be of type"),  # type: ignore[arg-type]
    "edges from 1": (lambda: Documents.from_cu_seqlens(torch.tensor([1, 8])), "cu_seqlens=[1, 8] must be 0, then wher"),
    "one edge": (lambda: Documents.from_cu_seqlens(torch.tensor([0])), "cu_seqlens=[0] must be 0, then where each"),
    "edges fall": (lambda: Documents.from_cu_seqlens(torch.tensor([0, 5, 5])), "cu_seqlens=[0, 5, 5] must increase"),
    "edges float": (lambda: Documents.from_cu_seqlens(torch.ones(3)), "must be a torch.Tensor of int32 or int64; got"),
    "edges 2-D": (lambda: Documents.from_cu_seqlens(torch.ones(1, 3).int()), "must have 1 dimensions of tokens; got"),
    "ids list": (lambda: Documents.from_ids([0, 0, 1]), "ids must be a torch.Tensor of int32 or int64; got list"),
    "ids apart": (
        lambda: Documents.from_ids(torch.tensor([0, 1, 0])),
        "ids, in the order [0, 1, 0]: the tokens of a document must",
    ),
}


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
def test_bad_documents_are_refused_where_they_are_made(name: str) -> None:
    make, message = BAD_DOCUMENTS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_documents_from_lengths_edges_and_ids_are_equal() -> None:
    lengths = Documents([3, 1, 4])
    edges = Documents.from_cu_seqlens(torch.tensor([0, 3, 4, 8]))
    ids = Documents.from_ids(torch.tensor([7, 7, 7, -1, 2, 2, 2, 2]))
    assert lengths.lengths == edges.lengths == ids.lengths == ((3, 1, 4),)
    assert lengths.starts.tolist() == [[0, 0, 0, 3, 4, 4, 4, 4]] and lengths.ends.tolist() == [[3, 3, 3, 4, 8, 8, 8, 8]]
    assert edges.cu_seqlens(2).tolist() == [0, 3, 4, 8, 11, 12, 16] and lengths.longest == 4
    assert Documents.from_ids(torch.tensor([[0, 0, 1], [0, 1, 1]])).lengths == ((2, 1), (1, 2))


def test_documents_of_a_cpu_are_made_under_another_default_device() -> None:
    with torch.device("meta"):
        documents = Documents([3, 1, 4], "cpu")
    assert documents.places.tolist() == Documents([3, 1, 4]).places.tolist()


@pytest.mark.parametrize("impl", ["flash_gluon", "flash_cuda"])
def test_an_option_that_hides_nothing_is_dropped(impl: str) -> None:
    """So rows of dense kernels can run the call. Here they refuse it for another reason, and name no option."""
    wide = {"causal": True, "window": 8}, {"causal": True, "offset": 7}, {"offset": 3}
    for options in wide:
        with pytest.raises(ValueError, match=r"cannot run q \(2, 4, 8, 16\) with k and v \(2, 4, 8, 16\) in float32"):
            attention(Q, Q, Q, impl=impl, **options)
        torch.testing.assert_close(attention(Q, Q, Q, **options), attention(Q, Q, Q, impl="naive", **options))


def test_a_row_refuses_values_of_another_head_dimension_by_name() -> None:
    message = r"'flash_torch' cannot run q .* of head dimension 4 in .*: needs v of the head dimension of k, 16; got 4"
    with pytest.raises(ValueError, match=message):
        attention(Q, Q, Q[..., :4], impl="flash_torch")


# The text of a user's file with a row that has one option, or none.
OWN = "from lmsys.attention import Pattern\nfrom lmsys.attention.naive import naive\n\n\n"
OWN += "def {name}(q, k, v, *, causal, scale{more}):\n"
OWN += "    return naive(q, k, v, scale=scale, pattern=Pattern(causal{given}))\n"


def test_rows_of_others_are_given_the_options_that_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row `f(q, k, v, *, causal, scale)` is called without them, and refuses calls that have options."""
    files = {"plain": "", "masked": "mask", "windowed": "window"}
    targets = []
    for name, option in files.items():
        more, given = (f", {option}=None", f", {option}={option}") if option else ("", "")
        (tmp_path / f"{name}.py").write_text(OWN.format(name=name, more=more, given=given))
        targets.append(f"{tmp_path / name}.py:{name}")
    rows = ATTENTION.select(targets)
    monkeypatch.setattr(ATTENTION, "_all_rows", {row.name: row for row in rows} | dict(ATTENTION))
    q, mask = torch.randn(2, 4, 8, 16), torch.rand(8, 8) < 0.5
    assert torch.equal(attention(q, q, q, impl="plain"), attention(q, q, q, impl="masked"))
    options: dict[str, dict[str, Any]] = {"masked": {"mask": mask}, "windowed": {"window": 3, "causal": True}}
    for name, given in options.items():
        assert torch.equal(attention(q, q, q, impl=name, **given), attention(q, q, q, impl="naive", **given))
    message = r"'plain' \(.*plain.py:plain\) cannot run mask: it has no parameter `mask`"
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, mask=mask, impl="plain")
    with pytest.raises(ValueError, match="cannot run window, mask: it has no parameter `mask`"):
        attention(q, q, q, mask=mask, window=3, causal=True, impl="windowed")


def test_some_query_of_a_drawn_mask_sees_nothing() -> None:
    """Otherwise the laws of queries that see nothing would hold for no query."""
    case = AttentionCase(2, 4, 2, 40, 40, 16, "float32", mask=True)
    assert any((~drawn_mask(case, seed).any(-1)).any() for seed in range(5))


# Options, the first of which is a tensor that a caller may change later.
OF_THE_CALLER: dict[str, Callable[[], dict[str, Any]]] = {
    "key_lengths": lambda: {"key_lengths": torch.tensor([3, 6])},
    "offset": lambda: {"offset": torch.tensor([-2, 4]), "causal": True},
    "alibi": lambda: {"alibi": torch.rand(4)},
    "key_lengths, log-sum-exp": lambda: {"key_lengths": torch.tensor([3, 6]), "sinks": torch.rand(4)},
}


@pytest.mark.parametrize("impl", ["auto", "naive", "flash_torch", "flash_triton"])
@pytest.mark.parametrize("name", OF_THE_CALLER)
def test_a_tensor_changed_before_the_backward_is_refused_or_changes_nothing(name: str, impl: str) -> None:
    """A loop of its own may fill one tensor of lengths again and again, with a backward that comes later."""
    q, k, v = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    options = OF_THE_CALLER[name]()
    o = attention(q, k, v, impl=impl, **options)
    expected = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    next(iter(options.values())).add_(1)
    try:
        found = torch.autograd.grad(o.sum(), (q, k, v))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert all(map(torch.equal, expected, found))


def test_lengths_of_inference_mode_are_taken_by_a_training() -> None:
    with torch.inference_mode():
        lengths = torch.tensor([3, 6])
    q = torch.randn(2, 4, 8, 16, requires_grad=True)
    first, second = (attention(q, q, q, key_lengths=x, impl="flash_torch") for x in (lengths, torch.tensor([3, 6])))
    assert torch.equal(torch.autograd.grad(first.sum(), q)[0], torch.autograd.grad(second.sum(), q)[0])


@pytest.mark.parametrize("name", ["naive", "vectorized", "flash_torch"])
def test_alibi_is_as_exact_far_from_a_query_as_near_to_it(name: str) -> None:
    """Scores are then hundreds. In bfloat16 they would be whole numbers, and the budget, twice that error, useless."""
    case = AttentionCase(1, 4, 4, 64, 64, 64, "bfloat16", True, True)
    inputs, pattern = make_inputs(case, 0), Pattern(True, offset=500, alibi=torch.tensor([[0.1, 0.4, 0.7, 1.0]]))
    oracle = Oracle(case, inputs, pattern=pattern)
    assert oracle.budget["o"] < 0.2
    assert max(oracle.error_ratios(run(ATTENTION[name].load(), inputs, pattern=pattern), rms=True).values()) <= 1
