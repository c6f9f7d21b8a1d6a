"""The attention table, in reading order. A new kernel is a file beside this one and a row below."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import (
    FEW_QUERIES,
    AttentionCase,
    adapt,
    as_4d,
    as_autocast,
    case_of,
    check_inputs,
    constants_of,
    told,
    why_not_told,
)
from lmsys.attention.documents import Documents
from lmsys.attention.hidden import kept_apart
from lmsys.attention.lse import merge
from lmsys.attention.pattern import OPTIONS, Pattern, checked_pattern
from lmsys.kernels.custom_op import constant
from lmsys.registry import Entry, Table

__all__ = ["ATTENTION", "AttentionCase", "Documents", "Pattern", "attention", "merge"]

# Facts about a row. A function in a user's file has them as attributes.
TRAITS: dict[str, Any] = {
    "keeps_scores": False,  # it holds Q x K scores: memory grows as the square of the length
    "baseline": 0,  # speedups are over the timed row of the largest number; 0: never over this one
    "isolates": False,  # nothing that a pattern hides from a query changes its result, be it NaN
    "compiles": False,  # its first call runs torch.compile, for seconds
    "mask": "",  # module:attr of a function (pattern, queries, keys, device): what it reads of a pattern, made anew
    "kernels": "",  # a regular expression found in the names of its own device kernels: they count as attention
}
INTERVALS = "lmsys.attention.pattern:intervals"
BOOLEAN = "lmsys.attention.peers:boolean_mask"


def _ours(name: str, module: str, label: str, extra: str = "", any_case: bool = False, **traits: Any) -> Entry:
    module = f"lmsys.attention.{module}"
    supports = "" if any_case else f"{module}:{name}_supports"
    return Entry(name, f"{module}:{name}", label, supports=supports, extra=extra, traits=TRAITS | traits)


def _peer(
    name: str, label: str, extra: str = "peers", install: str = "", module: str = "peers", **traits: Any
) -> Entry:
    target = f"lmsys.attention.{module}:{name}"
    packages = {"supports": f"{target}_supports", "extra": extra, "install": install}
    return Entry(name, target, label, peer=True, **packages, traits=TRAITS | traits)


_flash_attn = partial(_peer, module="peers_flash_attn")


def is_measured(capability: tuple[int, int] | None) -> bool:
    """True for NVIDIA GPUs of a kind on which the rows of the table were timed: Hopper."""
    return capability == (9, 0) and torch.version.hip is None  # AMD's gfx90a has that number, too


ANY = 2**63
# Shapes in which another row than `flash_gluon` is the fastest, by (grad, head_dim, causal): the row, the most keys,
# and the least and the most queries of all heads and batch entries. `tests/attention/test_auto_order.py` holds them.
FASTER: dict[tuple[bool, int, bool], tuple[tuple[str, int, int, int], ...]] = {
    (False, 64, True): (("flash_triton", ANY, 0, 32_768),),
    (False, 64, False): (("flash_triton", ANY, 0, 24_576), ("sdpa_cudnn", ANY, 0, 49_152)),
    (False, 128, True): (("flash_triton", ANY, 0, 12_288), ("sdpa_cudnn", 512, 0, ANY)),
    (False, 128, False): (("flash_triton", ANY, 0, 12_288), ("sdpa_cudnn", 512, 0, ANY)),
    (True, 64, True): (("flash_triton", 512, 0, ANY), ("flash_triton", 1024, 262_144, ANY)),
    (True, 64, False): (("flash_gluon", 128, 0, ANY), ("flash_triton", 512, 0, 24_576)),
    (True, 128, True): (("flash_triton", 256, 0, ANY), ("flash_triton", 512, 262_144, ANY)),
    (True, 128, False): (("flash_triton", 256, 0, ANY),),
}


def _fastest_first(case: AttentionCase) -> tuple[str, ...]:
    """The rows that "auto" tries: on Hopper in the order measured there, on other GPUs torch's own choice first.

    Where `flash_gluon` cannot run, cuDNN has the faster forward, and above head_dim 64 the faster backward; up to 64
    `flash_triton` trains faster. None has a fast float32: there Triton multiplies without tensor cores. Under a pattern
    the first is the one that skips hidden tiles and needs nobody to keep hidden memory apart, and for few queries the
    one that divides the keys among programs. On a CPU there is none that Triton would interpret.

    On GPUs that nobody timed, options are an exception: SDPA has nothing for them but a mask of Q x K bytes, and skips
    no tile. There `flash_triton` is known to compile without spills; how fast it is, is not known.
    """
    if case.device == "cpu":
        return "sdpa_flash", "vectorized"
    if not is_measured(case.capability):
        return (
            ("flash_triton", "sdpa", "vectorized")
            if case.options and torch.version.hip is None
            else ("sdpa", "flash_triton", "vectorized")
        )
    if case.options or (case.queries <= FEW_QUERIES and case.queries < case.keys and not case.grad):
        # Keys and values of 1 GiB or more cuDNN reads faster on an H200, and as fast on an H100.
        is_large = not case.options and case.batch * case.kv_heads * case.keys * case.head_dim >= 2**28
        first = ("sdpa_cudnn", "flash_triton") if is_large else ("flash_triton", "sdpa_cudnn")
        return *first, "sdpa_efficient", "vectorized"
    if case.dtype == "float32":
        return "sdpa_efficient", "flash_triton", "vectorized"
    queries = case.batch * case.heads * case.queries
    shapes = FASTER.get((case.grad, case.head_dim, case.causal), ())
    faster = [row for row, keys, least, most in shapes if case.keys <= keys and least <= queries <= most]
    next_ = ("flash_triton", "sdpa_cudnn") if case.grad and case.head_dim <= 64 else ("sdpa_cudnn", "flash_triton")
    return *faster, "flash_gluon", *next_, "sdpa_flash", "sdpa_efficient", "vectorized"


ATTENTION = Table(
    "attention",
    [
        _ours("naive", "naive", "naive PyTorch", any_case=True, color="#00bbff", keeps_scores=True, baseline=1),
        _ours("naive_compiled", "naive", "naive, torch.compile", color="#cc6611", keeps_scores=True, compiles=True),
        _ours("vectorized", "vectorized", "vectorized PyTorch", any_case=True, color="#445511", keeps_scores=True),
        _ours("flash_torch", "flash_torch", "FlashAttention-2, PyTorch", color="#7700ee", mask=INTERVALS),
        _ours(
            "flash_triton_torch_bwd",
            "flash_triton",
            "Triton forward, PyTorch backward",
            extra="triton",
            color="#ddaa00",
            mask=INTERVALS,
            kernels=r"^_(fwd|split_keys|combine)_kernel$",
        ),
        _ours(
            "flash_triton",
            "flash_triton",
            "FlashAttention-2, Triton",
            extra="triton",
            color="#ff88aa",
            isolates=True,
            mask=INTERVALS,
            kernels=r"^_(fwd|split_keys|combine|dq|dq_again|dkdv|dkdv_again)_kernel$",
        ),
        Entry(
            "flash_gluon",
            "lmsys.attention.flash_gluon.kernels:flash_gluon",
            "Gluon, Hopper",
            supports="lmsys.attention.flash_gluon.support:flash_gluon_supports",
            extra="triton",
            traits=TRAITS
            | {
                "color": "#111188",
                "mask": INTERVALS,
                "kernels": r"^(forward|preprocess|backward|postprocess)_kernel$",
            },
        ),
        _ours(
            "flash_cuda",
            "flash_cuda",
            "FlashAttention-2, CUDA C++",
            color="#552222",
            kernels=r"^(fwd|dq|dkdv)_kernel\b",
        ),
        _peer("sdpa", "SDPA, PyTorch's choice", color="#111122", baseline=3, mask=BOOLEAN),
        _peer("sdpa_math", "SDPA math", color="#994477", keeps_scores=True, mask=BOOLEAN),
        _peer("sdpa_efficient", "SDPA efficient", color="#442255", mask=BOOLEAN),
        _peer("sdpa_flash", "SDPA flash", color="#9977ff", baseline=2, mask=BOOLEAN),
        _peer("sdpa_cudnn", "SDPA cuDNN", color="#aabb55", mask=BOOLEAN),
        _peer("flex", "FlexAttention", color="#4455aa", compiles=True, mask="lmsys.attention.peers:block_mask"),
        _flash_attn("varlen_attn", "torch varlen_attn", "", color="#77bb77"),
        _flash_attn("flash_attn_2", "flash-attn 2", "", "flash-attn --no-build-isolation", color="#bb77bb"),
        _flash_attn(
            "flash_attn_3",
            "flash-attn 3, Hopper",
            "",
            "flash-attn-3 from PyTorch's own package index, as docs/install.md says,",
            color="#dd0044",
        ),
        _flash_attn("flash_attn_4", "flash-attn 4 (CuTe)", color="#008855"),
    ],
    group="lmsys.attention",
    auto=_fastest_first,
)


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
        q, k, v = (as_autocast(x) for x in (q, k, v))
    check_inputs(q, k, v, scale)
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
    q4, k4, v4 = as_4d(q), as_4d(k), as_4d(v)
    if pattern.causal and not pattern.bounded and k4.shape[2] > q4.shape[2]:  # keys that no query sees
        k4, v4 = k4[:, :, : q4.shape[2]], v4[:, :, : q4.shape[2]]
        if pattern.bias is not None:
            pattern = replace(pattern, bias=pattern.bias[..., : q4.shape[2]])
    row, isolates = row_of(impl, case_of(q4, k4, v4, pattern, scale=scale))
    if 0 in (*q4.shape, *k4.shape):
        row, options = ATTENTION["naive"].load(), {"pattern": pattern}  # there is nothing to compute
    elif pattern.bounded and not isolates:
        row, options = partial(kept_apart, row), {"pattern": pattern}
    else:
        options = told(row, pattern)
    # A row's products have the dtypes that it gives them.
    with torch.autocast(q.device.type, enabled=False) if autocast else nullcontext():
        result = row(q4, k4, v4, scale=scale, **options)
    if return_lse:
        return result[0].reshape(*q.shape[:-1], v.shape[-1]), result[1].reshape(q.shape[:-1])
    return result.reshape(*q.shape[:-1], v.shape[-1])


def row_of(impl: str, case: AttentionCase) -> tuple[Callable[..., Any], bool]:
    """The function of the row that runs a case, and its trait "isolates"; ValueError where none can."""
    if torch.compiler.is_compiling():  # which asks once for cases of many lengths
        return getattr(_TRACED, _traced(impl, *constants_of(case)))
    return _picked(impl, case)[1]


def _picked(impl: str, case: AttentionCase) -> tuple[str, tuple[Callable[..., Any], bool]]:
    entry = ATTENTION.pick(impl, case)
    row = adapt(entry.load())
    if case.options and (reason := why_not_told(row, [name for name in OPTIONS if getattr(case, name)])):
        raise ValueError(f"attention {impl!r} ({entry.target}) cannot run {', '.join(case.options)}: {reason}")
    return entry.name, (row, entry.trait("isolates"))


_TRACED = SimpleNamespace()  # what torch.compile has asked for, by names: it takes no function for a constant


@constant
def _traced(impl: str, *fields: Any) -> str:
    name, row = _picked(impl, AttentionCase(*fields))
    setattr(_TRACED, name, row)
    return name
