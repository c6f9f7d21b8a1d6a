"""Patterns, as kernels read them: where the interval that each query, or each key, sees begins and ends.

`extent` is what a kernel is given of `lmsys.attention.bounds.Bounds`: two pointers, to `first` and `end`, and whether
each batch entry has rows of its own (1) or all have the same (0). A dense kernel is given None for each, and none of
this becomes code.
Owners are the queries of a forward, and the keys of a backward; others are those that they see.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def edges(extent, batch, start, length, NUM: gl.constexpr):
    """Owners [start, start + NUM), of `length`: some see [low, stop), all of them see [full_from, full_to)."""
    first_ptr, end_ptr, per_entry = extent
    rows = batch * per_entry * length
    one = rows + gl.minimum(start, length - 1)
    last = rows + gl.minimum(start + NUM, length) - 1
    return gl.load(first_ptr + one), gl.load(end_ptr + last), gl.load(first_ptr + last), gl.load(end_ptr + one)


@gluon.jit
def intervals(extent, batch, start, length, NUM: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the intervals of owners [start, start + NUM) begin, and how long they are; 0 of those past the end."""
    first_ptr, end_ptr, per_entry = extent
    owners = start + gl.arange(0, NUM, layout=LAYOUT)
    places = batch * per_entry * length + owners
    inside = owners < length
    first = gl.load(first_ptr + places, mask=inside, other=0)
    return first, gl.maximum(gl.load(end_ptr + places, mask=inside, other=0) - first, 0)


@gluon.jit
def hide_outside(x, others, first, length, HIDDEN: gl.constexpr):
    """x (owners, others), but HIDDEN, 0 or -inf, where an owner does not see the other.

    By one comparison: unsigned, the others before `first` are farthest from it. As two, or where the compiler sees how
    the distances come about, a step takes 60 to 150 instructions more, and spills registers.
    """
    ASM: gl.constexpr = _hide_outside_asm(HIDDEN)
    arguments = [x, others[None, :], first[:, None], length[:, None]]
    return gl.inline_asm_elementwise(ASM, "=f,f,r,r,r", arguments, dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _hide_outside_asm(hidden):
    bits = {0.0: "0f00000000", float("-inf"): "0fFF800000"}[hidden]
    return f"""{{
        .reg .pred seen;
        .reg .b32 distance;
        sub.s32 distance, $2, $3;
        setp.lt.u32 seen, distance, $4;
        selp.f32 $0, $1, {bits}, seen;
    }}"""
