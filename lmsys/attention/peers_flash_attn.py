"""Peers (other people's implementations): FlashAttention's packages, versions 2 to 4, and torch's `varlen_attn`.

`varlen_attn` is torch's copy of FlashAttention-2. Each peer is a row of the table of implementations, `table.py`: a
function here, and beside it `<name>_supports`, which returns None, or the reason why the function cannot run a case
(call). The packages' functions read (B, S, H, D), align a causal mask at the bottom right, and count a window as keys
to the left and right of the query's own position. A package is imported only when its row is asked for. For another
version of the package add two `partial`s, as for `flash_attn_2`, and a row.

Legend: B batch, H query heads, Hkv key and value heads, S sequence, Q queries, K keys, D head dimension.
"""

import importlib
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention import contract, peers
from lmsys.attention.documents import Documents
from lmsys.attention.pattern import PLAIN, TWO_SIDED, Pattern, kept_on_documents
from lmsys.values import sentences_of

BEYOND = (99, 0)  # a compute capability above those of all GPUs, which stands for no upper limit
KNOWN = "window", TWO_SIDED, "offset", "documents"  # the options of an `AttentionCase` that all rows here know


def _flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
    module: str,
    caches: bool = False,
) -> Tensor:
    """Calls flash_attn_func, or for documents flash_attn_varlen_func, on all sequences laid end to end.

    q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D). `module` is the name of the package. In torch's
    deterministic mode the functions are called with `deterministic=True`. With `caches`, a call with few queries and
    more keys, or with key lengths, goes to flash_attn_with_kvcache, which divides the keys among programs.
    """
    package, pattern = importlib.import_module(module), pattern or PLAIN[causal]
    options: dict[str, Any] = {"softmax_scale": scale, "causal": pattern.causal}
    if pattern.left is not None:
        options["window_size"] = pattern.left, pattern.right  # keys to the left and right of the query's position
    in_order = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
    tensors = [contract.aligned(x).transpose(1, 2) for x in (q, k, v)]  # (B, S, H, D)
    if pattern.documents is not None:
        of_q, of_k = pattern.documents, pattern.documents.keys
        options |= {
            "cu_seqlens_q": of_q.cu_seqlens(q.shape[0]),
            "cu_seqlens_k": of_k.cu_seqlens(q.shape[0]),
            "max_seqlen_q": of_q.longest,
            "max_seqlen_k": of_k.longest,
        }
        o = package.flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors), **options, **in_order)
    elif caches and (pattern.key_lengths is not None or _decodes(q, k, v)):
        lengths = pattern.key_lengths  # clamped, since the kernel would read memory beyond the cache
        lengths = None if lengths is None else lengths.clamp(0, k.shape[2]).to(torch.int32)
        o = package.flash_attn_with_kvcache(*tensors, cache_seqlens=lengths, **options)
    else:
        o = package.flash_attn_func(*tensors, **options, **in_order)
    o = o[0] if isinstance(o, tuple) else o  # version 4 also returns the log-sum-exp
    # The gradient of o is copied if it is not 16-byte aligned, as inputs are.
    return contract.with_aligned_gradient(o).view(tensors[0].shape).transpose(1, 2)


def _decodes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True for few queries and more keys, without gradients, as in decoding."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return q.shape[2] <= contract.FEW_QUERIES and q.shape[2] < k.shape[2] and not learns


def _flash_attn_supports(
    case: contract.AttentionCase,
    module: str,
    least: tuple[int, int],
    below: tuple[int, int] = BEYOND,
    caches: bool = False,
) -> str | None:
    """None, or why the package `module` cannot run `case`.

    It runs on compute capabilities from `least` up to, not including, `below`. `caches`: as in `_flash_attn`.
    """
    if reason := _why_not(case, "flash-attn", least, below, *KNOWN, *(["key_lengths"] if caches else [])):
        return reason
    if case.key_lengths and (case.causal or case.documents or case.grad):
        return "flash-attn takes key_lengths in its call for caches: without `causal`, documents and gradients"
    # If the package is missing, the table reports the ImportError. If only version 4 is installed, `flash_attn` can be
    # imported, but has nothing but `cute`.
    lacks = not hasattr(importlib.import_module(module), "flash_attn_func")
    return f"the package {module} that is installed here has no flash_attn_func" if lacks else None


