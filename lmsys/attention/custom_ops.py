"""Makes a row of the table from a forward and a backward kernel: PyTorch can differentiate, compile and trace it.

A *flash row* is an attention row (an implementation in table.py) of this kind. flash_torch.py, flash_triton.py,
flash_cuda.py and flash_gluon/launch.py each call `flash` with the two functions that launch their kernels. `flash`
returns an autograd Function, which eager calls use, and the function of the row. Under torch.compile, torch.func and
dispatch modes the row calls custom operators instead: opaque nodes of a graph, with known shapes (`_custom_op`).
Operators take no Python objects, so a `Pattern` (the options of a call) is passed to them as a text, numbers and
tensors: `_apart` takes it apart, and `_together` makes it again. A new option needs no change here if its value is a
tensor or a number; if its gradient is wanted, see NEEDS in lse.py.

Queries, keys and values may be parts of one tensor, which their projection has written. In an eager call their
gradients may then be parts of one tensor as well (`gradients_like`).

Legend: B batch, H query heads, Hkv key/value heads, N = H + 2 Hkv, S length, D head dimension.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention import contract, documents, hidden
from lmsys.attention.lse import NEEDS, attend_with_lse
from lmsys.attention.naive import naive
from lmsys.attention.pattern import Pattern
from lmsys.autograd import is_watched, no_forward_mode
from lmsys.kernels.custom_op import define

Forward = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, causal, scale) -> o, log-sum-exp
Backward = Callable[..., tuple[Tensor, ...]]  # (q, k, v, o, lse, do, causal, scale) -> dq, dk, dv
# The arguments that both operators take behind the tensors of attention, in the schema language of torch.library. The
# indices in this file count all arguments of an operator in this order:
#   forward   q, k, v, causal, scale, layout, numbers, floats, tensors
#   backward  q, k, v, o, lse, do, causal, scale, layout, numbers, floats, tensors
# Autograd does not look into a list. So the autograd Functions `CustomOp` and `Gradients` take each tensor of `tensors`
# as an argument of its own, from index 8 and from index 11 on.
ASKED = "bool causal, float scale, str layout, SymInt[] numbers, float[] floats, Tensor[] tensors"


def _like(x: Tensor) -> Tensor:
    """An empty tensor of x's shape (B, H, S, D), contiguous as (B, S, H, D), as the next projection reads it."""
    batch, heads, length, head_dim = x.shape
    return x.new_empty_strided(x.shape, (length * heads * head_dim, head_dim, heads * head_dim, 1))


def _laid_out(x: Tensor) -> Tensor:
    """x itself if it has the memory layout of `_like`, which results of an operator must have; else a copy in it."""
    return x if x.transpose(1, 2).is_contiguous() else _like(x).copy_(x)


def whole_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The contiguous tensor (B, S, N, D) of which q (B, H, S, D), k and v (B, Hkv, S, D) are the heads, in this order.

    None if they are not views of one such tensor.
    """
    (batch, heads, length, head_dim), (_, kv_heads, _, _) = q.shape, k.shape
    row = (heads + 2 * kv_heads) * head_dim
    if q.stride(2) != row or not k.shape == v.shape == (batch, kv_heads, length, head_dim):
        return None
    first, strides = q.storage_offset(), (length * row, head_dim, row, 1)
    offsets = first, first + heads * head_dim, first + (heads + kv_heads) * head_dim
    if (
        any(x.stride() != strides or x.storage_offset() != at for x, at in zip((q, k, v), offsets, strict=True))
        or len({x.untyped_storage().data_ptr() for x in (q, k, v)}) != 1
    ):
        return None
    return q.as_strided((batch, length, heads + 2 * kv_heads, head_dim), (length * row, row, head_dim, 1))


def gradients_like(
    q: Tensor, k: Tensor, v: Tensor, like: Callable[[Tensor], Tensor], together: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty dq, dk and dv: views of one tensor if q, k and v are, so that the projection's backward need not join them.

    Otherwise they are like(q), like(k) and like(v). They are so, too, if a row of a head is no multiple of 16 bytes,
    since the GPU's TMA needs such a multiple.

    like      makes an empty tensor with the shape of its argument
    together  False: never views of one tensor. For custom operators, whose results have a fixed layout
    """
    whole = whole_of(q, k, v) if together else None
    if whole is None or q.shape[-1] * q.element_size() % 16:
        return like(q), like(k), like(v)
    heads, kv_heads = q.shape[1], k.shape[1]
    dq, dk, dv = torch.empty_like(whole).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    return dq, dk, dv


