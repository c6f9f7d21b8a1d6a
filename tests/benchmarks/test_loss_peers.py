"""benchmarks/loss_peers.py: other people's losses as rows, why they cannot run a case, and how they are called.

Modules with the same functions, in plain PyTorch, stand for packages that are not installed. On a GPU, installed ones
are compared with float64. A new package is a line of PACKAGES.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import loss_peers
from benchmarks.bench_loss import LOSSES, LossTest
from benchmarks.loss import (
    ERRORS,
    ODD_TOKENS,
    ODD_VOCABULARY,
    OUTPUTS,
    Inputs,
    odd_inputs,
    references,
    relative_error,
    unchunked,
)
from tests.benchmarks.test_bench_loss import drawn, records

EXTRA, GIT = "[peers]'", "'cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy.git'"
PACKAGES = {  # {row: (the module that computes the loss, what pip installs for it)}
    "liger": ("liger_kernel.transformers.functional", EXTRA),
    "cut_cross_entropy": ("cut_cross_entropy.cce_utils", GIT),
    "cut_cross_entropy_kahan": ("cut_cross_entropy.cce_utils", GIT),
    "cut_cross_entropy_exact": ("cut_cross_entropy.cce_utils", GIT),
    "quack": ("quack.linear_cross_entropy", EXTRA),
}
# {row: the arguments `impl` of its calls into the package, if that follows autocast}. In Apple's package `impl` names
# how gradients are added, and whether small terms are left out; "": the row passes none.
IMPLS = {
    "liger": [],
    "cut_cross_entropy": ["cce"],
    "cut_cross_entropy_kahan": ["cce_kahan_full_c"],
    "cut_cross_entropy_exact": ["cce_exact"],
    "quack": [""],
}
LEAST = {"liger": (7, 0), "quack": (9, 0)}  # the least compute capability; that of the others is 8.0
rows = pytest.mark.parametrize("row", PACKAGES)


def case_of(row: str, precision: str = "bf16", device: str = "cuda", **sizes: int) -> LossTest:
    """A case of a row, with other `sizes` if they are given."""
    case = LossTest("s", LOSSES[row], device, tokens=64, d_model=64, vocab_size=128, precision=precision)
    return replace(case, **sizes)


def install(row: str, monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Makes the package of a row importable for a test: its module has these functions, and so has the package."""
    package, _, _ = PACKAGES[row][0].partition(".")
    for name in (package, package + ".transformers", PACKAGES[row][0]):
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


@rows
def test_on_a_cpu_a_row_needs_no_package(row: str) -> None:
    reason = LOSSES[row].why_not(case_of(row, device="cpu"))
    assert reason is not None and reason.endswith(" runs on CUDA only") and LOSSES[row].peer


