"""Peers: functions that call torch's own attention as its users would, to compare our implementations with.

The table of implementations, `table.py`, has a *row* for each. `sdpa` leaves the choice of a backend to PyTorch. Each
other row forces one implementation. A case (call) that this implementation cannot run is refused, with the reason that
torch gives, if it gives one, and never worked around. For a row `name` here, `name_supports` returns None or the
reason. A new peer is such a pair of functions and a row. `peers_flash_attn.py` has the rows that call FlashAttention's
own functions.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension, Dv that of the values.
"""

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lmsys.attention import compiled, contract
from lmsys.attention.pattern import OFFSETS, PLAIN, TWO_SIDED, Pattern, kept_on_documents
from lmsys.values import sentences_of

# The options, by their names in `AttentionCase.options`, that flex and all rows of SDPA take. None of their values is a
# tensor that a caller may change, so a mask of these options alone is made once and kept between calls.
MADE_ONCE = "causal", "window", TWO_SIDED, "prefix", "offset", "documents"
KNOWN = *MADE_ONCE, OFFSETS, "key_lengths", "mask"  # the options that all rows of SDPA know
# A lock around `sdpa_kernel`, which sets flags of the whole process and later puts back those that it found: two
# threads at once could leave them off. The lock does not cover other calls of torch's attention, such as those of the
# row `sdpa`: another thread that makes one meanwhile sees these flags.
_turn = threading.RLock()


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention, with `is_causal`; under a pattern with an `attn_mask`, boolean or a bias.

    Inputs that are not 16-byte aligned are copied: on CUDA torch's kernels give wrong results, or end the process.
    """
    q, k, v = contract.aligned(q), contract.aligned(k), contract.aligned(v)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if pattern is None:
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **grouped)
        return contract.with_aligned_gradient(o)
    # seen: True where a query sees a key. blind: True for queries that see no key, whose o is 0; None: there are none.
    seen, blind = _seen_and_blind(pattern, q.shape[2], k.shape[2], q.device)
    mask = seen if pattern.bias is None else torch.where(seen, pattern.bias, -torch.inf).to(q.dtype)
    mask = mask.expand(*q.shape[:-1], k.shape[2])
    o = contract.with_aligned_gradient(
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **grouped)
    )
    return o if blind is None else o.masked_fill(blind, 0)


def _seen_and_blind(
    pattern: Pattern, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The masks of `Pattern.seen_and_blind`, kept between calls, as users keep theirs, if no option is a tensor."""
    if any(isinstance(x, Tensor) for x in pattern.options.values()):
        return pattern.seen_and_blind(num_queries, num_keys, device)
    return _masks_of(pattern, num_queries, num_keys, device)


# The trait `mask` of rows in `table.py`: the mask, computed anew, so that it can be timed.
boolean_mask = Pattern.seen_and_blind
_masks_of = kept_on_documents(boolean_mask, most=2)  # few results: a mask has Q x K bytes


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
    backend: SDPBackend,
) -> Tensor:
    """`sdpa` by one backend of torch. Threads take turns, but not in compiled code: tracing has chosen the backend."""
    with nullcontext() if torch.compiler.is_compiling() else _turn, sdpa_kernel(backend):
        return sdpa(q, k, v, causal=causal, scale=scale, pattern=pattern)


sdpa_math = partial(_sdpa, backend=SDPBackend.MATH)
sdpa_flash = partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION)
sdpa_efficient = partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION)
sdpa_cudnn = partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)


def sdpa_supports(case: contract.AttentionCase) -> str | None:
    return contract.why_not_options(case, *KNOWN, "bias") or why_not_scale(case)


def sdpa_math_supports(case: contract.AttentionCase) -> str | None:
    return contract.why_not_options(case, *KNOWN, "bias")


def sdpa_flash_supports(case: contract.AttentionCase) -> str | None:
    return (
        _torch_says(case, SDPBackend.FLASH_ATTENTION, torch.backends.cuda.can_use_flash_attention)
        if case.device == "cuda"
        else contract.why_not_options(case, *KNOWN) or contract.why_not_value_dim(case) or why_not_scale(case)
    )


