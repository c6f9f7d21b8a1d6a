"""Puts any strategy behind the contract of wrapper.py: ours, torch's, and those that students write for CS336.

A strategy is a class. Its instance, here called a *container*, is a module around the module that is trained. A
container written for assignment 2 of the course CS336 works unchanged.

`lmsys.training.prepare` (for training and benchmarks) and `lmsys.check.trained` (for `lmsys check`) make an
`Adapter(class, module, group, **options)`, and from then on call the adapter in place of the container. To take
containers whose methods have other names, change `Adapter`; to take other names of options, change `_arguments`.
"""

import hashlib
import inspect
from contextlib import nullcontext
from typing import Any

import torch

from lmsys.parallel import collectives, structure
from lmsys.values import hold, instance


class Adapter:
    """Makes a container, and supplies the methods of the contract that it lacks, such as `make_optimizer`.

    strategy  the class, or a function that makes the container
    module    the module that the container wraps
    group     the process group, for a strategy that takes one
    options   keyword arguments of `strategy`

    Attributes:
    wrapper          the container
    finish           its finish_gradient_synchronization
    can_stay_local   True where it has `no_sync`, so that a backward can leave its gradients on this rank
    no_sync          the container's; without one, a context that does nothing
    wait             the container's, which waits for communication that goes on after a step, such as ZeRO-1's; without
                     one, a no-op
    full_state_dict  the container's; without one, the module's state_dict

    ValueError for a class that cannot be called with a module, or has no finish_gradient_synchronization().
    """

    def __init__(self, strategy: Any, module: torch.nn.Module, group: collectives.Group, **options: Any):
        self.module = instance("module", module, torch.nn.Module)
        self.wrapper = strategy(module, **_arguments(strategy, group, options))
        hold(
            (
                hasattr(self.wrapper, "finish_gradient_synchronization"),
                f"{strategy.__name__} is no strategy: it has no finish_gradient_synchronization()",
            )
        )
        self.finish = self.wrapper.finish_gradient_synchronization
        self.can_stay_local = hasattr(self.wrapper, "no_sync")
        self.no_sync: Any = getattr(self.wrapper, "no_sync", nullcontext)
        self.wait: Any = getattr(self.wrapper, "wait", lambda: None)
        self.full_state_dict: Any = getattr(self.wrapper, "full_state_dict", module.state_dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the container."""
        return self.wrapper(*args, **kwargs)

    def make_optimizer(self, optimizer_cls: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """An optimizer of the module, made by the container's `make_optimizer` if it has one.

        kwargs  options of `optimizer_cls`, and `groups` as in `Wrapper.make_optimizer`
        """
        if hasattr(self.wrapper, "make_optimizer"):
            return self.wrapper.make_optimizer(optimizer_cls, **kwargs)
        return optimizer_cls(structure.grouped(self.module, kwargs.pop("groups", None)), **kwargs)

    def fingerprint(self) -> str:
        """A hash of the sums of all floating-point parameters and buffers, equal on ranks that hold equal models.

        Benchmarks compare it. All ranks call it, since `full_state_dict` may communicate.
        """
        sums = [x.double().sum() for x in self.full_state_dict().values() if x.is_floating_point()]
        return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()


def _arguments(strategy: Any, group: collectives.Group, options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for the strategy: the options, and the process group if it takes one.

    CS336's containers take `bucket_size_mb` in place of `bucket_mb`. ValueError for options that the strategy does not
    take.
    """
    try:
        taken = inspect.signature(strategy).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"{strategy=} cannot be called with a module: {error}") from error
    given = dict(options)
    if "process_group" in taken:
        given["process_group"] = group
    if "bucket_size_mb" in taken:
        given.setdefault("bucket_size_mb", given.pop("bucket_mb", 25))  # 25 MiB is the default of `Bucketed`
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    unknown = sorted(given.keys() - taken.keys())
    hold((takes_all or not unknown, f"{strategy.__name__} does not take {', '.join(unknown)}"))
    return given
