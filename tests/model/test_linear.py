"""`linear(x, *weights)` is F.linear for several weights at once, with more exact weight gradients under autocast.

`Case` draws inputs; each test runs it by `linear` and by `plain_linear`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmsys.attention.compiled import why_no_compiler
from lmsys.model.linear import linear
from lmsys.testing import error_ratio
from lmsys.training.optimizer import AdamW, clip_grad_norm
from tests.support.variants import few_by_default

DTYPES = [torch.bfloat16, torch.float16]


def plain_linear(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat([F.linear(x, w) for w in weights], dim=-1)


@dataclass(frozen=True)
class Case:
    """x (*lead, features) and a weight (n, features) for each n in `rows`.

    needs  which of x and the weights need gradients
    gaps   True: x is a view with gaps in memory
    """

    lead: tuple[int, ...]
    features: int
    rows: tuple[int, ...]
    needs: tuple[bool, bool, bool, bool]
    gaps: bool
    seed: int
    device: str = "cpu"

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [(*self.lead, self.features), *((n, self.features) for n in self.rows)]
        tensors = [torch.randn(shape, generator=generator).to(self.device, dtype) for shape in shapes]
        if self.gaps:
            tensors[0] = torch.stack((tensors[0],) * 2, dim=-1)[..., 0]
        return [x.requires_grad_(need) for x, need in zip(tensors, self.needs, strict=False)]

    def run(self, function: Callable[..., Tensor], dtype: torch.dtype, autocast: torch.dtype | None) -> list[Tensor]:
        """[the output, the gradients of a weighted sum of it]"""
        leaves = self.leaves(dtype)
        with torch.autocast(self.device, autocast, enabled=autocast is not None):
            y = function(*leaves)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(self.seed + 1)).to(self.device)
        wanted = [x for x in leaves if x.requires_grad]
        return [y.detach(), *torch.autograd.grad((y * weights.to(y.dtype)).sum(), wanted)]


cases = st.builds(
    lambda rows, **rest: Case(rows=tuple(rows), **rest),
    lead=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    features=st.integers(1, 40),
    rows=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    needs=st.tuples(st.booleans(), st.just(True), st.booleans(), st.booleans()),
    gaps=st.booleans(),
    seed=st.integers(0, 2**16),
)


def assert_right(case: Case, tested: list[Tensor], autocast: torch.dtype) -> None:
    reference, plain = case.run(plain_linear, torch.float64, None), case.run(plain_linear, torch.float32, autocast)
    for x, ref, low in zip(tested, reference, plain, strict=True):
        assert x.dtype == low.dtype and x.shape == low.shape
        assert error_ratio(x, ref, low.to(autocast)) <= 1  # the budget is that of the operands' dtype


@given(case=cases, autocast=st.sampled_from(DTYPES))
def test_under_autocast_it_is_as_exact_as_torchs(case: Case, autocast: torch.dtype) -> None:
    assert_right(case, case.run(linear, torch.float32, autocast), autocast)


# (dtype of all inputs, that of autocast): without autocast, with inputs that are narrow already, and in float64.
LEFT_TO_TORCH = [
    *((dtype, None) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
    *((dtype, dtype) for dtype in DTYPES),
    *((torch.float64, dtype) for dtype in DTYPES),
]


@given(case=cases, dtypes=st.sampled_from(LEFT_TO_TORCH))
def test_where_nothing_is_cast_it_is_torchs(case: Case, dtypes: tuple[torch.dtype, torch.dtype | None]) -> None:
    ours, theirs = (case.run(function, *dtypes) for function in (linear, plain_linear))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@settings(max_examples=10)
@given(cases, st.sampled_from(DTYPES))
def test_a_second_forward_for_the_backward_gives_the_same(case: Case, autocast: torch.dtype) -> None:
    again, once = (
        case.run(f, torch.float32, autocast) for f in (partial(checkpoint, linear, use_reentrant=False), linear)
    )
    torch.testing.assert_close(again, once, rtol=0, atol=0)


# Which of x and the weights need gradients.
NEEDS = (True, True, True, True), (False, True, False, True), (True, False, False, False)


@pytest.mark.long
@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
@pytest.mark.parametrize("autocast", [torch.bfloat16, None])
@pytest.mark.parametrize("needs", few_by_default([(needs,) for needs in NEEDS], one_in=3))
def test_compiled_equals_eager(needs: tuple[bool, bool, bool, bool], autocast: torch.dtype | None) -> None:
    case = Case((2, 3), 8, (6, 4, 4), needs, gaps=False, seed=0)
    compiled = torch.compile(linear, fullgraph=True, dynamic=False)
    for x, expected in zip(*(case.run(f, torch.float32, autocast) for f in (compiled, linear)), strict=True):
        assert x.dtype == expected.dtype and error_ratio(x, expected.double(), expected) <= 1


def test_gradients_that_are_rows_of_one_tensor_can_be_used_as_any() -> None:
    case = Case((4,), 8, (6, 4, 4), (True,) * 4, gaps=False, seed=0)

    def trained(function: Callable[..., Tensor]) -> list[Tensor]:
        x, *weights = case.leaves(torch.float32)
        optimizer = AdamW(weights, lr=0.1)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for _ in range(2):  # accumulated
                with torch.autocast("cpu", torch.bfloat16):
                    function(x, *weights).square().mean().backward()
            assert clip_grad_norm(weights, 0.1) > 0.1
            optimizer.step()
        return [*weights, *(w.grad for w in weights if w.grad is not None)]

    for ours, theirs in zip(trained(linear), trained(plain_linear), strict=True):
        assert error_ratio(ours, theirs.double(), theirs.bfloat16()) <= 1


@pytest.mark.gpu
@settings(max_examples=20)
@given(case=cases, autocast=st.sampled_from(DTYPES))
def test_on_a_gpu_it_is_as_exact_as_torchs(case: Case, autocast: torch.dtype) -> None:
    case = Case(**{**case.__dict__, "device": "cuda"})
    assert_right(case, case.run(linear, torch.float32, autocast), autocast)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("autocast", DTYPES)
def test_on_a_gpu_weight_gradients_are_not_rounded(autocast: torch.dtype, compiled: bool) -> None:
    case = Case((512,), 64, (96, 32, 32), (True,) * 4, gaps=False, seed=0, device="cuda")
    function = torch.compile(lambda *leaves: linear(*leaves), fullgraph=True, dynamic=False) if compiled else linear
    x, *weights = case.leaves(torch.float32)
    with torch.autocast("cuda", autocast):
        y = function(x, *weights)
    grad = torch.randn(y.shape, device="cuda").to(autocast)
    gradients = torch.cat(torch.autograd.grad(y, weights, grad))
    exact = grad.double().mT @ x.to(autocast).double()
    rounded = exact.to(autocast).double()
    assert (gradients.double() - exact).norm() < 0.01 * (rounded - exact).norm()
