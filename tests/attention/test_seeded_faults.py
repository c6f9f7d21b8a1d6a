"""The error budget of `lmsys.testing` must reject wrong rows: faults are planted into the source of `flash_torch`."""

import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmsys.attention import AttentionCase, flash_torch
from lmsys.testing import Inputs, Oracle, make_inputs, run

TILE = 32
numbers = itertools.count()
FAULTS = {  # name -> (a piece of the right source, the faulty piece that replaces it)
    "dropped rescale of the sum of values": (
        "acc = acc.mul_(rescale).add_(_dot(p.to(operand), v_tile))",
        "acc = acc.add_(_dot(p.to(operand), v_tile))",
    ),
    "dropped rescale of the sum of weights": (
        "total = total * rescale + p.sum(dim=-1, keepdim=True)",
        "total = total + p.sum(dim=-1, keepdim=True)",
    ),
    "mask off by one, one key too many": (
        "_hide(scores, bounds.visible(rows, columns))",
        "_hide(scores, bounds.visible(rows, slice(columns.start - 1, columns.stop - 1)))",
    ),
    "mask off by one, one key too few": (
        "_hide(scores, bounds.visible(rows, columns))",
        "_hide(scores, bounds.visible(rows, slice(columns.start + 1, columns.stop + 1)))",
    ),
    "unwritten tail row": (
        "o[:, :, rows] = heads_last(o_tile)",
        "o[:, :, row : min(rows.stop, num_queries - 1)] = heads_last(o_tile)[:, :, : num_queries - 1 - row]",
    ),
    "swapped scale in the backward": ("(ds * scale).to(dtype)", "(ds / scale).to(dtype)"),
    "delta left out of the backward": ("ds = p * (dp - delta.unsqueeze(-1))", "ds = p * dp"),
    "query head reads its neighbour's keys": (
        "k, v = (x.reshape(num_groups, num_keys, -1) for x in (k, v))\n    q_groups",
        "k, v = (x.roll(1, dims=1).reshape(num_groups, num_keys, -1) for x in (k, v))\n    q_groups",
    ),
    "a group's queries taken from strided heads": (
        "return x.reshape(num_groups, -1, *x.shape[2:])",
        "return x.unflatten(1, (-1, num_groups // x.shape[0])).transpose(1, 2).reshape(num_groups, -1, *x.shape[2:])",
    ),
    "last tile of keys left out of dk and dv": (
        "for column in range(0, num_keys, tile):",
        "for column in range(0, num_keys - tile, tile):",
    ),
}


def row_with(right: str, wrong: str) -> Callable[..., Tensor]:
    """flash_torch, in tiles of TILE, with one piece of its source replaced."""
    source = inspect.getsource(flash_torch)
    assert source.count(right) == 1, f"flash_torch.py has no single {right!r}; name the line anew"
    own = f'custom_ops.flash("faulty_{next(numbers)}"'
    faulty = source.replace(right, wrong).replace('custom_ops.flash("flash_torch"', own)
    assert faulty.count(own) == 1, "else the fault is in the operator that other tests call"
    namespace: dict[str, object] = {"__name__": "faulty"}
    exec(compile(faulty, "faulty flash_torch.py", "exec"), namespace)
    function = namespace["FlashTorch"]

    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor:
        return function.apply(q, k, v, causal, scale, TILE)  # type: ignore[attr-defined]

    return row


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def checked(request: pytest.FixtureRequest) -> tuple[AttentionCase, Inputs, Oracle]:
    case = AttentionCase(2, 4, 2, 100, 100, 64, request.param, causal=True, grad=True)
    inputs = make_inputs(case, seed=0)
    return case, inputs, Oracle(case, inputs)


def worst(row: Callable[..., Tensor], checked: tuple[AttentionCase, Inputs, Oracle], rms: bool = False) -> float:
    case, inputs, oracle = checked
    return max(oracle.error_ratios(run(row, inputs, causal=case.causal, lse=True), rms=rms).values())


def test_the_row_without_a_fault_passes(checked: tuple[AttentionCase, Inputs, Oracle]) -> None:
    assert worst(row_with("TILE_SCORES = {", "TILE_SCORES = {"), checked, rms=True) <= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_rejected(fault: str, checked: tuple[AttentionCase, Inputs, Oracle]) -> None:
    assert worst(row_with(*FAULTS[fault]), checked) > 1


@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
def test_one_percent_is_rejected(name: str, checked: tuple[AttentionCase, Inputs, Oracle]) -> None:
    """In float32 the largest error shows it. In bfloat16 that is within rounding, and the root mean square shows it."""
    case, inputs, oracle = checked
    outputs = run(flash_torch.flash_torch, inputs, causal=case.causal)
    outputs[name] = (outputs[name].double() * 1.01).to(outputs[name].dtype)
    assert oracle.error_ratios(outputs, rms=case.dtype == "bfloat16")[name] > 1


def test_not_a_number_is_never_right(checked: tuple[AttentionCase, Inputs, Oracle]) -> None:
    case, inputs, oracle = checked
    outputs = run(flash_torch.flash_torch, inputs, causal=case.causal)
    for value in (float("nan"), float("inf")):
        outputs["dk"][0, 0, 0, 0] = value
        assert oracle.error_ratios(outputs)["dk"] == float("inf")


def test_a_sample_of_heads_still_sees_every_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above MAX_SCORES scores, whole heads are drawn by the seed; their error budget is that of a full check."""
    monkeypatch.setattr("lmsys.testing.MAX_SCORES", 3 * 2 * 50 * 40)
    monkeypatch.setattr("lmsys.testing.BLOCK_SCORES", {"cpu": 300, "cuda": 300})
    case = AttentionCase(2, 8, 4, 50, 40, 16, "float32", causal=True, grad=True)
    inputs = make_inputs(case, seed=1)
    oracle = Oracle(case, inputs)
    assert oracle.reference["dk"].shape == (3, 1, 40, 16) and oracle.reference["o"].shape == (3, 2, 50, 16)
    outputs = run(flash_torch.flash_torch, inputs, causal=True, lse=True)
    assert max(oracle.error_ratios(outputs).values()) <= 1
    assert torch.equal(oracle.reference["o"], Oracle(case, inputs).reference["o"])
    outputs["dv"].mul_(1.01)
    assert oracle.error_ratios(outputs)["dv"] > 1
