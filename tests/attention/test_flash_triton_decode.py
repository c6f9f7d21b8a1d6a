"""`flash_triton` for few queries: keys are divided into parts, and `parts_of` chooses how many, so as to fill the GPU.

One kernel computes attention over each part, and another combines the parts.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 to run the kernels")

import torch  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from lmsys.attention import AttentionCase, Documents, Pattern, flash_triton  # noqa: E402
from lmsys.attention.contract import FEW_QUERIES  # noqa: E402
from lmsys.attention.flash_triton_decode import FULL, decode, parts_of  # noqa: E402
from lmsys.attention.tuning import Tile  # noqa: E402
from lmsys.testing import Oracle, make_inputs  # noqa: E402
from tests.support.attention_rows import Row, assert_within_budget, skip_unless_it_runs  # noqa: E402
from tests.support.patterns import make_pattern, patterned  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def row_of(device: str) -> Row:
    """`flash_triton` on this device; the test is skipped where it cannot run."""
    row = Row("flash_triton", device)
    skip_unless_it_runs(row, row.case())
    return row


def as_decoding(case: AttentionCase, queries: int, group: int) -> AttentionCase:
    """The case with so many queries, and with so many query heads to a key head."""
    return replace(case, queries=queries, heads=case.kv_heads * group, grad=False)


@pytest.mark.parametrize("device", DEVICES)
def test_any_number_of_parts_gives_attention(device: str) -> None:
    """o and the log-sum-exp match the oracle for any options together, also where some parts have no keys."""
    row = row_of(device)

    @settings(max_examples=60 if device == "cuda" else 6, suppress_health_check=list(HealthCheck))
    @given(
        case=patterned(row, documents=False, prefix=None, alibi=False, sinks=False),
        seed=st.integers(0, 2**31),
        queries=st.sampled_from([1, 2, 3, FEW_QUERIES]),
        group=st.sampled_from([1, 3, 8, 20]),
        parts=st.sampled_from([None, 1, 2, 7]),
    )
    def holds(case: AttentionCase, seed: int, queries: int, group: int, parts: int | None) -> None:
        case = as_decoding(case, queries, group)
        inputs, pattern = make_inputs(case, seed, memory="" if seed % 2 else "transposed"), make_pattern(case, seed)
        o, lse = decode(inputs.q, inputs.k, inputs.v, case.head_dim**-0.5, pattern, parts)
        assert_within_budget(Oracle(case, inputs, pattern=pattern).error_ratios({"o": o, "lse": lse}))

    holds()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [1, 3, 40])
def test_each_query_has_a_window_of_its_own(parts: int, device: str) -> None:
    """40 parts are more than `_combine_kernel` reads at a time."""
    case = row_of(device).case(heads=4, kv_heads=2, queries=3, keys=600, causal=True, window=580, offset=597)
    inputs, pattern = make_inputs(case, parts), make_pattern(case, 0)
    o, lse = decode(inputs.q, inputs.k, inputs.v, case.head_dim**-0.5, pattern, parts)
    assert_within_budget(Oracle(case, inputs, pattern=pattern).error_ratios({"o": o, "lse": lse}))


@pytest.mark.parametrize("device", DEVICES)
def test_keys_beyond_key_lengths_change_no_bit(device: str) -> None:
    """Only keys that are seen are divided into parts, so bits equal those of a short cache. Without keys o is 0."""
    row = row_of(device)
    lengths, keys = ([0, 1, 33, 70], 70) if device == "cpu" else ([0, 1, 4097, 32_768], 32_768)
    case = row.case(batch=4, heads=8, kv_heads=2, queries=1, keys=keys)
    q, k, v = (getattr(make_inputs(case, 0), name) for name in "qkv")

    def decoded(batch: slice, keys: int, parts: int | None) -> tuple[Tensor, Tensor]:
        pattern = Pattern(key_lengths=torch.tensor(lengths[batch], dtype=torch.int32, device=device))
        return decode(q[batch], k[batch, :, :keys], v[batch, :, :keys], 0.2, pattern, parts)

    for parts in (1, 3):
        o, lse = decoded(slice(None), keys, parts)
        assert not o[0].any() and bool((lse[0] == -torch.inf).all())
        for entry, length in list(enumerate(lengths))[1:]:
            alone = decoded(slice(entry, entry + 1), length, parts)
            assert torch.equal(o[entry], alone[0][0]) and torch.equal(lse[entry], alone[1][0])
    first, again = decoded(slice(None), keys, None), decoded(slice(None), keys, None)
    assert all(map(torch.equal, first, again))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (4, 4)])
def test_a_long_cache_on_a_gpu(heads: tuple[int, int]) -> None:
    row = row_of("cuda")
    for batch, queries, head_dim in ((1, 1, 128), (8, 1, 64), (3, 16, 256)):
        case = row.case(batch=batch, heads=heads[0], kv_heads=heads[1], queries=queries, keys=20_001, dtype="bfloat16")
        case = replace(case, head_dim=head_dim, causal=True, offset=20_001 - queries)
        inputs, pattern = make_inputs(case, batch), Pattern(True, offset=case.offset)
        o, lse = decode(inputs.q, inputs.k, inputs.v, head_dim**-0.5, pattern)
        assert_within_budget(Oracle(case, inputs, pattern=pattern).error_ratios({"o": o, "lse": lse}))


def test_decode_is_called_for_few_queries_without_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    def takes(queries: int, tile: Tile | None = None, pattern: Pattern | None = None) -> bool:
        called.clear()
        q = torch.zeros(1, 2, queries, 16)
        flash_triton._forward(q, q, q, True, 0.25, tile, pattern)
        return bool(called)

    row_of("cpu")
    monkeypatch.setattr("lmsys.attention.flash_triton_decode.decode", lambda *asked: called.append(asked))
    assert takes(1) and takes(FEW_QUERIES) and takes(3, pattern=Pattern(True, window=2, softcap=3.0))
    assert not takes(FEW_QUERIES + 1) and not takes(1, Tile(32, 32, 4, 1))
    assert not takes(4, pattern=Pattern(True, documents=Documents([1, 3])))


@given(st.integers(1, 2000), st.integers(0, 500), st.integers(1, 300))
def test_parts_fill_the_gpu(owners: int, most: int, places: int) -> None:
    """The programs fill the share FULL of the GPU's places, or no smaller number of parts does.

    owners  programs of each part; most: the largest number of parts; places: programs that run at once. Programs run in
            waves of as many as there are places, and one more part would need one more wave
    """
    parts = parts_of(owners, most, places)
    assert 1 <= parts <= max(1, most)
    if parts == most or parts == 1:
        return
    programs = parts * owners
    waves = -(-programs // places)
    assert programs >= FULL * waves * places or all(
        other * owners <= FULL * -(-other * owners // places) * places for other in range(1, parts)
    )
    assert programs + owners > waves * places, "one more part would need one more wave"


@pytest.mark.parametrize(
    ("owners", "most", "parts"),
    [
        (8 * 8, 256, 1),
        (4 * 8, 256, 4),
        (1 * 8, 256, 16),
        (64 * 8, 256, 1),
        (1 * 8, 8, 8),
        (300, 256, 2),
        (5000, 256, 1),
        (1, 0, 1),
    ],
)
def test_parts_on_an_h200(owners: int, most: int, parts: int) -> None:
    """It has 132 multiprocessors, each of which runs one program at head dimension 128; 32,768 keys are 256 tiles."""
    assert parts_of(owners, most, 132) == parts
