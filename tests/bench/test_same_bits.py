"""Records say whether a row repeats its bits (`repeatable`), and has the same bits alone (`batch_invariant`).

Neither makes a row wrong. ROWS has attention rows that repeat, that do not, and that depend on the batch; its module
is written to a file, and the fixture `by_case` measures all of them.

The runner compares bits by lmsys/measure/repeats.py, whose laws come last. `apart` compares two dictionaries of tensors
bit by bit, and returns {name: largest difference} of the tensors that are not the same. `repeated` calls a function
several times, and compares each result with the first.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.bench_attention import Attention
from lmsys.bench import Settings
from lmsys.measure.repeats import BITS, LEAST, MOST, apart, repeated
from tests.support.harness import Telling, cases_of, records

ROWS = '''
import torch
from lmsys.attention.naive import naive


def repeats(q, k, v, *, causal=False, scale=None):
    return naive(q, k, v, causal=causal, scale=scale)


def any_order(q, k, v, *, causal=False, scale=None):
    """Adds up the keys in a random order, as threads do that end in any order."""
    order = torch.randperm(k.shape[2])
    return naive(q, k[:, :, order], v[:, :, order], causal=causal, scale=scale)


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx * (1 + torch.randint(-4, 5, dx.shape) * 2.0**-23)


def dq_by_atomics(q, k, v, *, causal=False, scale=None):
    return naive(Noise.apply(q), k, v, causal=causal, scale=scale)


def by_batch(q, k, v, *, causal=False, scale=None):
    """Adds up the keys in reverse for a batch of 1."""
    if len(q) == 1:
        k, v = k.flip(2), v.flip(2)
    return naive(q, k, v, causal=causal, scale=scale)


def compiled(q, k, v, *, causal=False, scale=None):
    return by_batch(q, k, v, causal=causal, scale=scale)


compiled.compiles = True


def never_alone(q, k, v, *, causal=False, scale=None):
    if len(q) == 1:
        raise ValueError("no batch of 1")
    return naive(q, k, v, causal=causal, scale=scale)


def untidy(q, k, v, *, causal=False, scale=None):
    if len(q) == 1:
        torch.set_default_dtype(torch.float64)
    return naive(q, k, v, causal=causal, scale=scale)


def lenient(q, k, v, *, causal=False, scale=None):
    if len(q) == 1:
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory ^= True
    return naive(q, k, v, causal=causal, scale=scale)
'''
WITH_GRADIENTS = ("repeats", "any_order", "dq_by_atomics", "by_batch")
NAMES = (*WITH_GRADIENTS, "compiled", "never_alone", "untidy", "lenient")
RecordsByCase = dict[tuple[str, str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def by_case(tmp_path_factory: pytest.TempPathFactory) -> RecordsByCase:
    """{(row, direction, batch): record}. The rows' random numbers begin with a fixed seed."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("rows") / "rows.py"
    path.write_text(ROWS)
    shape = {"length": ((65, 65),), "head_dim": (16,), "heads": ((2, 2),), "causal": (False,), "dtype": ("float32",)}
    collected: RecordsByCase = {}
    for names, direction, batch in ((NAMES, "fwd", 3), (WITH_GRADIENTS, "bwd", 3), (("by_batch",), "fwd", 1)):
        rows = tuple(f"{path}:{name}" for name in names)
        asked = {"attention": rows, "batch": (batch,), "direction": (direction,)}
        cases = cases_of(Attention(), Settings(device="cpu"), **asked, **shape)
        by_row = records(Attention(), cases, min_rounds=2, seconds_per_row=0.0, checks_files=False)
        collected |= {(row, direction, batch): record for row, record in by_row.items()}
    return collected


def test_no_row_is_wrong_for_its_bits(by_case: RecordsByCase) -> None:
    assert len(by_case) == len(NAMES) + len(WITH_GRADIENTS) + 1
    for key, record in by_case.items():
        assert record["outcome"] == "ok" and record["time_s"] > 0, (key, record["reason"])
        assert 3 <= record["same_bits"]["calls"] <= 10, key


