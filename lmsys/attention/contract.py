"""The contract of attention rows: checks of inputs, the case that a row is asked to run, and how functions are called.

A row is an implementation in the table of `table.py`. `attention` in `call.py` checks its inputs by `check_inputs`, and
describes them as an `AttentionCase`. By this case the `supports(case)` of each row decides if the row can run.
`attention` then calls the row's function, which `adapt` wraps if it has another signature than ours. A new option needs
a field of `AttentionCase`; to accept another signature, add a rule to `adapt`.

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

FEW_QUERIES = 16  # decoding: with at most this many queries, a program for each tile of queries does not fill a GPU
FLOAT32_MAX = torch.finfo(torch.float32).max
# {name of a dtype in `AttentionCase.dtype`: the dtype}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# If torch.compile leaves a size open (dynamic shapes), the row is picked by this value: see `constants_of`.
TYPICAL = {"batch": 2, "queries": 4096, "keys": 4096, "window": 128, "offset": 1, "prefix": 1}
TYPICAL_ON_CPU = TYPICAL | {"queries": 64, "keys": 64}  # smaller, since Triton may run in its interpreter there


@dataclass(unsafe_hash=True)
class AttentionCase:
    """A call of attention, described by plain values. By them the `supports(case)` of a row decides if it can run.

    Do not change a case after it is made. It is not `frozen`, because each call of attention makes a case, and setting
    the fields of a frozen dataclass takes the host 2 us.
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
    # {name: value} of the options that are given. Two forms of options that few rows support have names of their own: a
    # window of two sides is TWO_SIDED, and an offset that is a tensor is OFFSETS.
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
    """The case of a call with q (B, H, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv) and the options of a pattern.

    grad  True: gradients are needed; None: they are if gradients are recorded now and q, k or v require them
    """
    batch, heads, queries, head_dim = q.shape
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) if grad is None else grad
    return AttentionCase(
        # The positional arguments are batch, heads, kv_heads, queries, keys, head_dim, dtype, causal, grad.
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
    """The options of a pattern as fields of a case: True in place of tensors and `Documents`."""
    return {name: True if isinstance(x, Tensor | Documents) else x for name, x in pattern.options.items()}


def why_not_plain(case: AttentionCase, *known: str) -> str | None:
    """None, or why a row that has only the options `known`, and only v of k's head dimension, cannot run the case."""
    return why_not_options(case, *known) or why_not_value_dim(case)


def why_not_options(case: AttentionCase, *known: str) -> str | None:
    """A text that names the options of the case that a row does not support, or None; it supports those in `known`."""
    unknown = [name for name in case.options if name not in known]
    return f"knows no {' and no '.join(unknown)}" if unknown else None


def why_not_value_dim(case: AttentionCase) -> str | None:
    """A text that says that the row needs v of k's head dimension, if the case has another, or None."""
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
    # Shapes are read once: each read costs the host a tenth of a microsecond.
    of_q, of_k, of_v, rank = q.shape, k.shape, v.shape, q.dim()
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
    """x in the dtype of autocast, as torch's SDPA casts its arguments; float64 and integer tensors are not cast."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def constants_of(case: AttentionCase) -> tuple[Any, ...]:
    """The fields of a case as plain constants, for torch.compile. Sizes that it leaves open become TYPICAL ones.

    A graph with dynamic sizes serves many sizes, so its row must be picked once, by typical sizes.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value

    fields, typical = [], TYPICAL_ON_CPU if case.device == "cpu" else TYPICAL

    def closed(name: str, value: int) -> int:
        """The value as a plain number, or the TYPICAL one if torch.compile leaves the value open."""
        # int() of a symbolic number would stay symbolic, even if its value is known. len(range(...)) is a plain number.
        return typical[name] if name in typical and not has_static_value(value) else len(range(value))

    for name in AttentionCase.__match_args__:  # all but `options`
        value = getattr(case, name)
        if name in ("scale", "softcap"):  # the `supports` of rows depends on their signs alone
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
    # `contiguous()` would not change the stride of a last dimension with one element, but torch's flash kernel on a CPU
    # needs stride 1 there, so `clone` makes the copy.
    x = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return x.unsqueeze(1) if x.dim() == 3 else x if x.dim() == 4 else x.flatten(0, -4)


def aligned(x: Tensor) -> Tensor:
    """x itself if it begins 16-byte aligned, and is contiguous or has aligned rows; otherwise a contiguous copy.

    A kernel that moves 16 bytes at a time would read memory outside of a tensor whose rows are not aligned, or end the
    process. An expanded tensor, with a stride of 0, is copied too, and so is a tensor that torch.func wraps.
    """
    fits = x.is_contiguous() or (
        x.stride(-1) == 1 and not any(not step or step * x.element_size() % 16 for step in x.stride()[:-1])
    )
    if torch.compiler.is_compiling():  # traced tensors have no addresses
        return x if fits else x.contiguous()
    if fits and not torch._C._functorch.is_functorch_wrapped_tensor(x) and not x.data_ptr() % 16:
        return x  # a tensor that torch.func wraps may have one more dimension inside, which nobody sees: it is copied
    return x.clone(memory_format=torch.contiguous_format)


def with_aligned_gradient(o: Tensor) -> Tensor:
    """o, with a hook that calls `aligned` on its incoming gradient before the row's backward reads it."""
    if o.requires_grad and not torch.compiler.is_compiling():  # gradients of compiled code are aligned
        o.register_hook(aligned)
    return o


def for_scores(x: Tensor) -> Tensor:
    """q or k as operands of the scores: float16 becomes float32, since scores beyond 65,504 would be infinite."""
    return x.float() if x.dtype == torch.float16 else x


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """k or v (B, Hkv, K, D) repeated for every query head: (B, H, K, D), whose head h is head h // (H / Hkv) of x."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# {our name of a parameter: the names that functions of other people give to it}
ROLES = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "mask": ("mask", "attn_mask"),
}


@cache
def adapt(implementation: Any) -> Callable[..., Tensor]:
    """Makes a row's callable, `f(q, k, v, *, causal, scale)` on 4-D tensors, of somebody's `implementation`.

    The implementation is a function or a `torch.autograd.Function`; ValueError if it is not callable. Its parameters
    decide how it is called, by the first of these rules that holds:

    1. A function with keywords `causal` and `scale`, or with `**kwargs`, is returned unchanged. Only such a function
       can get the options of a `Pattern`: each by a parameter of its name, or all by a parameter `pattern`
       (`keywords_of`).
    2. An implementation whose fourth parameter is a flag (`_has_flag`) is called as in the course CS336:
       `f(q, k, v, is_causal)` on (B, S, D), with as many key heads as query heads. This rule does not hold if there is
       a parameter for the scale, by a name of ROLES, or if a plain function has a parameter named `causal`.
    3. All others are called on 4-D tensors, with `causal` and `scale` by the names of ROLES. If there is no parameter
       for `causal`, but one for a mask, it gets a boolean tensor (Q, K), True where a query sees a key.

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
    """True if the fourth of these parameters, after q, k and v, is a positional flag that says if attention is causal.

    A parameter with a name of ROLES["causal"] is such a flag. One with another name is a flag if no later parameter has
    such a name, and if its default is True or False, or it has no default. But if a plain function has a parameter with
    a name of ROLES["mask"] and without a default, this is a tensor, and no flag.

    is_function  True: they are the parameters of an autograd Function; False: of a plain function
    """
    after_v = list(taken.values())[3:]
    if not after_v or after_v[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return False
    first, *later = after_v
    is_tensor = first.name in ROLES["mask"] and not is_function
    could_be = isinstance(first.default, bool) or (first.default is first.empty and not is_tensor)
    return first.name in ROLES["causal"] or (could_be and not any(x.name in ROLES["causal"] for x in later))


def _parameters_used(implementation: Any) -> dict[str, inspect.Parameter]:
    """The parameters, by name and in order, to which `adapt` gives arguments; all parameters of a plain function.

    For an autograd Function they are the first four parameters of `forward` after ctx, and all later ones without a
    default. But if a parameter behind the fourth has a name of ROLES["causal"], they are all parameters up to the last
    one for `causal` or `scale`, and the later ones without a default.
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
    """None, or a reason: the case needs `causal` or a scale, and the implementation has no parameter for it.

    `lmsys.check` calls this before it checks a row.
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
    """The keyword arguments by which a row gets the pattern: `causal`, and each option that is given, by its name.

    A row with a parameter `pattern` gets the whole pattern instead, unless there are no options besides `causal`.
    ValueError names the options for which the row has no parameter.
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
    """A text that names the parameters that the row lacks for these options, or None.

    `**kwargs` do not count as parameters for options: the row might not read them.
    """
    missing = [name for name in options if not {name, "pattern"} & _parameters(row)]
    return f"it has no parameter {' and no '.join(f'`{name}`' for name in missing)}" if missing else None


# Earlier commits have these names for the two functions. Under `lmsys bench --against` the `call.py` of an earlier
# commit runs with this file.
told, why_not_told = keywords_of, why_not_given


@cache
def _parameters(row: Callable[..., Tensor]) -> frozenset[str]:
    """The names of a row's parameters."""
    return frozenset(inspect.signature(row).parameters)


def _adapt_cs336(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a row's callable, as `adapt` returns it, of `function(q, k, v, is_causal)` on (B, S, D)."""

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        _hold_default(scale, q)
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        o = only_o(function(*(x.flatten(0, 1) for x in (q, k, v)), causal))
        # Another shape stays as it is, for those who check results: `view` would take any with as many elements.
        return o.unflatten(0, q.shape[:2]) if o.shape[:-1] == (q.shape[:2].numel(), q.shape[2]) else o

    return row


def only_o(result: Any) -> Tensor:
    """The result itself, if it is a tensor; else TypeError. For rows that are not asked for a log-sum-exp."""
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
