"""From the first kernel's start to the last one's end, as CUPTI saw them: what a pair of events is held against."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SEPARATOR_NS = 20_000  # a separator is shorter; the same kernel for longer is a wait, and stands for nothing


def spans_of(call: Callable[[], Any], separator: str, skipped: int = 0) -> list[float]:
    """Seconds, gaps included, of what runs on the device between each two short kernels named `separator`.

    They come in pairs; what is between pairs is left out, and so are the first `skipped` kernels of each span. Empty
    where CUPTI gives nothing, as where another profiler has it, or where something is missing.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in recorded.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
    )
    groups: list[list[tuple[int, int]]] = []  # one begins at each separator
    for start, end, name in kernels:
        if separator not in name:
            if groups:
                groups[-1].append((start, end))
        elif end - start < SEPARATOR_NS:
            groups.append([])
    spans = [group[skipped:] for group in groups[::2]]
    if len(groups) % 2 or not all(spans):
        return []
    return [(max(end for _, end in span) - span[0][0]) / 1e9 for span in spans]
