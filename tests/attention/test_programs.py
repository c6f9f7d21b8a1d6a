"""attention() inside of programs: compiled, exported, under autocast, in torch.func, checkpointed, differentiated
twice, after inference mode. The results of rows are compared with those of `naive` in float64."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmsys.attention import ATTENTION, Documents, attention
from lmsys.attention.contract import case_of
from lmsys.attention.pattern import checked_pattern
from lmsys.testing import error_ratio
from tests.support.variants import by_default_all_but

KERNELS = ("flash_torch", "flash_triton", "flash_triton_torch_bwd", "flash_cuda", "flash_gluon")
ROWS = ("flash_torch", "flash_triton", "vectorized", "naive", "sdpa_flash", "sdpa_math", "auto")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_DEVICES = [*product(KERNELS[:3], ["cpu"]), *(pytest.param(row, "cuda", marks=pytest.mark.gpu) for row in KERNELS)]
# By name: a function (tokens, device) -> options of a call on two sequences.
OPTIONS: dict[str, Callable[[int, str], dict[str, Any]]] = {
    "causal": lambda n, device: {"causal": True},
    "window": lambda n, device: {"causal": True, "window": 3},
    "documents": lambda n, device: {"causal": True, "documents": Documents([[3, n - 3], [5, n - 5]], device)},
    "key_lengths": lambda n, device: {"key_lengths": torch.tensor([3, n - 2], device=device)},
    "softcap": lambda n, device: {"causal": True, "softcap": 2.0, "offset": 2},
    "two sides": lambda n, device: {"window": (2, 3)},
    "keys": lambda n, device: {
        "causal": True,
        "prefix": 2,
        "documents": Documents([[3, n - 3], [5, n - 5]], device, keys=Documents([[4, n - 4], [2, n - 2]], device)),
    },
    "alibi": lambda n, device: {
        "causal": True,
        "offset": torch.tensor([1, 3], device=device),
        "alibi": torch.tensor([0.5, 0.1], device=device),
    },
}


def tensors(length: int = 9, device: str = "cpu", dtype: torch.dtype = torch.float32, head_dim: int = 16) -> Any:
    """q (2, 2, S, D), k and v (2, 1, S, D), which require gradients."""
    generator = torch.Generator().manual_seed(length)
    drawn = (torch.randn(2, heads, length, head_dim, generator=generator) for heads in (2, 1, 1))
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def call(row: str, asked: dict[str, Any], q: Tensor) -> Callable[..., Tensor]:
    """attention() by a row; skips the test where the row cannot run it."""
    k = q[:, ::2]
    others = "window", "documents", "key_lengths", "softcap", "mask", "prefix", "bias", "alibi", "sinks"
    plain = {"causal": False, "offset": 0, "return_lse": False} | dict.fromkeys(others)
    pattern = checked_pattern(q, k, **plain | asked)
    if row != "auto" and (reason := ATTENTION[row].why_not(case_of(q, k, k, pattern))):
        pytest.skip(reason)
    return partial(attention, impl=row, **asked)


def results(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """[o, dq, dk, dv]: the function's result, and the gradients of a sum over it."""
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o.sin().sum(), leaves)]


def assert_right(found: list[Tensor], run: Callable[..., list[Tensor]], leaves: list[Tensor], **asked: Any) -> None:
    """`found` equals run(attention in float64, leaves), within the error that `naive` has in the leaves' dtype."""
    plain = partial(attention, impl="naive", **asked)
    exact = run(plain, *(x.detach().double().requires_grad_() for x in leaves))
    for one, right, usual in zip(found, exact, run(plain, *leaves), strict=True):
        assert error_ratio(one, right, usual) <= 1


ALWAYS: dict[tuple[str, str], Any] = {("causal", "auto"): [], ("documents", "flash_torch"): [pytest.mark.long]}
COMPILED = [pytest.param(*both, marks=ALWAYS.get(both, [pytest.mark.on_request])) for both in product(OPTIONS, ROWS)]


