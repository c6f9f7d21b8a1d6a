"""Predicted FLOP, bytes and parameters (lmsys/cost, dev/paper_formulas.py).

They are compared with sums over single elements, with published figures, and with a model's own parameters.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.paper_formulas import (
    Layer,
    compute_bound_batch,
    devices_needed,
    fsdp_bytes,
    stack_activation_bytes,
    stack_state_bytes,
)
from lmsys.config import SIZES, ModelConfig, model_config
from lmsys.cost.communication import bus_factor, ddp_overhead, fit_latency_bandwidth, optimal_bucket_bytes
from lmsys.cost.memory import training_memory, zero_memory
from lmsys.cost.operations import (
    FLOPS_OF_FORWARD,
    attention_bytes,
    attention_flops,
    attention_pairs,
    model_flops,
    model_parameters,
)
from lmsys.model import TransformerLM

lengths = st.integers(1, 60)
TINY, LAYER = model_config("tiny"), Layer(1, 1, 1, 1, 1)


@given(lengths, lengths)
def test_pairs_are_those_of_a_query_and_a_key_that_it_sees(queries: int, keys: int) -> None:
    assert attention_pairs(queries, keys, causal=False) == queries * keys
    visible = sum(j <= i for i in range(queries) for j in range(keys))
    expected = queries * keys / 2 if queries == keys else visible  # a square counts as half, as in published figures
    assert attention_pairs(queries, keys, causal=True) == expected


def test_flops_of_a_published_case() -> None:
    """FlashAttention's own convention: 4 · B · H · S² · D forward, half of it when causal, 2.5 times that backward."""
    forward = 4 * 16 * 16 * 1024**2 * 128
    case = {"batch": 16, "heads": 16, "queries": 1024, "keys": 1024, "head_dim": 128}
    assert attention_flops(**case, causal=False, direction="fwd") == forward
    assert attention_flops(**case, causal=True, direction="bwd") == 2.5 * forward / 2
    assert attention_flops(**case, causal=True, direction="fwdbwd") == 3.5 * forward / 2


@given(batch=st.integers(1, 4), heads=st.integers(1, 4), group=st.integers(1, 3), queries=lengths, keys=lengths)
def test_bytes_are_the_sizes_of_inputs_and_outputs(batch: int, heads: int, group: int, queries: int, keys: int) -> None:
    q, k = batch * heads * group * queries * 8 * 2, batch * heads * keys * 8 * 2  # head dimension 8, 2 bytes
    sizes = {"batch": batch, "heads": heads * group, "kv_heads": heads, "queries": queries, "keys": keys, "head_dim": 8}
    moved = {
        direction: attention_bytes(**sizes, dtype="bfloat16", direction=direction) for direction in FLOPS_OF_FORWARD
    }
    assert moved == {
        "fwd": q + k + k + q,
        "bwd": (q + k + k + q) + (q + k + k),
        "fwdbwd": (q + k + k + q) + (q + q + k + k),
    }


configs = st.builds(
    lambda heads, group, half, **rest: ModelConfig(
        d_model=2 * half * heads * group, num_heads=heads * group, num_kv_heads=heads, **rest
    ),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.integers(1, 3),
    d_ff=st.integers(1, 40),
    num_layers=st.integers(1, 3),
    vocab_size=st.integers(1, 50),
)


@given(configs)
def test_parameters_are_those_of_the_network(config: ModelConfig) -> None:
    built = TransformerLM(config, device="meta")
    assert model_parameters(config) == sum(p.numel() for p in built.parameters())


def test_parameters_of_the_named_sizes() -> None:
    millions = {name: round(model_parameters(model_config(name)) / 1e6) for name in SIZES}
    published = {"tiny": 3, "small": 129, "medium": 423, "large": 969, "xl": 1998, "2.7b": 3407, "10b": 12833}
    published |= {"1b": 1033, "3b": 2998, "8b": 8126}  # with a vocabulary of 151,936
    assert millions == published


@given(configs, st.integers(1, 64), st.integers(1, 4))
def test_a_step_has_six_operations_for_each_weight_and_token_and_those_of_attention(
    config: ModelConfig, context: int, batch: int
) -> None:
    tokens, width = batch * context, config.d_model
    weights = model_parameters(config) - config.vocab_size * width  # embeddings are read, not multiplied
    forward = attention_flops(batch, 1, context, context, width, causal=True, direction="fwd") * config.num_layers
    flops = {
        mode: model_flops(config, tokens=tokens, context=context, mode=mode) for mode in ("forward", "backward", "step")
    }
    assert flops["step"] == pytest.approx(6 * weights * tokens + 3 * forward)
    assert flops["forward"] * 2 == pytest.approx(flops["backward"])
    assert flops["forward"] + flops["backward"] == pytest.approx(flops["step"])


