"""Trainings that a sharded optimizer meets: groups of parameters, schedules, parameters without a gradient."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lmsys.extremes.strategy import Trial

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.25, "momentum": 0.5},
    "AdamW": {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.1},
}
SECOND: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0}  # of the second group of parameters
SLOWER = 0.5  # a schedule multiplies options by it after each step
TRIALS = (
    Trial("SGD with momentum, one step", steps=1),
    Trial("SGD with momentum", steps=3),
    Trial("AdamW", steps=3, optimizer="AdamW"),
    Trial("AdamW, tied weights", ("tied",), optimizer="AdamW"),
    Trial("AdamW, groups of parameters", optimizer="AdamW", groups=True),
    Trial("SGD with a schedule of learning rate and momentum", schedule=True),
    Trial("frozen parameters", ("frozen",), optimizer="AdamW", extreme=True),
    Trial("gradients from 1e-20 to 1e+10", ("sizes",), extreme=True),
    Trial("parameters without a gradient", ("idle",), optimizer="AdamW", extreme=True),
    Trial("fewer parameters than ranks", single=True, extreme=True),
)


def optimizer_trials(world_size: int, seed: int) -> list[Trial]:
    """All trials, from the simplest to the rarest."""
    return [replace(trial, sharded=True, world_size=world_size, seed=seed) for trial in TRIALS]


def made_optimizer(trial: Trial, module: nn.Module, make: Callable[..., Any]) -> Any:
    """The trial's optimizer of the module, by make(parameters or groups, class, **options)."""
    named: dict[str, Any] = dict(module.named_parameters())
    params = [named["head.weight"]] if trial.single else list(named.values())
    if trial.groups:
        biases = [p for name, p in named.items() if name.endswith("bias")]
        others = [p for name, p in named.items() if not name.endswith("bias")]
        params = [{"params": others}, {"params": biases, **SECOND}]
    return make(params, getattr(torch.optim, trial.optimizer), **OPTIMIZERS[trial.optimizer])


def change_options(optimizer: Any) -> None:
    """Does what a schedule does after a step."""
    for group in optimizer.param_groups:
        group["lr"] *= SLOWER
        group["momentum"] *= SLOWER
