"""Other people's kernels under patterns: the arguments that we call them with mean what the pattern says.

Their packages need GPUs. Stubs stand for them here: plain PyTorch functions, written from the packages' documentation.
A new pattern is an entry in PATTERNS.
"""

import inspect
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

from lmsys.attention import ATTENTION, AttentionCase, Documents, Pattern, peers, peers_flash_attn
from lmsys.attention.naive import naive
from lmsys.deterministic import deterministic_mode
from lmsys.processes import in_own_process
from lmsys.testing import Oracle, make_inputs, run

BEYOND = "offset", "prefix of documents"  # PATTERNS that the functions of FlashAttention cannot express
PACKED = Documents([5, 1, 10])  # lengths, in all batch entries
EACH = Documents([[16], [7, 9]])  # lengths in each of two batch entries
PATTERNS = {
    "causal": Pattern(True),
    "window": Pattern(True, 4),
    "offset": Pattern(True, 9, offset=3),
    "documents": Pattern(documents=PACKED),
    "causal documents": Pattern(True, documents=PACKED),
    "documents of each": Pattern(True, 6, documents=EACH),
    "two sides": Pattern(False, (2, 3)),
    "prefix of documents": Pattern(True, documents=EACH, prefix=3),
    "other keys": Pattern(True, 4, documents=Documents([5, 11], keys=Documents([9, 7]))),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_flex_masks_what_the_pattern_hides(name: str) -> None:
    pattern = PATTERNS[name]
    found = create_mask(peers._mask_mod(pattern), 2, None, 16, 16, device="cpu")
    assert torch.equal(found, pattern.seen(16, 16, torch.device("cpu")).expand_as(found))


def test_flex_is_compiled_once_for_documents_of_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []

    def compile_for(function: Any, key: Any) -> Any:
        keys.append(key)
        return lambda q, *_, **options: q

    monkeypatch.setattr(peers.compiled, "compile_for", compile_for)
    q = torch.randn(2, 1, 16, 8)
    for documents in (PACKED, Documents([4, 12]), EACH):
        peers.flex(q, q, q, pattern=Pattern(True, documents=documents))
    assert keys[0] == keys[1] != keys[2]
    assert not any(isinstance(part, Documents) for part in keys[0]), "they would be kept for ever"


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, causal: bool, window_size: Any = (-1, -1),
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """A stub of flash_attn_func: (B, S, H, D), causal at the bottom right, a window of keys to the left and right."""
    left, right = window_size
    assert (left >= 0) == (right >= 0)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    pattern = Pattern(causal, (left, right) if left >= 0 else None, offset=k.shape[1] - q.shape[1])
    return naive(*(x.transpose(1, 2) for x in (q, k, v)), scale=softmax_scale, pattern=pattern).transpose(1, 2)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A stub of flash_attn_varlen_func on (tokens, H, D). It also returns a log-sum-exp, as version 4 does."""
    parts = []
    for tensors, edges, longest in (((q,), cu_seqlens_q, max_seqlen_q), ((k, v), cu_seqlens_k, max_seqlen_k)):
        lengths = edges.diff().tolist()
        assert edges.dtype == torch.int32 and longest == max(lengths)
        parts += [x.unsqueeze(0).split(lengths, dim=1) for x in tensors]
    return torch.cat([dense(*tensors, **options)[0] for tensors in zip(*parts, strict=True)]), torch.empty(0)


def cached(q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor | None, **options: Any) -> Tensor:
    """A stub of flash_attn_with_kvcache: batch entry b has a cache of cache_seqlens[b] keys."""
    assert not torch.is_grad_enabled() or not q.requires_grad
    if cache_seqlens is None:
        return dense(q, k, v, **options)
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.min() > 0 and cache_seqlens.max() <= k.shape[1]
    entries = zip(q.split(1), k.split(1), v.split(1), cache_seqlens.tolist(), strict=True)
    return torch.cat([dense(q1, k1[:, :length], v1[:, :length], **options) for q1, k1, v1, length in entries])


@pytest.mark.parametrize("mode", [nullcontext, deterministic_mode])
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in BEYOND])
def test_flash_attn_is_called_by_the_pattern_and_deterministic_where_torch_is(
    name: str, mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = types.SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    q, k, v = torch.randn(2, 4, 16, 8), *torch.randn(2, 2, 2, 16, 8)
    with mode():
        found = peers_flash_attn.flash_attn_2(q, k, v, scale=0.3, pattern=PATTERNS[name])
    torch.testing.assert_close(found, naive(q, k, v, scale=0.3, pattern=PATTERNS[name]))
    if name == "window":  # the last queries, as in decoding
        tensors, pattern = (q[:, :, 11:], k, v), Pattern(True, 4, offset=11)
        found = peers_flash_attn.flash_attn_2(*tensors, pattern=pattern)
        torch.testing.assert_close(found, naive(*tensors, pattern=pattern))


def test_flash_attn_3_decodes_by_its_call_for_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_attn_with_kvcache is for few queries over more keys, or over caches. With gradients or many queries it is
    flash_attn_func that is called."""
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *tensors, **options: (calls.append(name), function(*tensors, **options))[1]

    functions = {"flash_attn_func": dense, "flash_attn_with_kvcache": cached}
    stub = types.SimpleNamespace(**{name: noted(name, function) for name, function in functions.items()})
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stub)
    q, k, v = torch.randn(2, 4, 16, 8), *torch.randn(2, 2, 2, 40, 8)
    lengths = torch.tensor([40 + 5, 7])  # more keys than there are is all of them
    few, many = "flash_attn_with_kvcache", "flash_attn_func"
    cases = [
        ((q, k, v), Pattern(True, 4, offset=24), few),
        ((q[:, :, :1], k, v), Pattern(), few),
        ((q, k, v), Pattern(key_lengths=lengths), few),
        ((q, k[:, :, :16], v[:, :, :16]), Pattern(True), many),
        ((torch.randn(2, 4, 17, 8), k, v), Pattern(), many),
        ((q.clone().requires_grad_(), k, v), Pattern(), many),
    ]
    for tensors, pattern, name in cases:
        found = peers_flash_attn.flash_attn_3(*tensors, pattern=pattern)
        torch.testing.assert_close(found, naive(*tensors, pattern=pattern))
        assert calls.pop() == name and not calls


