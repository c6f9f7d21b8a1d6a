"""Formulas of the paper problems on parallelism of CS336: times and memory of layers over many devices. No torch.

CS336 is Stanford's course on language models. `dev/on_paper.py` writes the answers with these formulas;
docs/cs336.md says which function answers which problem: a new formula needs a line there. tests/cost/ compares the
formulas with sums over single matmuls and tensors, and with published figures.

`Layer` is the gated feed-forward layer y = (f(x W1) * (x W2)) W3, with x (B, D), W1 and W2 (D, F), W3 (F, D), in 16
bits. A device computes C FLOP/s, and at the same time sends W bytes/s. Only matmuls count: 6·B·D·F operations forward,
12·B·D·F backward. Collectives run in a ring (`lmsys.cost.communication.BUS_FACTORS`); their bytes are those of the
whole tensor. The kinds of parallelism are

    data      the batch is divided; backward: gradients of the three weights are all-reduced
    fsdp      weights are divided too; forward and backward: they are all-gathered; backward: gradients are
              reduce-scattered
    tensor    W1, W2 are divided by columns, W3 by rows; forward: y is all-reduced; backward: dx is all-reduced

A stack is a number of blocks, each with two feed-forward matrices and nothing else, as in CS336,
"communication_accounting".

Sources: CS336, assignment 2 (2026), the exercises "Analyzing Parallelism Strategies"; Austin et al. 2025, "How to Scale
Your Model", section on training.
"""

import math
from dataclasses import dataclass

from lmsys.cost.communication import bus_factor
from lmsys.values import one_of

ELEMENT = 2  # bytes of an element
FLOPS = {"forward": 6, "backward": 12}  # operations over B·D·F: three matmuls of 2; in the backward two for each
WEIGHT_COLLECTIVES: dict[str, dict[str, tuple[str, ...]]] = {  # {kind: {direction: collectives of the three weights}}
    "data": {"forward": (), "backward": ("all_reduce",)},
    "fsdp": {"forward": ("all_gather",), "backward": ("all_gather", "reduce_scatter")},
}
KINDS = (*WEIGHT_COLLECTIVES, "tensor")


def ring_seconds(operation: str, total_bytes: float, world_size: int, bytes_per_s: float) -> float:
    """Seconds of a collective in a ring of n ranks: (n - 1) / n · S / W for S bytes, twice that for an all-reduce."""
    return bus_factor(operation, world_size) * total_bytes / bytes_per_s


def circulating_all_reduce_seconds(total_bytes: float, world_size: int, bytes_per_s: float) -> float:
    """Seconds of an all-reduce that passes each rank's whole tensor round the ring: n - 1 steps of S bytes."""
    return (world_size - 1) * total_bytes / bytes_per_s


