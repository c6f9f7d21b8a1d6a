"""Hugging Face's Llama at our dimensions: the model that a user would otherwise train, as a row beside ours.

The table `benchmarks.models.MODEL_ROWS` names `Llama` and `LlamaTuned`, and `benchmarks.data_parallel.cases.MODELS`
names `ShardedLlama`. These classes have the methods of our `TransformerLM` that benchmarks call. They also have
`take_weights`, `as_ours` and `meant`, by which benchmarks give them our weights and compare them with our model. A
setting of Llama is changed in `Llama.__init__`. Somebody else's model of another kind needs the same methods.

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
CAUSAL = "sdpa_causal"  # the name, in transformers, of an attention that gets `is_causal` in place of a mask
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)


class Llama(nn.Module):
    """LlamaForCausalLM with SDPA, called as `lmsys.model.TransformerLM` is, once `take_weights` has given it weights.

    ValueError for a rope_theta other than the default. If a torch before 2.14 compiles it, transformers hands SDPA the
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
        """The mean loss, by the model's own function. `documents` is always None: a strategy's wrapper passes it on."""
        return self.loss_and_logits(tokens, targets)[0]

    def loss_and_logits(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(the mean loss, by the model's own function; the logits). The targets are the next tokens already."""
        output = self.wrapped(input_ids=tokens, labels=targets, shift_labels=targets)
        return output.loss, output.logits

    def take_weights(self, ours: nn.Module, shared: bool = False) -> "Llama":
        """Takes the weights of `ours`, a TransformerLM, and returns this model.

        Rotary embeddings rotate pairs of channels: Llama the pair (i, i + D / 2), our model (2i, 2i + 1), where D is
        the size of a head. So the rows of query and key matrices are reordered, and both compute the same function.

        shared  True: takes the very parameters of `ours`, so that a second model needs no memory for weights and
                gradients. Their rows keep their order, so Llama computes another function, by the same operations
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
        """Turns gradients, by Llama's names of parameters, into gradients by ours, with rows in our order."""
        return {self.names[name.removeprefix("wrapped.")]: self.meant(name, x) for name, x in gradients.items()}

    def meant(self, name: str, weight: Tensor) -> Tensor:
        """A weight, or its gradient, with its rows in the order of our model that computes the same function.

        name  Llama's name of the parameter, or ours

        `rig.py` passes this function to `spots.Reference`.
        """
        return self._reordered(name, weight, (-1, 2, self.head_dim // 2))

    def _reordered(self, name: str, x: Tensor, rows: tuple[int, int, int]) -> Tensor:
        """A query or key matrix with its rows in another order; other weights as they are.

        rows  the shape (heads, a, b) into which the axis of rows is split; a and b are then exchanged
        """
        return x.unflatten(0, rows).transpose(1, 2).flatten(0, 2) if "q_proj" in name or "k_proj" in name else x


class LlamaTuned(Llama):
    """Llama as an expert runs it: no mask is made, and SDPA is told `is_causal`, so that it takes its fast kernels.

    Torch chooses among these kernels; on Hopper it takes cuDNN's. No order is set here by the context
    `sdpa_kernel(set_priority=True)`: when it ends, it does not restore the order that torch found at the first call.
    """

    attention = CAUSAL


def _theirs(name: str) -> str:
    """Llama's name of a parameter, from our name of it, such as "layers.0.attn.q_proj.weight"."""
    layer, _, part = name.removesuffix(".weight").partition(".")[2].partition(".")
    return f"{NAMES.get(name.removesuffix('.weight')) or f'model.layers.{layer}.{NAMES[part]}'}.weight"


ATEN = torch.ops.aten
KEPT_ATTENTION = {
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}
# By level: how many results of a layer's matmuls are kept for the backward, the first of q, k, v, o, gate, up, down.
KEPT_MATMULS = {"matmuls": 6, "attention": 4, "whole": 0}


class ShardedLlama(Llama):
    """A Llama whose layers are compiled one by one, and are run again in the backward as `checkpoint_blocks` says.

    Masks are made outside of what is compiled, so SDPA is told `is_causal`, and takes its fast kernels.
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
    """Two contexts, for a layer's forward and for its recomputation, that ask a policy about each operator."""
    matmuls = {False: 0, True: 0}  # how many the layer has done: False in the forward, True in the recomputation

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = level != "whole" and operator in KEPT_ATTENTION
        if operator is ATEN.mm.default:
            matmuls[context.is_recompute] += 1
            kept = matmuls[context.is_recompute] <= KEPT_MATMULS[level]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
