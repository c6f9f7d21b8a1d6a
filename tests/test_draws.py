"""`lmsys.draws`, which makes inputs that can be drawn again from a seed and the number of a draw.

A draw is a window of a stream of values. The tests show: the stream's 32-bit words are those of Philox4x32-10, by known
answers and by `block_of`; any part of a draw can be made alone; values have the right distribution; and a GPU draws the
same bits.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmsys import draws
from lmsys.draws import STARTS, Draws, part, philox, start, values, whole_numbers

SEEDS = st.integers(0, 2**64 - 1)
# (counter, key, words) from the file kat_vectors of Random123, the lines "philox4x32 10".
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def block_of(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The reference: four words of Philox4x32-10, computed with Python's integers."""
    (a, b, c, d), (k, l) = counter, key  # noqa: E741
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = second >> 32 ^ b ^ k, second & 0xFFFFFFFF
        c, d = first >> 32 ^ d ^ l, first & 0xFFFFFFFF
        k, l = k + 0x9E3779B9 & 0xFFFFFFFF, l + 0xBB67AE85 & 0xFFFFFFFF  # noqa: E741
    return a, b, c, d


def test_the_reference_gives_the_known_answers() -> None:
    for counter, key, words in KNOWN:
        assert block_of(counter, key) == words


@given(seed=SEEDS, first=st.integers(0, 2**40), count=st.integers(1, 9))
def test_words_are_those_of_the_reference(seed: int, first: int, count: int) -> None:
    expected = [
        word
        for block in range(first, first + count)
        for word in block_of((block & 0xFFFFFFFF, block >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    ]
    assert philox(seed, first, count).tolist() == expected


def drawn(device: str = "cpu") -> Draws:
    """Draws of four tensors that differ in dtype, layout and distribution; `fill` draws into them."""
    tensors = {
        "x": torch.empty(3, 5, device=device),
        "narrow": torch.empty(4, 6, dtype=torch.bfloat16, device=device),
        "transposed": torch.empty(7, 2, device=device).mT,
        "tokens": torch.empty(2, 9, dtype=torch.int64, device=device),
    }
    return Draws(tensors, seed=5, std={"narrow": 0.125}, below={"tokens": 1000})


@given(draw=st.integers(0, 2**53), first=st.integers(0, 13))
def test_a_part_of_a_draw_is_made_alone(draw: int, first: int) -> None:
    inputs = drawn()
    inputs.fill(draw)
    for name, x in inputs.tensors.items():
        distribution = {"narrow": {"std": 0.125}, "tokens": {"below": 1000}}.get(name, {})
        alone = part(5, draw, name, first, x.numel() - first, x.dtype, **distribution)
        assert torch.equal(alone, x.flatten()[first:]), name


def test_values_made_for_a_part_are_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of values is computed once. Writing into a part does not change it."""
    wanted = 5, 7, "kept", 0, 10, torch.float32
    first = part(*wanted)
    expected = first.clone()
    first.zero_()
    monkeypatch.setattr(draws, "philox", None)  # a second computation would fail
    assert torch.equal(part(*wanted), expected)


def test_a_part_may_have_no_elements() -> None:
    for first in range(-start(0, "none") % draws._BLOCK, 2 * draws._BLOCK, draws._BLOCK // 2):
        assert part(0, 0, "none", first, 0, torch.float32).shape == (0,)


@given(seed=SEEDS, first=st.integers(0, 50), at_once=st.integers(1, 5))
def test_values_do_not_depend_on_how_many_are_computed_at_once(seed: int, first: int, at_once: int) -> None:
    whole = values(seed, 0, 90), whole_numbers(seed, 0, 90, below=17)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "_AT_ONCE", at_once)
        assert torch.equal(values(seed, first, 40), whole[0][first : first + 40])
        assert torch.equal(whole_numbers(seed, first, 40, below=17), whole[1][first : first + 40])


def test_a_draw_changes_values_and_nothing_else() -> None:
    inputs, other_inputs = drawn(), drawn()
    inputs.fill(1)
    before = {name: (x.data_ptr(), x.stride(), x._version, x.clone()) for name, x in inputs.tensors.items()}
    inputs.fill(2)
    other_inputs.fill(2)
    for name, x in inputs.tensors.items():
        pointer, stride, version, values_then = before[name]
        assert (x.data_ptr(), x.stride(), x._version) == (pointer, stride, version)
        assert not torch.equal(x, values_then) and torch.equal(x, other_inputs.tensors[name])
    inputs.fill(3, ["tokens"])
    assert torch.equal(inputs.tensors["x"], other_inputs.tensors["x"])
    assert not torch.equal(inputs.tensors["tokens"], other_inputs.tensors["tokens"])


def within_five_sigma(sample: Tensor, mean: float, std: float) -> bool:
    return abs(sample.double().mean().item() - mean) <= 5 * std / sample.numel() ** 0.5


@given(seed=SEEDS)
def test_values_have_mean_0_and_standard_deviation_1_and_are_those_of_float32(seed: int) -> None:
    x = values(seed, 0, STARTS)
    assert within_five_sigma(x, 0, 1) and within_five_sigma(x.double().square(), 1, 2**0.5)
    assert 3 < x.max() < 3.5 and -3.5 < x.min() < -3  # a value is made of four bytes, and is 3.45 at most
    assert len(x.unique()) > 0.98 * STARTS and not torch.equal(x.bfloat16().float(), x)


@given(seed=SEEDS, below=st.sampled_from([1, 2, 7, 10_000, 2**31]))
def test_whole_numbers_are_below_their_bound_and_each_is_as_likely(seed: int, below: int) -> None:
    x = whole_numbers(seed, 0, STARTS, below)
    assert x.dtype == torch.int64 and x.min() >= 0 and x.max() < below
    assert within_five_sigma(x, (below - 1) / 2, below / 12**0.5)
    if below <= 7:
        assert all(within_five_sigma(x == number, 1 / below, below**-0.5) for number in range(below))


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bits() -> None:
    by_device = [drawn(device) for device in ("cpu", "cuda")]
    for draws_of_device in by_device:
        draws_of_device.fill(7)
    for name, x in by_device[0].tensors.items():
        assert torch.equal(x, by_device[1].tensors[name].cpu()), name
