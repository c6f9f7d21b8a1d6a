"""Work, traffic and parameters against what can be counted one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.accounting import (
    DIRECTIONS,
    attention_bytes,
    attention_flops,
    attention_pairs,
    model_flops,
    model_parameters,
)
from lmsys.config import SIZES, ModelConfig, model_config
from lmsys.model import TransformerLM

lengths = st.integers(1, 60)


@given(lengths, lengths)
def test_pairs_are_those_that_the_mask_leaves(queries: int, keys: int) -> None:
    assert attention_pairs(queries, keys, causal=False) == queries * keys
    visible = sum(j <= i for i in range(queries) for j in range(keys))
    expected = queries * keys / 2 if queries == keys else visible
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
    q, k = batch * heads * group * queries * 8 * 2, batch * heads * keys * 8 * 2
    moved = {
        direction: attention_bytes(batch, heads * group, heads, queries, keys, 8, dtype="bfloat16", direction=direction)
        for direction in DIRECTIONS
    }
    assert moved == {
        "fwd": q + k + k + q,
        "bwd": (q + k + k + q) + (q + k + k),
        "fwdbwd": (q + k + k + q) + (q + q + k + k),
    }


def test_an_unknown_direction_is_named() -> None:
    with pytest.raises(ValueError, match="direction='forward'"):
        attention_flops(1, 1, 1, 1, 1, causal=False, direction="forward")


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
    assert millions == {"tiny": 3, "small": 129, "medium": 423, "large": 969, "xl": 1998, "2.7b": 3407}


@given(configs, st.integers(1, 64), st.integers(1, 4))
def test_a_step_is_six_operations_a_weight_and_token_and_half_the_scores(
    config: ModelConfig, context: int, batch: int
) -> None:
    tokens, width = batch * context, config.d_model
    weights = model_parameters(config) - config.vocab_size * width
    forward = attention_flops(batch, 1, context, context, width, causal=True, direction="fwd") * config.num_layers
    flops = {
        mode: model_flops(config, tokens=tokens, context=context, mode=mode) for mode in ("forward", "backward", "step")
    }
    assert flops["step"] == pytest.approx(6 * weights * tokens + 3 * forward)
    assert flops["forward"] * 2 == pytest.approx(flops["backward"])
    assert flops["forward"] + flops["backward"] == pytest.approx(flops["step"])


def test_a_mode_without_operations_is_named() -> None:
    with pytest.raises(ValueError, match="mode='optimizer'"):
        model_flops(model_config("tiny"), tokens=1, context=1, mode="optimizer")
