"""The options of the losses (smoothing, z-loss, soft cap, weights of tokens and so on) equal the formula in float64.

PATHS are the ways in which a loss is computed; `holds` tests one of them on a case. A new option is added to `formula`
and `cases`, and its bad values to BAD.

Legend: N tokens, V vocabulary, M d_model.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.model import loss
from lmsys.model.loss import IGNORED, MOST_SOFTCAP, REDUCTIONS, cross_entropy, linear_cross_entropy
from lmsys.testing import error_ratio

WIDTH = 16
FEW = 12  # tokens, or chunks of them
MOST_LOGITS = 2**24  # of a case: in float64, 128 MiB
Loss = Callable[..., Any]


def formula(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(the loss, its z-loss) as a textbook writes them, from logits in float32 or float64."""
    logits, ignored = hidden @ weight.mT, options.get("ignore_index", IGNORED)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap := options.get("softcap"):
        logits = softcap * torch.tanh(logits / softcap)
    smoothing, counted = options.get("label_smoothing", 0.0), targets != ignored
    share = F.one_hot(targets.where(counted, 0), len(weight)) * (1 - smoothing) + smoothing / len(weight)
    lse = logits.logsumexp(dim=-1)
    z = (options.get("z_loss", 0.0) * lse.square()).where(counted, 0)
    losses = (lse - (share * logits).sum(dim=-1)).where(counted, 0) + z
    token_weights = options.get("token_weights")
    factors = (counted if token_weights is None else token_weights.where(counted, 0)).to(losses.dtype)
    divisor = factors.sum() if options.get("reduction", "mean") == "mean" else torch.ones(())
    losses, z = losses * factors, z.detach() * factors.detach()
    return (losses, z) if options.get("reduction") == "none" else (losses.sum() / divisor, z.sum() / divisor.detach())


def by_logits(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, **options: Any) -> Any:
    """`cross_entropy` of all logits at once, which needs no `chunk`."""
    return cross_entropy(hidden @ weight.mT, targets, **options)


