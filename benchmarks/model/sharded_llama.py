"""Hugging Face's Llama as large models are trained with torch alone: layer by layer compiled, sharded and checkpointed.

The recipe is torchtitan's (Liang et al. 2024, arXiv 2410.06511, section 2): torch's selective checkpointing, by
operator, around each layer; torch.compile around that; `fully_shard` around both. What is kept is what a level of
`lmsys.checkpointing` says.
"""

from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.model.llama import Llama
from lmsys.config import ModelConfig

ATEN = torch.ops.aten
KEPT_ATTENTION = {
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}
KEPT_MATMULS = {"matmuls": 6, "attention": 4, "whole": 0}  # of a layer's: q, k, v, o, gate, up, down


class ShardedLlama(Llama):
    """A Llama whose layers run again as its config's `checkpoint_blocks` says, and are compiled one by one.

    As its masks are made outside of what is compiled, SDPA is told `is_causal`, and takes its fast kernels.
    """

    def __init__(self, config: ModelConfig, device: Any = None):
        super().__init__(config, device)
        layers = self.wrapped.model.layers
        for group in config.groups:
            for number in range(group.first, group.stop):
                if group.level != "none":
                    contexts = partial(_contexts, group.level)
                    layers[number] = checkpoint_wrapper(layers[number], context_fn=contexts, preserve_rng_state=False)

    def compile_blocks(self) -> "ShardedLlama":
        """Compiles each layer, and the loss, so that logits stay in the precision of the matmuls."""
        for layer in self.wrapped.model.layers:
            layer.compile(fullgraph=True, dynamic=False)
        self.wrapped.loss_function = torch.compile(self.wrapped.loss_function, dynamic=False)
        return self


def _contexts(level: str) -> tuple[Any, Any]:
    """Contexts of a layer as it runs, and as it runs again, that ask a policy about each operator."""
    matmuls = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = level != "whole" and operator in KEPT_ATTENTION
        if operator is ATEN.mm.default:
            matmuls[context.is_recompute] += 1
            kept = matmuls[context.is_recompute] <= KEPT_MATMULS[level]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts
