"""The contract of every attention row: the case it is asked to run, validation, and foreign signatures.

A row is an implementation in the table of `table.py`. `call.py` checks the inputs here, describes them as an
`AttentionCase`, by which the `supports(case)` of each row decides, and calls the row that `adapt` makes of a target. A
new option needs a field of `AttentionCase`; a new foreign signature is a case in `adapt`.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension, Dv that of the values.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmsys import signature
from lmsys.attention.documents import Documents
from lmsys.attention.pattern import OFFSETS, OPTIONS, TWO_SIDED, Pattern
from lmsys.kernels.custom_op import constant
from lmsys.values import finite, hold

FEW_QUERIES = 16  # with at most this many queries (decoding), tiles of queries alone do not fill a GPU
FLOAT32_MAX = torch.finfo(torch.float32).max
# By the name that a case has for the dtype.
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Sizes that stand in for those that torch.compile leaves open (dynamic shapes): see `constants_of`.
TYPICAL = {"batch": 2, "queries": 4096, "keys": 4096, "window": 128, "offset": 1, "prefix": 1}
TYPICAL_ON_CPU = TYPICAL | {"queries": 64, "keys": 64}  # where Triton may be interpreted


@dataclass(unsafe_hash=True)
class AttentionCase:
    """A call of attention in plain values, by which `supports(case)` of every row decides whether it can run it.

    A case must not be changed. It is not `frozen`, because each call of attention makes a case, and setting the fields
    of a frozen dataclass takes the host 2 us.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    causal: bool = False
    grad: bool = False
    device: str = "cpu"
    capability: tuple[int, int] | None = None  # the CUDA device's, else None
    scale: float | None = None  # None: head_dim ** -0.5
    value_dim: int | None = None  # head dimension of v; None: head_dim
    # The options of a `Pattern`: numbers by their value, tensors by True where one is given.
    window: int | tuple[int, int] | None = None
    offset: int = 0  # True if it is a tensor
    documents: bool = False
    key_lengths: bool = False
    mask: bool = False
    softcap: float | None = None
    prefix: int | None = None
    bias: bool = False
    alibi: bool = False
    sinks: bool = False
    return_lse: bool = False
    # The options that are given: name -> value. Two forms that few rows know are named TWO_SIDED and OFFSETS.
    options: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rare = {"window": isinstance(self.window, tuple) and TWO_SIDED, "offset": self.offset is True and OFFSETS}
        self.options = {rare.get(name) or name: value for name in OPTIONS if (value := getattr(self, name))}

    @property
    def plain(self) -> "AttentionCase":
        """The case without options."""
        without: dict[str, Any] = dict.fromkeys(OPTIONS)
        return replace(self, **without | {"offset": 0})

    def __str__(self) -> str:
        q = self.batch, self.heads, self.queries, self.head_dim
        k = self.batch, self.kv_heads, self.keys, self.head_dim
        v = "" if self.value_dim in (None, self.head_dim) else f" of head dimension {self.value_dim}"
        given = [name if value is True else f"{name} {value}" for name, value in self.options.items()]
        under = f" under {', '.join(given)}" if given else ""
        return f"q {q} with k and v {k}{v}{under} in {self.dtype} on {self.device}"


def case_of(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float | None = None, grad: bool | None = None
) -> AttentionCase:
    """The case that q (B, H, Q, D), k (B, Hkv, K, D) and v (B, Hkv, K, Dv) make under a pattern."""
    batch, heads, queries, head_dim = q.shape
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) if grad is None else grad
    return AttentionCase(
        # By place: batch, heads, kv_heads, queries, keys, head_dim, dtype, causal, grad.
        *(batch, heads, k.shape[1], queries, k.shape[2], head_dim, DTYPE_NAMES[q.dtype], pattern.causal, grad),
        device=q.device.type,
        capability=capability_of(q.device.index) if q.is_cuda else None,
        scale=scale,
        value_dim=None if v.shape[-1] == head_dim else v.shape[-1],
        **options_of(pattern),
    )


@constant  # torch.compile calls it while it traces, and takes its result for a constant
def capability_of(index: int | None) -> tuple[int, int]:
    """The compute capability, (major, minor), of the CUDA device of this index; None: of the current device."""
    return torch.cuda.get_device_capability(index)


def options_of(pattern: Pattern) -> dict[str, Any]:
    """The options of a pattern as fields of a case."""
    return {name: True if isinstance(x, Tensor | Documents) else x for name, x in pattern.options.items()}


