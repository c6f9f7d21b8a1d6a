"""The adapters of CS336's assignments 1 (basics) and 2 (systems), of 2025 and 2026: the `tests/adapters.py` of each.

docs/cs336.md says how to run the public tests with it, and which of them pass.
"""

from torch.func import functional_call

from lmsys.attention import attention
from lmsys.attention.flash_torch import FlashTorch
from lmsys.config import ModelConfig
from lmsys.model import TransformerLM, functions, loss, transformer
from lmsys.model.rotary import RotaryEmbedding
from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.overlapped import Bucketed, Overlapped
from lmsys.parallel.sharded_optimizer import ShardedOptimizer
from lmsys.tokenizer import Tokenizer, train
from lmsys.training.checkpoint import load_checkpoint, save_checkpoint
from lmsys.training.optimizer import AdamW, clip_grad_norm, cosine_schedule
from lmsys.training.sampling import get_batch

# Assignment 1: modules, with the weights that a test gives.


def run_linear(d_in, d_out, weights, in_features):
    return functional_call(transformer.Linear(d_in, d_out), {"weight": weights}, in_features)


def run_embedding(vocab_size, d_model, weights, token_ids):
    return functional_call(transformer.Embedding(vocab_size, d_model), {"weight": weights}, token_ids)


def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    weights = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    return functional_call(transformer.FeedForward(d_model, d_ff), weights, in_features)


def run_rmsnorm(d_model, eps, weights, in_features):
    return functional_call(transformer.RMSNorm(d_model, eps), {"weight": weights}, in_features)


def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    return RotaryEmbedding(d_k, max_seq_len, theta).rotate(in_query_or_key, token_positions)


def run_scaled_dot_product_attention(Q, K, V, mask=None):
    return attention(Q, K, V, mask=mask)


def run_multihead_self_attention(
    d_model,
    num_heads,
    q_proj_weight,
    k_proj_weight,
    v_proj_weight,
    o_proj_weight,
    in_features,
    rope=None,
    positions=None,
):
    projections = {"q": q_proj_weight, "k": k_proj_weight, "v": v_proj_weight, "output": o_proj_weight}
    weights = {f"{name}_proj.weight": weight for name, weight in projections.items()}
    return functional_call(
        transformer.Attention(d_model, num_heads), weights, (in_features,), {"rope": rope, "positions": positions}
    )


def run_multihead_self_attention_with_rope(
    d_model,
    num_heads,
    max_seq_len,
    theta,
    q_proj_weight,
    k_proj_weight,
    v_proj_weight,
    o_proj_weight,
    in_features,
    token_positions=None,
):
    rope = RotaryEmbedding(d_model // num_heads, max_seq_len, theta)
    weights = q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight
    return run_multihead_self_attention(d_model, num_heads, *weights, in_features, rope, token_positions)


def run_transformer_block(d_model, num_heads, d_ff, max_seq_len, theta, weights, in_features):
    block = transformer.Block(ModelConfig(d_model, d_ff, 1, num_heads))
    rope = RotaryEmbedding(d_model // num_heads, max_seq_len, theta)
    return functional_call(block, weights, (in_features,), {"rope": rope})


def run_transformer_lm(
    vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, weights, in_indices
):
    config = ModelConfig(
        d_model,
        d_ff,
        num_layers,
        num_heads,
        vocab_size=vocab_size,
        context_length=context_length,
        rope_theta=rope_theta,
    )
    return functional_call(TransformerLM(config), weights, in_indices)


# Assignment 1: functions, the optimizer, data, checkpoints and the tokenizer.

run_silu = functions.silu
run_softmax = functions.softmax
run_cross_entropy = loss.cross_entropy
run_save_checkpoint = save_checkpoint
run_load_checkpoint = load_checkpoint
get_tokenizer = Tokenizer


def run_get_batch(dataset, batch_size, context_length, device):
    return get_batch(dataset, batch_size, context_length, device)


def run_gradient_clipping(parameters, max_l2_norm):
    clip_grad_norm(parameters, max_l2_norm)


def get_adamw_cls():
    return AdamW


def run_get_lr_cosine_schedule(it, max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters):
    return cosine_schedule(
        it,
        max_lr=max_learning_rate,
        min_lr=min_learning_rate,
        warmup_steps=warmup_iters,
        total_steps=cosine_cycle_iters,
    )


def run_train_bpe(input_path, vocab_size, special_tokens, **kwargs):
    tokenizer = train(input_path, vocab_size, special_tokens)
    return tokenizer.vocab, tokenizer.merges


# Assignment 2.


def get_flashattention_autograd_function_pytorch():
    return FlashTorch


def get_flashattention_autograd_function_triton():
    from lmsys.attention.flash_triton import FlashTriton  # Triton may be absent where only the other is tested

    return FlashTriton


def get_ddp(module):
    return Overlapped(module)


def get_ddp_bucketed(module, bucket_size_mb):
    return Bucketed(module, bucket_mb=bucket_size_mb)


def get_fsdp(module, compute_dtype=None):
    for child in module.modules():
        if type(child).__name__ == "RMSNorm":  # the course's computes in float32
            child.reads_own_dtype = True
    return Fsdp(module, compute_dtype=compute_dtype)


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish_gradient_synchronization()
    fsdp_model.unshard()  # a test reads the gradients of the module's own parameters


def fsdp_gather_full_params(fsdp_model):
    return fsdp_model.full_state_dict()


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def ddp_on_after_backward(ddp_model, optimizer):
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    pass  # buckets are made as gradients come


get_ddp_individual_parameters = get_ddp
ddp_individual_parameters_on_after_backward = ddp_on_after_backward
ddp_bucketed_on_after_backward = ddp_on_after_backward