@pytest.mark.parametrize(
    ("row", "direction", "batch", "invariant", "differ", "alone"),
    [
        ("repeats", "fwd", 3, True, set(), set()),
        ("repeats", "bwd", 3, True, set(), set()),
        # A sum in no fixed order shows in every tensor. It cannot show if the row depends on the batch.
        ("any_order", "fwd", 3, None, {"o"}, set()),
        ("any_order", "bwd", 3, None, {"o", "dq", "dk", "dv"}, set()),
        ("dq_by_atomics", "fwd", 3, True, set(), set()),
        ("dq_by_atomics", "bwd", 3, None, {"dq"}, set()),
        ("by_batch", "fwd", 3, False, set(), {"o"}),
        ("by_batch", "bwd", 3, False, set(), {"o", "dq"}),
        ("by_batch", "fwd", 1, None, set(), set()),  # a batch of 1 is alone already
        ("compiled", "fwd", 3, None, set(), set()),  # compiles for each shape, and is not asked alone
    ],
)
def test_a_record_names_the_tensors_that_do_not_repeat_or_depend_on_the_batch(
    by_case: RecordsByCase,
    row: str,
    direction: str,
    batch: int,
    invariant: bool | None,
    differ: set[str],
    alone: set[str],
) -> None:
    record = by_case[row, direction, batch]
    bits = record["same_bits"]
    assert record["repeatable"] is (not differ) and record["batch_invariant"] is invariant
    assert bits["differ"].keys() == differ and all(0 < size < 1e-4 for size in bits["differ"].values()), bits
    assert bits["alone"].keys() >= alone and bool(bits["alone"]) == bool(alone), bits
    assert bits["elements"] == ([] if batch == 1 or row == "compiled" else [0, 2]) and bits["failure"] is None


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("never_alone", "no batch of 1"),
        ("untidy", "it leaves changed: torch's d"),
        ("lenient", "it leaves changed: deterministic mode"),
    ],
)
def test_what_fails_alone_is_told_and_costs_nothing_else(by_case: RecordsByCase, row: str, why: str) -> None:
    record = by_case[row, "fwd", 3]
    assert record["repeatable"] is True and record["batch_invariant"] is None and why in record["same_bits"]["failure"]


class Asked(Telling):
    """A benchmark with `outputs`: so the runner calls rows again to compare bits."""

    def outputs(self, candidate: Any, setup: Any, element: int | None = None) -> dict[str, Any]:
        self._note("outputs", candidate.case.impl)
        return {}


def test_rows_are_called_again_last_of_all() -> None:
    benchmark = Asked()
    assert all(record["repeatable"] for record in records(benchmark, cases_of(benchmark)).values())
    first = benchmark.called.index("outputs right")
    assert (
        set(benchmark.called[first:]) == {"outputs right", "outputs also"} and benchmark.called[first - 1] == "redraw"
    )


def test_what_fails_in_the_repeats_costs_them_only() -> None:
    benchmark = Asked(outputs=MemoryError("no room"))
    for record in records(benchmark, cases_of(benchmark)).values():
        assert (
            record["outcome"] == "ok"
            and record["time_s"] > 0
            and record["repeatable"] is record["batch_invariant"] is None
        )
        assert record["same_bits"]["calls"] == 0 and record["same_bits"]["failure"] == "no room"


def test_what_was_not_timed_is_not_called_again() -> None:
    benchmark = Asked()
    by_case = records(benchmark, cases_of(benchmark), timed=False)
    assert all("same_bits" not in record and record["repeatable"] is None for record in by_case.values())
    assert "outputs right" not in benchmark.called


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A random tensor that depends on the seed alone."""
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_a_change_of_any_bit_is_seen(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    outputs = {"x": drawn(shape, dtype, seed), "y": drawn(shape, dtype, seed + 1)}
    changed = {name: x.clone().mT.contiguous().mT if x.dim() > 1 else x.clone() for name, x in outputs.items()}
    assert apart(outputs, changed) == {}
    at = data.draw(st.integers(0, changed["y"].numel() - 1), label="at")
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 2), label="bit")
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), shape))
    changed["y"].view(BITS[dtype.itemsize])[place] ^= 1 << bit
    difference = abs(float(outputs["y"][place]) - float(changed["y"][place]))
    assert apart(outputs, changed) == {"y": pytest.approx(difference if math.isfinite(difference) else 0.0)}


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), math.nan)
    assert apart({"x": nan}, {"x": nan.clone()}) == {}
    assert apart({"x": zero}, {"x": -zero}) == {"x": 0.0}
    assert apart({"x": nan}, {"x": zero}) == {"x": 0.0}


def test_the_largest_difference_of_all_calls_counts() -> None:
    sizes = iter([0.0, 0.25, 2.0, 0.5])
    first, calls, differ = repeated(lambda: {"x": torch.full((2,), next(sizes)), "y": torch.ones(())})
    assert calls == LEAST == 3 and differ == {"x": 2.0} and first["x"].tolist() == [0.0, 0.0]


def test_more_calls_are_made_while_there_is_time() -> None:
    assert repeated(dict, 60.0) == ({}, MOST, {})


def test_a_row_that_writes_into_one_buffer_is_seen() -> None:
    buffer = torch.zeros(2)
    assert repeated(lambda: {"x": buffer.add_(1)})[2] == {"x": 2.0}
