"""Work from shapes: operations and bytes of attention, parameters and operations of a model. Imports no torch.

Benchmarks divide this work by times to get rates, and the training loop to get MFU, the share of a GPU's peak. To count
another operation, add a function here, and call it in its benchmark.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension; M d_model, F d_ff, L layers,
V vocabulary size, S sequence length.
"""

from lmsys.config import ModelConfig
from lmsys.values import one_of

# Attention's operations as multiples of its forward's: a backward does five matmuls where the forward does two.
FLOPS_OF_FORWARD = {"fwd": 1.0, "bwd": 2.5, "fwdbwd": 3.5}
# A model's operations as a share of a training step's, by the mode of a benchmark.
FLOPS_OF_STEP = {"forward": 1 / 3, "train_forward": 1 / 3, "backward": 2 / 3, "step": 1.0}
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def attention_pairs(queries: int, keys: int, causal: bool) -> float:
    """How many (query, key) pairs of one head count as work.

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
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    *,
    causal: bool,
    direction: str,
    pairs: float | None = None,
) -> float:
    """Operations of attention's matmuls: forward 4·B·H·D for each pair, backward 2.5 times that, both 3.5 times.

    pairs  (query, key) pairs of a head, where a mask other than the causal one hides some; None: `attention_pairs`
    Neither the softmax nor recomputing scores in the backward counts as work. ValueError for an unknown direction.
    """
    forward = 4 * batch * heads * head_dim * (attention_pairs(queries, keys, causal) if pairs is None else pairs)
    return forward * FLOPS_OF_FORWARD[one_of("direction", direction, FLOPS_OF_FORWARD)]


def attention_bytes(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, head_dim: int, *, dtype: str, direction: str
) -> int:
    """The fewest bytes that attention must move: each input is read once, each output written once.

    fwd reads q, k, v and writes o; bwd reads q, k, v, do and writes dq, dk, dv; fwdbwd writes o as well. Tensors that a
    row saves for its backward are not counted.
    """
    query_side = batch * heads * queries * head_dim  # q, o, do, dq
    key_side = batch * kv_heads * keys * head_dim  # k, v, dk, dv
    num_query_side, num_key_side = {"fwd": (2, 2), "bwd": (3, 4), "fwdbwd": (4, 4)}[
        one_of("direction", direction, FLOPS_OF_FORWARD)
    ]
    return (num_query_side * query_side + num_key_side * key_side) * ELEMENT_BYTES[dtype]


def newton_schulz_flops(rows: int, columns: int, steps: int) -> float:
    """Operations of Muon's `steps` Newton-Schulz iterations on a matrix; its sides are n and m, n the shorter one.

    An iteration multiplies n x m by m x n, and n x n by n x m: 2 n² m operations each. It also squares an n x n matrix,
    which takes 2 n³ operations.
    """
    short, long = sorted((rows, columns))
    return steps * (4.0 * short**2 * long + 2.0 * short**3)


def model_parameters(config: ModelConfig) -> int:
    """How many numbers `TransformerLM` learns.

    They are in the input embedding and the head, both (V, M), a last norm, and seven matrices and two norms per layer.
    """
    width = config.d_model
    return 2 * config.vocab_size * width + config.num_layers * (block_matrices(config) + 2 * width) + width


def block_matrices(config: ModelConfig) -> int:
    """How many numbers the seven matrices of a layer hold."""
    return config.d_model * (2 * config.head_dim * (config.num_heads + config.kv_heads) + 3 * config.d_ff)


def model_flops(config: ModelConfig, *, tokens: int, context: int, mode: str) -> float:
    """Operations of a training step, as MFU counts them: (6 · (parameters - V·M) + 6·L·S·M) · tokens.

    For a token, each weight but the input embedding's takes part in one multiplication and addition in the forward, and
    in two in the backward. Attention adds 12·L·S·M, and causal attention half of it. A forward is a third of a step, a
    backward two thirds; recomputing and the optimizer are not counted as work. Source: Chowdhery et al. 2022 (PaLM,
    arXiv 2204.02311), appendix B.

    mode  a key of FLOPS_OF_STEP, else ValueError
    """
    counted = (
        model_parameters(config) - config.vocab_size * config.d_model + config.num_layers * context * config.d_model
    )
    return 6 * counted * tokens * FLOPS_OF_STEP[one_of("mode", mode, FLOPS_OF_STEP)]
