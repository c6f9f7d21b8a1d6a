"""`lmsys.training.muon_triton`: symmetric products against float64, in Triton's interpreter, and compiled on a GPU."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lmsys.kernels import launch
from lmsys.testing import error_ratio, ratio_of
from lmsys.training import muon
from lmsys.training.muon import COEFFICIENTS, newton_schulz, normalized
from tests.support.optimizers import step_alike

triton = pytest.importorskip("triton", reason="pip install triton==3.6.0 to run the kernel in its interpreter")
muon_triton = pytest.importorskip("lmsys.training.muon_triton")

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton compiles here: see the cuda test")
# Triton's interpreter computes bfloat16 wrongly, without a word.
DEVICES = {"cpu": [torch.float16], "cuda": [torch.float16, torch.bfloat16]}
SMALL = {"SIDE": 16, "DEPTH": 16, "num_warps": 4, "num_stages": 2}
shapes = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40))


@pytest.fixture(params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device. The kernels take matrices of all sizes, in small tiles, and on a CPU, too."""
    monkeypatch.setattr(muon_triton, "takes", lambda x: x.itemsize == 2)
    monkeypatch.setattr(muon_triton, "tile_options", lambda count, rows, device: SMALL)
    monkeypatch.setattr(muon, "_halved", lambda x: muon_triton if muon_triton.takes(x) else None)
    return request.param


