"""The published forms of Adam and AdamW, and which of them an optimizer follows.

Two choices make a form, and authors differ in both. None is a mistake where it is kept to:

- eps is added to √(v / (1 - β2ᵗ)), after bias correction (arXiv 1412.6980, Algorithm 1; torch), or to √v, before it
  (the efficient order of computation at the end of section 2 there; CS336's handout).
- AdamW's weights decay before the step (arXiv 1711.05101, Algorithm 2; torch), or after it, moved as they are (CS336's
  handout; transformers' AdamW).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmsys.check.optimizer_claims import Claim
from lmsys.check.optimizer_formula import Adam, Formula, Run, Sgd, Trace
from lmsys.check.optimizer_runs import Asked, run_of, trace_of
from lmsys.testing import error_ratio

NEAR_EPS = 2.0**-27  # gradients of about 7.5e-9: beside them an eps of 1e-8 counts


@dataclass(frozen=True)
class Form:
    """One of the ways to write an algorithm.

    rule     its arithmetic
    words    the name of the form, in words
    differs  its distance from torch's form, in words; "" for torch's
    """

    rule: Adam | Sgd
    words: str
    differs: str = ""

    def __str__(self) -> str:
        return f"{self.words}; it differs from torch's by {self.differs}" if self.differs else self.words


def _before_correction(m: Tensor, v: Tensor, correction1: float, correction2: float, eps: float) -> Tensor:
    return (m * (math.sqrt(correction2) / correction1)) / (v.sqrt() + eps)


_ADAMW = Adam()
_ADAM = Adam(taken=lambda lr, decay, p: 0.0, in_gradient=1.0)
_LARGER_EPS = "an eps that is 1 / √(1 - beta2 ** t) times as large, 32 times in the first step of beta2 = 0.999"
_LATE_DECAY = "lr weight_decay of the step itself"
FORMS: Mapping[str, Sequence[Form]] = {  # where some do not differ, the first counts
    "AdamW": (
        Form(_ADAMW, "AdamW in the form of torch.optim.AdamW"),
        Form(
            replace(_ADAMW, update=_before_correction),
            "AdamW with eps before bias correction, as in Kingma & Ba's efficient form (arXiv 1412.6980, section 2)",
            _LARGER_EPS,
        ),
        Form(replace(_ADAMW, late=True), "AdamW with decay after the step, as in CS336's handout", _LATE_DECAY),
        Form(
            replace(_ADAMW, late=True, update=_before_correction),
            "AdamW in the form of CS336's handout: decay after the step, eps before bias correction",
            f"{_LATE_DECAY}, and by {_LARGER_EPS}",
        ),
    ),
    "Adam": (
        Form(_ADAM, "Adam in the form of torch.optim.Adam"),
        Form(
            replace(_ADAM, update=_before_correction),
            "Adam with eps before bias correction, as in Kingma & Ba's efficient form (arXiv 1412.6980, section 2)",
            _LARGER_EPS,
        ),
    ),
    "SGD": (Form(Sgd(), "SGD in the form of torch.optim.SGD"),),
}


def form_of(optimizer: Any, claim: Claim, seed: int, device: str) -> Form | None:
    """The form that an optimizer follows for the most of its first steps; None where no form has its very first."""
    decay = {"weight_decay": 0.5} if claim.algorithm == "AdamW" and "weight_decay" in claim.settings else {}
    run = run_of(Asked("the first steps", 4, (decay,)), seed, device)
    run = replace(run, gradients=[[g * NEAR_EPS for g in of_step if g is not None] for of_step in run.gradients])
    try:
        made = trace_of(optimizer, claim, run)
    except Exception:
        return None  # the questions say so
    if not all(bool(p.isfinite().all()) for of_step in made for p in of_step):
        return None
    begins = [list(run.parameters), *made[:-1]]
    followed = [_followed(form, run, begins, made) for form in FORMS[claim.algorithm]]
    return FORMS[claim.algorithm][followed.index(max(followed))] if max(followed) else None


def _followed(form: Form, run: Run, begins: Trace, made: Trace) -> int:
    """The number of steps before the first that is not the form's."""
    exact, plain = (Formula(form.rule).trace(run, begins, dtype) for dtype in (torch.float64, torch.float32))
    pairs = [zip(*of_step, strict=True) for of_step in zip(made, exact, plain, strict=True)]
    right = [all(error_ratio(*of) <= 1 for of in of_step) for of_step in pairs]
    return [*right, False].index(False)