def _apart(pattern: Pattern | None) -> tuple[str, tuple[int, ...], tuple[float, ...], list[Tensor]]:
    """Takes a pattern apart, for an operator: (layout, numbers, floats, tensors), all empty without a pattern.

    The layout names each option and the kinds of its values (`_kind`), such as "window:nn documents:ttttt".
    """
    options = {} if pattern is None else pattern.options
    parts = {name: x.parts if isinstance(x, documents.Documents) else (x,) for name, x in options.items()}
    parts |= {name: x for name, x in options.items() if isinstance(x, tuple)}  # a window with two sides
    layout = " ".join(f"{name}:{''.join(map(_kind, values))}" for name, values in parts.items())
    numbers, floats, tensors = ([x for values in parts.values() for x in values if _kind(x) == kind] for kind in "nft")
    return layout, tuple(numbers), tuple(floats), tensors


def _kind(value: Any) -> str:
    """The letter of a value in a layout: t tensor, f float, n any other number."""
    return "t" if isinstance(value, Tensor) else "f" if isinstance(value, float | torch.SymFloat) else "n"


def _together(causal: bool, layout: str, *parts: Sequence[Any]) -> dict[str, Pattern]:
    """{"pattern": the pattern that `_apart` has taken apart}, as a keyword argument for a launcher; {} without one.

    parts  numbers, floats and tensors, in this order
    """
    if not layout:  # no pattern, as in most calls: the quick way, since the GPU may wait for the host
        return {}
    next_of, given = dict(zip("nft", map(iter, parts), strict=True)), dict[str, Any]()
    for name, kinds in (part.split(":") for part in layout.split()):
        values = [next(next_of[kind]) for kind in kinds]
        several = documents.Documents.of_parts(*values) if name == "documents" else tuple(values)
        given[name] = several if len(kinds) > 1 else values[0]
    return {"pattern": Pattern(causal, **given)}


def _exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, pattern: Pattern | None = None) -> Tensor:
    """o by `naive`, computed in float32 or wider and returned in q's dtype."""
    wide = [x.to(torch.promote_types(q.dtype, torch.float32)) for x in (q, k, v)]
    if pattern is not None and pattern.bounded:  # rows with the trait `isolates` come here without `hidden.kept_apart`
        return hidden.kept_apart(naive, *wide, scale=scale, pattern=pattern).to(q.dtype)
    return naive(*wide, causal=causal, scale=scale, pattern=pattern).to(q.dtype)