@pytest.mark.parametrize(("options", "row"), COMPILED)
def test_a_compiled_call_has_no_break_and_one_graph_for_all_lengths(options: str, row: str) -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def function(q: Tensor, k: Tensor, v: Tensor, asked: dict[str, Any]) -> Tensor:
        return attention(q, k, v, impl=row, **asked)

    compiled, counted = torch.compile(function, fullgraph=True, dynamic=True, backend=counter), []
    for length in (11, 13, 17):
        asked, leaves = OPTIONS[options](length, "cpu"), tensors(length)
        call(row, asked, leaves[0])
        found = results(lambda *x, asked=asked: compiled(*x, asked), *leaves)
        assert_right(found, results, leaves, **asked)
        with torch.no_grad():
            assert_right([compiled(*leaves, asked)], lambda f, *x: [f(*x).detach()], leaves, **asked)
        counted.append(counter.frame_count)
    assert counted[0] == counted[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("row", [*KERNELS, "sdpa_efficient", "sdpa_cudnn", "auto"])
@pytest.mark.parametrize("options", ["causal", "window", "documents"])
def test_modes_of_the_compiler(row: str, mode: str, options: str) -> None:
    torch.compiler.reset()
    asked, leaves = OPTIONS[options](512, "cuda"), tensors(512, "cuda", torch.bfloat16, 64)
    compiled = torch.compile(call(row, asked, leaves[0]), fullgraph=True, mode=mode)
    for _ in range(4):  # the first calls warm up and record
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in results(compiled, *leaves)]
        assert_right(found, results, leaves, **asked)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("row", by_default_all_but(["flash_torch", "vectorized", "auto"], "vectorized", "auto"))