@rows
def test_a_missing_package_gives_the_line_that_installs_it(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, source = PACKAGES[row]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    reason = LOSSES[row].why_not(case_of(row))
    assert reason is not None and reason.startswith(f"{row} needs a package that is not here")
    assert "python -m pip install" in reason and reason.endswith(f"{source} brings it")


def test_pypis_cut_cross_entropy_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    install("cut_cross_entropy_exact", monkeypatch)
    monkeypatch.delitem(sys.modules, "cut_cross_entropy.cce_utils")
    reason = LOSSES["cut_cross_entropy_exact"].why_not(case_of("cut_cross_entropy_exact"))
    assert reason is not None and "'cut_cross_entropy.cce_utils'" in reason and GIT in reason


@rows
@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)])
def test_a_row_runs_from_a_compute_capability_on(
    row: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(row, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason, least = LOSSES[row].why_not(case_of(row)), LEAST.get(row, (8, 0))
    assert (reason is None) == (capability >= least)
    assert reason is None or f"compute capability {least[0]}.{least[1]}" in reason


@given(eighths=st.lists(st.integers(1, 60), min_size=3, max_size=3), place=st.integers(0, 2), off=st.integers(0, 7))
def test_quack_takes_multiples_of_8_alone(eighths: list[int], place: int, off: int) -> None:
    sizes = [8 * x for x in eighths]
    sizes[place] += off
    with pytest.MonkeyPatch.context() as patch:
        install("quack", patch)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        case = case_of("quack", tokens=sizes[0], d_model=sizes[1], vocab_size=sizes[2])
        reason = LOSSES["quack"].why_not(case)
    assert (reason is None) == (off == 0)
    assert reason is None or f"got {sizes[0]}, {sizes[1]} and {sizes[2]}" in reason


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_quack_knows_narrow_precisions_alone(precision: str) -> None:
    reason = LOSSES["quack"].why_not(case_of("quack", precision))
    assert reason == f"quack knows bf16 and fp16, not {precision}"


@rows
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_row_calls_its_package_as_an_expert_would(row: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins have the parameters of the packages' functions, and check dtypes and settings."""
    narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    impls = []

    def fused(input: Tensor, weight: Tensor, target: Tensor, *, accum_dtype: torch.dtype) -> Tensor:
        assert input.dtype == weight.dtype == narrow and accum_dtype == torch.float32
        return unchunked(input, weight, target)

    def follows_autocast(e: Tensor, c: Tensor, targets: Tensor, *, impl: str = "") -> Tensor:
        assert e.dtype == c.dtype == torch.float32
        impls.append(impl)
        return unchunked(e, c, targets)

    functions = {
        "liger_fused_linear_cross_entropy": fused,
        "linear_cross_entropy": follows_autocast,
        "chunked_linear_cross_entropy": follows_autocast,
    }
    install(row, monkeypatch, **functions)
    inputs = checked(odd_inputs(precision, "cpu", 0))
    answer = inputs.run(LOSSES[row].load())
    assert max(inputs.check(answer).values()) <= 1
    assert impls == IMPLS[row]


def checked(inputs: Inputs) -> Inputs:
    """Inputs with their references."""
    inputs.exact, inputs.plain = references(inputs.in_blocks)
    return inputs


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_row_is_checked_on_odd_sizes_if_it_takes_them(multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(case: LossTest) -> str | None:
        return "too odd" if case.tokens % multiple else None

    def row(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return unchunked(hidden, weight, targets) * (1.01 if len(weight) == ODD_VOCABULARY else 1.0)

    monkeypatch.setattr(loss_peers, "quack", row)
    monkeypatch.setattr(loss_peers, "quack_supports", supports)
    record = records(row=("quack",))["quack"]
    if multiple == 1:
        assert record["outcome"] == "wrong" and f"of {ODD_VOCABULARY} classes" in record["reason"]
    else:
        assert record["outcome"] == "ok", record["reason"]


@pytest.mark.parametrize("output", range(3))
def test_an_error_shows_in_its_output_alone(output: int) -> None:
    """The error of an output is a share of the largest value among the tokens, or classes, of its group."""
    inputs = checked(drawn(tokens=300, vocab_size=400))
    answer = [inputs.exact[0].mean(), *(x.clone() for x in inputs.exact[1:])]
    answer[output] *= 1 + 2**-10
    errors = inputs.errors(tuple(answer))  # type: ignore[arg-type]
    for number, name in enumerate(ERRORS):
        assert errors[name] == pytest.approx(2**-10 if number == output else 0.0, rel=1e-4), OUTPUTS[number]
    answer[output] *= float("nan")
    assert inputs.errors(tuple(answer))[ERRORS[output]] is None  # type: ignore[arg-type]


@given(share=st.floats(1e-6, 1e3), scale=st.floats(1e-6, 1e6))
def test_the_error_of_a_group_is_a_share_of_its_largest_value(share: float, scale: float) -> None:
    exact, groups = torch.ones(4, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    exact[groups == 1] *= scale
    x = exact.clone()
    x[1, 2] += share * scale
    assert relative_error(x, exact, groups) == pytest.approx(share, rel=1e-4)


# {(row, precision): gradients that the installed package is known not to make as exactly as is allowed}. The benchmark
# says by how much they are off, and calls the rows wrong. `cut_cross_entropy`, the package's default, adds gradients in
# bfloat16, and leaves small terms out.
INEXACT = {
    ("cut_cross_entropy", "fp32"): OUTPUTS[1:],
    ("cut_cross_entropy", "bf16"): OUTPUTS[1:],
    ("cut_cross_entropy_kahan", "fp32"): OUTPUTS[1:2],
    ("cut_cross_entropy_exact", "fp32"): OUTPUTS[1:2],
}


@rows
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(ODD_TOKENS, ODD_VOCABULARY), (104, 640)])  # quack takes multiples of 8
@pytest.mark.gpu
def test_an_installed_row_is_right_at_odd_sizes(row: str, precision: str, sizes: tuple[int, int]) -> None:
    inputs = odd_inputs(precision, "cuda", 0, *sizes)
    tokens, classes = sizes
    if reason := LOSSES[row].why_not(case_of(row, precision, tokens=tokens, vocab_size=classes)):
        pytest.skip(reason)
    answer = checked(inputs).run(LOSSES[row].load())
    ratios, errors = inputs.check(answer), inputs.errors(answer)
    assert ratios["loss"] <= 1, ratios
    right = {name: ratio for name, ratio in ratios.items() if name not in INEXACT.get((row, precision), ())}
    assert max(right.values()) <= 1, (ratios, errors)
