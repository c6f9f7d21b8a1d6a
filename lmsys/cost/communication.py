"""Times of collectives, and how many devices one feed-forward layer can use before it waits for them. No torch.

Strategies choose buckets by the fit of latency and bandwidth; benchmarks and reports call it too, and `bus_factor`.
`Layer` answers questions of CS336 on paper: y = (f(x W1) * (x W2)) W3, x (B, D), W1 and W2 (D, F), W3 (F, D), in 16
bits. A device computes C FLOP/s and sends W bytes/s at once. Only matmuls count: 6·B·D·F operations forward, 12·B·D·F
backward. A collective is a ring's (`BUS_FACTORS`), its bytes those of the whole tensor.

    data      the batch is divided; backward: gradients of the three weights are all-reduced
    fsdp      weights are divided too; forward and backward: all-gathered; backward: gradients are reduce-scattered
    tensor    W1, W2 by columns, W3 by rows; forward: y is all-reduced, backward: dx

The exercises of CS336, assignment 2 (2026), "Analyzing Parallelism Strategies"; Austin et al. 2025, "How to Scale Your
Model", section on training.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmsys.values import hold, one_of

ELEMENT = 2  # bytes of an element
FLOPS = {"forward": 6, "backward": 12}  # times B·D·F: three matmuls, and in the backward two for each
WEIGHT_COLLECTIVES: dict[str, dict[str, tuple[str, ...]]] = {
    "data": {"forward": (), "backward": ("all_reduce",)},
    "fsdp": {"forward": ("all_gather",), "backward": ("all_gather", "reduce_scatter")},
}
KINDS = (*WEIGHT_COLLECTIVES, "tensor")


def fit_latency_bandwidth(sizes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Fits t = o + bytes / w by least squares of relative errors: (o in seconds, at least 1 us; w in bytes/s).

    sizes, times_s  bytes of each collective, and its seconds

    ValueError for fewer than two sizes, or for times that do not grow with size.
    """
    what = f"{list(sizes)} bytes, {list(times_s)} s"
    is_able = len({*sizes}) >= 2 and len(sizes) == len(times_s) and all(time > 0 for time in times_s)
    hold((is_able, f"a fit needs positive times of at least two sizes; got {what}"))
    rows = [(1 / time**2, size, time) for size, time in zip(sizes, times_s, strict=True)]
    total = math.fsum(w for w, _, _ in rows)
    mean_size, mean_time = math.fsum(w * s for w, s, _ in rows) / total, math.fsum(w * t for w, _, t in rows) / total
    slope = math.fsum(w * (s - mean_size) * (t - mean_time) for w, s, t in rows)
    slope /= math.fsum(w * (s - mean_size) ** 2 for w, s, _ in rows)
    hold((slope > 0, f"times do not grow with size, so there is no bandwidth: {what}"))
    return max(mean_time - slope * mean_size, 1e-6), 1 / slope


