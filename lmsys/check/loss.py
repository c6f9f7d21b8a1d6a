"""Losses: the questions that they are asked, each held to float64.

`f(logits, targets)`, or with the head in it `f(hidden, weight, targets)` (the weight may come first); each may take an
`ignore_index`. The loss is the mean over all tokens that count. A module's class is built without arguments.

Legend: N tokens, V vocabulary, M d_model.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys import draws
from lmsys.check.formulas import RESULT, Problem, judge, run
from lmsys.check.loss_mistakes import mistakes, plain, right
from lmsys.check.question import Fault, Options, Question
from lmsys.check.signature import Called, called, is_module_class, names_of, parameters_of
from lmsys.config import IGNORED
from lmsys.extremes.loss import KINDS, WIDTH, write_head, write_kind
from lmsys.registry import Entry

ROLES = {
    "hidden": ("hidden", "input", "x", "h", "hidden_states"),
    "logits": ("logits", "predictions", "scores"),
    "weight": ("weight", "w", "linear_weight", "lin_weight", "head"),
    "targets": ("targets", "target", "labels", "label", "y"),
    "ignore_index": ("ignore_index", "ignored", "ignore"),
}
UPSTREAM = 0.625  # the gradient of the loss: no 1, and exact
TOKENS, VOCABULARY = 101, 517  # no multiple of anything
ALL = 10**9  # tokens


@dataclass(frozen=True)
class Asked:
    """A case. ignored: so many of the first tokens; None: the function takes no ignore_index, or needs none."""

    about: str
    tokens: int
    vocab_size: int
    dtype: torch.dtype = torch.float32
    kind: int = 0
    ignored: int | None = None
    ignore_index: int = IGNORED

    @property
    def shape(self) -> str:
        left_out = f", {min(self.ignored, self.tokens)} ignored as {self.ignore_index}" if self.ignored else ""
        return f"{self.about} ({str(self.dtype)[6:]}, {self.tokens} tokens, {self.vocab_size} classes{left_out})"


def cases() -> Iterator[Asked]:
    """From the simplest to the rarest; extreme ones last."""
    yield Asked("a few tokens", 24, 96)
    yield Asked("a vocabulary that no block divides", TOKENS, VOCABULARY)
    yield Asked("more tokens than a chunk", 2 * TOKENS + 128, VOCABULARY)
    yield Asked("ignored tokens", 2 * TOKENS + 128, VOCABULARY, ignored=TOKENS)
    yield Asked("another ignore_index", TOKENS, VOCABULARY, ignored=TOKENS // 3, ignore_index=7)
    for dtype in (torch.bfloat16, torch.float16):
        yield Asked("a vocabulary that no block divides", TOKENS, VOCABULARY, dtype)
    for dtype in (torch.float32, torch.bfloat16):
        for about, kind in KINDS.items():
            yield Asked(about, TOKENS, VOCABULARY, dtype, kind)
    yield Asked("all tokens ignored", 24, 96, ignored=ALL)


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The cases that the function can be asked."""
    call = called(_instance(entry.load()), roles_of(entry.load()))
    for asked in cases():
        reason = None
        if asked.ignored and not call.has("ignore_index"):
            reason = "it takes no ignore_index"
        judged = _no_token_counts if asked.ignored == ALL else _judged
        about = f"{asked.about}, {str(asked.dtype)[6:]}"
        yield Question(about, partial(judged, call, asked, options), asked.shape, reason, bool(asked.kind))


def _instance(implementation: Any) -> Any:
    return implementation() if is_module_class(implementation) else implementation


def roles_of(implementation: Any) -> Mapping[str, Any]:
    """The roles by names; an input without a weight beside it is logits."""
    parameters = parameters_of(implementation)
    needed = names_of(name for name, one in parameters.items() if one.default is one.empty)
    if needed & set(ROLES["weight"]):
        return ROLES
    both = (*ROLES["logits"], *ROLES["hidden"])
    return {"logits": both, "targets": ROLES["targets"], "ignore_index": ROLES["ignore_index"]}


def problem_of(call: Called, asked: Asked, options: Options) -> Problem:
    """The inputs of a case."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def drawn(name: str, *shape: int) -> Tensor:
        return draws.values(draws.key(options.seed, name), 0, math.prod(shape)).view(shape)

    hidden, weight = drawn("hidden", asked.tokens, WIDTH), drawn("weight", asked.vocab_size, WIDTH) * WIDTH**-0.5
    seed = draws.key(options.seed, "targets")
    targets = draws.whole_numbers(seed, 0, asked.tokens, asked.vocab_size - 1)
    if asked.kind:
        write_head(weight, targets)
        write_kind(asked.kind, hidden)
    hidden, weight = hidden.to(asked.dtype), weight.to(asked.dtype)
    if asked.ignored:
        targets[: asked.ignored] = asked.ignore_index
    if call.has("weight"):
        inputs = {"hidden": hidden, "weight": weight}
    else:
        inputs = {"logits": (hidden.double() @ weight.double().mT).to(asked.dtype)}
    settings = {"targets": targets.to(device), "ignore_index": asked.ignore_index}
    upstream = torch.tensor(UPSTREAM, device=device) if options.grad else None
    return Problem({name: x.to(device) for name, x in inputs.items()}, settings, upstream, bool(asked.kind))


def _judged(call: Called, asked: Asked, options: Options) -> Fault | None:
    return judge(call, right, mistakes, problem_of(call, asked, options), widened=True, plain_formula=plain)


def _no_token_counts(call: Called, asked: Asked, options: Options) -> Fault | None:
    """The mean of no token is NaN in torch and 0 elsewhere: both are right. Gradients are 0 in either."""
    try:
        found = run(call, problem_of(call, asked, options))
    except Exception as error:
        return Fault(f"  it raises {type(error).__name__} where no token counts: {str(error).splitlines()[:1]}")
    loss = found.pop(RESULT).item()
    if loss != 0 and not math.isnan(loss):
        return Fault(f"  the loss is {loss:.6g} where no token counts; expected NaN, as torch has it, or 0")
    for name, x in found.items():
        if x.count_nonzero():
            mistake = "gradients are divided by the number of tokens that count, 0"
            text = f"  the gradient of {name} is not 0 where no token counts: {x.flatten()[0].item():.6g}, ..."
            return Fault(f"{text}\n  pattern: {mistake}", mistake)
    return None
