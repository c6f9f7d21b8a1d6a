"""The alpha-beta model of an all-reduce, measured: a latency and a bandwidth, the same on every rank."""

import time

import torch
import torch.distributed as dist

from lmsys.cost.communication import fit_latency_bandwidth
from lmsys.parallel.collectives import Group, is_nccl

SIZES = {"cpu": (2**12, 2**20, 2**22), "cuda": (2**12, 2**22, 2**26)}  # bytes
CALLS = 5
ROUNDS = 8


def latency_and_bandwidth(group: Group, device: torch.device) -> tuple[float, float]:
    """Fits t = o + bytes / w by least squares over SIZES: o in seconds (alpha) and w in bytes/s (1 / beta).

    Of each size every rank keeps its least time, and the fit takes the slowest rank's. If these times do not grow with
    the size, as on a busy machine, the ranks measure again, at most ROUNDS times. ValueError if they never grow.
    """
    sizes = SIZES[device.type]
    least = torch.full((len(sizes),), float("inf"), dtype=torch.float64, device=device)
    for left in reversed(range(ROUNDS)):
        times = [_seconds(torch.zeros(size // 4, device=device), group) for size in sizes]
        least = torch.minimum(least, least.new_tensor(times))
        slowest = least.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        found = slowest.tolist()
        if found == sorted(found) or not left:  # all ranks decide alike
            break
    return fit_latency_bandwidth(sizes, found)


def _seconds(x: torch.Tensor, group: Group) -> float:
    """The least of CALLS, after one that connects."""
    found = []
    for _ in range(1 + CALLS):
        dist.barrier(group) if not is_nccl(group, x) else torch.cuda.synchronize(x.device)
        start = time.perf_counter()
        dist.all_reduce(x, group=group)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        found.append(time.perf_counter() - start)
    return min(found[1:])
