"""What training a model must hold in memory, in bytes, from its config. Imports no torch.

Legend: N tokens (B·S), M d_model, F d_ff, H query heads, Hkv key/value heads, D head dimension, V vocabulary.
"""

from dataclasses import dataclass

from lmsys.accounting import block_matrices, model_parameters
from lmsys.config import ModelConfig

MATMUL_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # of an element that a matmul reads
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
        """Of a step: as the backward makes gradients it lets activations go, so the larger of them is what counts."""
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