def sdpa_efficient_supports(case: contract.AttentionCase) -> str | None:
    return (
        _torch_says(case, SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.can_use_efficient_attention, "bias")
        if case.device == "cuda"
        else "SDPA's memory-efficient attention runs on CUDA only"
    )


def sdpa_cudnn_supports(case: contract.AttentionCase) -> str | None:
    return (
        _torch_says(case, SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.can_use_cudnn_attention)
        if case.device == "cuda"
        else "SDPA's cuDNN attention runs on CUDA only"
    )


def why_not_scale(case: contract.AttentionCase) -> str | None:
    """None, or why a kernel cannot take the scale of this case."""
    # These kernels take the maximum before they scale, and scale the -inf of hidden keys.
    return (
        f"gives NaN or overflows unless scale > 0; got {case.scale}"
        if case.scale is not None and case.scale <= 0
        else None
    )


def _torch_says(
    case: contract.AttentionCase, backend: SDPBackend, can_use: Callable[..., bool], *added: str
) -> str | None:
    """None if torch says that this backend runs the case, else the reason from torch's warnings.

    If torch gives no reason, the text says which changes of the case would let the backend run it. `added`: options
    that the backend takes beside KNOWN.
    """
    if reason := contract.why_not_options(case, *KNOWN, *added) or why_not_scale(case):
        return reason
    ask = partial(_asked, backend=backend, can_use=can_use, deterministic=torch.are_deterministic_algorithms_enabled())
    # Under `causal` alone, `attention` cuts off the keys after the last query, which no query sees, before it calls a
    # row. So torch runs the case if it takes all keys, or if it takes those that are left (`seen`).
    seen = replace(case, keys=min(case.keys, case.queries)) if case.causal and not case.options else case
    if (reasons := ask(case)) is None and (reasons := ask(seen)) is None:
        return None
    if reasons:
        return f"torch: {reasons}"
    takes = [change for change, other in _changes(case).items() if ask(other) is None]
    advice = f"it would take {' or '.join(takes)}" if takes else "another row can: SDPA math runs every case"
    return f"torch {torch.__version__} refuses and does not say why; {advice}"


def _changes(case: contract.AttentionCase) -> dict[str, contract.AttentionCase]:
    """Cases that differ from this one in one point, by the change in words."""
    return {
        "as many key heads as query heads": replace(case, kv_heads=case.heads),
        f"bfloat16 in place of {case.dtype}": replace(case, dtype="bfloat16"),
        f"head_dim 64 in place of {case.head_dim}": replace(case, head_dim=64),
        "a case without gradients": replace(case, grad=False),
        "no causal mask": replace(case, causal=False),
        "no option but `causal`": case.plain,
        "v of the head dimension of k": replace(case, value_dim=None),
    }