BLOCKS = {"num_blocks": 126, "d_model": 16384, "d_ff": 53248}  # of CS336's problem; each block has two matrices


def test_the_figures_of_a_published_solution() -> None:
    """They answer CS336's problem "communication_accounting" (assignment 2)."""
    gib, tokens = 2**30, 2**20
    assert stack_state_bytes(**BLOCKS) == 3276 * gib
    assert stack_activation_bytes(**BLOCKS, tokens=1) == 2 * 1071 * 2**13
    activations = stack_activation_bytes(**BLOCKS, tokens=tokens)
    assert activations == 17136 * gib
    assert devices_needed(3276 * gib + activations, 80 * gib) == 256
    assert devices_needed(fsdp_bytes(**BLOCKS, tokens=tokens, world_size=1), 95 * gib) == 125
    assert fsdp_bytes(**BLOCKS, tokens=tokens, world_size=125) < 95 * gib
    # On a mesh of 16 x 4 TPUs v5p, with 4.6e14 FLOP/s and 9e10 bytes/s in each direction of a link.
    least = compute_bound_batch(4.6e14, 2 * 9e10, BLOCKS["d_ff"], fsdp_axes=2, tensor_axes=1)
    assert least == pytest.approx(61.325, abs=1e-3)
    assert math.ceil(least) * 16 * 4 == 3968


@given(st.floats(1e5, 1e11), st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_the_best_bucket_is_where_the_overhead_is_least(total: float, latency: float, bandwidth: float) -> None:
    best = total / optimal_bucket_bytes(total, latency, bandwidth)
    least = ddp_overhead(total, best, latency, bandwidth)
    assert least == pytest.approx(2 * math.sqrt(total * latency / bandwidth))
    assert all(ddp_overhead(total, best * factor, latency, bandwidth) >= least * (1 - 1e-9) for factor in (0.5, 0.9, 2))


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12))
def test_a_fit_recovers_latency_and_bandwidth(latency: float, bandwidth: float) -> None:
    sizes = [1e3, 1e6, 1e8, 1e9]
    found = fit_latency_bandwidth(sizes, [latency + size / bandwidth for size in sizes])
    assert found == pytest.approx((latency, bandwidth), rel=1e-6)


@pytest.mark.parametrize(("sizes", "times"), [([1], [1.0]), ([1, 2], [1.0, 0.0]), ([1, 2], [1.0, 0.5]), ([1, 2], [1])])
def test_times_without_a_bandwidth_are_refused(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match=r"positive times|no bandwidth"):
        fit_latency_bandwidth(sizes, times)


def test_each_zero_stage_divides_one_more_kind_of_memory() -> None:
    by_stage = [zero_memory(num_parameters=10, world_size=4, stage=stage) for stage in range(4)]
    assert [sum(memory.values()) for memory in by_stage] == [160, 100, 70, 40]
    assert by_stage[1] == {"parameters": 40, "gradients": 40, "optimizer": 20}


def test_bus_bandwidth_counts_what_a_link_carries() -> None:
    assert [bus_factor(name, world_size=4) for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")] == [
        1.5, 0.75, 0.75, 1.0,
    ]  # fmt: skip


ONES = {"batch": 1, "heads": 1, "queries": 1, "keys": 1, "head_dim": 1, "causal": False}


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (attention_flops, ONES | {"direction": "forward"}, "direction='forward'"),
        (model_flops, {"config": TINY, "tokens": 1, "context": 1, "mode": "optimizer"}, "mode='optimizer'"),
        (zero_memory, {"num_parameters": 10, "world_size": 4, "stage": 4}, "stage=4"),
        (bus_factor, {"operation": "gather", "world_size": 2}, "operation='gather'"),
        (
            LAYER.most_devices,
            {"kind": "expert", "direction": "forward"},
            "kind='expert' must be one of data, fsdp, tensor",
        ),
        (LAYER.compute_seconds, {"direction": "fwd", "devices": 2}, "direction='fwd'"),
        (
            training_memory,
            {"config": TINY, "batch": 1, "context": 8, "precision": "int8"},
            "precision='int8' must be one of fp32, tf32, bf16, fp16",
        ),
    ],
)
def test_a_word_that_is_not_known_is_named(
    function: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(**arguments)
