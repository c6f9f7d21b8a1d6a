"""A timed update of some weights, checked by the formula, also where gradients are zero, tiny and huge.

Such gradients are planted in rows of one matrix: `lmsys.extremes.optimizer`. Every row is judged alone, in units of its
own largest value, for beside the moments of a huge gradient all others are nothing. A row whose values all lie below
the smallest normal number of float32, as the second moment of a tiny gradient does, is judged in units of that number:
below it float32 rounds to multiples of 2**-149, whatever the size.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmsys.extremes.optimizer import plant
from lmsys.testing import error_ratio, ratio_of

MOMENTS = "exp_avg", "exp_avg_sq"
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass
class Update:
    """Rows of a parameter with their moments, before an update and after it; the gradient and step that it took.

    planted  the values of the gradients that were planted in the first rows
    """

    name: str
    rows: list[int]
    old: dict[str, Tensor]
    new: dict[str, Tensor]
    gradient: Tensor
    count: float
    group: Mapping[str, Any]
    planted: Sequence[float] = ()

    def ratios(self) -> dict[str, float]:
        """The error of each over its budget, which is what the formula loses in float32, its constants included.

        The worst row counts, of the planted ones each by itself.
        """
        exact, plain = (self._by_formula(dtype) for dtype in (torch.float64, torch.float32))
        ratios: dict[str, float] = {}
        for what, x in self.new.items():
            for i in range(len(self.rows)):
                where = f" where the gradient is {self.planted[i]:.2g}" if i < len(self.planted) else ""
                name = f"{what} of {self.name}{where}"
                ratios[name] = max(ratios.get(name, 0.0), _ratio_of_row(x[i], exact[what][i], plain[what][i]))
        return ratios

    def _by_formula(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """AdamW: see `lmsys.training.optimizer`."""
        p, m, v, g = (x.to(dtype) for x in (*self.old.values(), self.gradient))
        beta1, beta2, lr = torch.tensor([*self.group["betas"], self.group["lr"]], dtype=dtype, device=p.device)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        root = v.sqrt() / (1 - beta2**self.count).sqrt() + self.group["eps"]
        p = p - lr * self.group["weight_decay"] * p - lr * m / (1 - beta1**self.count) / root
        return dict(zip(self.old, (p, m, v), strict=True))


def _ratio_of_row(new: Tensor, exact: Tensor, plain: Tensor) -> float:
    """Judges the elements that float32 can hold: where the formula itself overflows it, nothing is right or wrong."""
    finite = plain.isfinite()
    if not finite.any():
        return 0.0
    new, exact, plain = new[finite], exact[finite], plain[finite]
    if exact.abs().max() >= SMALLEST_NORMAL:
        return ratio_of(new, exact, plain, torch.float32)
    new, exact, plain = (x.double() / SMALLEST_NORMAL for x in (new, exact, plain))
    return error_ratio(new, exact, plain.float())


@dataclass
class Watch:
    """Rows of a parameter before an update, by the draw: no key is known before a call.

    planted   the values of the gradients that are planted in the first rows; () for none
    replaced  the gradients whose place they have taken
    """

    name: str
    parameter: Tensor
    rows: list[int]
    old: dict[str, Tensor]
    planted: Sequence[float] = ()
    replaced: Tensor | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], num_rows: int, draw: int, optimizer: Optimizer | None) -> "Watch":
        chance = random.Random(draw)
        name = chance.choice([name for name, p in parameters.items() if p.dim() == 2])
        parameter = parameters[name]
        rows = chance.sample(range(len(parameter)), min(num_rows, len(parameter)))
        return cls(name, parameter, rows, _state(parameter, rows, optimizer))

    def plant(self, values: Sequence[float], scale: float) -> None:
        """Puts extreme gradients in place of those of the first rows, times a loss scale."""
        gradient, self.planted = self.parameter.grad, values[: len(self.rows)]
        assert gradient is not None
        rows = self.rows[: len(self.planted)]
        self.replaced = gradient[rows] / scale
        plant(gradient, rows, self.planted, scale)

    def put_back(self) -> None:
        """The gradients, not scaled, as the backward has made them."""
        if self.replaced is not None and self.parameter.grad is not None:
            self.parameter.grad[self.rows[: len(self.planted)]] = self.replaced

    def done(self, optimizer: Optimizer) -> Update:
        gradient, group = self.parameter.grad, dict(optimizer.param_groups[0])
        assert gradient is not None
        count = float(optimizer.state[self.parameter]["step"])
        new = _state(self.parameter, self.rows, optimizer)
        return Update(self.name, self.rows, self.old, new, gradient[self.rows], count, group, self.planted)


def _state(parameter: Tensor, rows: list[int], optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Zeros for the moments of an optimizer that has made no step."""
    weights, state = parameter.detach()[rows], optimizer.state.get(parameter, {}) if optimizer else {}
    return {"weights": weights} | {m: state[m][rows] if m in state else torch.zeros_like(weights) for m in MOMENTS}
