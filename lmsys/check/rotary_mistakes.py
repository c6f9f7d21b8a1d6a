"""Mistakes that people make in rotary position embedding, tried to explain a wrong result: see `formulas`.

Legend: B batch, H heads, S sequence length, D head dimension.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lmsys.check.formulas import (
    Formula,
    Gradients,
    Inputs,
    Mistakes,
    Outputs,
    Problem,
    Settings,
    backwards,
    forwards,
)
from lmsys.check.signature import Called

NEIGHBOURS, HALVES = "neighbours (2i, 2i + 1)", "halves (i, i + D / 2)"
THETAS = (100.0, 1000.0, 10_000.0, 500_000.0, 1_000_000.0)
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


def mistakes(call: Called, problem: Problem) -> Mistakes:
    """The plainest first; of a function that is given tables, those of positions and frequencies are not its own."""
    plainest: dict[str, Formula] = {
        "it turns the other way: the sine has the wrong sign": by(lambda x, s: -angles_of(x, s)),
        "sine and cosine are exchanged": by(lambda x, s: math.pi / 2 - angles_of(x, s)),
        "x is returned as it is": lambda x, s: x["x"] * 1,
        "pairs are mixed up: tables of neighbours, and halves are turned": _mixed_with_halves,
        "pairs are mixed up: tables of halves, and neighbours are turned": _mixed_with_neighbours,
        "only the first half of the head dimension is turned": _half_turned,
    }
    of_angles = {} if call.has("cos") else forwards(ANGLES) | forwards(_rounded(problem.dtype), torch.float32)
    return {
        **forwards(plainest),
        **of_angles,
        **forwards({"the batch's second axis, heads, is taken for the sequence": _over_heads}),
        **backwards(right, BACKWARDS),
    }


def _turning(times: float) -> Gradients:
    """A backward that turns by so many times the angles."""

    def gradients(exact: Problem, _: Outputs) -> Outputs:
        angles = times * angles_of(exact.inputs["x"], exact.settings)
        return {"x": turned(exact.upstream, angles, exact.settings["pairs"])}

    return gradients


BACKWARDS = {
    "the backward turns as the forward does: it must turn back": _turning(1.0),
    "the backward does not turn": _turning(0.0),
}


def _mixed_with_neighbours(inputs: Inputs, settings: Settings) -> Tensor:
    """The tables' columns are laid out for halves, and neighbours are turned."""
    x, angles = inputs["x"], angles_of(inputs["x"], settings).repeat(1, 2)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    across = torch.stack((-second, first), dim=-1).flatten(-2)
    return x * angles.cos().to(x.dtype) + across * angles.sin().to(x.dtype)


def _mixed_with_halves(inputs: Inputs, settings: Settings) -> Tensor:
    x, angles = inputs["x"], angles_of(inputs["x"], settings).repeat_interleave(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos().to(x.dtype) + torch.cat((-second, first), dim=-1) * angles.sin().to(x.dtype)


def _half_turned(inputs: Inputs, settings: Settings) -> Tensor:
    (x, rest), angles = inputs["x"].chunk(2, dim=-1), angles_of(inputs["x"], settings)
    return torch.cat([turned(x, angles[:, : x.shape[-1] // 2], settings["pairs"]), rest], dim=-1)


def _at(positions: Callable[[Tensor], Tensor]) -> Formula:
    return by(lambda x, s: angles_of(x, {**s, "positions": positions(s["positions"])}))


def _with_theta(theta: float) -> Formula:
    return by(lambda x, s: angles_of(x, {**s, "theta": theta}))


def _with_power(power: float) -> Formula:
    """theta^(-2i / D) to this power."""
    return by(lambda x, s: angles_of(x, {**s, "theta": s["theta"] ** power}))


ANGLES: dict[str, Formula] = {
    "positions are ignored: they begin at 0, or a table of an earlier call is read again": (
        _at(lambda p: torch.arange(len(p), device=p.device))
    ),
    "positions begin at 1": _at(lambda p: p + 1),
    "positions are one too few": _at(lambda p: p - 1),
    "all tokens are at the last position": _at(lambda p: p[-1:].expand(len(p))),
    **{f"theta is always {theta:,.0f}, whatever is given": _with_theta(theta) for theta in THETAS},
    "frequencies rise with the column: the sign of the exponent is wrong": _with_power(-1.0),
    "the exponent is -i / D, not -2i / D": _with_power(0.5),
    "the exponent is -4i / D, not -2i / D": _with_power(2.0),
}


def _rounded(dtype: torch.dtype) -> dict[str, Formula]:
    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(torch.float32)

    def product(positions: Tensor, frequencies: Tensor) -> Tensor:
        return positions[:, None] * frequencies

    return {
        "positions are rounded to the dtype of x": (
            by(lambda x, s: product(rounded(s["positions"]), frequencies(x, s["theta"])))
        ),
        "frequencies are rounded to the dtype of x": (
            by(lambda x, s: product(s["positions"], rounded(frequencies(x, s["theta"]))))
        ),
        "positions and frequencies are rounded to the dtype of x": (
            by(lambda x, s: rounded(product(rounded(s["positions"]), rounded(frequencies(x, s["theta"])))))
        ),
        "angles are rounded to the dtype of x": by(lambda x, s: rounded(angles_of(x, s))),
    }


def _over_heads(inputs: Inputs, settings: Settings) -> Tensor:
    x = inputs["x"]
    heads = torch.arange(x.shape[1], device=x.device)
    angles = angles_of(x, {**settings, "positions": heads})[:, None, :]  # (H, 1, D / 2)
    return turned(x, angles, settings["pairs"])