def by_kernel(*inputs: Any, tile: int = 2**14, **options: Any) -> Any:
    """`linear_cross_entropy` with its Triton kernel, on a CPU interpreted. More than `tile` classes take two passes."""
    loss_triton = pytest.importorskip("lmsys.model.loss_triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_triton, "TILE", tile)
        patch.setattr(loss, "_replace_by_gradient", loss_triton.replace_by_gradient)
        return linear_cross_entropy(*inputs, **options)


PATHS: dict[str, Loss] = {
    "chunked": linear_cross_entropy,
    "kernel": by_kernel,
    "kernel, two passes": partial(by_kernel, tile=2**9),
    "logits": by_logits,
}


@st.composite
def cases(
    draw: Any, *dtypes: torch.dtype, vocabularies: tuple[int, ...] = (1, 2, 33, 517, 1100), most_tokens: int = FEW
) -> dict[str, Any]:
    """Sizes, a dtype and options of a loss. Many tokens are drawn as often as a few.

    std    the standard deviation of hidden states
    small  drawn weights of tokens are so small that in float16 gradients of logits would be 0 with them
    """
    vocabulary = draw(st.sampled_from(vocabularies))
    most = draw(st.sampled_from([FEW, min(most_tokens, MOST_LOGITS // vocabulary)]))
    tokens = draw(st.integers(1, most))
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "dtype": draw(st.sampled_from(dtypes)),
        "ignored": draw(st.sampled_from(["none", "some", "all"])),
        "weights": draw(st.sampled_from([None, None, "drawn", "with a gradient"])),
        "chunk": draw(st.none() | st.integers(math.ceil(tokens / FEW), tokens + 1)),
        "seed": draw(st.integers(0, 2**31)),
        "std": draw(st.sampled_from([0.1, 1.0, 4.0])),
        "small": draw(st.booleans()),
        "options": {
            "reduction": draw(st.sampled_from(REDUCTIONS)),
            "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 0.9, 1.0])),
            "z_loss": draw(st.sampled_from([0.0, 0.0, 1e-4, 0.3])),
            "softcap": draw(st.sampled_from([None, None, 0.5, 5.0, 30.0, 1e5])),
            "ignore_index": draw(st.sampled_from([IGNORED, 0])),
        },
    }


def holds(path: Loss, device: str, case: dict[str, Any]) -> None:
    """AssertionError unless one of PATHS is right on a case: the loss, its z-loss, and all gradients."""
    generator = torch.Generator().manual_seed(case["seed"])
    tokens, vocabulary, dtype, options = (case[name] for name in ("tokens", "vocabulary", "dtype", "options"))
    hidden = (torch.randn(tokens, WIDTH, generator=generator) * case["std"]).to(device, dtype)
    weight = torch.randn(vocabulary, WIDTH, generator=generator).to(device, dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    targets[: {"none": 0, "some": tokens // 2, "all": tokens}[case["ignored"]]] = options["ignore_index"]
    small = 2.0**-23 if case["small"] and case["weights"] == "drawn" else 1.0
    token_weights = (torch.rand(tokens, generator=generator).to(device) + 0.1) * small if case["weights"] else None
    upstream = torch.randn(tokens if options["reduction"] == "none" else (), generator=generator).to(device)
    many = max(1.0, tokens / FEW)  # by which sums over tokens are divided, as they would overflow float16
    upstream /= 1.0 if options["reduction"] == "mean" else small * many  # a mean divides by the weights

    def results(compute: torch.dtype, call: Loss, **more: Any) -> list[Tensor]:
        """[the loss, its z-loss, the gradients] of a call with inputs in the dtype `compute`."""
        leaves = [x.detach().to(compute).requires_grad_() for x in (hidden, weight)]
        if token_weights is not None:
            factors = token_weights.detach().to(torch.promote_types(compute, torch.float32))
            more["token_weights"] = factors.requires_grad_(case["weights"] == "with a gradient")
            leaves += [factors] if factors.requires_grad else []
        value, z = call(*leaves[:2], targets, **options, **more)
        assert not z.requires_grad and value.shape == z.shape
        return [value.detach(), z, *torch.autograd.grad(value, leaves, upstream.to(value.dtype))]

    tested = results(dtype, path, chunk=case["chunk"], return_z_loss=True)
    exact, plain = results(torch.float64, formula), results(dtype, formula)
    if options["reduction"] == "mean" and not bool((targets != options["ignore_index"]).any()):
        assert tested[0].isnan() and not any(x.count_nonzero() for x in tested[2:])
        return
    judged = torch.float32 if dtype == torch.float64 else dtype
    # The gradient of a token's weight in a mean is a difference of losses over a sum, which may cancel to nothing.
    total = many if options["reduction"] == "sum" else 1.0
    sizes = [total, total, 1.0, 1.0, 10 * max(1.0, exact[0].abs().max().item())]
    for x, reference, low, size in zip(tested, exact, plain, sizes[: len(tested)], strict=True):
        assert error_ratio(x / size, reference / size, (low / size).to(judged)) <= 1


SMALL: dict[str, Any] = {
    "tokens": 6,
    "vocabulary": 33,
    "dtype": torch.float16,
    "ignored": "none",
    "weights": "drawn",
    "chunk": 4,
    "seed": 0,
    "std": 1.0,
    "small": True,
    "options": {"reduction": "sum", "ignore_index": IGNORED},
}
# Most capped logits are near -softcap, where 1 - (logit / softcap)² keeps no more digits than the tanh.
SATURATED = SMALL | {
    "tokens": 5,
    "dtype": torch.float32,
    "weights": None,
    "chunk": None,
    "seed": 105,
    "std": 4.0,
    "small": False,
    "options": {"reduction": "sum", "softcap": 2.0, "ignore_index": IGNORED},
}


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=30)
@example(case=SMALL)
@example(case=SMALL | {"options": {"reduction": "mean", "ignore_index": IGNORED}})
@example(case=SMALL | {"options": {"reduction": "none", "ignore_index": IGNORED}})
@example(case=SATURATED)
@given(case=cases(torch.float32, torch.float16, torch.bfloat16, torch.float64))
def test_all_options_together_equal_the_formula(path: str, case: dict[str, Any]) -> None:
    if path.startswith("kernel"):  # the kernel takes no float64, and the interpreter computes bfloat16 wrongly
        case["dtype"] = torch.float16 if case["dtype"] == torch.float16 else torch.float32
    holds(PATHS[path], "cpu", case)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["chunked", "logits"])
@settings(max_examples=200)
@given(
    case=cases(
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        vocabularies=(1, 33, 517, 10_000, 32_000, 50_000),
        most_tokens=1300,
    )
)
def test_on_a_gpu_too(path: str, case: dict[str, Any]) -> None:
    holds(PATHS[path], "cuda", case)


def inputs(vocabulary: int = 20, tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight (both leaves) and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator).requires_grad_() for n in (tokens, vocabulary))
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"reduction": "average"}, "reduction='average' must be one of mean, sum, none"),
    ({"label_smoothing": 1.1}, "label_smoothing=1.1 must be at least 0 and at most 1"),
    ({"z_loss": -1e-4}, "z_loss=-0.0001 must be at least 0"),
    ({"z_loss": float("nan")}, "z_loss=nan must be a finite number"),
    ({"softcap": 0.0}, "softcap=0.0 must be"),
    ({"softcap": 10 * MOST_SOFTCAP}, "softcap=1e"),
    ({"ignore_index": 0.5}, "ignore_index=0.5 must be a whole number"),
    ({"token_weights": torch.ones(5)}, "token_weights must be floating-point numbers beside targets, "),
    ({"token_weights": torch.ones(6, dtype=torch.int64)}, "token_weights must be floating-point numbers"),
    ({"token_weights": 2.0}, "token_weights must be floating-point numbers"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
@pytest.mark.parametrize("path", ["chunked", "logits"])
def test_a_bad_value_is_named(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PATHS[path](*inputs(), chunk=3, **options)


def test_values_at_ignored_tokens_are_not_read() -> None:
    hidden, weight, targets = inputs()
    targets[2], token_weights = IGNORED, torch.rand(6)
    for reduction, bad in product(REDUCTIONS, (float("nan"), float("inf"))):
        token_weights[2] = bad
        for call in (linear_cross_entropy, partial(by_logits, chunk=3)):
            value = call(hidden, weight, targets, token_weights=token_weights, reduction=reduction)
            of_hidden, of_weight = torch.autograd.grad(value.sum(), (hidden, weight))
            assert value.isfinite().all() and of_weight.isfinite().all() and not of_hidden[2].any()
            with_nan = hidden.detach().index_fill(0, torch.tensor(2), float("nan"))
            assert call(with_nan, weight, targets, z_loss=0.1, reduction=reduction).isfinite().all()
