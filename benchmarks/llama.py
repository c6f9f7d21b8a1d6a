"""Hugging Face's Llama at our dimensions: the model that a user would otherwise train, as a row beside ours."""

from typing import Any

import torch
from torch import Tensor, nn

from lmsys.config import ModelConfig

LAYER_NAMES = {
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
NAMES = {"token_embeddings": "model.embed_tokens", "ln_final": "model.norm", "lm_head": "lm_head"}


class Llama(nn.Module):
    """LlamaForCausalLM with SDPA, called as `lmsys.model.TransformerLM` is.

    ImportError that names the extra when transformers is missing; ValueError for a rope_theta that is not its default.
    """

    def __init__(self, config: ModelConfig, device: Any = None):
        super().__init__()
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise ImportError(f"Llama needs transformers ({error}); pip install 'lmsys[peers]' brings it") from error
        if config.rope_theta != 10_000.0:
            raise ValueError(
                f"rope_theta={config.rope_theta}: versions of transformers differ but for the default, 10000"
            )
        with torch.device(device or "cpu"):
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
                    attn_implementation="sdpa",
                )
            )
        self.head_dim = config.head_dim

    def compile_blocks(self) -> "Llama":
        """As its users do: the whole model."""
        self.wrapped.compile()
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        return self.wrapped(input_ids=tokens).logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Its own loss, which shifts the tokens itself: `targets` are taken to be the tokens' successors."""
        return self.wrapped(input_ids=tokens, labels=tokens).loss

    def take_weights(self, ours: nn.Module) -> "Llama":
        """The weights of a TransformerLM, with query and key rows ordered for its rotation of (i, i + D / 2)."""
        state = {}
        for name, weight in ours.state_dict().items():
            layer, _, part = name.removesuffix(".weight").partition(".")[2].partition(".")
            if part in ("attn.q_proj", "attn.k_proj"):
                weight = weight.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            known = NAMES.get(name.removesuffix(".weight"))
            state[f"{known or f'model.layers.{layer}.{LAYER_NAMES[part]}'}.weight"] = weight
        self.wrapped.load_state_dict(state)
        return self