@dataclass(frozen=True)
class Layer:
    """The feed-forward layer of the module's docstring, and the devices that it runs on.

    tokens, d_model, d_ff     B, D and F of the whole layer
    flops_per_s, bytes_per_s  C and W of each device
    """

    tokens: float
    d_model: float
    d_ff: float
    flops_per_s: float
    bytes_per_s: float

    def compute_seconds(self, direction: str, devices: float) -> float:
        """Seconds of arithmetic on `devices`: each kind of parallelism divides it evenly.

        ValueError for a direction that is not in FLOPS.
        """
        flops = FLOPS[one_of("direction", direction, FLOPS)] * self.tokens * self.d_model * self.d_ff
        return flops / devices / self.flops_per_s

    def communication_seconds(self, kind: str, direction: str, devices: int) -> float:
        """Seconds of the collectives of one kind of parallelism over `devices`.

        ValueError for a kind that is not in KINDS, or a direction that is not in FLOPS.
        """
        one_of("kind", kind, KINDS)
        one_of("direction", direction, FLOPS)
        if kind == "tensor":  # y and dx have equal bytes, so forward and backward send as long
            return self.mesh_seconds(1, devices)[1]
        weights = 3 * self.d_model * self.d_ff * ELEMENT, devices, self.bytes_per_s
        return sum(ring_seconds(operation, *weights) for operation in WEIGHT_COLLECTIVES[kind][direction])

    def most_devices(self, kind: str, direction: str) -> float:
        """The largest number of devices n, not rounded, on which communication takes no longer than computation.

        Computation takes T / n, and communication X (n - 1) / n, so n <= 1 + T / X. With T and X of the layer it is

        data, fsdp   n <= 1 + B W / C
        tensor       n <= 1 + 3 F W / (2 C) forward, n <= 1 + 3 F W / C backward

        It is infinite if nothing is sent, as in the forward of data parallelism.
        """
        per_device = self.communication_seconds(kind, direction, 2) * 2  # X: at n = 2 the factor (n - 1) / n is 1 / 2
        return 1 + self.compute_seconds(direction, 1) / per_device if per_device else float("inf")

    def mesh_seconds(self, fsdp: float, tensor: float) -> tuple[float, float]:
        """(seconds of all-gathers, seconds of the all-reduce) of a forward over a mesh of fsdp x tensor devices.

        The all-gathers have a device's share of the weights, 1 / tensor; the all-reduce its share of y, 1 / fsdp.
        """
        weights = 3 * self.d_model * self.d_ff * ELEMENT / tensor
        outputs = self.tokens / fsdp * self.d_model * ELEMENT
        return (fsdp - 1) / fsdp * weights / self.bytes_per_s, 2 * (tensor - 1) / tensor * outputs / self.bytes_per_s

    def largest_mesh(self, overlapped: bool) -> tuple[float, float]:
        """The largest mesh (fsdp, tensor), not rounded, on which a forward computes at least as long as it sends.

        overlapped  True: both kinds of communication run at once, and each axis of the mesh has its own limit. False:
                    they run in turn, so that 3F (fsdp - 1) + 2B (tensor - 1) <= 3BF W/C; the product fsdp · tensor is
                    largest where the terms 3F fsdp and 2B tensor are equal, or where one axis has a single device
        """
        if overlapped:
            return self.most_devices("fsdp", "forward"), self.most_devices("tensor", "forward")
        of_fsdp, of_tensor = 3 * self.d_ff, 2 * self.tokens
        total = 3 * self.tokens * self.d_ff * self.bytes_per_s / self.flops_per_s + of_fsdp + of_tensor
        fsdp = min(max(total / 2 / of_fsdp, 1.0), (total - of_tensor) / of_fsdp)
        return fsdp, (total - of_fsdp * fsdp) / of_tensor


def compute_bound_batch(
    flops_per_s: float, link_bytes_per_s: float, d_ff: int, *, fsdp_axes: int = 1, tensor_axes: int = 1
) -> float:
    """Tokens per device above which FSDP with tensor parallelism is compute-bound: alpha^2 / (M_X M_Y F).

    alpha is FLOP/s over the bytes/s of a link in both directions together. M_X and M_Y are the numbers of axes of the
    devices' mesh that FSDP and tensor parallelism use (`fsdp_axes`, `tensor_axes`); F is `d_ff`.
    Austin et al. 2025, "How to Scale Your Model", section on training, "FSDP and tensor parallelism".
    """
    return (flops_per_s / link_bytes_per_s) ** 2 / (fsdp_axes * tensor_axes * d_ff)


def stack_state_bytes(num_blocks: int, d_model: int, d_ff: int) -> int:
    """Bytes of master weights, accumulated gradients and two moments of a stack: 16 for each weight, all in float32."""
    return 16 * 2 * num_blocks * d_model * d_ff


def stack_activation_bytes(num_blocks: int, d_model: int, d_ff: int, tokens: int) -> int:
    """Bytes that the blocks of a stack keep for their backward in bfloat16: the input of each matrix."""
    return 2 * tokens * num_blocks * (d_model + d_ff)


def devices_needed(total_bytes: float, device_bytes: float) -> int:
    """How many devices of `device_bytes` hold `total_bytes` that are divided evenly."""
    return math.ceil(total_bytes / device_bytes)


def fsdp_bytes(num_blocks: int, d_model: int, d_ff: int, tokens: int, world_size: int) -> float:
    """Bytes of a stack on each of `world_size` devices, which share its state and half of its activations evenly.

    The other half of the activations is recomputed in the backward.
    """
    state = stack_state_bytes(num_blocks, d_model, d_ff)
    return (state + stack_activation_bytes(num_blocks, d_model, d_ff, tokens) / 2) / world_size
