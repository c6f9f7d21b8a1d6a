"""`attention`: checks a call once, picks the row that runs it, and gives the row what it reads."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lmsys.attention import contract, hidden, table
from lmsys.attention.documents import Documents
from lmsys.attention.pattern import OPTIONS, checked_pattern
from lmsys.kernels.custom_op import constant
from lmsys.traits import AttentionTraits


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    prefix: int | None = None,
    documents: Documents | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    offset: int | Tensor | str = 0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Any:
    """softmax(scale · q kᵀ) v, by the row `impl` of the table.

    q (..., H, Q, D), k (..., Hkv, K, D), v (..., Hkv, K, Dv) with H a multiple of Hkv (grouped-query
    heads), or (B, Q, D), (B, K, D), (B, K, Dv); one dtype and device. Returns o (..., H, Q, Dv) or
    (B, Q, Dv) of q's dtype; with `return_lse` (o, lse). Under autocast q, k and v are cast to its dtype, as torch's own
    SDPA does, but for float64.

    Differentiable any number of times by our own rows, whose second derivatives are computed from Q x K scores, in
    plain PyTorch; forward-mode derivatives are refused by those with kernels. Rows of others have what they have.
    `torch.func`'s grad, vjp and vmap, torch.compile without a break, torch.export and selective checkpointing, to which
    flash rows are operators `torch.ops.lmsys.<row>`, take every row that they can. For a bias, sinks and `return_lse`
    flash rows are no operators: they are differentiable once, torch.compile's graph breaks there, and torch.func
    refuses them.

    A query sees the keys that all of these let it see; one that sees none gives zeros, and gradients of zero. What an
    option hides from a query never changes its result, nor its gradient, be it NaN or infinity. Where `causal`
    alone hides, that is so of keys that no query sees, j >= Q; of others NaN may reach queries before them, as in
    torch's SDPA.
    Any memory is taken: what a backend cannot read, such as rows that are not 16-byte aligned, is copied for it.
    Without queries, keys or batch entries there is nothing to compute: o is empty, or zeros where there are no keys.

    causal       query i sees keys j <= i + offset: aligned at the top left as in torch SDPA, also for Q != K
    scale        the factor of the scores; None: D ** -0.5
    window       with `causal` a number: the last `window` of those keys alone, j > i + offset - window; or two,
                 (left, right): i + offset - left <= j <= i + offset + right
    prefix       with `causal` and no window: all queries also see the first `prefix` keys, j < prefix
    documents    `Documents` packed into the sequence, made once; a query sees its own alone. The last query of one
                 stands at its last key: `causal` is aligned at the bottom right. `prefix` is of each
    key_lengths  (B,) int32 or int64, of caches of different lengths: keys j < key_lengths[b]. From 0 to K: on a CPU
                 others are refused, on CUDA, where the host cannot know them, they are taken as 0 or K
    softcap      scores become softcap · tanh(score / softcap), before anything is hidden
    offset       the position of query 0 among the keys, a number or one for each batch entry, (B,) int32 or int64;
                 "end": the queries are the last of their keys, at K - Q or with `key_lengths` at key_lengths - Q
    mask         boolean, broadcastable to (..., H, Q, K), or to (B, Q, K): True where a query sees a key
    bias         of q's dtype or float32, broadcastable as a mask: added to the scores, and differentiable. Finite: what
                 hides is a mask
    alibi        slopes (H,) of Press et al. 2022: alibi[h] · |i + offset - j| is taken from the scores. A row with
                 kernels makes them of positions, where a bias is read
    sinks        (H,): for each head the logit of one more key, which all queries see and whose value is zero, as in
                 gpt-oss; differentiable
    return_lse   lse (..., H, Q) or (B, Q), float32 (float64 for float64): the natural logarithm of the softmax's
                 denominator, -inf of a query that sees nothing; differentiable. `merge` makes one of partial results
    impl         a row of the table. "auto" takes the fastest one that supports the case, on a CPU none that Triton
                 interprets; a named row that cannot run it is a ValueError that says why.
    """
    autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    if autocast:
        q, k, v = (contract.as_autocast(x) for x in (q, k, v))
    contract.check_inputs(q, k, v, scale)
    pattern = checked_pattern(
        *(q, k),
        causal=causal,
        window=window,
        prefix=prefix,
        documents=documents,
        key_lengths=key_lengths,
        softcap=softcap,
        offset=offset,
        mask=mask,
        bias=bias,
        alibi=alibi,
        sinks=sinks,
        return_lse=return_lse,
    )
    scale = None if scale is None else float(scale)
    q4, k4, v4 = contract.as_4d(q), contract.as_4d(k), contract.as_4d(v)
    if pattern.causal and not pattern.bounded and k4.shape[2] > q4.shape[2]:  # keys that no query sees
        k4, v4 = k4[:, :, : q4.shape[2]], v4[:, :, : q4.shape[2]]
        if pattern.bias is not None:
            pattern = replace(pattern, bias=pattern.bias[..., : q4.shape[2]])
    row, isolates = row_of(impl, contract.case_of(q4, k4, v4, pattern, scale=scale))
    if 0 in (*q4.shape, *k4.shape):
        row, options = table.ATTENTION["naive"].load(), {"pattern": pattern}  # there is nothing to compute
    elif pattern.bounded and not isolates:
        row, options = partial(hidden.kept_apart, row), {"pattern": pattern}
    else:
        options = contract.keywords_of(row, pattern)
    # A row's products have the dtypes that it gives them.
    with torch.autocast(q.device.type, enabled=False) if autocast else nullcontext():
        result = row(q4, k4, v4, scale=scale, **options)
    o = (result[0] if return_lse else result).reshape(*q.shape[:-1], v.shape[-1])
    return (o, result[1].reshape(q.shape[:-1])) if return_lse else o


def row_of(impl: str, case: contract.AttentionCase) -> tuple[Callable[..., Any], bool]:
    """The function of the row that runs a case, and its trait `isolates`; ValueError where none can."""
    return (
        getattr(_TRACED, _traced(impl, *contract.constants_of(case)))
        if torch.compiler.is_compiling()  # which asks once for cases of many lengths
        else _picked(impl, case)[1]
    )


def _picked(impl: str, case: contract.AttentionCase) -> tuple[str, tuple[Callable[..., Any], bool]]:
    entry = table.ATTENTION.pick(impl, case)
    row = contract.adapt(entry.load())
    if case.options and (reason := contract.why_not_told(row, [name for name in OPTIONS if getattr(case, name)])):
        raise ValueError(f"attention {impl!r} ({entry.target}) cannot run {', '.join(case.options)}: {reason}")
    return entry.name, (row, AttentionTraits.of(entry).isolates)


_TRACED = SimpleNamespace()  # what torch.compile has asked for, by names: it takes no function for a constant


@constant
def _traced(impl: str, *fields: Any) -> str:
    name, row = _picked(impl, contract.AttentionCase(*fields))
    setattr(_TRACED, name, row)
    return name
