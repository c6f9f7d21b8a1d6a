"""`lmsys.model.fused`: kernels of fused blocks against float64, a fused model against an eager one, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmsys.config import model_config
from lmsys.model import TransformerLM, fused
from lmsys.model.transformer import RMSNorm
from lmsys.testing import error_ratio

needs_triton = pytest.mark.skipif(not fused.HAS_TRITON, reason="pip install triton to test its kernels")
sizes = st.tuples(st.integers(1, 9), st.integers(1, 40))
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
streams = st.one_of(st.tuples(st.just(torch.float32), dtypes), dtypes.map(lambda dtype: (dtype, dtype)))
EPS = 1e-5


def drawn(shape: tuple[int, ...], seed: int, *dtypes: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for dtype in dtypes]


def right(
    function: Callable[..., Any], plain: Callable[..., Any], inputs: list[Tensor], dtypes: list[torch.dtype]
) -> None:
    """AssertionError unless results and gradients of `function` keep the budget: `plain` in float64 is exact.

    dtypes  those that the results must have
    """
    tested, exact, rounded = (
        _with_gradients(called, [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs])
        for called, dtype in ((function, None), (plain, torch.float64), (plain, torch.float32))
    )
    for y, exact_y, plain_y, dtype in zip(tested, exact, rounded, [*dtypes, *(x.dtype for x in inputs)], strict=True):
        assert y.dtype == dtype
        assert error_ratio(y, exact_y, plain_y.to(dtype)) <= 1


def _with_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """The results, then the gradients of the inputs. Gradients of the results have the same values in every call."""
    generator = torch.Generator().manual_seed(7)
    results = function(*inputs)
    grads = [torch.randn(y.shape, generator=generator).bfloat16().to(y.device, y.dtype) for y in results]
    return [*results, *torch.autograd.grad(results, inputs, grads)]


@needs_triton
@given(size=sizes, seed=st.integers(0, 99), kinds=streams)
def test_an_addition_and_a_norm(
    size: tuple[int, int], seed: int, kinds: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    """The branch may be narrower than the stream. The sum has a gradient of its own, too."""
    stream, matmuls = kinds
    x, branch = drawn(size, seed, stream, matmuls, device=device)
    (weight,) = drawn(size[1:], seed + 1, torch.float32, device=device)

    def plain(x: Tensor, branch: Tensor, weight: Tensor) -> list[Tensor]:
        total = x + branch
        if total.dtype == torch.float32:  # not in float64: the budget is that of a sum in the stream's dtype
            total = total.to(stream).float()
        return [total, torch.nn.functional.rms_norm(total, size[1:], weight, EPS)]

    right(lambda *given: fused._AddNorm.apply(*given, EPS, matmuls), plain, [x, branch, weight], [stream, matmuls])


@needs_triton
@given(size=sizes, seed=st.integers(0, 99), kinds=streams)
def test_a_norm_alone(size: tuple[int, int], seed: int, kinds: tuple[torch.dtype, torch.dtype], device: str) -> None:
    stream, matmuls = kinds
    (x,), (weight,) = drawn(size, seed, stream, device=device), drawn(size[1:], seed, torch.float32, device=device)
    total, _ = fused._AddNorm.apply(x, None, weight, EPS, matmuls)
    assert torch.equal(total, x)

    def norm(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [fused._AddNorm.apply(x, None, weight, EPS, matmuls)[1]]

    def plain(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [torch.nn.functional.rms_norm(x, size[1:], weight, EPS)]

    right(norm, plain, [x, weight], [matmuls])


@needs_triton
@given(
    size=st.one_of(sizes, st.tuples(st.integers(1, 3), st.sampled_from([4096, 4097]))),  # one program a row, and two
    seed=st.integers(0, 99),
    dtype=dtypes,
)
def test_the_product_of_swiglu(size: tuple[int, int], seed: int, dtype: torch.dtype, device: str) -> None:
    num_rows, width = size
    (halves,) = drawn((num_rows, 2 * width), seed, dtype, device=device)

    def plain(halves: Tensor) -> list[Tensor]:
        return [torch.nn.functional.silu(halves[:, :width]) * halves[:, width:]]

    right(lambda halves: [fused._SwiGLU.apply(halves)], plain, [halves], [dtype])


def models(
    device: str, residual: str = "wide", attention: str = "naive"
) -> tuple[TransformerLM, TransformerLM, Tensor]:
    """(an eager model, a fused model with equal weights, tokens). residual, attention: as in ModelConfig."""
    sizes = {"vocab_size": 500, "d_ff": 128, "num_kv_heads": 2}  # small: kernels are interpreted
    config = replace(model_config("tiny", context_length=6), attention=attention, residual=residual, **sizes)
    torch.manual_seed(1)
    plain, other = TransformerLM(config, device), TransformerLM(config, device)
    other.load_state_dict(plain.state_dict())
    return plain, other.fuse_blocks(), torch.randint(config.vocab_size, (2, 7), device=device)


def gradients(model: TransformerLM, tokens: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """[loss, the gradient of each parameter], under autocast to `dtype` if given."""
    with torch.autocast(tokens.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    return [loss, *torch.autograd.grad(loss, [*model.parameters()])]


def test_on_a_cpu_a_fused_model_has_the_bits_of_an_eager_one() -> None:
    plain, other, tokens = models("cpu")
    assert all(map(torch.equal, gradients(plain, tokens), gradients(other, tokens)))
    with torch.no_grad():
        assert torch.equal(plain(tokens[:, :-1]), other(tokens[:, :-1]))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "residual", "attention"),
    [(None, "wide", "flash_triton"), (torch.bfloat16, "wide", "naive"), (torch.bfloat16, "narrow", "naive")],
)
def test_a_fused_model_errs_no_more_than_an_eager_one(
    dtype: torch.dtype | None, residual: str, attention: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other, tokens = models(device, residual, attention)
    ordinary = gradients(plain, tokens, dtype)
    monkeypatch.setattr(fused, "needs_plain_torch", lambda x: False)  # on a CPU, too, by Triton's interpreter
    of_fused = gradients(other, tokens, dtype)
    monkeypatch.undo()
    plain.config = replace(plain.config, attention="naive")
    exact = gradients(plain.double(), tokens)
    for x, usual, exact_x in zip(of_fused, ordinary, exact, strict=True):
        assert error_ratio(x, exact_x, usual.to(dtype or torch.float32)) <= 1


def test_a_second_derivative_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(fused, "needs_plain_torch", lambda x: False)
    x = torch.randn(3, 4, requires_grad=True)
    total, normalised = fused.add_norm(x, x.detach(), RMSNorm(4, EPS))
    for y in (normalised, fused.swiglu(x)):
        with pytest.raises(RuntimeError, match="is differentiable once"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_checkpointing_is_refused() -> None:
    config = replace(model_config("tiny"), checkpoint_blocks="attention")
    with pytest.raises(ValueError, match="checkpoint_blocks='attention' must be 0"):
        TransformerLM(config).fuse_blocks()