@pytest.fixture(params=[True, False], ids=["by descriptors", "by addresses"])
def examples(request: pytest.FixtureRequest, anywhere: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many are tried. Tiles move as on a card with TMA, then as on one without, which compiles for each shape."""
    for module in (launch, muon_triton):
        monkeypatch.setattr(module, "by_tma", lambda device: request.param)
    monkeypatch.setattr(launch, "_kernels", {})
    return 60 if anywhere == "cuda" and request.param else 6


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def judge(y: Tensor, exact: Tensor, plain: Tensor) -> None:
    """AssertionError unless y is exactly symmetric, and within the budget of torch's product.

    In the interpreter a tile on the diagonal is a product by NumPy, which is not exactly symmetric on some processors.
    """
    assert y.dtype == plain.dtype and y.shape == plain.shape and error_ratio(y, exact, plain) <= 1
    tiles = torch.arange(y.shape[-1], device=y.device) // SMALL["SIDE"]
    assert ((y == y.mT) | ((tiles == tiles[:, None]) & (not y.is_cuda))).all()


def test_products_are_symmetric_and_right(anywhere: str, examples: int) -> None:
    """They are so for any sizes and layouts. Several matrices at once give each the bits that it has alone."""

    @settings(max_examples=examples)
    @given(shapes, st.sampled_from(["plain", "mT", "padded"]), st.integers(0, 99), st.sampled_from(DEVICES[anywhere]))
    @example((1, 1, 1), "plain", 0, torch.float16)
    @example((2, 48, 33), "mT", 1, torch.float16)
    @example((2, 33, 48), "padded", 1, torch.float16)
    def holds(shape: tuple[int, int, int], layout: str, seed: int, dtype: torch.dtype) -> None:
        count, rows, columns = shape
        if layout == "mT":
            x = drawn((count, columns, rows), dtype, seed, anywhere).mT
        else:
            x = drawn((count, rows, columns + 8), dtype, seed, anywhere)[..., :columns]
            x = x if layout == "padded" else x.contiguous()
        product = muon_triton.symmetric(x)
        assert product.shape == (count, rows, -(-rows // 16) * 16) and not product[..., rows:].any()
        gram = product[..., :rows]
        judge(gram, x.double() @ x.double().mT, x @ x.mT)
        wide, one = gram.double(), torch.eye(rows, device=anywhere)
        plain = torch.baddbmm(gram.float(), gram.float(), gram.float(), beta=-2.0, alpha=0.5) + 3.0 * one
        y = muon_triton.polynomial(x, 3.0, -2.0, 0.5)
        judge(y, 0.5 * wide @ wide - 2.0 * wide + 3.0 * one.double(), plain.to(dtype))
        for place in range(count):
            assert torch.equal(muon_triton.polynomial(x[place : place + 1], 3.0, -2.0, 0.5), y[place : place + 1])

    holds()


def test_tiles_change_no_bit(anywhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums run over columns in one order, whatever the tile: so may one matrix have other tiles than several.

    In the interpreter the order is NumPy's, which on some processors depends on the tile: there results are right.
    """
    for dtype in DEVICES[anywhere]:
        x = drawn((2, 70, 50), dtype, 0, anywhere)
        results = []
        for side, stages in ((16, 2), (32, 3), (64, 6)):
            options = SMALL | {"SIDE": side, "num_stages": stages}
            monkeypatch.setattr(muon_triton, "tile_options", lambda count, rows, device, options=options: options)
            results.append(muon_triton.polynomial(x, 3.0, -2.0, 0.5))
        wide = muon_triton.symmetric(x)[..., :70].double()
        exact = 0.5 * wide @ wide - 2.0 * wide + 3.0 * torch.eye(70, device=anywhere, dtype=torch.float64)
        for result in results:
            assert (
                torch.equal(result, results[0])
                if anywhere == "cuda"
                else error_ratio(result, exact, exact.to(dtype)) <= 1
            )


@pytest.mark.parametrize(
    "count, rows, side, stages",
    [(1, 1024, 64, 6), (1, 1600, 128, 6), (1, 4096, 128, 3), (24, 512, 128, 3), (24, 1024, 128, 3)],
)
def test_tiles_follow_from_how_many_there_are(
    count: int, rows: int, side: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were the fastest on an H200."""
    monkeypatch.setattr(muon_triton, "by_tma", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    options = muon_triton.tile_options(count, rows, torch.device("cuda"))
    assert options == {"SIDE": side, "DEPTH": 64, "num_warps": 4, "num_stages": stages}
    monkeypatch.setattr(muon_triton, "by_tma", lambda device: False)
    assert muon_triton.tile_options(count, rows, torch.device("cuda"))["SIDE"] == 128


def exact_and_plain(x: Tensor, steps: int = 5) -> tuple[Tensor, Tensor]:
    """The iteration in float64, and by torch's matmuls in x's dtype."""
    plain = x.mT if x.shape[1] > x.shape[2] else x
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = plain @ plain.mT
        plain = torch.baddbmm(plain, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), plain, beta=a)
    return newton_schulz(x.double(), steps), plain.mT if x.shape[1] > x.shape[2] else plain


def test_an_iteration_is_as_near_to_the_exact_one_as_torchs(anywhere: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(shapes, st.integers(1, 5), st.integers(0, 99), st.sampled_from(DEVICES[anywhere]))
    def holds(shape: tuple[int, int, int], steps: int, seed: int, dtype: torch.dtype) -> None:
        x = normalized(list(drawn(shape, torch.float32, seed, anywhere)), dtype)
        exact, plain = exact_and_plain(x, steps)
        y = newton_schulz(x, steps)
        assert y.dtype == dtype and ratio_of(y, exact, plain, dtype) <= 1

    holds()


def test_a_step_has_the_same_bits_whichever_others_are_stepped(anywhere: str) -> None:
    for dtype in DEVICES[anywhere]:
        step_alike(*drawn((2, 3, 40, 24), torch.float32, 0, anywhere), ns_dtype=dtype)


def test_the_kernels_are_for_large_matrices_in_narrow_dtypes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    least = muon_triton.SMALLEST
    large = torch.zeros(4, least, least, dtype=torch.bfloat16)
    assert not muon_triton.takes(large) and muon._halved(large) is None
    for arch, taken in ((75, False), (80, True), (90, True)):
        monkeypatch.setattr(muon_triton, "arch_of", lambda device, arch=arch: arch)
        assert muon_triton.takes(large) is taken
    assert not muon_triton.takes(large.float()) and not muon_triton.takes(large[:, 1:])
    assert not muon_triton.takes(large[:1]) and muon_triton.takes(torch.zeros(1, 1024, 8, dtype=torch.float16))


def launch_products() -> None:
    """The target of `dev.targets`: both products of an iteration, of few tiles, of one wave of them and of many."""
    for rows in (1024, 1600, 4096):
        muon_triton.polynomial(torch.randn(1, rows, rows, device="cuda", dtype=torch.bfloat16), 3.0, -4.0, 2.0)


OTHERS = "sm_80", "sm_86", "sm_89", "sm_100", "sm_120"
CARDS = ["sm_90", *(pytest.param(card, marks=pytest.mark.on_request) for card in OTHERS)]


@pytest.mark.parametrize("card", CARDS)
def test_both_kernels_compile_for_a_card(card: str, capsys: pytest.CaptureFixture[str]) -> None:
    from dev.targets.__main__ import main

    assert main([f"{__file__}:launch_products", "--card", card, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["constants"]["ADDS"] for line in lines} == {False, True}
    for line in lines:
        assert line["reason"] is None and line["spills"] == 0 and line["tensor_cores"] and line["copies"] >= 4
    if card == "sm_90":  # the next tile's loads hide behind this one's products, or there is no next tile
        assert [line["blocks"] for line in lines] == [2, 2, 1, 1, 2, 2]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the matrices that the kernels are given, call by call."""
    real: Callable[..., Tensor] = muon_triton.polynomial
    rows: list[int] = []

    def counting(x: Tensor, *coefficients: float) -> Tensor:
        rows.append(x.shape[1])
        return real(x, *coefficients)

    monkeypatch.setattr(muon_triton, "polynomial", counting)
    return rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1600, 6400), (1, 4096, 4096), (2, 2500, 1000), (24, 512, 512), (3, 777, 1001)])
