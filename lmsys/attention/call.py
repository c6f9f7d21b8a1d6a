"""`attention`, the public function: it checks a call once, picks the row that runs it, and calls that row.

Users and models call `attention`. A *row* is an implementation in the table of `table.py`. `contract.py` checks the
tensors, `pattern.py` the options. To add an option, add a parameter here, pass it to `checked_pattern`, and make the
changes that the docstrings of pattern.py and contract.py name.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension, Dv that of the values.
"""

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
    (B, Q, Dv) of q's dtype; with `return_lse` (o, lse). Under autocast q, k and v are cast to its dtype, except float64
    tensors, as torch's own SDPA does.

    Our own rows are differentiable any number of times. Their second derivatives are computed from Q x K scores, in
    plain PyTorch. Rows with kernels refuse forward-mode derivatives. Rows of others are as differentiable as the
    functions that they call. `torch.func`'s grad, vjp and vmap, torch.compile without a graph break, torch.export and
    selective checkpointing work with every row that they can run. They see a *flash row*, which is one of ours whose
    name begins with `flash_`, as one custom operator, `torch.ops.lmsys.<row>`. With a bias, sinks or `return_lse` flash
    rows are not custom operators: then they are differentiable once, torch.compile's graph breaks there, and torch.func
    refuses them.

    A query sees the keys that all options let it see. A query that sees none has zeros as its result and as its
    gradient. NaN and infinity in keys that an option hides from a query never change its result or its gradient, but
    for rounding. If `causal` is the only option that hides keys, this holds only for keys that no query sees, j >= Q;
    NaN in other keys may reach queries before them, as in torch's SDPA.

    Tensors may have any memory layout. A tensor that a backend cannot read, for example because its rows are not
    16-byte aligned, is copied. Without queries or batch entries o is empty; without keys it is zeros.

    causal       query i sees keys j <= i + offset: aligned at the top left as in torch SDPA, also for Q != K
    scale        the factor of the scores; None: D ** -0.5
    window       with `causal` a number: a query sees only the last `window` of the keys that `causal` lets it see,
                 j > i + offset - window; or two numbers, (left, right): i + offset - left <= j <= i + offset + right
    prefix       with `causal` and no window: all queries also see the first `prefix` keys, j < prefix
    documents    `Documents` packed into the sequence; a query sees only keys of its own document. Make the object once,
                 for many calls. The last query of a document stands at its last key: `causal` is aligned at the bottom
                 right. A `prefix` then means the first keys of each document
    key_lengths  (B,) int32 or int64, for caches of different lengths: batch entry b sees keys j < key_lengths[b]. The
                 lengths are from 0 to K; others are refused on a CPU, and clamped on CUDA, where the host cannot read
                 them without waiting
    softcap      scores become softcap · tanh(score / softcap), before anything is hidden
    offset       the position of query 0 among the keys, a number or one for each batch entry, (B,) int32 or int64;
                 "end": the queries are the last of their keys, at K - Q or with `key_lengths` at key_lengths - Q
    mask         boolean, broadcastable to (..., H, Q, K), or to (B, Q, K): True where a query sees a key
    bias         of q's dtype or float32, broadcastable as a mask: added to the scores, and differentiable. It must be
                 finite; a mask hides keys
    alibi        slopes (H,) of Press et al. 2022: alibi[h] · |i + offset - j| is subtracted from the scores. Rows with
                 kernels compute it from positions, and so read no bias from memory
    sinks        (H,): for each head the logit of one more key, which all queries see and whose value is zero, as in
                 gpt-oss; differentiable
    return_lse   also return lse (..., H, Q) or (B, Q), float32 (float64 for a float64 q): the natural logarithm of the
                 softmax's denominator, -inf for a query that sees nothing; differentiable. `merge` combines partial
                 results by it
    impl         the name of a row. "auto" takes the fastest row that supports the case, but on a CPU no row that
                 Triton interprets. ValueError says why a named row cannot run the case.
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
    # `bounded` is True if an option other than `causal` hides keys. If it is False, no query sees the keys from Q on,
    # so they are cut off.
    if pattern.causal and not pattern.bounded and k4.shape[2] > q4.shape[2]:
        k4, v4 = k4[:, :, : q4.shape[2]], v4[:, :, : q4.shape[2]]
        if pattern.bias is not None:
            pattern = replace(pattern, bias=pattern.bias[..., : q4.shape[2]])
    row, isolates = row_of(impl, contract.case_of(q4, k4, v4, pattern, scale=scale))
    if q4.numel() == 0 or k4.numel() == 0:
        row, options = table.ATTENTION["naive"].load(), {"pattern": pattern}  # there is nothing to compute
    elif pattern.bounded and not isolates:  # options hide keys, and the row alone would let NaN in them through
        row, options = partial(hidden.kept_apart, row), {"pattern": pattern}
    else:
        options = contract.keywords_of(row, pattern)
    # Autocast is off inside of a row: its matmuls have the dtypes that the row chooses.
    with torch.autocast(q.device.type, enabled=False) if autocast else nullcontext():
        result = row(q4, k4, v4, scale=scale, **options)
    o = result[0] if return_lse else result
    if o.shape != (*q.shape[:-1], v.shape[-1]):  # `reshape` to the same shape would cost the host time, too
        if o.shape != (*q4.shape[:-1], v.shape[-1]):
            raise RuntimeError(f"{impl}: o must have shape {(*q4.shape[:-1], v.shape[-1])}; got {tuple(o.shape)}")
        o = o.reshape(*q.shape[:-1], v.shape[-1])
    return (o, result[1].reshape(q.shape[:-1])) if return_lse else o


def row_of(impl: str, case: contract.AttentionCase) -> tuple[Callable[..., Any], bool]:
    """(the function of the row that runs a case, its trait `isolates`). ValueError if `impl` cannot run the case.

    If the trait is True, the row keeps NaN in hidden keys out of its results by itself; for other rows
    `hidden.kept_apart` does it.
    """
    return (
        getattr(_TRACED, _traced(impl, *contract.constants_of(case)))
        if torch.compiler.is_compiling()  # `constants_of` puts typical sizes in place of dynamic ones
        else _picked(impl, case)[1]
    )


def _picked(impl: str, case: contract.AttentionCase) -> tuple[str, tuple[Callable[..., Any], bool]]:
    """Picks the row outside of torch.compile's trace: (name of the row, the result of `row_of`)."""
    entry = table.ATTENTION.pick(impl, case)
    row = contract.adapt(entry.load())
    if case.options and (reason := contract.why_not_given(row, [name for name in OPTIONS if getattr(case, name)])):
        raise ValueError(f"attention {impl!r} ({entry.target}) cannot run {', '.join(case.options)}: {reason}")
    return entry.name, (row, AttentionTraits.of(entry).isolates)


# The results of `row_of` under torch.compile, by the row's name: a traced function may return a name as a constant, but
# not a function.
_TRACED = SimpleNamespace()


@constant  # torch.compile calls it while it traces, and takes its result for a constant
def _traced(impl: str, *fields: Any) -> str:
    """The name of the row that runs `AttentionCase(*fields)`. Stores the result of `row_of` in _TRACED by this name."""
    name, row = _picked(impl, contract.AttentionCase(*fields))
    setattr(_TRACED, name, row)
    return name
