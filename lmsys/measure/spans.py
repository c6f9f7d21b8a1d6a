"""From the first kernel's start to the last one's end, as CUPTI saw them: what a pair of events is held against."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def spans_of(calls: Sequence[Callable[[], Any]], separator: str, skipped: int = 0) -> list[float]:
    """Seconds, gaps included, of the last kernels of each call: those behind the second of its two kernels named
    `separator`, without the first `skipped` of them.

    Empty where CUPTI gives nothing, as where another profiler has it, or where a call has other than two separators or
    no kernel behind them.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for call in calls:
            call()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in recorded.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
    )
    groups: list[list[tuple[int, int]]] = []  # one begins at each separator
    for start, end, name in kernels:
        if separator in name:
            groups.append([])
        elif groups:
            groups[-1].append((start, end))
    measured = [group[skipped:] for group in groups[1::2]]
    if len(groups) != 2 * len(calls) or not all(measured):
        return []
    return [(max(end for _, end in group) - group[0][0]) / 1e9 for group in measured]