@lru_cache(maxsize=4096)  # asking costs more than a small call; the answer depends on the case and on determinism
def _asked(
    case: contract.AttentionCase, backend: SDPBackend, can_use: Callable[..., bool], deterministic: bool
) -> str | None:
    """None if the backend can run the case, else torch's reasons: "" if it gives none."""

    def shaped(heads: int, length: int, width: int, dtype: torch.dtype = contract.DTYPES[case.dtype]) -> Tensor:
        # Every row is the same memory: torch looks at shapes, never at values, so no case is too large to ask.
        return torch.empty(width, dtype=dtype, device=case.device).expand(case.batch, heads, length, width)

    q, k = shaped(case.heads, case.queries, case.head_dim), shaped(case.kv_heads, case.keys, case.head_dim)
    v = shaped(case.kv_heads, case.keys, case.value_dim or case.head_dim)
    q, k, v = (x.requires_grad_(case.grad) for x in (q, k, v))
    dtype = contract.DTYPES[case.dtype] if case.bias else torch.bool
    mask = shaped(case.heads, case.queries, case.keys, dtype) if case.options else None
    # q, k, v, attn_mask, dropout, is_causal (a mask includes the causal order), enable_gqa
    params = torch.backends.cuda.SDPAParams(
        q, k, v, mask, 0.0, case.causal and mask is None, case.heads != case.kv_heads
    )
    with _turn, sdpa_kernel(backend), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if can_use(params, debug=True):
            return None
    return " ".join(str(warning.message).split("(Triggered internally")[0].strip() for warning in caught)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
) -> Tensor:
    """FlexAttention, compiled for the case. Its block mask, which skips hidden blocks, is made once and kept."""
    pattern = pattern or PLAIN[causal]
    queries, group = q.shape[2], q.shape[1] // k.shape[1]
    documents, numbers = pattern.documents, (pattern.left, pattern.right, pattern.prefix, pattern.offset)
    block_mask = _block_mask_of(pattern, queries, k.shape[2], q.device) if pattern.hides else None
    # FlexAttention sends short queries to a decoding kernel. There the queries of a group must fit one block of the
    # mask, 128; if they do not, the other kernel is forced.
    options = {"BACKEND": "TRITON"} if q.is_cuda and queries < 128 < queries * group else None
    packed = None if documents is None else documents.starts.shape  # documents whose `starts` have one shape share code
    key = compiled.layout_key(q, k, v), numbers, packed, pattern.softcap, scale, torch.is_grad_enabled()
    return compiled.compile_for(flex_attention, key)(
        *(q, k, v),
        score_mod=None if pattern.softcap is None else _capped(pattern.softcap),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=group > 1,
        kernel_options=options,
    )


def flex_supports(case: contract.AttentionCase) -> str | None:
    reasons = sentences_of(
        (True, contract.why_not_plain(case, *MADE_ONCE, "softcap") or ""),
        (case.dtype == "float64", "FlexAttention has no float64 kernel"),
        (case.device == "cpu" and case.grad, "FlexAttention has no backward on CPU"),
        (
            case.device == "cuda" and case.head_dim < 16,
            f"FlexAttention needs head_dim >= 16 on CUDA; got {case.head_dim}",
        ),
    )
    return next(reasons, None) or compiled.why_no_compiler(case.device)


def block_mask(pattern: Pattern, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """FlexAttention's mask of a pattern, computed anew: the trait `mask` of `flex`, so that it can be timed."""
    # `create_block_mask` is not compiled here, so it holds a (Q, K) matrix of flags: 4 GiB at 65,536 queries and keys.
    batch = None if pattern.documents is None or pattern.documents.batch == 1 else pattern.documents.batch
    return create_block_mask(_mask_mod(pattern), batch, None, num_queries, num_keys, device=device)


_block_mask_of = kept_on_documents(block_mask)


def _mask_mod(pattern: Pattern) -> Callable[..., Tensor]:
    """FlexAttention's `mask_mod`: (batch entry, head, query, key), as indices, -> True where the query sees the key."""
    # `seen` refers to numbers and tensors alone. The documents keep it (`kept_on_documents`), so it must not refer to
    # them.
    left, right, prefix, offset = pattern.left, pattern.right, pattern.prefix, pattern.offset
    documents = pattern.documents
    several = documents is not None and documents.batch > 1
    # By query, each (B or 1, Q): its position among the keys, its document's first key, and the key after the last.
    packed = documents and (documents.places, documents.key_starts, documents.key_ends)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        entry = batch if several else 0
        place, start, end = (x[entry, query] for x in packed) if packed else (query, 0, None)
        seen = place + offset + right >= key if right is not None else key >= 0
        if prefix is not None:
            seen = seen | (key < start + prefix)
        if left is not None:
            seen = seen & (place + offset - left <= key)
        return seen if end is None else seen & (start <= key) & (key < end)

    return seen


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """FlexAttention's `score_mod` of a softcap; equal softcaps give the same function, so that nothing recompiles."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