def _custom_op(name: str, forward: Forward, backward: Backward) -> tuple[Callable[..., Tensor], Backward]:
    """Registers the operators `lmsys::<name>` and `lmsys::<name>_backward`, and returns two functions that call them.

    Both functions are differentiable, and take 4-D tensors:
    (q, k, v, causal, scale, pattern) -> o and (q, k, v, o, lse, do, causal, scale, pattern) -> dq, dk, dv.
    A pattern that is not None replaces `causal`. Second derivatives are computed by `naive`.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, *parts: Any) -> tuple[Tensor, Tensor]:
        o, lse = forward(q, k, v, causal, scale, **_together(causal, *parts))
        return _laid_out(o), lse

    def run_backward(*args: Any) -> tuple[Tensor, ...]:
        causal, _, *parts = args[6:]  # parts: layout, numbers, floats, tensors
        return tuple(map(_laid_out, backward(*args[:8], **_together(causal, *parts))))

    forward_op = define(
        name,
        f"(Tensor q, Tensor k, Tensor v, {ASKED}) -> (Tensor, Tensor)",
        run,
        lambda q, *_: (_like(q), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))),
        batched=True,
    )
    backward_op = define(
        f"{name}_backward",
        f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, {ASKED}) -> (Tensor, Tensor, Tensor)",
        run_backward,
        lambda q, k, v, *_: (_like(q), _like(k), _like(v)),
        batched=True,
    )

    class Gradients(torch.autograd.Function):
        """dq, dk, dv by `backward_op`. Their own derivatives are computed by `_exact`, in plain PyTorch."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
            return backward_op(*args[:11], args[11:])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            q, k, v, _, _, do, *ctx.asked = inputs[:11]  # asked: causal, scale, layout, numbers, floats
            ctx.save_for_backward(q, k, v, do, *inputs[11:])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            q, k, v, do, *tensors = ctx.saved_tensors
            causal, scale, *parts = ctx.asked
            function = partial(_exact, causal=causal, scale=scale, **_together(causal, *parts, tensors))
            _, pull = torch.func.vjp(lambda q, k, v, do: torch.func.vjp(function, q, k, v)[1](do), q, k, v, do)
            *gradients, of_do = pull(grads)
            # One gradient for each argument, in their order. It is None for o, lse, the five of `asked`, and the
            # tensors of the pattern.
            return *gradients, None, None, of_do, *[None] * (5 + len(tensors))

    class CustomOp(torch.autograd.Function):
        """o and the log-sum-exp by `forward_op`, differentiable.

        The backward is in this class, and not registered with the operator by torch.library: in compiled code that
        would cost the host about 15 us for each call.
        """

        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, Tensor]:
            return forward_op(*args[:8], args[8:])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            q, k, v, *ctx.asked = inputs[:8]  # asked: causal, scale, layout, numbers, floats
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(q, k, v, *output, *inputs[8:])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            q, k, v, o, lse, *tensors = ctx.saved_tensors
            args = q, k, v, o, lse, grads[0], *ctx.asked
            dqkv = backward_op(*args, tensors) if torch.compiler.is_compiling() else Gradients.apply(*args, *tensors)
            return *dqkv, *[None] * (5 + len(tensors))

    class Refusing(CustomOp):
        """`CustomOp` that refuses forward-mode derivatives by its `jvp`; torch.compile accepts no Function with one."""

        jvp = staticmethod(no_forward_mode)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, pattern: Pattern | None = None) -> Tensor:
        *parts, tensors = _apart(pattern)
        if not torch.compiler.is_compiling():
            return Refusing.apply(q, k, v, causal, scale, *parts, *tensors)[0]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return CustomOp.apply(q, k, v, causal, scale, *parts, *tensors)[0]
        # Without gradients the operator itself is called, and not the Function: if the parameters of a Function's
        # `forward` are *args, torch.compile takes the first for a context, passes one in place of q, and fails.
        return forward_op(q, k, v, causal, scale, *parts, tensors)[0]

    def gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *parts, tensors = _apart(args[8])  # the pattern
        return Gradients.apply(*args[:8], *parts, *tensors)

    return attend, gradients


