"""Work and traffic of attention against what can be counted one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.accounting import DIRECTIONS, attention_bytes, attention_flops, attention_pairs

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
