"""The memory that training a model needs, in bytes, from its config. Imports no torch.

Legend: N tokens (B·S), M d_model, F d_ff, H query heads, Hkv key/value heads, D head dimension, V vocabulary.
"""

import math
from dataclasses import dataclass

from lmsys.config import ModelConfig
from lmsys.cost.operations import block_matrices, model_parameters

MATMUL_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes of an element that a matmul reads
WIDE = 4  # parameters, gradients, optimizer state, the residual stream


@dataclass(frozen=True)
class Footprint:
    """Bytes. activations: what is live between forward and backward beside the rest, the head's gradient included."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self) -> int:
        """The peak of a step: the backward frees activations as it makes gradients, so the larger of the two counts."""
        return self.parameters + self.optimizer + max(self.gradients, self.activations)


def training_memory(config: ModelConfig, batch: int, context: int, precision: str) -> Footprint:
    """AdamW in float32, blocks in eager mode, an attention row that keeps q, k, v, o and the log-sum-exp.

    `precision` is of MATMUL_BYTES, with autocast for the half ones; ValueError for another. With checkpointing, a
    group's input is kept, and the activations of one group while it is run again.
    """
    if precision not in MATMUL_BYTES:
        raise ValueError(f"{precision=} must be one of {', '.join(MATMUL_BYTES)}")
    wide, tokens = WIDE * model_parameters(config), batch * context
    return Footprint(wide, wide, 2 * wide, _activations(config, tokens, MATMUL_BYTES[precision]))


def zero_memory(num_parameters: int, world_size: int, stage: int) -> dict[str, float]:
    """Bytes on each device of float32 parameters, gradients and AdamW's two moments.

    Stage 0: all on each; 1: optimizer state divided by world_size; 2: gradients too; 3: parameters too. Rajbhandari et
    al. 2020, "ZeRO" (arXiv 1910.02054), section 5, there with 16-bit parameters and gradients. ValueError for another.
    """
    if stage not in range(4):
        raise ValueError(f"{stage=} must be 0, 1, 2 or 3")
    one = 4.0 * num_parameters
    parts = {"parameters": (one, 3), "gradients": (one, 2), "optimizer": (2 * one, 1)}
    return {name: size / world_size if stage >= since else size for name, (size, since) in parts.items()}


def stack_parameters(num_blocks: int, d_model: int, d_ff: int) -> int:
    """Weights of blocks that are two feed-forward matrices and nothing else: CS336, "communication_accounting"."""
    return 2 * num_blocks * d_model * d_ff


def stack_state_bytes(num_blocks: int, d_model: int, d_ff: int) -> int:
    """Master weights, accumulated gradients and two moments, all in float32."""
    return 16 * stack_parameters(num_blocks, d_model, d_ff)


def stack_activation_bytes(num_blocks: int, d_model: int, d_ff: int, tokens: int) -> int:
    """Bytes that the same blocks keep for their backward in bfloat16: the input of each matrix."""
    return 2 * tokens * num_blocks * (d_model + d_ff)


def devices_needed(total_bytes: float, device_bytes: float) -> int:
    """How many devices hold so much, if it divides evenly."""
    return math.ceil(total_bytes / device_bytes)


def fsdp_bytes(num_blocks: int, d_model: int, d_ff: int, tokens: int, world_size: int) -> float:
    """Bytes on each device, with state and every second block's activations sharded and the others not kept."""
    state = stack_state_bytes(num_blocks, d_model, d_ff)
    return (state + stack_activation_bytes(num_blocks, d_model, d_ff, tokens) / 2) / world_size


def _activations(config: ModelConfig, tokens: int, narrow: int) -> int:
    layers, group = config.num_layers, config.checkpoint_blocks
    inputs = 0
    if group:
        inputs, layers = -(-layers // group) * WIDE * config.d_model, group
    casts = config.num_layers * block_matrices(config) * narrow if narrow < WIDE else 0  # autocast's copies of weights
    last = (WIDE + narrow) * config.d_model + WIDE + 8  # ln_final: input, scale; gradient of its output; token id
    head = WIDE * config.vocab_size * config.d_model  # its gradient is made in the forward
    return tokens * (layers * _block(config, narrow) + inputs + last) + casts + head


def _block(config: ModelConfig, narrow: int) -> int:
    """Bytes that a block keeps for each token."""
    heads, kv_heads, head_dim = config.num_heads, config.kv_heads, config.head_dim
    norms = 2 * ((WIDE + narrow) * config.d_model + WIDE)  # input, output, and 1 / rms
    attention = narrow * (2 * heads + 2 * kv_heads) * head_dim + WIDE * heads  # q, o, k, v, log-sum-exp
    feed_forward = 4 * narrow * config.d_ff  # w1 x, its silu, w3 x, their product
    return norms + attention + feed_forward
