"""Rotary position embedding: the questions that it is asked, each held to float64.

`f(x, positions)`, perhaps with a theta; `f(x, cos, sin)` with tables (S, D / 2); or a module's class, built with a
theta, a head dimension and a longest sequence, and called as (x, positions). x is (B, H, S, D), positions (S). Pairs
may be neighbours (2i, 2i + 1) or of the two halves (i, i + D / 2), but the same pairs in all. A case's shape is that of
x.

Legend: B batch, H heads, S sequence length, D head dimension.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch

from lmsys.check.formulas import NARROW, RESULT, Asked, Problem, drawn, judge, outputs_of, questions_of, run
from lmsys.check.question import Fault, Options, Question
from lmsys.check.rotary_mistakes import HALVES, NEIGHBOURS, mistakes, plain, right
from lmsys.check.signature import Called, Roles, built, called, is_module
from lmsys.extremes.model import ROWS
from lmsys.registry import Entry

ROLES: Roles = {
    "x": ("x", "q", "input", "in_query_or_key", "t"),
    "positions": ("positions", "token_positions", "position_ids", "pos"),
    "cos": ("cos",),
    "sin": ("sin",),
    "theta": ("theta", "base", "rope_theta"),
}
BUILT: Roles = {
    "theta": ROLES["theta"],
    "head_dim": ("head_dim", "d_k", "dim", "d_head", "rotary_dim"),
    "length": ("max_seq_len", "context_length", "max_position_embeddings", "max_len", "seq_len"),
}
THETA, LONGEST = 10_000.0, 2**11
SMALL, ODD = (1, 2, 16, 64), (1, 2, 33, 64)
LATE = {"first position": LONGEST - 33}
CASES = (
    Asked("a few tokens", SMALL),
    Asked("several batches, an odd length", (2, 3, 37, 32)),
    Asked("positions that begin later", SMALL, more={"first position": 100}),
    Asked("the same length at other positions", SMALL, more={"first position": 7, "step": 3}),
    Asked("a theta of its own", SMALL, more={"first position": 50, "theta": 500_000.0}),
    Asked("late positions", ODD, more=LATE),
    *(Asked("a few tokens", SMALL, dtype) for dtype in NARROW),
    *(Asked("late positions", ODD, dtype, more=LATE) for dtype in NARROW),
    *(Asked(x, ODD, dtype, x, {"first position": 3}) for dtype in (torch.float32, torch.bfloat16) for x in ROWS),
)


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The cases; which pairs are turned is what the first one shows."""
    implementation = entry.load()
    call = None if is_module(implementation) else called(implementation, ROLES)
    takes_theta = call is None or call.has("theta") or call.has("cos")

    def reason(asked: Asked) -> str | None:
        return "it takes no theta" if "theta" in asked.more and not takes_theta else None

    return questions_of(CASES, partial(_judged, implementation, options), options, reason)


def remark(entry: Entry, options: Options) -> str:
    """Says which pairs are turned."""
    return f"it turns {pairs_of(entry.load(), options)}"


@cache
def pairs_of(implementation: Any, options: Options) -> str:
    """NEIGHBOURS or HALVES: the nearer to what it gives for the first case. HALVES where it raises."""
    problems = {pairs: _problem(CASES[0], options, pairs) for pairs in (HALVES, NEIGHBOURS)}
    try:
        result = run(_call_of(implementation, problems[HALVES]), problems[HALVES])[RESULT].double()
        errors = {pairs: (result - outputs_of(right, x)[RESULT]).norm().item() for pairs, x in problems.items()}
    except Exception:  # `judge` says so
        return HALVES
    return min(errors, key=lambda pairs: errors[pairs])


def _call_of(implementation: Any, problem: Problem) -> Called:
    """The function; of a class a module with the problem's theta."""
    if is_module(implementation):
        x = problem.inputs["x"]
        values = {"theta": problem.settings["theta"], "head_dim": x.shape[-1], "length": LONGEST}
        implementation = built(implementation, BUILT, values).to(x.device)
    return called(implementation, ROLES)


def _judged(implementation: Any, options: Options, asked: Asked) -> Fault | None:
    problem = _problem(asked, options, pairs_of(implementation, options))
    call = _call_of(implementation, problem)
    return judge(call, right, partial(mistakes, call), problem, plain_formula=plain)


def _problem(asked: Asked, options: Options, pairs: str) -> Problem:
    """The inputs of a case. Tables are float32."""
    head_dim, theta = asked.shape[-1], asked.more.get("theta", THETA)
    x = drawn(options, "x", *asked.shape)
    if asked.extreme:
        ROWS[asked.extreme](x.view(-1, head_dim))
    positions = torch.arange(asked.shape[2]) * asked.more.get("step", 1) + asked.more.get("first position", 0)
    angles = positions.double()[:, None] * theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    settings = {"positions": positions, "theta": theta, "pairs": pairs}
    tables = {"cos": angles.cos().float(), "sin": angles.sin().float()}
    return Problem.of(asked, options, {"x": x}, settings | tables, drawn(options, "upstream", *asked.shape))