def test_real_sizes(shape: tuple[int, int, int], dtype: torch.dtype, launches: list[int]) -> None:
    x = normalized(list(torch.randn(shape, device="cuda")), dtype)
    exact, plain = exact_and_plain(x)
    y = newton_schulz(x)
    assert launches == [min(shape[1:])] * 5
    assert ratio_of(y, exact, plain, dtype) <= 1
    assert torch.equal(newton_schulz(x), y)
    wide = x.mT if shape[1] > shape[2] else x
    gram = muon_triton.symmetric(wide)[..., : wide.shape[1]]
    judge(gram, wide.double() @ wide.double().mT, wide @ wide.mT)
    alone = [muon_triton.symmetric(row[None])[0, :, : wide.shape[1]] for row in wide]
    assert all(map(torch.equal, alone, gram))


@pytest.mark.gpu
def test_a_matrix_of_a_large_model_keeps_its_bits_beside_others(launches: list[int]) -> None:
    step_alike(*drawn((2, 4, 1280, 1024), torch.float32, 0, "cuda"), ns_dtype=torch.bfloat16)
    assert launches == [1024] * 40  # five iterations of four matrices, alone and beside one another


@pytest.mark.gpu
def test_an_iteration_that_is_differentiated_is_torchs(launches: list[int]) -> None:
    """The kernels have no backward, and a gradient without their part would be wrong without a word."""
    x = normalized([torch.randn(1024, 1024, device="cuda")], torch.bfloat16).requires_grad_()
    newton_schulz(x, 1).sum().backward()
    assert launches == [] and x.grad.any()
    newton_schulz(x.detach(), 1)
    assert launches == [1024]


def test_tensors_without_an_address_take_torchs_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DTensor does, whose `data_ptr` is 0: `fully_shard(model)` gives Muon such parameters."""
    monkeypatch.setattr(muon_triton, "takes", lambda x: True)
    with FakeTensorMode():
        assert muon._halved(torch.empty(1, 1024, 1024, dtype=torch.bfloat16, device="cuda")) is None

    def taken(x: Tensor) -> Tensor:
        monkeypatch.setattr(Tensor, "is_cuda", True)
        assert muon._halved(x) is None
        monkeypatch.undo()
        return x

    torch.vmap(taken)(torch.zeros(2, 1, 4, 4))
