"""Rotary position embedding: its cases, its formula in float64, and the known mistakes.

`kinds.py` calls `questions`. The implementation is a function `f(x, positions)`, perhaps with a theta, or
`f(x, cos, sin)` with tables (S, D / 2). Or it is a module's class, built with a theta, a head dimension and a longest
sequence, and called as (x, positions). x is (B, H, S, D), positions are (S,). The pairs of columns that are rotated may
be neighbours (2i, 2i + 1) or lie in two halves (i, i + D / 2), but must be the same in all cases. A case's shape is
that of x. ROLES and BUILT list the names that parameters may have. A new mistake goes to `mistakes` or one of its
tables, and an exhibit of the museum, a published fault that makes it, to `tests/museum/rotary.py`.

Legend: B batch, H heads, S sequence length, D head dimension.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from lmsys import registry, signature
from lmsys.check import formulas, question
from lmsys.extremes.model import ROWS

ROLES: signature.Roles = {
    "x": ("x", "q", "input", "in_query_or_key", "t"),
    "positions": ("positions", "token_positions", "position_ids", "pos"),
    "cos": ("cos",),
    "sin": ("sin",),
    "theta": ("theta", "base", "rope_theta"),
}
BUILT: signature.Roles = {  # as ROLES, for the parameters of a class's constructor
    "theta": ROLES["theta"],
    "head_dim": ("head_dim", "d_k", "dim", "d_head", "rotary_dim"),
    "length": ("max_seq_len", "context_length", "max_position_embeddings", "max_len", "seq_len"),
}
THETA, LONGEST = 10_000.0, 2**11  # the theta of most cases; the longest sequence, so every position is below it
SMALL, ODD = (1, 2, 16, 64), (1, 2, 33, 64)  # shapes of x (B, H, S, D)
LATE = {"first position": LONGEST - 33}  # the last token of ODD is then at LONGEST - 1
CASES = (
    (
        formulas.Case("a few tokens", SMALL),
        formulas.Case("several batches, an odd length", (2, 3, 37, 32)),
        formulas.Case("positions that begin later", SMALL, more={"first position": 100}),
        formulas.Case("the same length at other positions", SMALL, more={"first position": 7, "step": 3}),
        formulas.Case("packed documents, whose positions restart", SMALL, more={"document": 5}),
        formulas.Case("one token at a late position", (2, 2, 1, 64), more={"first position": 200}),
        formulas.Case("a theta of its own", SMALL, more={"first position": 50, "theta": 500_000.0}),
        formulas.Case("late positions", ODD, more=LATE),
        formulas.Case("parts of wider rows", ODD, more={"spare columns": 3}),
        formulas.Case("a second backward of a retained graph", ODD, more=LATE | {"retained": True}),
    )
    + formulas.cases_in(formulas.NARROW, ["a few tokens"], SMALL)
    + formulas.cases_in(formulas.NARROW, ["late positions"], ODD, more=LATE)
    # In float32 and bfloat16.
    + formulas.cases_in(formulas.DTYPES[:2], ROWS, ODD, more={"first position": 3}, extreme=True)
)


def questions(entry: registry.Entry, options: question.Options) -> Iterator[question.Question]:
    """A question for each case. The first case also shows which pairs the implementation rotates."""
    implementation = entry.load()
    call = None if signature.is_module(implementation) else signature.called(implementation, ROLES)
    # A function that takes neither a theta nor tables is not asked about another theta.
    lacking = [] if call is None or call.has("theta") or call.has("cos") else ["theta"]
    return formulas.questions_of(CASES, partial(_fault_of, implementation, options), options, lacking)


def remark(entry: registry.Entry, options: question.Options) -> str:
    """A sentence that says which pairs are rotated. `kinds.py` ends the report with it."""
    return f"it turns {pairs_of(entry.load(), options)}"


@cache
def pairs_of(implementation: Any, options: question.Options) -> str:
    """NEIGHBOURS or HALVES, whichever is nearer to the implementation's result of the first case.

    HALVES if it raises an exception, which the first question then reports.
    """
    problems = {pairs: _problem(CASES[0], options, pairs) for pairs in (HALVES, NEIGHBOURS)}
    try:
        result = formulas.run(_call_of(implementation, problems[HALVES]), problems[HALVES])[formulas.RESULT].double()
        errors = {
            pairs: (result - formulas.outputs_of(right, x)[formulas.RESULT]).norm().item()
            for pairs, x in problems.items()
        }
    except Exception:
        return HALVES
    return min(errors, key=lambda pairs: errors[pairs])


def _call_of(implementation: Any, problem: formulas.Problem) -> signature.Called:
    """The implementation, called by roles. A class is built first, as a module with the problem's theta."""
    if signature.is_module(implementation):
        x = problem.inputs["x"]
        implementation = signature.built(
            implementation, BUILT, {"theta": problem.settings["theta"], "head_dim": x.shape[-1], "length": LONGEST}
        ).to(x.device)
    return signature.called(implementation, ROLES)


