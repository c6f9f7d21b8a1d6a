"""What one call needs: peak memory, and the bytes that its forward keeps for the backward."""

import gc
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}


def parse_size(text: str) -> int:
    """Bytes that "24GiB", "512MiB" or "16GB" name. ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", text.strip())
    size = round(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size; write a positive number and a unit, such as 24GiB, 512MiB or 16GB")
    return size


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most that was live during `call`, its result included, above what was live before it."""
    gc.collect()
    return _peak_on_cuda(call) if device == "cuda" else _peak_on_cpu(call)


def _peak_on_cuda(call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(call: Callable[[], Any]) -> int:
    """By the allocator's own events, which the profiler collects; each is a size, negative when freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    del result
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Bytes of the storages that `forward` saves for its backward, inputs included, each storage counted once."""
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # alive until the end, so that no address is given twice

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        kept.append(x.detach())
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(storages.values())
