"""Over how many devices one feed-forward layer can be spread before it waits for communication. No torch.

The layer is y = (f(x W1) * (x W2)) W3, x (B, D), W1 and W2 (D, F), W3 (F, D), in 16 bits. A device computes C FLOP/s
and sends W bytes/s at once. Only matmuls count: 6·B·D·F operations forward, 12·B·D·F backward. A collective is
a ring's (`lmsys.accounting.BUS_FACTORS`), its bytes those of the whole tensor.

    data      the batch is divided; backward: gradients of the three weights are all-reduced
    fsdp      weights are divided too; forward and backward: all-gathered; backward: gradients are reduce-scattered
    tensor    W1, W2 by columns, W3 by rows; forward: y is all-reduced, backward: dx

The exercises of CS336, assignment 2 (2026), "Analyzing Parallelism Strategies"; Austin et al. 2025, "How to Scale Your
Model", section on training.
"""

from dataclasses import dataclass

from lmsys.accounting import bus_factor

ELEMENT = 2  # bytes
FLOPS = {"forward": 6, "backward": 12}  # of B·D·F: three matmuls, and two for each of them
WEIGHT_COLLECTIVES: dict[str, dict[str, tuple[str, ...]]] = {
    "data": {"forward": (), "backward": ("all_reduce",)},
    "fsdp": {"forward": ("all_gather",), "backward": ("all_gather", "reduce_scatter")},
}
KINDS = (*WEIGHT_COLLECTIVES, "tensor")


def ring_seconds(operation: str, total_bytes: float, world_size: int, bytes_per_s: float) -> float:
    """Of a collective in a ring, (n - 1) / n · S / W; an all-reduce is a reduce-scatter and an all-gather."""
    return bus_factor(operation, world_size) * total_bytes / bytes_per_s


def circulating_all_reduce_seconds(total_bytes: float, world_size: int, bytes_per_s: float) -> float:
    """Of an all-reduce that passes each rank's whole tensor round the ring: n - 1 steps of S bytes."""
    return (world_size - 1) * total_bytes / bytes_per_s


@dataclass(frozen=True)
class Layer:
    """tokens B, d_model D, d_ff F; flops_per_s C and bytes_per_s W of each device."""

    tokens: float
    d_model: float
    d_ff: float
    flops_per_s: float
    bytes_per_s: float

    def compute_seconds(self, direction: str, devices: float) -> float:
        """The same however the work is divided. ValueError for a direction that is not in FLOPS."""
        if direction not in FLOPS:
            raise ValueError(f"{direction=} must be one of {tuple(FLOPS)}")
        return FLOPS[direction] * self.tokens * self.d_model * self.d_ff / devices / self.flops_per_s

    def communication_seconds(self, kind: str, direction: str, devices: int) -> float:
        """Over `devices` of one kind of parallelism. ValueError for another than those of KINDS and FLOPS."""
        if kind not in KINDS or direction not in FLOPS:
            raise ValueError(f"{kind=} must be one of {KINDS} and {direction=} one of {tuple(FLOPS)}")
        if kind == "tensor":
            return self.mesh_seconds(1, devices)[1]
        operations = WEIGHT_COLLECTIVES[kind][direction]
        weights = 3 * self.d_model * self.d_ff * ELEMENT
        return sum(ring_seconds(one, weights, devices, self.bytes_per_s) for one in operations)

    def most_devices(self, kind: str, direction: str) -> float:
        """The largest n for which communication takes no longer than computation: both are (...) / n.

        data, fsdp   n <= 1 + B W / C
        tensor       n <= 1 + 3 F W / (2 C) forward, twice the second term backward
        """
        per_device = self.communication_seconds(kind, direction, 2) * 2  # of (n - 1) / n, without it
        return 1 + self.compute_seconds(direction, 1) / per_device if per_device else float("inf")

    def mesh_seconds(self, fsdp: float, tensor: float) -> tuple[float, float]:
        """Of a forward over fsdp x tensor devices: all-gathers along the one axis, the all-reduce along the other."""
        weights = 3 * self.d_model * self.d_ff * ELEMENT / tensor
        outputs = self.tokens / fsdp * self.d_model * ELEMENT
        gathered = (fsdp - 1) / fsdp * weights / self.bytes_per_s
        return gathered, 2 * (tensor - 1) / tensor * outputs / self.bytes_per_s

    def largest_mesh(self, overlapped: bool) -> tuple[float, float]:
        """(fsdp, tensor), not rounded, of the largest fsdp x tensor that a forward keeps busy.

        Overlapped, each axis has its own limit. Where they share the links, 3F (fsdp - 1) + 2B (tensor - 1) <= 3BF W/C,
        and the product is largest where both terms of 3F fsdp + 2B tensor are equal, or at an axis of one device.
        """
        if overlapped:
            return self.most_devices("fsdp", "forward"), self.most_devices("tensor", "forward")
        of_fsdp, of_tensor = 3 * self.d_ff, 2 * self.tokens
        room = 3 * self.tokens * self.d_ff * self.bytes_per_s / self.flops_per_s + of_fsdp + of_tensor
        fsdp = min(max(room / 2 / of_fsdp, 1.0), (room - of_tensor) / of_fsdp)
        return fsdp, (room - of_fsdp * fsdp) / of_tensor