def _why_not(
    case: contract.AttentionCase, who: str, least: tuple[int, int], below: tuple[int, int], *known: str
) -> str | None:
    """None, or why the package `who` cannot run `case`; `known` are the options that it knows.

    It runs on compute capabilities from `least` up to, not including, `below`.
    """
    needed = f"compute capability {'.'.join(map(str, least))}{' or later' if below == BEYOND else ''}"
    reasons = sentences_of(
        (case.device != "cuda", f"{who} runs on CUDA only"),
        (True, contract.why_not_plain(case, *known) or ""),
        (
            case.capability is not None and not least <= case.capability < below,
            f"{who} of this version needs {needed}; this GPU has {'.'.join(map(str, case.capability or ()))}",
        ),
        (case.dtype not in ("float16", "bfloat16"), f"{who} knows float16 and bfloat16, not {case.dtype}"),
        (
            (case.causal or case.window) and case.offset != (0 if case.documents else case.keys - case.queries),
            f"{who} aligns a mask at the bottom right, so it needs the offset K - Q, of documents or for Q = K 0",
        ),
        (
            case.head_dim > 256 or case.head_dim % 8,
            f"{who} needs a head_dim that is a multiple of 8 and at most 256; got {case.head_dim}",
        ),
    )
    return next(reasons, None) or peers.why_not_scale(case)


flash_attn_2 = partial(_flash_attn, module="flash_attn")
flash_attn_2_supports = partial(_flash_attn_supports, module="flash_attn", least=(8, 0))
flash_attn_3 = partial(_flash_attn, module="flash_attn_interface", caches=True)
flash_attn_3_supports = partial(
    _flash_attn_supports, module="flash_attn_interface", least=(9, 0), below=(10, 0), caches=True
)
flash_attn_4 = partial(_flash_attn, module="flash_attn.cute")
flash_attn_4_supports = partial(_flash_attn_supports, module="flash_attn.cute", least=(9, 0))


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn on one sequence, (1, H, S, D), of documents or as one document."""
    from torch.nn.attention.varlen import varlen_attn as of_torch

    pattern = pattern or PLAIN[causal]
    of_q, of_k = (  # where sequences begin and end, in q and in k
        (_whole(pattern, x.shape[2], x.device) for x in (q, k))
        if pattern.documents is None
        else (pattern.documents, pattern.documents.keys)
    )
    tensors = [contract.aligned(x).squeeze(0).transpose(0, 1) for x in (q, k, v)]  # (S, H, D)
    o = of_torch(
        *tensors,
        *(of_q.cu_seqlens(1), of_k.cu_seqlens(1), of_q.longest, of_k.longest),
        scale=scale,
        window_size=tuple(-1 if side is None else side for side in (pattern.left, pattern.right)),  # -1: no limit
        **({"enable_gqa": True} if q.shape[1] != k.shape[1] else {}),
    )
    return contract.with_aligned_gradient(o).transpose(0, 1).unsqueeze(0)


@kept_on_documents
def _whole(pattern: Pattern, length: int, device: torch.device) -> Documents:
    """One document of the whole sequence, for a pattern without documents. It is kept for later calls."""
    return Documents([length], device)


def varlen_attn_supports(case: contract.AttentionCase) -> str | None:
    """None, or why `varlen_attn` cannot run `case`.

    Its module is imported only for a GPU: it imports torch's compiler, which takes longer than torch itself.
    """
    if reason := _why_not(case, "varlen_attn", (8, 0), BEYOND, *KNOWN):  # least, below, known
        return reason
    if case.batch > 1:
        return f"varlen_attn takes sequences packed one after another, so it needs a batch of 1; got {case.batch}"
    from torch.nn.attention.varlen import varlen_attn as of_torch

    if case.heads != case.kv_heads and "enable_gqa" not in inspect.signature(of_torch).parameters:  # before torch 2.12
        return f"varlen_attn of torch {torch.__version__} has no enable_gqa, which grouped heads need"
    return None