def ddp_overhead(total_bytes: float, num_buckets: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds that gradients in n equal buckets add to a backward: T = n o + s / (n w).

    If computing a bucket takes as long as sending it, what is left is the calls' latencies and the last bucket. From
    CS336, assignment 2, "ddp_bucketed_benchmarking" (b).
    """
    return num_buckets * latency_s + total_bytes / (num_buckets * bytes_per_s)


def optimal_bucket_bytes(total_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """The bytes of a bucket for which `ddp_overhead` is least: sqrt(s o w), where its two terms are equal."""
    return math.sqrt(total_bytes * latency_s * bytes_per_s)


BUS_FACTORS: dict[str, Callable[[int], float]] = {  # share of the bytes that a link carries, in a ring of n
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def bus_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests, PERFORMANCE.md); bytes are those of the whole tensor.

    ValueError for an operation that is not in BUS_FACTORS.
    """
    return BUS_FACTORS[one_of("operation", operation, BUS_FACTORS)](world_size)


def ring_seconds(operation: str, total_bytes: float, world_size: int, bytes_per_s: float) -> float:
    """Seconds of a collective in a ring: (n - 1) / n · S / W, twice that for an all-reduce."""
    return bus_factor(operation, world_size) * total_bytes / bytes_per_s


def circulating_all_reduce_seconds(total_bytes: float, world_size: int, bytes_per_s: float) -> float:
    """Seconds of an all-reduce that passes each rank's whole tensor round the ring: n - 1 steps of S bytes."""
    return (world_size - 1) * total_bytes / bytes_per_s


@dataclass(frozen=True)
class Layer:
    """The feed-forward layer above. tokens B, d_model D, d_ff F; flops_per_s C and bytes_per_s W are of each device."""

    tokens: float
    d_model: float
    d_ff: float
    flops_per_s: float
    bytes_per_s: float

    def compute_seconds(self, direction: str, devices: float) -> float:
        """Seconds of arithmetic, however the work is divided. ValueError for a direction that is not in FLOPS."""
        flops = FLOPS[one_of("direction", direction, FLOPS)] * self.tokens * self.d_model * self.d_ff
        return flops / devices / self.flops_per_s

    def communication_seconds(self, kind: str, direction: str, devices: int) -> float:
        """Seconds of communication over `devices`. kind: one of KINDS, direction: of FLOPS; ValueError for others."""
        one_of("kind", kind, KINDS)
        one_of("direction", direction, FLOPS)
        if kind == "tensor":
            return self.mesh_seconds(1, devices)[1]
        weights = 3 * self.d_model * self.d_ff * ELEMENT, devices, self.bytes_per_s
        return sum(ring_seconds(operation, *weights) for operation in WEIGHT_COLLECTIVES[kind][direction])

    def most_devices(self, kind: str, direction: str) -> float:
        """The largest n for which communication takes no longer than computation: both are (...) / n.

        data, fsdp   n <= 1 + B W / C
        tensor       n <= 1 + 3 F W / (2 C) forward, twice the second term backward
        """
        per_device = self.communication_seconds(kind, direction, 2) * 2  # without the factor (n - 1) / n
        return 1 + self.compute_seconds(direction, 1) / per_device if per_device else float("inf")

    def mesh_seconds(self, fsdp: float, tensor: float) -> tuple[float, float]:
        """(seconds of all-gathers, seconds of the all-reduce) of a forward over fsdp x tensor devices."""
        weights = 3 * self.d_model * self.d_ff * ELEMENT / tensor
        outputs = self.tokens / fsdp * self.d_model * ELEMENT
        return (fsdp - 1) / fsdp * weights / self.bytes_per_s, 2 * (tensor - 1) / tensor * outputs / self.bytes_per_s

    def largest_mesh(self, overlapped: bool) -> tuple[float, float]:
        """(fsdp, tensor), not rounded: the most devices on which a forward computes at least as long as it sends.

        overlapped  True: both kinds of communication run at once, and each axis has its own limit. False: they share
                    the links, so that 3F (fsdp - 1) + 2B (tensor - 1) <= 3BF W/C; the product is largest where both
                    terms of 3F fsdp + 2B tensor are equal, or at an axis of one device
        """
        if overlapped:
            return self.most_devices("fsdp", "forward"), self.most_devices("tensor", "forward")
        of_fsdp, of_tensor = 3 * self.d_ff, 2 * self.tokens
        room = 3 * self.tokens * self.d_ff * self.bytes_per_s / self.flops_per_s + of_fsdp + of_tensor
        fsdp = min(max(room / 2 / of_fsdp, 1.0), (room - of_tensor) / of_fsdp)
        return fsdp, (room - of_fsdp * fsdp) / of_tensor


def compute_bound_batch(
    flops_per_s: float, link_bytes_per_s: float, d_ff: int, *, fsdp_axes: int = 1, tensor_axes: int = 1
) -> float:
    """Tokens per device above which FSDP with tensor parallelism is compute-bound: alpha^2 / (M_X M_Y F).

    alpha = FLOP/s over the bytes/s of a link in both directions, M the mesh axes that each kind of parallelism has.
    Austin et al. 2025, "How to Scale Your Model", section on training, "FSDP and tensor parallelism".
    """
    return (flops_per_s / link_bytes_per_s) ** 2 / (fsdp_axes * tensor_axes * d_ff)
