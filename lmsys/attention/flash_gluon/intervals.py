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
    """(first, end) of owners [start, start + NUM); those past the end see nothing."""
    first_ptr, end_ptr, per_entry = extent
    owners = start + gl.arange(0, NUM, layout=LAYOUT)
    places = batch * per_entry * length + owners
    inside = owners < length
    return gl.load(first_ptr + places, mask=inside, other=0), gl.load(end_ptr + places, mask=inside, other=0)


@gluon.jit
def within(others, first, end):
    """Where owners, the first dimension, see others."""
    return (others[None, :] >= first[:, None]) & (others[None, :] < end[:, None])