def test_a_module_is_exported_for_any_length(row: str, strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, causal=True, window=4, impl=row)

    length = torch.export.Dim("length", min=2, max=100)
    lengths = {2: length}, {2: length}, {2: length}
    exported = torch.export.export(Module(), tuple(tensors()), dynamic_shapes=lengths, strict=strict)
    leaves = tensors(21)
    for program in (exported, exported.run_decompositions()):
        found = [program.module()(*leaves).detach()]
        assert_right(found, lambda f, *x: [f(*x).detach()], leaves, causal=True, window=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", [*ROWS, "flash_gluon"])
def test_autocast_is_that_of_sdpa(row: str, device: str) -> None:
    dtype = torch.float16 if row == "flash_triton" else torch.bfloat16  # Triton's interpreter has no bfloat16
    leaves = tensors(9, device, head_dim=64)
    function = call(row, {}, leaves[0].to(dtype))
    with torch.autocast(device, dtype=dtype):
        o, mixed = function(*leaves), function(leaves[0].to(dtype), *leaves[1:])
        theirs = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
    assert o.dtype == mixed.dtype == theirs.dtype
    narrow = [x.detach().to(dtype) for x in leaves]
    for one in (o, mixed):
        assert_right([one], lambda f, *x: [f(*x).detach()], narrow)
    assert [g.dtype for g in torch.autograd.grad(o.float().sum(), leaves)] == [torch.float32] * 3


@pytest.mark.parametrize("row", ["naive", "flash_torch", "sdpa_math"])
def test_autocast_leaves_float64_as_sdpa_does(row: str) -> None:
    leaves = tensors(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(*leaves, impl=row)
        assert found.dtype == F.scaled_dot_product_attention(*leaves, enable_gqa=True).dtype == torch.float64
    assert_right([found], lambda f, *x: [f(*x).detach()], leaves)


def transformed(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Values and gradients by torch.func, of one batch and by vmap of three, which are another axis of each tensor."""
    q, k, v = (x.detach() for x in (q, k, v))
    several = torch.stack([q, -q, q * 2], dim=1), torch.stack([k, k / 2, -k])

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v).sin().sum()

    o, pull = torch.func.vjp(function, q, k, v)
    gradients = torch.func.grad(loss, argnums=(0, 1, 2))
    batched = {"in_dims": (1, 0, None)}
    return [
        *(o, *pull(torch.cos(o))),
        *gradients(q, k, v),
        torch.func.vmap(function, **batched)(*several, v),
        *torch.func.vmap(gradients, **batched)(*several, v),
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k, v).square().sum())(q),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "row", by_default_all_but(["flash_torch", "flash_triton", "vectorized", "sdpa_math"], "flash_triton")
)
@pytest.mark.parametrize("options", OPTIONS)
def test_functions_of_torch_func(row: str, options: str, device: str) -> None:
    leaves = tensors(device=device)
    asked = OPTIONS[options](9, device)
    assert_right(transformed(call(row, asked, leaves[0]), *leaves), transformed, leaves, **asked)


def differentiated_again(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """A Hessian-vector product, a gradient penalty, and a third derivative."""
    o = function(*leaves)
    first = torch.autograd.grad(o.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(o.sum() + 10 * sum(g.square().sum() for g in first), leaves, create_graph=True)
    product = torch.autograd.grad(first[0].sum(), leaves, torch.ones(()).to(o), retain_graph=True)
    third = torch.autograd.grad(second[0].square().sum(), leaves[1])
    return [x.detach() for x in (*second, *product, *third)]


@pytest.mark.parametrize(("row", "device"), ON_DEVICES)
@pytest.mark.parametrize("options", by_default_all_but(OPTIONS, "window", "key_lengths", "two sides"))
def test_derivatives_of_gradients_are_right(row: str, options: str, device: str) -> None:
    """Also those that `torch.autograd.grad` of some inputs alone computes: they were zero once."""
    dtype, head_dim = (torch.bfloat16, 64) if row == "flash_gluon" else (torch.float32, 16)
    leaves = tensors(9, device, dtype, head_dim)
    asked = OPTIONS[options](9, device)
    assert_right(differentiated_again(call(row, asked, leaves[0]), *leaves), differentiated_again, leaves, **asked)


@pytest.mark.parametrize("row", KERNELS[:2])
def test_sinks_are_differentiable_once_and_break_the_compilers_graph(row: str) -> None:
    torch.compiler.reset()
    leaves, asked = tensors(), {"causal": True, "sinks": torch.tensor([0.5, 0.1])}
    found = results(torch.compile(partial(attention, impl=row, **asked), backend="aot_eager"), *leaves)
    assert_right(found, results, leaves, **asked)
    with pytest.raises(RuntimeError, match="differentiable once"):
        differentiated_again(partial(attention, impl=row, **asked), *leaves)
    with pytest.raises(RuntimeError, match=r"torch\.func|functorch transforms"):
        transformed(partial(attention, impl=row, **asked), *leaves)


def test_a_flash_row_says_that_sinks_cannot_be_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, sinks=torch.zeros(2), impl="flash_torch")

    with pytest.raises(ValueError, match=r"no operator under sinks, as torch\.export needs"):
        torch.export.export(Module(), tuple(x.detach() for x in tensors()))


def test_derivatives_of_gradients_in_three_dimensions() -> None:
    leaves = [x[:, 0].detach().requires_grad_() for x in tensors()]
    found = differentiated_again(partial(attention, impl="flash_torch", causal=True), *leaves)
    assert_right(found, differentiated_again, leaves, causal=True)


@pytest.mark.parametrize("row", KERNELS[:2])
def test_forward_mode_is_refused(row: str) -> None:
    q, k, v = tensors()
    function = call(row, {}, q)
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivatives \(jvp\); impl='naive' has them"):
        torch.func.jvp(lambda q: function(q, k, v), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        function(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("row", KERNELS[:2])
def test_selective_checkpointing_finds_the_operators(row: str) -> None:
    leaves, asked = tensors(), {"causal": True, "window": 3}
    function, ran = call(row, asked, leaves[0]), []
    kept = f"lmsys.{row}.default"

    def policy(ctx: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        ran.append((str(operator), ctx.is_recompute))
        return CheckpointPolicy.MUST_SAVE if str(operator) == kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    found = results(partial(checkpoint, function, use_reentrant=False, context_fn=contexts), *leaves)
    assert (kept, False) in ran
    assert_right(found, results, leaves, **asked)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("options", ["window", "documents", "softcap"])
def test_training_after_inference_mode(row: str, options: str) -> None:
    """Masks and bounds made under inference mode are kept, and must be usable outside of it."""
    leaves = tensors(8)
    with torch.inference_mode():
        asked = OPTIONS[options](8, "cpu")
        function = call(row, asked, leaves[0])
        function(*leaves)
    assert_right(results(function, *leaves), results, leaves, **asked)


def test_numbers_may_change_from_call_to_call_of_compiled_code() -> None:
    q, k, v = torch.randn(3, 1, 2, 16, 16)
    attend = partial(attention, q, k, v, causal=True, impl="vectorized")

    def call(number: int) -> Tensor:
        return torch.stack([attend(window=number, offset=number + 1), attend(prefix=number)])

    torch.compiler.reset()  # graphs of other tests count, too
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for number in (3, 5, 7):
        assert torch.allclose(compiled(number), call(number), atol=1e-5)