def _fault_of(implementation: Any, options: question.Options, case: formulas.Case) -> question.Fault | None:
    """The fault of the implementation in a case, or None."""
    problem = _problem(case, options, pairs_of(implementation, options))
    call = _call_of(implementation, problem)
    return formulas.judge(call, right, partial(mistakes, call), problem, plain_formula=plain)


def _problem(case: formulas.Case, options: question.Options, pairs: str) -> formulas.Problem:
    """The inputs of a case. The tables of cosines and sines are float32."""
    head_dim, theta = case.shape[-1], case.more.get("theta", THETA)
    x = formulas.drawn(options, "x", *case.shape)
    if case.extreme:
        ROWS[case.about](x.view(-1, head_dim))
    positions = torch.arange(case.shape[2]) % case.more.get("document", LONGEST) * case.more.get(
        "step", 1
    ) + case.more.get("first position", 0)
    angles = angles_of(x.double(), {"positions": positions, "theta": theta})
    return formulas.Problem.of(
        case,
        options,
        inputs={"x": x},
        settings={
            "positions": positions,
            "theta": theta,
            "pairs": pairs,
            "cos": angles.cos().float(),
            "sin": angles.sin().float(),
        },
        grad_output=formulas.drawn(options, "upstream", *case.shape),
    )


NEIGHBOURS, HALVES = "neighbours (2i, 2i + 1)", "halves (i, i + D / 2)"  # the pairs of columns that turn together
THETAS = (100.0, 1000.0, 10_000.0, 500_000.0, 1_000_000.0)  # thetas that an implementation may have hard-coded


def angles_of(x: torch.Tensor, settings: formulas.Settings) -> torch.Tensor:
    """positions · theta^(-2i / D) (S, D / 2), in x's dtype, at least float32."""
    return settings["positions"][:, None] * frequencies(x, settings["theta"])


def frequencies(x: torch.Tensor, theta: float) -> torch.Tensor:
    """theta^(-2i / D) for each pair i, (D / 2,), in x's dtype, at least float32."""
    columns = torch.arange(0, x.shape[-1], 2, device=x.device).to(torch.promote_types(x.dtype, torch.float32))
    return theta ** (-columns / x.shape[-1])


def turned(x: torch.Tensor, angles: torch.Tensor, pairs: str, columns: str = "") -> torch.Tensor:
    """x (..., S, D) with `pairs`, HALVES or NEIGHBOURS, rotated by angles (S, D / 2), in x's dtype.

    columns  the pairs that the tables of cosines and sines are laid out for; "" means `pairs`. Any others are a mistake
    """
    first, second = x.chunk(2, dim=-1) if pairs == HALVES else x.unflatten(-1, (-1, 2)).unbind(-1)
    # Each pair (a, b) of x as (-b, a), in the same columns; and the angle of each column.
    across = torch.cat((-second, first), -1) if pairs == HALVES else torch.stack((-second, first), -1).flatten(-2)
    by_column = torch.cat((angles, angles), -1) if (columns or pairs) == HALVES else angles.repeat_interleave(2, -1)
    return x * by_column.cos().to(x.dtype) + across * by_column.sin().to(x.dtype)


def by(angles: Callable[[torch.Tensor, formulas.Settings], torch.Tensor]) -> formulas.Formula:
    """The formula that rotates x by angles(x, settings), which are (S, D / 2)."""
    return lambda inputs, settings: turned(inputs["x"], angles(inputs["x"], settings), settings["pairs"])


right = by(angles_of)


# `right` with every angle too large by a relative eps of float32. `formulas.judge` allows twice the error that this
# makes: 2 units in the last place of an angle. Right implementations need this room. They compute a frequency by a
# power or an exponential, and mostly a reciprocal, which are off by at most one unit; the product with the position
# rounds once more.
plain = by(lambda x, s: angles_of(x, s) * (1 + torch.finfo(torch.float32).eps))