def varlen_of_torch(*args: Any, scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
    """A stub of torch's varlen_attn: a window of (-1, -1) is full attention, one of (W, 0) is causal."""
    q, k, v, *edges, max_q, max_k = args
    assert enable_gqa == (q.shape[1] != k.shape[1])
    ends = {"cu_seqlens_q": edges[0], "cu_seqlens_k": edges[1], "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    causal = {"causal": window_size == (-1, 0), "window_size": window_size if window_size[0] >= 0 else (-1, -1)}
    return varlen(q, k, v, **ends, softmax_scale=scale, **causal)[0]


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("name", ["full", *(name for name in PATTERNS if name not in (*BEYOND, "documents of each"))])
def test_varlen_attn_is_called_by_the_pattern(name: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_of_torch)
    q, k, v = torch.randn(1, 4, 16, 8), *torch.randn(2, 1, kv_heads, 16, 8)
    pattern = PATTERNS.get(name, Pattern())
    cases = [(q, pattern)]
    if name in ("full", "window"):  # the last queries, as in decoding
        cases.append((q[:, :, 11:], replace(pattern, offset=11)))
    for queries, pattern in cases:
        found = peers_flash_attn.varlen_attn(queries, k, v, scale=0.3, pattern=pattern)
        torch.testing.assert_close(found, naive(queries, k, v, scale=0.3, pattern=pattern))


def test_torchs_varlen_attn_has_the_parameters_of_its_stub() -> None:
    parameters = inspect.signature(torch_varlen_attn).parameters
    assert list(parameters)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= parameters.keys()


def test_varlen_attn_says_which_cases_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase(1, 4, 2, 16, 16, 64, "bfloat16", causal=True, grad=True, device="cuda", capability=(9, 0))
    why_not = ATTENTION["varlen_attn"].why_not
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_of_torch)
    assert why_not(case) is why_not(replace(case, documents=True, window=3)) is None
    assert "a batch of 1; got 2" in str(why_not(replace(case, batch=2)))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v: q)  # as in torch 2.11
    assert "enable_gqa" in str(why_not(case)) and why_not(replace(case, kv_heads=4)) is None


CACHES = {"causal": False, "key_lengths": True}
BOTTOM_RIGHT = {"offset": 12}  # K - Q
ASKED = [  # (row, fields of a case of 4 causal queries and 16 keys, why the row cannot run it)
    ("flash_attn_2", {**BOTTOM_RIGHT, "window": 4}, None),
    ("flash_attn_2", {}, "needs the offset K - Q"),
    ("flash_attn_2", {"offset": 3}, "needs the offset K - Q"),
    ("flash_attn_2", {**BOTTOM_RIGHT, "softcap": 2.0, "key_lengths": True}, "knows no key_lengths and no softcap"),
    ("flash_attn_3", CACHES, None),
    ("flash_attn_3", BOTTOM_RIGHT, None),
    ("flash_attn_3", {"key_lengths": True, **BOTTOM_RIGHT}, "in its call for caches"),
    ("flash_attn_3", CACHES | {"documents": True}, "in its call for caches"),
    ("flash_attn_3", CACHES | {"grad": True}, "in its call for caches"),
    ("flash_attn_3", {"capability": (10, 0)}, "needs compute capability 9.0; this GPU has 10.0"),
]


@pytest.mark.parametrize(("row", "fields", "reason"), ASKED)
def test_flash_attn_says_which_patterns_it_cannot_run(
    row: str, fields: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(flash_attn_func=dense))
    case = AttentionCase(1, 2, 2, 4, 16, 64, "bfloat16", causal=True, device="cuda", capability=(9, 0))
    found = ATTENTION[row].why_not(replace(case, **fields))
    assert found is None if reason is None else reason in str(found)


def _errors_of_cudnn(layouts: tuple[str, ...]) -> float:
    """The largest error over its budget in the last of several calls.

    layouts  for each call, how the gradient do lies in memory: "contiguous" (B, H, S, D) or "transposed" (B, S, H, D)
    """
    case = AttentionCase(1, 2, 2, 128, 583, 128, "float16", False, True, "cuda", torch.cuda.get_device_capability())
    inputs = make_inputs(case, 0)
    for layout in layouts:
        do = inputs.do.transpose(1, 2).contiguous().transpose(1, 2) if layout == "transposed" else inputs.do
        outputs = run(peers.sdpa_cudnn, replace(inputs, do=do))
    return max(Oracle(case, inputs).error_ratios(outputs, rms=True).values())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layouts",
    [
        ("contiguous",),
        ("transposed",),
        pytest.param(
            ("contiguous", "transposed"),
            marks=pytest.mark.xfail(
                reason="torch 2.11 keeps cuDNN's backward by the layouts of q, k and v, and not by that of do",
                strict=False,
            ),
        ),
    ],
)
def test_cudnn_reads_do_as_it_lies_in_memory(layouts: tuple[str, ...]) -> None:
    """Each case runs in a process of its own, in which torch has cached no backward yet."""
    assert in_own_process(_errors_of_cudnn, layouts) <= 1
