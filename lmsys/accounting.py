"""What must be done, from shapes: operations and bytes of attention, parameters and operations of a model, what
communication costs, and what training over several devices holds on each. No torch.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension; M d_model, F d_ff, L layers,
V vocabulary size, S sequence length.
"""

import math
from collections.abc import Callable, Sequence

from lmsys.config import ModelConfig

DIRECTIONS = ("fwd", "bwd", "fwdbwd")
FLOPS_OF_FORWARD = {"fwd": 1.0, "bwd": 2.5, "fwdbwd": 3.5}  # a backward does five matmuls where the forward does two
FLOPS_OF_STEP = {"forward": 1 / 3, "train_forward": 1 / 3, "backward": 2 / 3, "step": 1.0}
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def attention_pairs(queries: int, keys: int, causal: bool) -> float:
    """How many (query, key) pairs count as work, for one head.

    All Q·K without a mask. Causal and Q == K: half of them, Q·K / 2, as FlashAttention and the papers after
    it count (the diagonal adds another Q / 2). Causal and Q != K: exactly the pairs with key j <= query i.
    """
    if not causal:
        return float(queries * keys)
    if queries == keys:
        return queries * keys / 2
    rows_with_a_limit = min(queries, keys)  # query i sees i + 1 keys, and all of them from query K - 1 on
    return float(rows_with_a_limit * (rows_with_a_limit + 1) // 2 + (queries - rows_with_a_limit) * keys)


def attention_flops(
    batch: int, heads: int, queries: int, keys: int, head_dim: int, *, causal: bool, direction: str
) -> float:
    """Operations of the two matmuls: forward 4·B·H·D for each pair, backward 2.5 times that, both 3.5 times.

    Recomputing scores in the backward is not counted as work, nor is the softmax. ValueError for an unknown direction.
    """
    _check(direction)
    forward = 4 * batch * heads * head_dim * attention_pairs(queries, keys, causal)
    return forward * FLOPS_OF_FORWARD[direction]


def attention_bytes(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, head_dim: int, *, dtype: str, direction: str
) -> int:
    """The least that must move: each input read once, each output written once.

    fwd reads q, k, v and writes o; bwd reads q, k, v, do and writes dq, dk, dv; fwdbwd writes o as well. What a
    row saves between the two is its own affair and not counted.
    """
    _check(direction)
    query_side = batch * heads * queries * head_dim  # q, o, do, dq
    key_side = batch * kv_heads * keys * head_dim  # k, v, dk, dv
    num_query_side, num_key_side = {"fwd": (2, 2), "bwd": (3, 4), "fwdbwd": (4, 4)}[direction]
    return (num_query_side * query_side + num_key_side * key_side) * ELEMENT_BYTES[dtype]


def model_parameters(config: ModelConfig) -> int:
    """How many numbers `TransformerLM` learns: two embeddings, a last norm; in each layer seven matrices, two norms."""
    width = config.d_model
    return 2 * config.vocab_size * width + config.num_layers * (block_matrices(config) + 2 * width) + width


def block_matrices(config: ModelConfig) -> int:
    """How many numbers the seven matrices of a layer hold."""
    attention = 2 * config.d_model * config.head_dim * (config.num_heads + config.kv_heads)
    return attention + 3 * config.d_model * config.d_ff


def model_flops(config: ModelConfig, *, tokens: int, context: int, mode: str) -> float:
    """Operations of a training step, as MFU counts them: (6 · (parameters - V·M) + 6·L·S·M) · tokens.

    Each weight but the input embedding's takes part in one multiplication and addition forward and two backward, and
    causal attention adds half of 12·L·S·M. A forward is a third of it, a backward two thirds; recomputing and the
    optimizer are not counted as work. Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B.
    ValueError for a mode that has no such count.
    """
    if mode not in FLOPS_OF_STEP:
        raise ValueError(f"{mode=} must be one of {tuple(FLOPS_OF_STEP)}")
    weights = model_parameters(config) - config.vocab_size * config.d_model
    step = (6 * weights + 6 * config.num_layers * context * config.d_model) * tokens
    return step * FLOPS_OF_STEP[mode]


def fit_latency_bandwidth(sizes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """(o in seconds, w in bytes/s) of t = o + bytes / w: least squares of relative errors, o at least 1 us.

    ValueError for fewer than two sizes, or for times that do not grow with size.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(times_s) or not all(time > 0 for time in times_s):
        raise ValueError(
            f"a fit needs positive times of at least two sizes; got {list(sizes)} bytes, {list(times_s)} s"
        )
    weights = [1 / time**2 for time in times_s]
    total = math.fsum(weights)
    mean_size = math.fsum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    mean_time = math.fsum(w * t for w, t in zip(weights, times_s, strict=True)) / total
    rows = list(zip(weights, sizes, times_s, strict=True))
    slope = math.fsum(w * (s - mean_size) * (t - mean_time) for w, s, t in rows)
    slope /= math.fsum(w * (s - mean_size) ** 2 for w, s, _ in rows)
    if slope <= 0:
        raise ValueError(
            f"times do not grow with size, so there is no bandwidth: {list(sizes)} bytes, {list(times_s)} s"
        )
    return max(mean_time - slope * mean_size, 1e-6), 1 / slope


def ddp_overhead(total_bytes: float, num_buckets: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds that gradients in n equal buckets add to a backward: T = n o + s / (n w).

    If computing a bucket takes as long as sending it, what is left is the calls' latencies and the last bucket. From
    CS336, assignment 2, "ddp_bucketed_benchmarking" (b).
    """
    return num_buckets * latency_s + total_bytes / (num_buckets * bytes_per_s)


def optimal_bucket_bytes(total_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """The bucket that makes `ddp_overhead` least: B = sqrt(s o w), where its two terms are equal."""
    return math.sqrt(total_bytes * latency_s * bytes_per_s)


BUS_FACTORS: dict[str, Callable[[int], float]] = {  # what a link carries of an operation's bytes, in a ring of n
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def bus_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests, PERFORMANCE.md); bytes are those of the whole tensor.

    ValueError for an operation that is not in BUS_FACTORS.
    """
    if operation not in BUS_FACTORS:
        raise ValueError(f"{operation=} must be one of {tuple(BUS_FACTORS)}")
    return BUS_FACTORS[operation](world_size)


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
    """What the same blocks keep for their backward in bfloat16: the input of each matrix."""
    return 2 * tokens * num_blocks * (d_model + d_ff)


def devices_needed(total_bytes: float, device_bytes: float) -> int:
    """How many devices hold so much, if it divides evenly."""
    return math.ceil(total_bytes / device_bytes)


def fsdp_bytes(num_blocks: int, d_model: int, d_ff: int, tokens: int, world_size: int) -> float:
    """On each device, with state and every second block's activations sharded and the others not kept."""
    state = stack_state_bytes(num_blocks, d_model, d_ff)
    return (state + stack_activation_bytes(num_blocks, d_model, d_ff, tokens) / 2) / world_size


def compute_bound_batch(
    flops_per_s: float, link_bytes_per_s: float, d_ff: int, *, fsdp_axes: int = 1, tensor_axes: int = 1
) -> float:
    """Tokens per device above which FSDP with tensor parallelism is compute-bound: alpha^2 / (M_X M_Y F).

    alpha = FLOP/s over the bytes/s of a link in both directions, M the mesh axes that each kind of parallelism has.
    Austin et al. 2025, "How to Scale Your Model", section on training, "FSDP and tensor parallelism".
    """
    return (flops_per_s / link_bytes_per_s) ** 2 / (fsdp_axes * tensor_axes * d_ff)


def _check(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"{direction=} must be one of {DIRECTIONS}")