def mistakes(call: signature.Called, problem: formulas.Problem) -> formulas.Mistakes:
    """The mistakes for a problem, the plainest first.

    A function that is given tables of cosines and sines makes no mistakes in positions and frequencies.
    """
    plainest: dict[str, formulas.Formula] = {
        "x is turned the other way: the sine has the wrong sign": by(lambda x, s: -angles_of(x, s)),
        "sine and cosine are exchanged": by(lambda x, s: torch.pi / 2 - angles_of(x, s)),
        "x is returned unchanged": lambda inputs, _: inputs["x"] * 1,  # * 1: a result of its own, for autograd
        "pairs are mixed up: cos and sin are ordered for pairs (2i, 2i + 1), but x is turned in pairs (i, i + D / 2)": (
            _mixed(pairs=HALVES, columns=NEIGHBOURS)
        ),
        "pairs are mixed up: cos and sin are ordered for pairs (i, i + D / 2), but x is turned in pairs (2i, 2i + 1)": (
            _mixed(pairs=NEIGHBOURS, columns=HALVES)
        ),
        "only the first half of the head dimension is turned": _half_turned,
    }
    return {
        **formulas.forwards(plainest),
        **(
            {}
            if call.has("cos")
            # Roundings are computed in float32, not in float64, since implementations compute angles in float32.
            else formulas.forwards(ANGLES) | formulas.forwards(_rounded(problem.dtype), torch.float32)
        ),
        **formulas.forwards(
            {
                "axis 1, the heads, is taken for the sequence, which is axis 2": by(  # the angles are (H, 1, D / 2)
                    lambda x, s: angles_of(x, {**s, "positions": torch.arange(x.shape[1], device=x.device)})[:, None]
                )
            }
        ),
        **formulas.backwards(right, BACKWARDS),
    }


def _turning(times: float) -> formulas.Gradients:
    """A backward that rotates grad_output by `times` the angles; -1 would be right."""
    return lambda exact, _: {
        "x": turned(exact.grad_output, times * angles_of(exact.inputs["x"], exact.settings), exact.settings["pairs"])
    }


BACKWARDS = {  # mistakes in the backward
    "the backward turns the same way as the forward; it must turn back": _turning(1.0),
    "the backward does not turn": _turning(0.0),
}


def _mixed(pairs: str, columns: str) -> formulas.Formula:
    """Rotates `pairs` by tables that are laid out for the pairs `columns`."""
    return lambda inputs, settings: turned(inputs["x"], angles_of(inputs["x"], settings), pairs, columns)


def _half_turned(inputs: formulas.Inputs, settings: formulas.Settings) -> torch.Tensor:
    """Rotates the first half of the columns alone."""
    (x, rest), angles = inputs["x"].chunk(2, dim=-1), angles_of(inputs["x"], settings)
    return torch.cat([turned(x, angles[:, : x.shape[-1] // 2], settings["pairs"]), rest], dim=-1)


def _with(name: str, other: Any) -> formulas.Formula:
    """The formula with another "positions" or "theta": `other` is the value, or a function of the given one."""
    return by(lambda x, s: angles_of(x, {**s, name: other(s[name]) if callable(other) else other}))


ANGLES: dict[str, formulas.Formula] = {  # mistakes in the angles
    "positions are ignored: 0, 1, 2, ... is used, or the table of an earlier call": (
        _with("positions", lambda p: torch.arange(len(p), device=p.device))
    ),
    "positions are one too large, as if they began at 1": _with("positions", lambda p: p + 1),
    "positions are one too small": _with("positions", lambda p: p - 1),
    "all tokens are at the last position": _with("positions", lambda p: p[-1:].expand(len(p))),
    "the exponent is -i / D, not -2i / D": _with("theta", lambda theta: theta**0.5),
    **{f"theta is always {theta:,.0f}, whatever is given": _with("theta", theta) for theta in THETAS},
    "frequencies rise with the column: the sign of the exponent is wrong": _with("theta", lambda theta: theta**-1.0),
    "the exponent is -4i / D, not -2i / D": _with("theta", lambda theta: theta**2.0),
}


def _rounded(dtype: torch.dtype) -> dict[str, formulas.Formula]:
    """Roundings to `dtype` on the way to the angles, by the mistake in words."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(torch.float32)

    return {
        "positions are rounded to the dtype of x": (
            by(lambda x, s: rounded(s["positions"])[:, None] * frequencies(x, s["theta"]))
        ),
        "frequencies are rounded to the dtype of x": (
            by(lambda x, s: s["positions"][:, None] * rounded(frequencies(x, s["theta"])))
        ),
        "positions and frequencies are rounded to the dtype of x": (
            by(lambda x, s: rounded(rounded(s["positions"])[:, None] * rounded(frequencies(x, s["theta"]))))
        ),
        "angles are rounded to the dtype of x": by(lambda x, s: rounded(angles_of(x, s))),
    }
