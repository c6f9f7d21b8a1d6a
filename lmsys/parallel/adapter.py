"""Any strategy behind one contract: ours, torch's, and a container written for CS336, assignment 2, as it is."""

import hashlib
import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lmsys.parallel import collectives, structure
from lmsys.values import hold


class Adapter:
    """Gives a strategy what it lacks of the contract: `make_optimizer`, `no_sync`, `full_state_dict`, a process group.

    ValueError for a class that cannot be called with a module, or has no finish_gradient_synchronization().
    """

    def __init__(self, strategy: Any, module: nn.Module, group: collectives.Group, **options: Any):
        self.module = module
        self.wrapper = strategy(module, **_arguments(strategy, group, options))
        hold(
            (
                hasattr(self.wrapper, "finish_gradient_synchronization"),
                f"{strategy.__name__} is no strategy: it has no finish_gradient_synchronization()",
            )
        )
        self.finish = self.wrapper.finish_gradient_synchronization

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(*args, **kwargs)

    @property
    def can_stay_local(self) -> bool:
        """True where a step without synchronization can be asked for."""
        return hasattr(self.wrapper, "no_sync")

    def no_sync(self) -> Any:
        return self.wrapper.no_sync() if self.can_stay_local else nullcontext()

    def make_optimizer(self, optimizer_cls: Any, **kwargs: Any) -> torch.optim.Optimizer:
        return (
            self.wrapper.make_optimizer(optimizer_cls, **kwargs)
            if hasattr(self.wrapper, "make_optimizer")
            else optimizer_cls(structure.grouped(self.module, kwargs.pop("groups", None)), **kwargs)
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.wrapper.full_state_dict() if hasattr(self.wrapper, "full_state_dict") else self.module.state_dict()

    def fingerprint(self) -> str:
        """Hash of the sums of all parameters: ranks with one model have the same."""
        sums = [x.double().sum() for x in self.full_state_dict().values() if x.is_floating_point()]
        return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()


def _arguments(strategy: Any, group: collectives.Group, options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the strategy: the options, and the process group where it takes one."""
    try:
        taken = inspect.signature(strategy).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"{strategy!r} cannot be called with a module: {error}") from error
    given = options | ({"process_group": group} if "process_group" in taken else {})
    if "bucket_size_mb" in taken:
        given["bucket_size_mb"] = given.pop("bucket_mb", 25)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    hold(
        (
            not (unknown := sorted(given.keys() - taken.keys())) or takes_all,
            f"{strategy.__name__} does not take {', '.join(unknown)}",
        )
    )
    return given