def why_not_plain(case: AttentionCase, *known: str) -> str | None:
    """None, or why the case needs more than the options `known`, or has a v whose head dimension is not that of k."""
    return why_not_options(case, *known) or why_not_value_dim(case)


def why_not_options(case: AttentionCase, *known: str) -> str | None:
    """None if the case has no options but those `known` to a row; else a text that names the others."""
    unknown = [name for name in case.options if name not in known]
    return f"knows no {' and no '.join(unknown)}" if unknown else None


def why_not_value_dim(case: AttentionCase) -> str | None:
    """None if v has the head dimension of k; else a text that says that the row needs this."""
    return (
        None
        if case.value_dim in (None, case.head_dim)
        else f"needs v of the head dimension of k, {case.head_dim}; got {case.value_dim}"
    )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
    """Raises ValueError, which names the value at fault, unless q (..., H, Q, D) or (B, Q, D), k and v fit together."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor; got {type(x).__module__}.{type(x).__qualname__}")
        if x.layout != torch.strided or x.is_nested:
            raise ValueError(
                f"{name} must be a dense tensor (layout torch.strided);"
                f" got {'a nested tensor' if x.is_nested else f'layout {x.layout}'}"
            )
    if scale is not None and not torch.compiler.is_compiling():
        finite("scale", scale, least=-FLOAT32_MAX, most=FLOAT32_MAX)
    of_q, of_k, of_v, rank = q.shape, k.shape, v.shape, q.dim()  # each read of a shape costs the host a tenth of a us
    if not (rank == k.dim() == v.dim() and rank >= 3):
        raise ValueError(f"q, k, v must have one rank of at least 3; got shapes {_shapes(q, k, v)}")
    heads = (of_q[-3], of_k[-3]) if rank > 3 else ()
    if 0 in (of_q[-1], of_k[-1], of_v[-1], *heads):
        raise ValueError(f"q, k, v must have a head and a head dimension of at least 1; got shapes {_shapes(q, k, v)}")
    if of_k[:-1] != of_v[:-1]:
        raise ValueError(f"k and v must have one shape but for the head dimension; got {tuple(of_k)} and {tuple(of_v)}")
    if of_q[-1] != of_k[-1]:
        raise ValueError(f"q and k must have one head dimension; got {of_q[-1]} and {of_k[-1]}")
    if of_q[: max(1, rank - 3)] != of_k[: max(1, rank - 3)]:  # (B, S, D) has no head axis
        raise ValueError(f"q and k must have the same batch dimensions; got shapes {_shapes(q, k, v)}")
    if heads and heads[0] % heads[1]:
        raise ValueError(f"query heads ({heads[0]}) must be a multiple of key/value heads ({heads[1]})")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPE_NAMES:
        raise ValueError(f"q, k, v must have one dtype of {sorted(DTYPES)}; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q, k, v must be on a CPU or a CUDA device; got {q.device}")


def as_autocast(x: Any) -> Any:
    """x cast as autocast casts the arguments of torch's SDPA: floating-point tensors, but not float64."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def constants_of(case: AttentionCase) -> tuple[Any, ...]:
    """The fields of a case as constants, for torch.compile. Lengths that it leaves open become TYPICAL ones."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    fields, typical = [], TYPICAL_ON_CPU if case.device == "cpu" else TYPICAL

    def closed(name: str, value: int) -> int:
        """The value as a plain number, or the TYPICAL one where torch.compile leaves it open."""
        # int() would leave even a known length symbolic; the length of a range is a plain number.
        return typical[name] if name in typical and not has_static_value(value) else len(range(value))

    for name in AttentionCase.__match_args__:  # all but `options`
        value = getattr(case, name)
        if name in ("scale", "softcap"):  # `supports` asks only for their signs
            value = None if value is None else 1.0 if value > 0 else -1.0
        elif isinstance(value, tuple):
            value = tuple(closed(name, x) for x in value)
        elif isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            value = closed(name, value)
        fields.append(value)
    return tuple(fields)


def as_4d(x: Tensor) -> Tensor:
    """(B, S, D) as (B, 1, S, D); (..., H, S, D) as (B, H, S, D) with the leading dimensions flattened into one.

    It is a copy where the last dimension has another stride than 1, which no kernel reads well.
    """
    # Of a dimension of one element `contiguous` would leave any stride, and torch's flash kernel on a CPU refuses it.
    x = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return x.unsqueeze(1) if x.dim() == 3 else x if x.dim() == 4 else x.flatten(0, -4)


def aligned(x: Tensor) -> Tensor:
    """x itself if each of its rows is 16-byte aligned, or if it is contiguous; otherwise a contiguous copy.

    Given a tensor with rows that are not aligned, a kernel that moves 16 bytes at a time would read memory outside of
    the tensor, or end the process. A tensor that is expanded, with a stride of 0, is copied too.
    """
    fits = x.is_contiguous() or (
        x.stride(-1) == 1 and not any(not step or step * x.element_size() % 16 for step in x.stride()[:-1])
    )
    if torch.compiler.is_compiling():  # traced tensors have no addresses
        return x if fits else x.contiguous()
    if fits and not torch._C._functorch.is_functorch_wrapped_tensor(x) and not x.data_ptr() % 16:
        return x  # a tensor that torch.func has wrapped may hide a dimension, and is copied
    return x.clone(memory_format=torch.contiguous_format)


def with_aligned_gradient(o: Tensor) -> Tensor:
    """o, with a hook that makes its gradient `aligned` before a backward reads it."""
    if o.requires_grad and not torch.compiler.is_compiling():  # compiled code gives aligned gradients
        o.register_hook(aligned)
    return o


def for_scores(x: Tensor) -> Tensor:
    """q or k as operands of the scores: float16 becomes float32, since scores beyond 65,504 would be infinite."""
    return x.float() if x.dtype == torch.float16 else x


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """k or v (B, Hkv, K, D) repeated for every query head: (B, H, K, D), whose head h is head h // (H / Hkv) of x."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# The names that foreign functions give to these parameters.
ROLES = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "mask": ("mask", "attn_mask"),
}


