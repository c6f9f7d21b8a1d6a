"""Strategies that raise on rank 1 in step $LMSYS_RAISE_AT: in a forward, in a gradient's hook, or in reading data.

tests/training/test_rank_faults.py trains with each class, and looks how soon all ranks end and with which message. A
new place to raise is a subclass of `Raises`.
"""

import os
import time
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from lmsys.parallel.overlapped import Bucketed
from lmsys.training.data import Batches

AT = int(os.environ.get("LMSYS_RAISE_AT", "5"))


class Fault(Exception):
    """Raised on purpose. Its message has the time, by the clock that all processes of a machine share."""

    def __init__(self, place: str):
        super().__init__(f"{place} at {time.monotonic():.3f} s")


def is_to_raise(step: int) -> bool:
    """True on rank 1 in the step of $LMSYS_RAISE_AT; steps count from 1."""
    return dist.get_rank() == 1 and step == AT


class Raises(Bucketed):
    """`Bucketed`, which counts its steps. It needs trainings with a single forward and backward in each step."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any):
        super().__init__(module, process_group, **options)
        self.steps = 0

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        self.steps += 1


class InForward(Raises):
    """Raises before the forward of a step."""

    def forward(self, *args: Any) -> Any:
        if is_to_raise(self.steps + 1):
            raise Fault("in a forward")
        return super().forward(*args)


class InHook(Raises):
    """Raises in the backward, in the hook of a gradient."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any):
        super().__init__(module, process_group, **options)
        next(module.parameters()).register_hook(self._hook)

    def _hook(self, gradient: Tensor) -> Tensor:
        if is_to_raise(self.steps + 1):
            raise Fault("in a hook")
        return gradient


class InData(Raises):
    """Raises where the training loop reads a batch: it wraps `Batches.batch`."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any):
        super().__init__(module, process_group, **options)
        read = Batches.batch

        def batch(self: Batches, step: int, micro: int) -> tuple[np.ndarray, ...]:
            if is_to_raise(step + 1):
                raise Fault("in the data")
            return read(self, step, micro)

        Batches.batch = batch  # type: ignore[method-assign]
