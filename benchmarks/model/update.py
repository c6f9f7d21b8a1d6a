"""A timed update of some weights, checked by the formula."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.arithmetic import ratio_of

MOMENTS = "exp_avg", "exp_avg_sq"


@dataclass
class Update:
    """Rows of a parameter with their moments, before an update and after it; the gradient and step that it took."""

    name: str
    rows: list[int]
    old: dict[str, Tensor]
    new: dict[str, Tensor]
    gradient: Tensor
    count: float
    group: Mapping[str, Any]

    def ratios(self) -> dict[str, float]:
        """The error of each over its budget, which is what the formula loses in float32, its constants included."""
        exact, plain = (self._by_formula(dtype) for dtype in (torch.float64, torch.float32))
        return {
            f"{what} of {self.name}": ratio_of(x, exact[what], plain[what], torch.float32)
            for what, x in self.new.items()
        }

    def _by_formula(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """AdamW: see `lmsys.training.optimizer`."""
        p, m, v, g = (x.to(dtype) for x in (*self.old.values(), self.gradient))
        beta1, beta2, lr = torch.tensor([*self.group["betas"], self.group["lr"]], dtype=dtype, device=p.device)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        root = (v / (1 - beta2**self.count)).sqrt() + self.group["eps"]
        p = p - lr * self.group["weight_decay"] * p - lr * m / (1 - beta1**self.count) / root
        return dict(zip(self.old, (p, m, v), strict=True))


@dataclass
class Watch:
    """Rows of a parameter before an update, by the draw: no key is known before a call."""

    name: str
    parameter: Tensor
    rows: list[int]
    old: dict[str, Tensor]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], num_rows: int, draw: int, optimizer: Optimizer | None) -> "Watch":
        chance = random.Random(draw)
        name = chance.choice([name for name, p in parameters.items() if p.dim() == 2])
        parameter = parameters[name]
        rows = chance.sample(range(len(parameter)), min(num_rows, len(parameter)))
        return cls(name, parameter, rows, _state(parameter, rows, optimizer))

    def done(self, optimizer: Optimizer) -> Update:
        gradient, group = self.parameter.grad, dict(optimizer.param_groups[0])
        assert gradient is not None
        count = float(optimizer.state[self.parameter]["step"])
        new = _state(self.parameter, self.rows, optimizer)
        return Update(self.name, self.rows, self.old, new, gradient[self.rows], count, group)


def _state(parameter: Tensor, rows: list[int], optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Zeros for the moments of an optimizer that has made no step."""
    weights, state = parameter.detach()[rows], optimizer.state.get(parameter, {}) if optimizer else {}
    return {"weights": weights} | {m: state[m][rows] if m in state else torch.zeros_like(weights) for m in MOMENTS}