@cache
def adapt(implementation: Any) -> Callable[..., Tensor]:
    """A row's callable, `f(q, k, v, *, causal, scale)` on 4-D tensors, made of `implementation`.

    The implementation is a function or a `torch.autograd.Function`; ValueError if it is not callable. The first of
    these rules that holds for it decides:

    1. A function with keywords `causal` and `scale`, or with `**kwargs`, is returned unchanged. No other implementation
       gets options of a `Pattern`. A function gets them by parameters of their names, or all of them by a parameter
       `pattern`: see `keywords_of`.
    2. An implementation whose fourth parameter is a flag (`_has_flag`) is called as CS336 writes it:
       `f(q, k, v, is_causal)` on (B, S, D), with as many key heads as query heads. Two kinds are excepted: those that
       have a parameter for the scale, by a name of ROLES, and functions that have one with the name `causal`.
    3. All others are called on 4-D tensors, with `causal` and `scale` by the names of ROLES. One that has no `causal`,
       but a `mask`, gets a boolean tensor (Q, K), True where a query sees a key.

    An autograd Function takes no keywords, so its arguments are given by position.
    """
    hold((callable(implementation), f"an attention row must be callable; got {implementation!r}"))
    taken, is_function = _parameters_used(implementation), signature.is_function(implementation)
    keywords = {name for name, x in taken.items() if x.kind is not x.POSITIONAL_ONLY}
    if not is_function and (_takes_all(implementation) or {"causal", "scale"} <= keywords):
        return implementation
    is_4d = "causal" in taken and not is_function or not taken.keys().isdisjoint(ROLES["scale"])
    if not is_4d and _has_flag(taken, is_function):
        return _adapt_cs336(implementation.apply if is_function else implementation)
    call = signature.called(implementation, ROLES, dict(list(taken.items())[3:]))

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        if causal and not (call.has("causal") or call.has("mask")):
            raise ValueError(f"{causal=}: this row has no parameter for it")
        if not call.has("scale"):
            _hold_default(scale, q)
        values: dict[str, Any] = {"causal": causal, "scale": q.shape[-1] ** -0.5 if scale is None else scale}
        if call.has("mask") and not call.has("causal"):
            visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            values["mask"] = visible.tril() if causal else visible
        return call(values, q, k, v)

    return row


