"""Extreme inputs of attention (lmsys/extremes/attention.py, lmsys/check/extremes.py).

A unit is the inputs of one key/value head of one sequence. A unit with extreme inputs can be drawn again alone from the
seed, a small share of units is extreme, and honest rows are right on such inputs.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsys.attention import ATTENTION
from lmsys.attention.contract import AttentionCase, adapt
from lmsys.check import extremes
from lmsys.extremes import BEFORE
from lmsys.extremes.attention import KINDS as EXTREMES
from lmsys.extremes.attention import TAIL, AttentionDraws, drawn_unit, extreme_of, plant, unit_tensors
from lmsys.testing import make_inputs
from tests.museum.families import exhibits

CASES = st.builds(
    AttentionCase,
    batch=st.integers(1, 3),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    queries=st.integers(1, 90),
    keys=st.integers(1, 90),
    head_dim=st.sampled_from([8, 16]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    causal=st.booleans(),
    grad=st.just(True),
)


@given(case=CASES, seed=st.integers(0, 2**32), draw=st.integers(0, 2**53))
def test_a_unit_is_drawn_again_alone(case: AttentionCase, seed: int, draw: int) -> None:
    inputs = make_inputs(case, 0)
    drawn = AttentionDraws(inputs.tensors, seed, case.causal)
    drawn.fill(draw)
    assert drawn.extreme == extreme_of(case, seed, draw)
    unit = drawn.extreme[0] if drawn.extreme else (case.batch - 1, 0)
    alone = drawn_unit(case, seed, draw, unit, case.causal)
    q, k, v = unit_tensors(inputs.tensors, unit)
    for x, y in ((q, alone["q"][0]), (k, alone["k"][0, 0]), (v, alone["v"][0, 0])):
        assert torch.equal(x, y)
    before = drawn_unit(case, seed, draw, unit, case.causal, BEFORE)  # as in old files, without extreme parts
    assert torch.equal(before["do"], alone["do"])
    assert torch.equal(before["q"], alone["q"]) or drawn.extreme is not None


def test_a_small_share_is_extreme() -> None:
    case = AttentionCase(2, 2, 2, 8, 8, 8, "float32")
    drawn = [extreme_of(case, 0, draw) for draw in range(2000)]
    hits = [planted for planted in drawn if planted is not None]
    assert abs(len(hits) / 2000 - 4 / 16) < 0.05  # a draw has 4 units, of which 1 in 16 is extreme
    assert {kind for _, kind in hits} == {*EXTREMES} and {unit for unit, _ in hits} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@given(case=CASES, kind=st.sampled_from([*EXTREMES]), seed=st.integers(0, 2**32))
def test_extreme_inputs_are_finite_and_in_their_unit_alone(case: AttentionCase, kind: str, seed: int) -> None:
    inputs = make_inputs(case, seed)
    q, k, v = (x.clone() for x in unit_tensors(inputs.tensors, (0, 0)))
    plant(kind, *unit_tensors(inputs.tensors, (0, 0)), case.causal)
    now = unit_tensors(inputs.tensors, (0, 0))
    assert all(bool(x.isfinite().all()) for x in now)
    others = make_inputs(case, seed)
    assert torch.equal(inputs.do, others.do) and torch.equal(inputs.q[1:], others.q[1:])
    changes = any(not torch.equal(x, y) for x, y in zip((q, k, v), now, strict=True))
    begin = case.keys - (case.keys % TAIL or min(TAIL, case.keys))
    stays = (kind == "equal" and case.keys == 1) or (kind == "last" and case.causal and case.queries <= begin)
    assert changes != stays


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    row=st.sampled_from(["vectorized", "flash_torch", "sdpa_flash"]),
    causal=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_honest_rows_are_right(dtype: str, row: str, causal: bool, seed: int) -> None:
    small_case = AttentionCase(1, 1, 1, 1, 1, 64, dtype, causal=causal, grad=True)
    case = extremes.case_of_kinds(small_case)
    fault = extremes.failure(adapt(ATTENTION[row].load()), case, True, seed)
    assert fault is None, fault


@pytest.mark.parametrize("mistake", ["no_max", "oob_zero"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_range_of_scores_names_a_mistake(mistake: str, dtype: str) -> None:
    """The head dimension is 80, whose default scale is no power of two. Gradients are checked, too."""
    (exhibit,) = (exhibit for exhibit in exhibits("attention") if exhibit.name == mistake)
    case = replace(extremes.case_of_kinds(AttentionCase(1, 1, 1, 1, 1, 80, dtype)), grad=True)
    name = extremes.range_mistake(exhibit.entry.load(), case, grad=True)
    assert name is not None and str(exhibit.mistake) in name
