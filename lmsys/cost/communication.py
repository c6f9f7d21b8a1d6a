"""Predicts times of collectives from their bytes, and a latency and a bandwidth that are fitted. Imports no torch.

Strategies of data parallelism choose the size of their *buckets* (gradients that are sent in one collective) by
`fit_latency_bandwidth` and `optimal_bucket_bytes`, and reports show the fit. The benchmark of data parallelism calls
`ddp_overhead`, that of collectives `bus_factor`. A new collective needs its line in BUS_FACTORS.
"""

import math
from collections.abc import Callable, Sequence

from lmsys.values import hold, one_of


def fit_latency_bandwidth(sizes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Fits t = o + bytes / w by least squares of relative errors: (o in seconds, at least 1 us; w in bytes/s).

    sizes, times_s  bytes of each collective, and its seconds

    ValueError for fewer than two sizes, or for times that do not grow with size.
    """
    what = f"{list(sizes)} bytes, {list(times_s)} s"
    hold(
        (
            len(set(sizes)) >= 2 and len(sizes) == len(times_s) and all(time > 0 for time in times_s),
            f"a fit needs positive times of at least two sizes; got {what}",
        )
    )
    # (weight a, size s, time t): a weighted fit, whose weights make errors relative. The slope is 1 / w.
    rows = [(1 / time**2, size, time) for size, time in zip(sizes, times_s, strict=True)]
    total = math.fsum(a for a, _, _ in rows)  # of the weights
    mean_size, mean_time = math.fsum(a * s for a, s, _ in rows) / total, math.fsum(a * t for a, _, t in rows) / total
    slope = math.fsum(a * (s - mean_size) * (t - mean_time) for a, s, t in rows) / math.fsum(
        a * (s - mean_size) ** 2 for a, s, _ in rows
    )
    hold((slope > 0, f"times do not grow with size, so there is no bandwidth: {what}"))
    # No collective is free, and for o = 0 the best bucket would have no bytes.
    return max(mean_time - slope * mean_size, 1e-6), 1 / slope


def ddp_overhead(total_bytes: float, num_buckets: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds that gradients of s bytes in n equal buckets add to a backward: T = n o + s / (n w).

    s is `total_bytes`, n `num_buckets`, o `latency_s`, the time that each call takes beside its bytes, w `bytes_per_s`.
    The formula holds if computing a bucket takes as long as sending it: then only the calls' latencies and the last
    bucket are not hidden. From CS336, assignment 2, "ddp_bucketed_benchmarking" (b).
    """
    return num_buckets * latency_s + total_bytes / (num_buckets * bytes_per_s)


def optimal_bucket_bytes(total_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """The bytes of a bucket for which `ddp_overhead` is least: sqrt(s o w), where its two terms are equal.

    The letters are those of `ddp_overhead`.
    """
    return math.sqrt(total_bytes * latency_s * bytes_per_s)


BUS_FACTORS: dict[str, Callable[[int], float]] = {  # by operation, in a ring of n ranks: see `bus_factor`
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def bus_factor(operation: str, world_size: int) -> float:
    """The bytes that each link of a ring carries in a collective, divided by the bytes of the whole tensor.

    This is "busbw" / "algbw" in nccl-tests (PERFORMANCE.md there).

    ValueError for an operation that is not in BUS_FACTORS.
    """
    return BUS_FACTORS[one_of("operation", operation, BUS_FACTORS)](world_size)