def _has_flag(taken: Mapping[str, inspect.Parameter], is_function: bool) -> bool:
    """True if the fourth of these parameters, behind q, k and v, is the causal mask as a flag that is given by place.

    It has a name of ROLES, or no later parameter has one; then its default, if it has one, is True or False. A `mask`
    without a default is a flag of an autograd Function alone.
    """
    after_v = list(taken.values())[3:]
    if not after_v or after_v[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return False
    first, *later = after_v
    is_tensor = first.name in ROLES["mask"] and not is_function
    could_be = isinstance(first.default, bool) or (first.default is first.empty and not is_tensor)
    return first.name in ROLES["causal"] or (could_be and not any(x.name in ROLES["causal"] for x in later))


def _parameters_used(implementation: Any) -> dict[str, inspect.Parameter]:
    """The parameters that `adapt` gives arguments to, by name, in their order. For a function they are all.

    For an autograd Function they are the first four parameters of `forward` after ctx, and all later ones without a
    default. If `causal` comes later than the fourth, they are all parameters up to the last one with a name of ROLES.
    """
    taken = list(signature.parameters_of(implementation).items())
    if not signature.is_function(implementation):
        return dict(taken)
    places = [place for place, (name, _) in enumerate(taken, start=1) if name in ROLES["causal"] + ROLES["scale"]]
    last = max(places) if any(name in ROLES["causal"] for name, _ in taken[4:]) else 4
    return dict(taken[:last]) | {name: x for name, x in taken[4:] if x.default is x.empty}


def _takes_all(implementation: Any) -> bool:
    """True if the implementation has a parameter `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters_used(implementation).values())


def why_not_called(implementation: Any, case: AttentionCase) -> str | None:
    """None, or why an implementation cannot be called for the case: it has no parameter for `causal` or `scale`.

    `lmsys.check` asks before it checks a row.
    """
    taken = _parameters_used(implementation)
    takes_scale = _takes_all(implementation) or taken.keys() & set(ROLES["scale"])
    takes_causal = (
        _takes_all(implementation)
        or taken.keys() & {*ROLES["causal"], *ROLES["mask"]}
        or _has_flag(taken, signature.is_function(implementation))
    )
    without_causal = "it takes no causal" if case.causal and not takes_causal else None
    return without_causal if case.scale is None or takes_scale else "it takes no scale"


def keywords_of(row: Callable[..., Tensor], pattern: Pattern) -> dict[str, Any]:
    """The keywords that tell a row the pattern: `causal`, and each option that is given, by its name.

    A row with a parameter `pattern` gets the whole pattern instead, unless `causal` says everything. ValueError names
    the options that the row has no parameter for.
    """
    if not pattern.options:
        return {"causal": pattern.causal}
    if reason := why_not_given(row, tuple(pattern.options)):
        raise ValueError(reason)
    return (
        {"pattern": pattern}
        if why_not_given(row, ("pattern",)) is None
        else {"causal": pattern.causal, **pattern.options}
    )


@constant
def why_not_given(row: Callable[..., Tensor], options: Iterable[str]) -> str | None:
    """None, or why a row cannot be given these options: the parameters that it lacks, for a message.

    `**kwargs` do not count: the row might not read them.
    """
    missing = [name for name in options if not {name, "pattern"} & _parameters(row)]
    return f"it has no parameter {' and no '.join(f'`{name}`' for name in missing)}" if missing else None


# Their names in earlier commits, whose `call.py` runs with this file under `lmsys bench --against`.
told, why_not_told = keywords_of, why_not_given


@cache
def _parameters(row: Callable[..., Tensor]) -> frozenset[str]:
    """The names of a row's parameters."""
    return frozenset(inspect.signature(row).parameters)


def _adapt_cs336(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A row's callable, as `adapt` returns it, made of `function(q, k, v, is_causal)` on (B, S, D)."""

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        _hold_default(scale, q)
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        return only_o(function(*(x.flatten(0, 1) for x in (q, k, v)), causal)).view(*q.shape[:-1], v.shape[-1])

    return row


def only_o(result: Any) -> Tensor:
    """The result of a row that is not asked for a log-sum-exp. TypeError if it is no tensor, such as (o, lse)."""
    if not isinstance(result, Tensor):
        raise TypeError(
            f"it returns a {type(result).__name__}: return o alone, a tensor; (o, lse) is for a parameter `return_lse`"
        )
    return result


def _hold_default(scale: float | None, q: Tensor) -> None:
    """ValueError unless the scale is the default one."""
    if scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5):
        raise ValueError(f"{scale=}: this row knows only the default scale, head_dim ** -0.5")


def _shapes(*tensors: Tensor) -> str:
    """The shapes, for a message."""
    return ", ".join(str(tuple(x.shape)) for x in tensors)
