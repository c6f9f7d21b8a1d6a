"""Calls in NVTX ranges, by which nsys and ncu find the kernels of one call among all others: docs/profiling.md."""

import torch

from lmsys.measure.clock import synchronize
from lmsys.measure.step import Step

NUM_CALLS = 3


def call_in_ranges(name: str, step: Step, device: str) -> None:
    """Calls a step a few times, each on new inputs and in a push/pop range of this name, with nothing else in it.

    A range is its thread's, so a backward runs in this thread too; and the device has done the call when it ends.
    """
    for draw in range(NUM_CALLS):
        step.before()
        step.redraw(draw)
        prepared = step.prepare()
        step.redraw_late(draw)
        synchronize(device)
        torch.cuda.nvtx.range_push(name)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                found = step.run(prepared)
            synchronize(device)
        finally:
            torch.cuda.nvtx.range_pop()
        step.keep(found, None)
