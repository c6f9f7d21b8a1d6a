"""Mistakes that people make in rotary position embedding, tried to explain a wrong result: see `formulas`.

Legend: B batch, H heads, S sequence length, D head dimension.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lmsys.check.formulas import Formula, Mistake, Outputs, Problem, backward, forward, grad_output_ignored, narrow
from lmsys.check.signature import Called

NEIGHBOURS, HALVES = "neighbours (2i, 2i + 1)", "halves (i, i + D / 2)"
THETAS = (100.0, 1000.0, 10_000.0, 500_000.0, 1_000_000.0)
Inputs = Mapping[str, Tensor]
Settings = Mapping[str, Any]
Angles = Callable[[Tensor, Settings], Tensor]  # of x and settings: (S, D / 2)


def angles_of(x: Tensor, settings: Settings) -> Tensor:
    """positions · theta^(-2i / D) (S, D / 2), in x's dtype, at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return settings["positions"].to(dtype)[:, None] * frequencies(x, settings["theta"])


def frequencies(x: Tensor, theta: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return theta ** (-torch.arange(0, x.shape[-1], 2, device=x.device).to(dtype) / x.shape[-1])


def turned(x: Tensor, angles: Tensor, pairs: str) -> Tensor:
    """x (..., S, D) with the pairs turned by angles (S, D / 2), in x's dtype."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if pairs == NEIGHBOURS else x.chunk(2, dim=-1)
    both = first * cos - second * sin, first * sin + second * cos
    return torch.stack(both, dim=-1).flatten(-2) if pairs == NEIGHBOURS else torch.cat(both, dim=-1)


def by(angles: Angles) -> Formula:
    return lambda inputs, settings: turned(inputs["x"], angles(inputs["x"], settings), settings["pairs"])


right = by(angles_of)


def plain(inputs: Inputs, settings: Settings) -> Tensor:
    """`right` with angles that are off by eps of float32: twice that, what is allowed, is 2 units in the last place.

    A frequency is a power or an exponential, which rounds by one of them at most, mostly inverted; the product with the
    position rounds once more.
    """
    angles = angles_of(inputs["x"], settings)
    return turned(inputs["x"], angles * (1 + torch.finfo(torch.float32).eps), settings["pairs"])


def mistakes(call: Called, problem: Problem) -> Iterator[Mistake]:
    """The plainest first; of a function that is given tables, those of positions and frequencies are not its own."""
    x, pairs = problem.inputs["x"], problem.settings["pairs"]
    dtype, head_dim = x.dtype, x.shape[-1]
    yield forward("it turns the other way: the sine has the wrong sign", by(lambda x, s: -angles_of(x, s)))
    yield forward("sine and cosine are exchanged", by(lambda x, s: math.pi / 2 - angles_of(x, s)))
    yield forward("x is returned as it is", lambda x, s: x["x"] * 1)
    for told, formula in _of_pairs().items():
        yield forward(told, formula)
    if not call.has("cos"):
        yield from _of_angles(dtype, head_dim)
        yield narrow("positions are rounded to the dtype of x", by(_positions_in(dtype)), torch.float32)
        yield narrow("frequencies are rounded to the dtype of x", by(_frequencies_in(dtype)), torch.float32)
        yield narrow("positions and frequencies are rounded to the dtype of x", by(_both_in(dtype)), torch.float32)
        yield narrow(
            "angles are rounded to the dtype of x",
            by(lambda x, s: angles_of(x, s).to(dtype).to(x.dtype)),
            torch.float32,
        )
    yield forward("the batch's second axis, heads, is taken for the sequence", _over_heads)
    yield grad_output_ignored(right)

    def of(angles: Callable[[Tensor], Tensor]) -> Callable[[Problem, Outputs], Outputs]:
        def gradients(exact: Problem, _: Outputs) -> Outputs:
            assert exact.grad_output is not None
            return {"x": turned(exact.grad_output, angles(angles_of(exact.inputs["x"], exact.settings)), pairs)}

        return gradients

    yield backward("the backward turns as the forward does: it must turn back", right, of(lambda a: a))
    yield backward("the backward does not turn", right, of(lambda a: 0 * a))


def _of_pairs() -> dict[str, Formula]:
    def mixed(tables_of_halves: bool) -> Formula:
        """The tables' columns are laid out for the one kind of pairs, and x is turned by the other."""

        def formula(inputs: Inputs, settings: Settings) -> Tensor:
            x, angles = inputs["x"], angles_of(inputs["x"], settings)
            if tables_of_halves:
                whole = torch.cat([angles, angles], dim=-1)
                first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
                across = torch.stack((-second, first), dim=-1).flatten(-2)
            else:
                whole = angles.repeat_interleave(2, dim=-1)
                first, second = x.chunk(2, dim=-1)
                across = torch.cat((-second, first), dim=-1)
            return x * whole.cos().to(x.dtype) + across * whole.sin().to(x.dtype)

        return formula

    def half_turned(inputs: Inputs, settings: Settings) -> Tensor:
        x, angles = inputs["x"], angles_of(inputs["x"], settings)
        width = x.shape[-1] // 2
        kept = angles[:, : width // 2]
        return torch.cat([turned(x[..., :width], kept, settings["pairs"]), x[..., width:]], dim=-1)

    return {
        "pairs are mixed up: tables of neighbours, and halves are turned": mixed(False),
        "pairs are mixed up: tables of halves, and neighbours are turned": mixed(True),
        "only the first half of the head dimension is turned": half_turned,
    }


def _of_angles(dtype: torch.dtype, head_dim: int) -> Iterator[Mistake]:
    def from_(first: Callable[[Tensor], Tensor]) -> Formula:
        return by(lambda x, s: angles_of(x, {**s, "positions": first(s["positions"])}))

    def powers(exponent: float) -> Formula:
        def angles(x: Tensor, s: Settings) -> Tensor:
            steps = torch.arange(0, x.shape[-1], 2, device=x.device).to(x.dtype)
            return s["positions"].to(x.dtype)[:, None] * s["theta"] ** (steps * exponent / x.shape[-1])

        return by(angles)

    def with_theta(theta: float) -> Formula:
        return by(lambda x, s: angles_of(x, {**s, "theta": theta}))

    yield forward(
        "positions are ignored: they begin at 0, or a table of an earlier call is read again",
        from_(lambda p: torch.arange(len(p), device=p.device)),
    )
    yield forward("positions begin at 1", from_(lambda p: p + 1))
    yield forward("positions are one too few", from_(lambda p: p - 1))
    yield forward("all tokens are at the last position", from_(lambda p: p[-1:].expand(len(p))))
    for theta in THETAS:
        told = f"theta is always {theta:,.0f}, whatever is given"
        yield forward(told, with_theta(theta))
    yield forward("frequencies rise with the column: the sign of the exponent is wrong", powers(1.0))
    yield forward("the exponent is -i / D, not -2i / D", powers(-0.5))
    yield forward("the exponent is -4i / D, not -2i / D", powers(-2.0))


def _positions_in(dtype: torch.dtype) -> Angles:
    return lambda x, s: s["positions"].to(dtype).to(x.dtype)[:, None] * frequencies(x, s["theta"])


def _frequencies_in(dtype: torch.dtype) -> Angles:
    return lambda x, s: s["positions"].to(x.dtype)[:, None] * frequencies(x, s["theta"]).to(dtype).to(x.dtype)


def _both_in(dtype: torch.dtype) -> Angles:
    return lambda x, s: (s["positions"].to(dtype)[:, None] * frequencies(x, s["theta"]).to(dtype)).to(x.dtype)


def _over_heads(inputs: Inputs, settings: Settings) -> Tensor:
    x = inputs["x"]
    heads = torch.arange(x.shape[1], device=x.device)
    angles = angles_of(x, {**settings, "positions": heads})[:, None, :]  # (H, 1, D / 2)
    return turned(x, angles, settings["pairs"])