def _autograd_function(name: str, forward: Forward, backward: Backward, gradients: Backward) -> Any:
    """The class `name` with `.apply(q, k, v, causal, scale, tile, pattern)` on (..., H, S, D) or (B, S, D).

    The last four arguments may be left out. The kernels take the maximum of the scores before they scale them, so
    `scale` must be positive (else ValueError).

    forward, backward  as in `flash`. They get `tile`, if one is given, as one more positional argument, and a pattern
                       as the keyword `pattern`
    gradients          called in place of `backward` if its results will be differentiated again
    """

    class Flash(torch.autograd.Function):
        """o by `forward`, and its gradients by `backward`. `Flash.kernels` has both, for `lse.attend_with_lse`."""

        @staticmethod
        def forward(
            ctx: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            causal: bool = False,
            scale: float | None = None,
            tile: Any = None,
            pattern: Pattern | None = None,
        ) -> Tensor:
            ctx.causal, ctx.tile = causal, () if tile is None else (tile,)
            ctx.options = {} if pattern is None else {"pattern": pattern}
            # A float, since Triton would make an int such as 1 a constant of the kernel.
            ctx.scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
            if ctx.scale <= 0:
                raise ValueError(f"{scale=} must be positive in {name}.apply; the row of the table takes any")
            if q.dim() == 4:  # no views here: each costs the host two microseconds
                o, lse = forward(q, k, v, causal, ctx.scale, *ctx.tile, **ctx.options)
            else:
                o, lse = forward(
                    contract.as_4d(q), contract.as_4d(k), contract.as_4d(v), causal, ctx.scale, *ctx.tile, **ctx.options
                )
                o, lse = o.reshape(q.shape), lse.view(q.shape[:-1])
            ctx.save_for_backward(q, k, v, o, lse, *([] if pattern is None else pattern.read_again))
            return o

        jvp = staticmethod(no_forward_mode)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            q, k, v, o, lse, *_ = ctx.saved_tensors
            asked, options, run = (ctx.causal, ctx.scale, *ctx.tile), ctx.options, backward
            if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated
                run, asked, options = gradients, (ctx.causal, ctx.scale, ctx.options.get("pattern")), {}
            if q.dim() == 4:
                return *run(q, k, v, o, lse, grads[0], *asked, **options), None, None, None, None
            q4, k4, v4, o4, do4 = map(contract.as_4d, (q, k, v, o, grads[0]))
            dqkv = run(q4, k4, v4, o4, lse.view(q4.shape[:-1]), do4, *asked, **options)
            return *(dx.reshape(x.shape) for dx, x in zip(dqkv, (q, k, v), strict=True)), None, None, None, None

    Flash.__name__ = Flash.__qualname__ = name
    Flash.kernels = forward, backward
    return Flash


def flash(
    name: str, class_name: str, forward: Forward, backward: Backward, registered: Backward | None = None
) -> tuple[Any, Callable[..., Any]]:
    """Makes a flash row: (its autograd Function, the class `class_name`; the row itself, a function called `name`).

    The row takes any scale. It calls the custom operators while torch.compile, torch.func or a dispatch mode is active
    (`is_watched`), and otherwise the autograd Function.

    forward     (q, k, v, causal, scale) -> o, log-sum-exp; it launches the kernels, as `backward` does
    backward    (q, k, v, o, lse, do, causal, scale) -> dq, dk, dv. Both also get a keyword `pattern`, if there is one
    registered  the function that the operator `lmsys::<name>_backward` calls; None: `backward`
    """
    operator, gradients = _custom_op(name, forward, registered or backward)
    eager = _autograd_function(class_name, forward, backward, gradients)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        pattern: Pattern | None = None,
    ) -> Any:
        """softmax(scale · q kᵀ) v: q (B, H, Q, D), k, v (B, Hkv, K, D) -> (B, H, Q, D), in memory linear in Q and K.

        A `pattern` replaces `causal`. With `pattern.return_lse` the log-sum-exp (B, H, Q) comes with o.
        """
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if scale <= 0:  # kernels take a positive scale: q is multiplied by the sign of the scale, or by 0
            q, scale = q * (-1 if scale < 0 else 0), -scale or 1.0
        if pattern is not None and not NEEDS.isdisjoint(pattern.options):  # a bias, sinks or `return_lse`
            if torch.compiler.is_exporting():
                options = ", ".join(sorted(NEEDS & pattern.options.keys()))
                raise ValueError(
                    f"a flash row is no operator under {options}, as torch.export needs; impl='vectorized' has it"
                )
            run = attend_with_lse
            if torch.compiler.is_compiling():  # the graph breaks here: torch.compile does not trace this form
                from lmsys.attention.untraced import attend_with_lse as run
            return run(eager, q, k, v, scale, pattern)
        causal = causal if pattern is None else pattern.causal
        return (
            operator(q, k, v, causal, scale, pattern)
            if is_watched()
            else eager.apply(q, k, v, causal, scale, None, pattern)
        )

    attend.__name__ = attend.__qualname__ = name
    # With `__wrapped__`, `inspect` finds the source of the row in the file of its kernels; result files record it.
    vars(attend).update(__signature__=inspect.signature(attend), __wrapped__=forward)
    return eager, attend
