"""Rotary position embedding: the questions that it is asked, each held to float64.

`f(x, positions)`, perhaps with a theta; `f(x, cos, sin)` with tables (S, D / 2); or a module's class, built with a
theta, a head dimension and a longest sequence, and called as (x, positions). x is (B, H, S, D), positions (S). Pairs
may be neighbours (2i, 2i + 1) or of the two halves (i, i + D / 2), but the same pairs in all.

Legend: B batch, H heads, S sequence length, D head dimension.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lmsys import draws
from lmsys.check.formulas import RESULT, Problem, judge, outputs_of, run
from lmsys.check.question import Fault, Options, Question
from lmsys.check.rotary_mistakes import HALVES, NEIGHBOURS, mistakes, plain, right
from lmsys.check.signature import Builder, Called, Roles, called, is_module_class
from lmsys.extremes.model import huge, outlier, zeros
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
EXTREME = {"rows of zeros": zeros, "huge rows": huge, "rows with an outlier channel": outlier}


@dataclass(frozen=True)
class Asked:
    """A case: x (B, H, S, D), whose first token is at position `first`; of the others each is `step` later."""

    about: str
    shape: tuple[int, int, int, int]
    first: int = 0
    step: int = 1
    dtype: torch.dtype = torch.float32
    theta: float = THETA
    extreme: str = ""

    def __str__(self) -> str:
        last = self.first + self.step * (self.shape[2] - 1)
        told = f"{str(self.dtype)[6:]}, x {self.shape}, positions {self.first} to {last}, theta {self.theta:g}"
        return f"{self.about} ({told})"


def cases() -> Iterator[Asked]:
    """From the simplest to the rarest."""
    yield Asked("a few tokens", (1, 2, 16, 64))
    yield Asked("several batches, an odd length", (2, 3, 37, 32))
    yield Asked("positions that begin later", (1, 2, 16, 64), first=100)
    yield Asked("the same length at other positions", (1, 2, 16, 64), first=7, step=3)
    yield Asked("a theta of its own", (1, 2, 16, 64), first=50, theta=500_000.0)
    yield Asked("late positions", (1, 2, 33, 64), first=LONGEST - 33)
    for dtype in (torch.bfloat16, torch.float16):
        yield Asked("a few tokens", (1, 2, 16, 64), dtype=dtype)
        yield Asked("late positions", (1, 2, 33, 64), first=LONGEST - 33, dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16):
        for about in EXTREME:
            yield Asked(about, (1, 2, 33, 64), first=3, dtype=dtype, extreme=about)


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The cases; which pairs are turned is what the first one shows."""
    row = Row(entry.load())
    for asked in cases():
        reason = "it takes no theta" if asked.theta != THETA and not row.takes_theta else None
        judged = partial(row.judged, asked, options)
        yield Question(f"{asked.about}, {str(asked.dtype)[6:]}", judged, str(asked), reason, bool(asked.extreme))


def remark(entry: Entry, options: Options) -> str:
    """Says which pairs are turned."""
    return f"it turns {Row(entry.load()).pairs(options)}"


class Row:
    """A function or a class, called with x, and with positions or tables."""

    def __init__(self, implementation: Any):
        self.implementation = implementation
        self.is_class = is_module_class(implementation)
        self.call = None if self.is_class else called(implementation, ROLES)
        self.takes_theta = self.call is None or self.call.has("theta") or self.call.has("cos")
        self._pairs = cache(self._turned)

    def pairs(self, options: Options) -> str:
        """NEIGHBOURS or HALVES: the nearer to what it gives for the first case. HALVES where it raises."""
        return self._pairs(options)

    def _turned(self, options: Options) -> str:
        problem = problem_of(next(cases()), options, HALVES)
        try:
            found = run(self.of(problem), problem)[RESULT].double()
        except Exception:  # `judged` says so
            return HALVES
        errors = {
            pairs: (found - outputs_of(right, problem_of(next(cases()), options, pairs))[RESULT]).norm().item()
            for pairs in (NEIGHBOURS, HALVES)
            if found.shape == problem.inputs["x"].shape
        }
        return min(errors, key=lambda pairs: errors[pairs], default=HALVES)

    def of(self, problem: Problem) -> Called:
        """The function, of a class with its theta."""
        if self.call is not None:
            return self.call
        x = problem.inputs["x"]
        build = called(Builder(self.implementation), BUILT)
        module = build({"theta": problem.settings["theta"], "head_dim": x.shape[-1], "length": LONGEST})
        roles = called(module, ROLES).roles
        return Called(module.to(x.device), roles, by_place=False)

    def judged(self, asked: Asked, options: Options) -> Fault | None:
        return judge(
            (call := self.of(problem := problem_of(asked, options, self.pairs(options)))),
            right,
            partial(mistakes, call),
            problem,
            plain_formula=plain,
        )


def problem_of(asked: Asked, options: Options, pairs: str) -> Problem:
    """The inputs of a case. Tables are float32."""
    device, head_dim = "cuda" if torch.cuda.is_available() else "cpu", asked.shape[-1]

    def drawn(name: str) -> Tensor:
        count = math.prod(asked.shape)
        return draws.values(draws.key(options.seed, name), 0, count).view(asked.shape)

    x = drawn("x")
    if asked.extreme:
        EXTREME[asked.extreme](x.view(-1, head_dim))
    positions = torch.arange(asked.shape[2]) * asked.step + asked.first
    angles = positions.double()[:, None] * asked.theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    tables = {"cos": angles.cos().float().to(device), "sin": angles.sin().float().to(device)}
    settings: Mapping[str, Any] = {"positions": positions.to(device), "theta": asked.theta, "pairs": pairs, **tables}
    upstream = drawn("upstream").to(device, asked.dtype) if options.grad else None
    return Problem({"x": x.to(device, asked.dtype)}, settings, upstream, bool(asked.extreme))
