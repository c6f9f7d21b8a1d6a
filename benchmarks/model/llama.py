"""Hugging Face's Llama at our dimensions: the model that a user would otherwise train, as a row beside ours.

The table `benchmarks.models.MODEL_ROWS` names `Llama` and `LlamaTuned`, and `benchmarks.data_parallel.cases.MODELS`
names `ShardedLlama`. Beside methods of our `TransformerLM` they have `take_weights`, `as_ours` and `meant`, by which
benchmarks give them our weights, and compare them with our model.

`ShardedLlama` is trained as large models are with torch alone: layer by layer compiled, sharded and checkpointed. The
recipe is torchtitan's (Liang et al. 2024, arXiv 2410.06511, section 2): torch's selective checkpointing, by operator,
around each layer; torch.compile around that; `fully_shard` around both. A level of `lmsys.checkpointing` says what is
kept.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lmsys.config import ModelConfig

NAMES = {  # our name of a module, in a layer or around the layers: its name in Llama
    "token_embeddings": "model.embed_tokens",
    "ln_final": "model.norm",
    "lm_head": "lm_head",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w3": "mlp.up_proj",
    "ffn.w2": "mlp.down_proj",
}
CAUSAL = "sdpa_causal"  # an attention of transformers that is told `is_causal` in place of a mask
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)


class Llama(nn.Module):
    """LlamaForCausalLM with SDPA, called as `lmsys.model.TransformerLM` is, once `take_weights` has given it weights.

    ValueError for a rope_theta that is not its default. Compiled by a torch before 2.14, transformers hands SDPA the
    causal mask as a tensor, which SDPA's flash kernel does not take. Users of transformers get the same.
    """

    attention = "sdpa"  # the name of an attention of transformers

    def __init__(self, config: ModelConfig, device: Any = None):
        super().__init__()
        if config.rope_theta != 10_000.0:
            raise ValueError(
                f"rope_theta={config.rope_theta}: versions of transformers differ but for the default, 10000"
            )
        with torch.device("meta"):
            self.wrapped = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=config.vocab_size,
                    hidden_size=config.d_model,
                    intermediate_size=config.d_ff,
                    num_hidden_layers=config.num_layers,
                    num_attention_heads=config.num_heads,
                    num_key_value_heads=config.kv_heads,
                    max_position_embeddings=config.context_length,
                    rms_norm_eps=config.norm_eps,
                    use_cache=False,
                    attn_implementation=self.attention,
                )
            )
        with torch.device(device or "cpu"):  # its buffers are not among the weights that `take_weights` sets
            self.wrapped.model.rotary_emb = type(self.wrapped.model.rotary_emb)(self.wrapped.config)
        self.head_dim = config.head_dim

    def compile_blocks(self) -> "Llama":
        """Compiles the whole model, as its users do."""
        self.wrapped.compile(dynamic=False)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits (B, S, V) of tokens (B, S)."""
        return self.wrapped(input_ids=tokens).logits

    def loss(self, tokens: Tensor, targets: Tensor, documents: None = None) -> Tensor:
        """Its own loss, without packed documents: a strategy's wrapper passes the argument on, as None."""
        return self.loss_and_logits(tokens, targets)[0]

    def loss_and_logits(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(its own mean loss, the logits); the targets are shifted already."""
        output = self.wrapped(input_ids=tokens, labels=targets, shift_labels=targets)
        return output.loss, output.logits

    def take_weights(self, ours: nn.Module, shared: bool = False) -> "Llama":
        """Takes a TransformerLM's weights; query and key rows are reordered for Llama's rotation of (i, i + D / 2).

        shared: the very parameters of `ours`, so that a second model needs no memory for weights and gradients. Their
        rows keep the order for a rotation of (2i, 2i + 1): Llama is then another function, of the same operations.
        """
        weights = {_theirs(name): weight for name, weight in ours.state_dict(keep_vars=shared).items()}
        if not shared:
            weights = {
                name: self._reordered(name, weight, (-1, self.head_dim // 2, 2)) for name, weight in weights.items()
            }
        self.wrapped.load_state_dict(weights, assign=True)
        self.names = {_theirs(name): name for name in ours.state_dict()}
        return self

    def as_ours(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of its parameters, by their names, as gradients of ours: the mapping of weights undone."""
        return {self.names[name.removeprefix("wrapped.")]: self.meant(name, x) for name, x in gradients.items()}

    def meant(self, name: str, weight: Tensor) -> Tensor:
        """A weight, or its gradient, as it is in the model of ours that computes the same function.

        `rig.py` passes this function to `spots.Reference`.
        """
        return self._reordered(name, weight, (-1, 2, self.head_dim // 2))

    def _reordered(self, name: str, x: Tensor, rows: tuple[int, int, int]) -> Tensor:
        """Query and key matrices with the last two of their rows' axes exchanged; others as they are."""
        return x.unflatten(0, rows).transpose(1, 2).flatten(0, 2) if "q_proj" in name or "k_proj" in name else x


class LlamaTuned(Llama):
    """Llama as an expert runs it: no mask is made, and SDPA is told `is_causal`, so that it takes its fast kernels.

    Torch chooses among these kernels: on Hopper cuDNN's. No order is set by `sdpa_kernel(set_priority=True)`, which at
    its end does not restore the preference that torch works out at the first call.
    """

    attention = CAUSAL


def _theirs(name: str) -> str:
    """Llama's name of a parameter of ours."""
    layer, _, part = name.removesuffix(".weight").partition(".")[2].partition(".")
    return f"{NAMES.get(name.removesuffix('.weight')) or f'model.layers.{layer}.{NAMES[part]}'}.weight"


ATEN = torch.ops.aten
KEPT_ATTENTION = {
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}
KEPT_MATMULS = {"matmuls": 6, "attention": 4, "whole": 0}  # how many of a layer's, in order: q, k, v, o, gate, up, down


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
                    layers[number] = checkpoint_wrapper(
                        layers[number], context_fn=partial(_contexts, group.level), preserve_rng_state=False
                    )

    def compile_blocks(self) -> "ShardedLlama":
        """Compiles each layer, and the loss, so that logits stay in the precision of the matmuls."""
        for layer in self.wrapped.model.layers:
            layer.compile(fullgraph=True, dynamic=False)
        self.wrapped.loss_function = torch.compile(self.wrapped.loss_function, dynamic=False)
        return self


def _contexts(level: str) -> tuple[Any, Any]:
    """Contexts of a layer as it runs, and as it runs again, that ask a policy about each operator."""
    matmuls = {False: 0, True: 0}  # how many the layer has done: False as it ran, True as it ran again

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = level != "whole" and operator in KEPT_ATTENTION
        if operator is ATEN.mm.default:
            matmuls[context.is_recompute] += 1
            kept = matmuls[context.is_recompute] <= KEPT_MATMULS[level]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
