"""`flash_triton` on GPUs without TMA: kernels that load tiles by addresses give the results of those with descriptors.

In the interpreter bits must be equal, since only the loads differ. On a GPU, where the two kinds of kernels have other
tiles, the oracle judges.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 to run the kernels")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from lmsys.attention import AttentionCase, flash_triton, flash_triton_decode  # noqa: E402
from lmsys.kernels import launch  # noqa: E402
from lmsys.kernels.launch import Strided, strided, with_aligned_rows  # noqa: E402
from lmsys.testing import Oracle, make_inputs  # noqa: E402
from tests.support.attention_rows import Row, assert_within_budget, law, skip_unless_it_runs  # noqa: E402
from tests.support.patterns import make_pattern, patterned  # noqa: E402


@contextmanager
def by_addresses() -> Iterator[list[str]]:
    """A context in which kernels are made without descriptors. Its value is the list of their names."""
    made: list[str] = []

    def recorded(function: object, descriptors: list[object], others: list[object], **options: object) -> object:
        assert all(isinstance(x, Tensor | Strided) for x in descriptors)
        made.append(function.__name__)
        return launch.Kernel(function, descriptors, others, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in (flash_triton, flash_triton_decode):
            patch.setattr(module, "by_tma", lambda device: False)
            patch.setattr(module, "Kernel", recorded)
            patch.setattr(module, "_kernels", {})
        patch.setattr(flash_triton, "_launches", {})
        yield made


def assert_right(run: Callable[[], dict[str, Tensor]], oracle: Oracle | None, *kernels: str) -> None:
    """AssertionError unless the results of run() by addresses are right, and equal those by descriptors.

    oracle   judges the results; None: they are only compared
    kernels  names of kernels, each of which must have been made
    """
    by_descriptors = run()
    with by_addresses() as made:
        results = run()
    assert made and set(made) >= set(kernels)
    if oracle is not None:
        assert_within_budget(oracle.error_ratios(results, rms=False))
    for name, x in by_descriptors.items():
        other = results[name]
        assert torch.equal(x.isnan(), other.isnan()), name
        assert x.is_cuda or torch.equal(x.nan_to_num(), other.nan_to_num()), name


@law(only=("flash_triton",))
def test_kernels_by_addresses_are_right(row: Row, case: AttentionCase, seed: int) -> None:
    """Head dimensions may be smaller than a tile's columns, and inputs may be views."""
    case = replace(case, head_dim=[case.head_dim, 20, 17, 48][seed % 4])
    inputs = make_inputs(case, seed, memory="" if seed % 2 else "transposed")
    assert_right(lambda: row.run(case, inputs), Oracle(case, inputs))


@law(only=("flash_triton",), of=patterned, batch=1)
def test_kernels_by_addresses_are_right_under_patterns(row: Row, case: AttentionCase, seed: int) -> None:
    """Half of the cases have a NaN that is hidden from some queries: the kernels then compute tiles a second time."""
    inputs, pattern = make_inputs(case, seed), make_pattern(case, seed)
    oracle = None if seed % 2 else Oracle(case, inputs, pattern=pattern)
    if seed % 2:
        (inputs.k, inputs.v)[seed // 2 % 2][..., seed % case.keys, :1] = torch.nan
    assert_right(lambda: row.run(case, inputs, pattern=pattern), oracle)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("queries", "group", "head_dim"), [(1, 3, 16), (5, 4, 20)])
def test_kernels_by_addresses_are_right_for_few_queries(
    queries: int, group: int, head_dim: int, parts: int, device: str
) -> None:
    row = Row("flash_triton", device)
    case = row.case(batch=2, heads=2 * group, kv_heads=2, queries=queries, keys=70, head_dim=head_dim, causal=True)
    skip_unless_it_runs(row, case)
    case = replace(case, offset=66)
    inputs, pattern = make_inputs(case, 0), make_pattern(case, 0)

    def run() -> dict[str, Tensor]:
        o, lse = flash_triton_decode.decode(inputs.q, inputs.k, inputs.v, head_dim**-0.5, pattern, parts)
        return {"o": o, "lse": lse}

    assert_right(run, Oracle(case, inputs, pattern=pattern), "_split_keys_kernel", *["_combine_kernel"][: parts - 1])


def test_rows_too_far_apart_for_32_bits_are_copied() -> None:
    """An offset inside of a tile has 32 bits. `far` has rows of 2**23 elements, `near` of half as many."""
    far = torch.empty(1, device="meta", dtype=torch.bfloat16).as_strided((1, 1, 300, 64), (64, 64, 2**23, 1))
    near = far.as_strided(far.shape, (64, 64, 2**22, 1))
    assert with_aligned_rows(near).stride() == near.stride() and with_aligned_rows(far).stride(2) == 64


def test_strides_are_passed_as_odd_numbers_above_one() -> None:
    """Strides n, in units of 16 bytes, are passed as 2 n + 1: Triton compiles 1 and multiples of 16 into the binary."""
    for dtype, length in product((torch.float16, torch.float32), (1, 5, 17)):
        x = with_aligned_rows(torch.zeros(2, 1, length, 20, dtype=dtype)[..., 1:])
        base, *numbers, columns = strided(x, x)
        batch, _, row = (stride * x.element_size() // 16 for stride in x.stride()[:3])
        assert base is x and columns.value == 19
        if length > 1:  # the stride between heads may be any, as there is one head
            assert numbers == [2 * n + 1 for n in (batch, numbers[1] // 2, row, length)]
        assert all(n % 2 and n > 1 for n in numbers) and numbers[3] == 2 * length + 1
