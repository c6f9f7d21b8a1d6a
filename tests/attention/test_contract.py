"""The contract of `attention`: errors for bad input, the order of "auto", views and ranks, and foreign signatures.

A new kind of bad tensors is added to BAD, with the message that it must give; a foreign signature is one more function
or autograd Function like those near the end. `row` means an implementation of attention, as in the README.
"""

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lmsys.attention import ATTENTION, AttentionCase, Pattern, attention, peers
from lmsys.attention.contract import adapt, why_not_called
from lmsys.attention.flash_torch import FlashTorch
from lmsys.attention.naive import naive
from lmsys.bench.findings import interpreted_kernels
from lmsys.registry import Entry


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


BAD = {
    "rank 2": ((zeros(8, 16), zeros(8, 16), zeros(8, 16)), "rank of at least 3; got shapes (8, 16)"),
    "mixed ranks": ((zeros(2, 2, 8, 16), zeros(2, 8, 16), zeros(2, 8, 16)), "one rank"),
    "no heads": ((zeros(1, 0, 8, 16), *2 * [zeros(1, 0, 8, 16)]), "a head and a head dimension of at least 1"),
    "no head dimension": (3 * (zeros(1, 2, 8, 0),), "of at least 1; got shapes (1, 2, 8, 0)"),
    "k unlike v": ((zeros(1, 2, 8, 16), zeros(1, 2, 8, 16), zeros(1, 2, 9, 16)), "(1, 2, 8, 16) and (1, 2, 9, 16)"),
    "head dimension": ((zeros(1, 2, 8, 16), *2 * [zeros(1, 2, 8, 32)]), "one head dimension; got 16 and 32"),
    "batch": ((zeros(3, 2, 8, 16), *2 * [zeros(1, 2, 8, 16)]), "same batch dimensions; got shapes (3, 2, 8, 16)"),
    "batch, 3-D": ((zeros(3, 8, 16), *2 * [zeros(1, 8, 16)]), "same batch dimensions"),
    "heads": ((zeros(1, 3, 8, 16), *2 * [zeros(1, 2, 8, 16)]), "query heads (3) must be a multiple"),
    "more key heads": ((zeros(1, 2, 8, 16), *2 * [zeros(1, 4, 8, 16)]), "query heads (2) must be a multiple"),
    "mixed dtypes": (
        (zeros(1, 2, 8, 16), zeros(1, 2, 8, 16, dtype=torch.float16), zeros(1, 2, 8, 16)),
        "got torch.float32, torch.float16, torch.float32",
    ),
    "integers": (3 * (zeros(1, 2, 8, 16, dtype=torch.int64),), "got torch.int64"),
    "complex": (3 * (zeros(1, 2, 8, 16, dtype=torch.complex64),), "got torch.complex64"),
    "devices": (
        (zeros(1, 2, 8, 16), *2 * [zeros(1, 2, 8, 16, device="meta")]),
        "on one device; got cpu, meta, meta",
    ),
    "no values": (3 * (zeros(1, 2, 8, 16, device="meta"),), "on a CPU or a CUDA device; got meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_refused_with_the_value_at_fault(name: str) -> None:
    tensors, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(*tensors)


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"scale": scale}, re.escape(f"scale={scale!r}"[:80]) + ".* must be a finite number")
        for scale in (float("nan"), float("inf"), 10**400, "0.5", True, torch.tensor(0.5))
    ),
    ({"scale": 1e300}, r"scale=1e\+300 must be at least -3.4.*e\+38 and at most 3.4.*e\+38"),
    *(
        ({"causal": causal}, r"causal=.* must be True or False")
        for causal in ("no", "false", None, 2, 1.0, torch.tensor(True))
    ),
    ({"impl": "flash_trtion"}, "unknown attention 'flash_trtion'; did you mean flash_triton"),
    ({"impl": "sdpa_cudnn"}, r"'sdpa_cudnn' cannot run q \(.*float32 on cpu: SDPA's cuDNN attention runs on CUDA only"),
    ({"impl": "sdpa_flash", "causal": True, "scale": -1.0}, "gives NaN or overflows unless scale > 0; got -1.0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_bad_option_and_a_row_that_cannot_run_the_case_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*3 * [zeros(1, 2, 8, 16)], **options)


X = zeros(2, 8, 16)
NOT_DENSE = [X.numpy(), X.tolist(), None, X.to_sparse(), torch.nested.nested_tensor([X[0], X[1]])]


@pytest.mark.parametrize("x", NOT_DENSE, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("place", range(3))
def test_only_dense_tensors_are_taken(x: Any, place: int) -> None:
    tensors: list[Any] = [X, X, X]
    tensors[place] = x
    with pytest.raises(ValueError, match=f"^{'qkv'[place]} must be a (torch.Tensor|dense tensor)"):
        attention(*tensors)


VIEWS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: torch.stack([x, x], dim=-1).flatten(-2)[..., ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
    "of one number": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("impl", ["auto", "naive", "flash_torch", "sdpa_flash"])
def test_views_give_what_their_copies_give(view: str, impl: str) -> None:
    tensors = [VIEWS[view](torch.randn(2, 4, 32, 16)) for _ in range(3)]
    found = attention(*tensors, impl=impl)
    assert torch.allclose(found, attention(*[x.contiguous() for x in tensors], impl=impl), atol=1e-6)


@pytest.mark.parametrize("impl", ["naive", "flash_torch", "flash_triton"])
def test_a_whole_number_is_a_scale_like_any_other(impl: str) -> None:
    """For Triton the type and the value of an int would be part of the kernel, which the next call would reuse."""
    if reason := ATTENTION[impl].why_not(AttentionCase(1, 2, 2, 8, 8, 16, "float32")):
        pytest.skip(reason)
    q, k, v = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    for scale in (1, 16, None, 1.0):
        found = adapt(ATTENTION[impl].load())(q, k, v, causal=True, scale=scale)
        torch.testing.assert_close(found, naive(q, k, v, causal=True, scale=scale))


def preferred(**changes: Any) -> list[str]:
    """The rows that "auto" tries in bfloat16 on an H200, in order, without `flash_gluon`."""
    case = AttentionCase(1, 32, 32, 8192, 8192, 64, "bfloat16", device="cuda", capability=(9, 0))
    return [name for name in ATTENTION.auto(replace(case, **changes)) if name != "flash_gluon"]


def test_auto_prefers_what_was_measured_as_the_fastest() -> None:
    hopper = AttentionCase(1, 32, 32, 8192, 8192, 64, "bfloat16", device="cuda", capability=(9, 0))
    assert ATTENTION.auto(hopper)[0] == "flash_gluon"
    assert preferred()[0] == preferred(head_dim=128)[0] == preferred(head_dim=128, grad=True)[0] == "sdpa_cudnn"
    assert preferred(grad=True)[0] == preferred(grad=True, head_dim=16)[0] == "flash_triton"
    assert preferred(grad=True, head_dim=80)[0] == "sdpa_cudnn"
    assert preferred(dtype="float32")[0] == preferred(dtype="float32", grad=True)[0] == "sdpa_efficient"
    assert ATTENTION.auto(replace(hopper, queries=1, keys=4096))[0] == "flash_triton"
    assert set(preferred(grad=True)) == set(preferred()) and preferred()[-1] == "vectorized"


# Compute capabilities of GPUs on which nothing was timed; None is unknown.
NEVER_TIMED = [None, (7, 5), (8, 0), (8, 6), (8, 9), (9, 4), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", NEVER_TIMED)
def test_auto_takes_torchs_choice_on_gpus_without_measurements(capability: tuple[int, int] | None) -> None:
    """That is `sdpa`. Another row is taken for an option that `sdpa` lacks, or for which it needs a Q x K mask."""
    case = AttentionCase(1, 2, 2, 32, 32, 64, "float16", causal=True, device="cuda", capability=capability)
    for plain in ({}, {"grad": True}, {"queries": 1}, {"mask": True}, {"head_dim": 512}):
        assert ATTENTION.pick("auto", replace(case, **plain)).name == "sdpa"
    for option in ({"window": 7}, {"documents": True}, {"key_lengths": True}, {"offset": 3}):
        runs = ATTENTION["flash_triton"].why_not(replace(case, **option)) is None
        assert ATTENTION.pick("auto", replace(case, **option)).name == ("flash_triton" if runs else "sdpa")
    for refused in ({"softcap": 2.0}, {"scale": -1.0}):
        runs = ATTENTION["flash_triton"].why_not(replace(case, **refused)) is None
        assert ATTENTION.pick("auto", replace(case, **refused)).name == ("flash_triton" if runs else "vectorized")


def test_kernels_that_this_triton_cannot_compile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_triton = pytest.importorskip("lmsys.attention.flash_triton")
    blackwell = AttentionCase(1, 2, 2, 32, 32, 64, "float16", device="cuda", capability=(10, 0))
    for version, runs in (("3.6.0", False), ("3.7.1", False), ("3.8.0", True)):
        monkeypatch.setattr(flash_triton, "version", lambda version=version: version)
        assert flash_triton.flash_triton_supports(blackwell) is None
        for change in ({"window": 7, "causal": True}, {"queries": 1}):
            reason = flash_triton.flash_triton_supports(replace(blackwell, **change))
            assert (reason is None) == runs and (runs or f"this is {version}" in reason)
            assert flash_triton.flash_triton_supports(replace(blackwell, capability=(8, 6), **change)) is None


@pytest.mark.parametrize("grad", [False, True])
def test_auto_takes_no_row_that_is_interpreted(grad: bool) -> None:
    case = AttentionCase(1, 2, 2, 8, 8, 16, "float32", grad=grad)
    assert not [name for name in ATTENTION.auto(case) if ATTENTION[name].extra == "triton"]
    with interpreted_kernels() as launched:
        q = torch.randn(1, 2, 8, 16, requires_grad=grad)
        attention(q, q, q, causal=True).sum()
    assert not launched


RANKS = [
    *((shape, shape) for shape in ((5, 8, 16), (2, 4, 8, 16), (3, 2, 4, 8, 16))),
    ((3, 2, 4, 8, 16), (3, 2, 2, 9, 16)),  # keys have fewer heads
]


@pytest.mark.parametrize(("of_q", "of_k"), RANKS)
@pytest.mark.parametrize("impl", ["auto", "naive", "flash_torch"])
def test_any_rank_of_three_or_more_gives_the_shape_of_q(
    of_q: tuple[int, ...], of_k: tuple[int, ...], impl: str
) -> None:
    q, k = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in (of_q, of_k))
    o = attention(q, k, k, causal=True, impl=impl)
    heads = [x.shape[-3] if x.dim() > 3 else 1 for x in (q, k)]
    flat_q, flat_k = (x.reshape(-1, n, *x.shape[-2:]) for x, n in zip((q, k), heads, strict=True))
    expected = naive(flat_q, flat_k, flat_k, causal=True).reshape(of_q)
    torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("shape", [(2, 4, 8, 16), (1, 2, 4, 8, 16)])
def test_a_result_of_another_shape_is_no_result(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """(B, S, H, D) has as many elements as (B, H, S, D)."""
    apart = Entry("apart", f"{__name__}:with_heads_last")
    monkeypatch.setitem(ATTENTION._all_rows, "apart", apart)
    q = torch.randn(shape)
    with pytest.raises(RuntimeError, match=r"apart: o must have shape \(2, 4, 8, 16\); got \(2, 8, 4, 16\)"):
        attention(q, q, q, impl="apart")


def with_heads_last(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return naive(q, k, v, causal=causal, scale=scale).transpose(1, 2)


def test_a_refusal_of_torch_without_a_reason_names_cases_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_equal_heads(params: Any, debug: bool) -> bool:
        return params.query.shape[1] == params.key.shape[1]

    monkeypatch.setattr(peers, "_asked", lru_cache(peers._asked.__wrapped__))
    why_not = partial(peers._torch_says, backend=SDPBackend.EFFICIENT_ATTENTION, can_use=takes_equal_heads)
    assert why_not(AttentionCase(1, 2, 2, 8, 8, 16, "float32")) is None
    reason = why_not(AttentionCase(1, 4, 2, 8, 8, 16, "float32"))
    assert reason and reason.endswith("refuses and does not say why; it would take as many key heads as query heads")
    why_never = partial(peers._torch_says, backend=SDPBackend.MATH, can_use=lambda *_, **__: False)
    assert "SDPA math runs every case" in (why_never(AttentionCase(1, 4, 2, 8, 8, 16, "float32")) or "")


def test_torch_is_asked_about_only_the_keys_that_causal_queries_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that takes 9 keys, but no single one, cannot run one causal query: `attention` gives it one key."""
    monkeypatch.setattr(peers, "_asked", lru_cache(peers._asked.__wrapped__))
    why_not = partial(peers._torch_says, backend=SDPBackend.MATH, can_use=lambda params, debug: params.key.shape[2] > 1)
    case = AttentionCase(1, 2, 2, 1, 9, 16, "float32")
    assert why_not(case) is None and why_not(replace(case, causal=True))
    assert why_not(replace(case, queries=2, causal=True)) is None


def _by_naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """The result of all the foreign rows below, which differ only in their signatures."""
    return naive(q, k, v, causal=causal, scale=scale)


def cs336(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """A function as CS336 asks for it, on (B, S, D)."""
    assert q.dim() == k.dim() == 3
    return naive(q[:, None], k[:, None], v[:, None], causal=is_causal)[:, 0]


def no_scale(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return _by_naive(q, k, v, causal, q.shape[-1] ** -0.5)


def softmax_scale(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
    return _by_naive(q, k, v, is_causal, softmax_scale)


def positional(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    return _by_naive(q, k, v, causal, sm_scale)


def without_keywords(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, /) -> Tensor:
    return _by_naive(q, k, v, causal, sm_scale)


def flag_before_causal(
    q: Tensor, k: Tensor, v: Tensor, flag: bool = False, causal: bool = False, scale: float = 1.0, /
) -> Tensor:
    """A parameter that `adapt` does not know keeps its default."""
    assert flag is False
    return _by_naive(q, k, v, causal, scale)


class ByPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
        return _by_naive(q, k, v, causal, sm_scale)


class WithDropout(torch.autograd.Function):
    """A signature like flash-attn's: `causal` comes after a parameter that `adapt` does not know."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False,
                sm_scale: float | None = None, extra: bool = False) -> Tensor:  # fmt: skip
        assert dropout_p == 0.0 and dropout_p is not False and extra is False
        return naive(q, k, v, causal=causal, scale=sm_scale)


class NeedsDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, causal: bool, sm_scale: float) -> Tensor:
        return _by_naive(q, k, v, causal, sm_scale)


def only_by_keyword(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    return naive(q, k, v, causal=is_causal)


def as_torch(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Any:
    """torch's order: the fourth parameter is no flag."""
    assert attn_mask is None
    return naive(query, key, value, causal=is_causal)


def visible(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """As CS336's first assignment has it: the mask is a tensor, True where a query sees a key."""
    return naive(q, k, v, pattern=Pattern(mask=None if mask is None else mask[None, None]))


def needs_visible(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return visible(q, k, v, mask)


class SetUp(torch.autograd.Function):
    """A Function in torch's newer form, whose forward takes no ctx."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return cs336(q, k, v, is_causal)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


TAKE_NO_SCALE = FlashTorch, cs336, no_scale, only_by_keyword, as_torch, visible, needs_visible, SetUp
TAKE_A_SCALE = softmax_scale, positional, without_keywords, flag_before_causal, ByPlace, WithDropout


@pytest.mark.parametrize("foreign", [*TAKE_NO_SCALE, *TAKE_A_SCALE])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_other_interfaces_are_accepted_as_they_are(foreign: Any, causal: bool) -> None:
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    refused = why_not_called(foreign, AttentionCase(2, 4, 2, 9, 9, 16, "float32", causal=causal, scale=0.3))
    assert refused == ("it takes no scale" if foreign in TAKE_NO_SCALE else None)
    for scale in (None, 0.25, *([] if refused else [0.3])):  # 0.25 is 16 ** -0.5, the default
        found = adapt(foreign)(q, k, k, causal=causal, scale=scale)
        torch.testing.assert_close(found, naive(q, k, k, causal=causal, scale=scale))


@pytest.mark.parametrize("change", [Tensor.flatten, Tensor.squeeze, lambda o: o[None], lambda o: o.flatten(0, 1)])
def test_a_shape_that_is_not_that_of_the_queries_is_not_mended(change: Any) -> None:
    """The result has as many elements as a right one, and (B, S, D) alone becomes (B, H, S, D)."""
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 9, 16)

    def row(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return change(cs336(q, k, v, is_causal))

    assert adapt(row)(q, k, k).shape != q.shape


@pytest.mark.parametrize("foreign", TAKE_NO_SCALE)
def test_a_row_that_takes_no_scale_refuses_another_than_the_default(foreign: Any) -> None:
    with pytest.raises(ValueError, match="scale=0.3"):
        adapt(foreign)(*torch.randn(3, 2, 4, 9, 16), scale=0.3)


@pytest.mark.parametrize(
    ("foreign", "message"),
    [(NeedsDropout, "parameter 'dropout_p' has no default and no known name"), (3, "must be callable; got 3")],
)
def test_what_cannot_be_called_as_a_row_is_refused(foreign: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapt(foreign)


def plain(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A row may take only q, k and v."""
    return naive(a, b, c)


def tiled(q: Tensor, k: Tensor, v: Tensor, tile: int = 2) -> Tensor:
    """A fourth parameter that is no flag keeps its default."""
    return torch.cat([naive(rows, k, v) for rows in q.split(tile, dim=2)], dim=2)


@pytest.mark.parametrize("foreign", [plain, tiled])
def test_a_row_that_takes_no_causal_runs_without(foreign: Any) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    assert torch.equal(adapt(foreign)(q, k, v), foreign(q, k, v))
    torch.testing.assert_close(foreign(q, k, v), naive(q, k, v))
    assert why_not_called(foreign, AttentionCase(2, 3, 3, 5, 5, 4, "float32", causal=True)) == "it takes no causal"
    with pytest.raises(ValueError, match="causal=True: this row has no parameter for it"):
        adapt(foreign)(q, k, v, causal=True)
