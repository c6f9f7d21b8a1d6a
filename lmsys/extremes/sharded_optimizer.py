"""Trainings that a sharded optimizer meets: groups of parameters, schedules, parameters without a gradient."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lmsys.extremes.strategy import Trial, probe

SGD: dict[str, Any] = {"lr": 0.25, "momentum": 0.5}
ADAMW: dict[str, Any] = {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.1}
OPTIMIZERS = {"SGD": SGD, "AdamW": ADAMW}
SECOND: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0}  # of the second group of parameters
SLOWER = 0.5  # a schedule multiplies options by it after each step


@dataclass(frozen=True)
class OptimizerTrial(Trial):
    """A trial whose ranks have the mean gradients when the optimizer steps.

    optimizer   a name in OPTIMIZERS
    groups      parameters are in two groups: biases are in a second, with options of its own
    schedule    learning rate and momentum change after each step
    single      there is a single parameter, so that a rank owns none
    """

    optimizer: str = "SGD"
    groups: bool = False
    schedule: bool = False
    single: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return OPTIMIZERS[self.optimizer]

    def params(self, module: nn.Module) -> list[Any]:
        """The parameters, or the groups, that the optimizer is given."""
        named = dict(module.named_parameters())
        if self.single:
            return [named["head.weight"]]
        if not self.groups:
            return list(named.values())
        return [
            {"params": [p for name, p in named.items() if not name.endswith("bias")]},
            {"params": [p for name, p in named.items() if name.endswith("bias")], **SECOND},
        ]


ORDINARY = (
    OptimizerTrial("SGD with momentum, one step", steps=1),
    OptimizerTrial("SGD with momentum", steps=3),
    OptimizerTrial("AdamW", steps=3, optimizer="AdamW"),
    OptimizerTrial("AdamW, tied weights", ("tied",), optimizer="AdamW"),
    OptimizerTrial("AdamW, groups of parameters", optimizer="AdamW", groups=True),
    OptimizerTrial("SGD with a schedule of learning rate and momentum", schedule=True),
)
EXTREME = (
    OptimizerTrial("frozen parameters", ("frozen",), optimizer="AdamW", extreme=True),
    OptimizerTrial("gradients from 1e-20 to 1e+10", ("sizes",), extreme=True),
    OptimizerTrial("parameters without a gradient", ("idle",), optimizer="AdamW", extreme=True),
    OptimizerTrial("fewer parameters than ranks", single=True, extreme=True),
)


def optimizer_trials(world_size: int, seed: int) -> list[OptimizerTrial]:
    """All trials, from the simplest to the rarest."""
    return [replace(trial, world_size=world_size, seed=seed) for trial in (*ORDINARY, *EXTREME)]


def module_of(trial: OptimizerTrial) -> nn.Module:
    """The module with the weights that all ranks begin with."""
    return probe(trial, 0)


def change_options(optimizer: Any) -> None:
    """Does what a schedule does after a step."""
    for group in optimizer.param_groups:
        group["lr"] *= SLOWER
        group["momentum"] *= SLOWER
