"""`lmsys.training.muon.Muon` equals torch's Muon with torch's AdamW, and the papers' formula in float64 (`Exact`).

Muon makes the update of a matrix nearly orthogonal, by Newton-Schulz steps; AdamW steps all parameters but the matrices
of hidden layers. Other tests are of properties: saved states, loss scaling, and which parameters Muon steps. What Muon
has of AdamW, such as clipping, and its bad options, are tested in test_optimizer.py.

A Newton-Schulz step has a triple (a, b, c) of coefficients: it maps each singular value x to a x + b x³ + c x⁵, so that
all come near 1. POLAR_EXPRESS, the triples of the Polar Express, is compared with the algorithm of its paper;
COEFFICIENTS is the one triple of Jordan's Muon.
"""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from lmsys.cost.operations import newton_schulz_flops
from lmsys.parallel.structure import grouped
from lmsys.testing import error_ratio, ratio_of
from lmsys.training.muon import (
    BATCH,
    COEFFICIENTS,
    EPS,
    POLAR_EXPRESS,
    Muon,
    hidden_matrices,
    matrix_groups,
    newton_schulz,
    normalized,
)
from lmsys.training.optimizer import clip_factor, grad_norm, scale_gradients, set_lr
from tests.support.optimizers import saved, step_alike
from tests.support.ranks import Net, Recipe

flags = st.booleans()
recipes = st.builds(
    Recipe, width=st.integers(1, 9), layers=st.integers(1, 3), tied=flags, frozen=flags, unused=flags, mixed=flags
)
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.02, 0.1]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "momentum": st.sampled_from([0.0, 0.5, 0.95]),
        "nesterov": flags,
        "adjust_lr_fn": st.sampled_from(["original", "match_rms_adamw"]),
        "ns_steps": st.integers(1, 6),
        "ns_coefficients": st.sampled_from([COEFFICIENTS, (2.0, -1.5, 0.5)]),
    }
)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40))
USUAL = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "original", "ns_steps": 5}
USUAL |= {"ns_coefficients": COEFFICIENTS}
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}  # options of AdamW


def groups_of(net: nn.Module) -> list[Any]:
    """The param groups for Muon: hidden matrices, and all others."""
    return grouped(net, matrix_groups(net))


def of_blocks(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(the matrices of blocks, all others), by their names and shapes."""
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    hidden = [p for name, p in trained if name.startswith("layers.") and p.dim() == 2]
    return hidden, [p for _, p in trained if not any(p is other for other in hidden)]


def formula(x: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS) -> Tensor:
    """a X + b (X Xᵀ) X + c (X Xᵀ)² X of one matrix, as the paper writes it."""
    a, b, c = coefficients
    gram = x @ x.T
    return a * x + (b * gram + c * gram @ gram) @ x


class Pair:
    """torch's Muon and torch's AdamW, as their users step a model by both."""

    def __init__(self, net: nn.Module, chosen: dict[str, Any]):
        hidden, others = of_blocks(net)
        adamw = {"lr": chosen["lr"], "weight_decay": chosen["weight_decay"]}
        self.muon = torch.optim.Muon(hidden, **chosen) if hidden else None
        self.adamw = torch.optim.AdamW(others, foreach=True, **ADAMW, **adamw)

    def step(self) -> None:
        for optimizer in filter(None, (self.muon, self.adamw)):
            optimizer.step()


class Exact:
    """Muon's formula in float64, one matrix after another, as it is written in the papers."""

    def __init__(self, net: nn.Module, chosen: dict[str, Any]):
        self.matrices, self.chosen = of_blocks(net)[0], chosen
        self.momentum = [torch.zeros_like(p) for p in self.matrices]

    @torch.no_grad()
    def step(self) -> None:
        lr, momentum = self.chosen["lr"], self.chosen["momentum"]
        for p, buffer in zip(self.matrices, self.momentum, strict=True):
            if p.grad is None:
                continue
            buffer.copy_(momentum * buffer + (1 - momentum) * p.grad)
            update = momentum * buffer + (1 - momentum) * p.grad if self.chosen["nesterov"] else buffer
            update = update / max(update.norm().item(), EPS)
            for _ in range(self.chosen["ns_steps"]):
                update = formula(update, self.chosen["ns_coefficients"])
            rows, columns = p.shape
            factors = {"original": max(1, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
            p.mul_(1 - lr * self.chosen["weight_decay"])
            p.sub_(lr * factors[self.chosen["adjust_lr_fn"]] * update)


def draw_gradients(nets: list[nn.Module], missing: float, generator: torch.Generator) -> None:
    """Sets equal gradients, drawn in float32, in all nets. A parameter has none with the probability `missing`."""
    for copies in zip(*(net.parameters() for net in nets), strict=True):
        grad = torch.randn(copies[0].shape, generator=generator)
        has_none = bool(torch.rand((), generator=generator) < missing)
        for p in copies:
            p.grad = None if has_none or not p.requires_grad else grad.to(p.dtype, copy=True)


@given(recipes, options, st.integers(1, 4), st.sampled_from([0.0, 0.3]), st.integers(0, 2**32))
@example(Recipe(width=9, tied=True), USUAL, 4, 0.0, 1)
@example(Recipe(width=5, unused=True), USUAL | {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, 4, 0.3, 2)
def test_muon_equals_torchs_muon_with_torchs_adamw(
    recipe: Recipe, chosen: dict[str, Any], steps: int, missing: float, seed: int
) -> None:
    """Momentum and the parameters that AdamW steps have equal bits; matrices are as near to exact steps as torch's."""
    torch.manual_seed(seed % 1000)
    ours = Net(recipe)
    theirs, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    start = copy.deepcopy(exact)
    muon, pair = Muon(groups_of(ours), **chosen), Pair(theirs, chosen)
    in_float64 = Exact(exact, chosen)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        draw_gradients([ours, theirs, exact], missing, generator)
        for optimizer in (muon, pair, in_float64):
            optimizer.step()
    hidden, others = of_blocks(ours)
    for p, q in zip(others, of_blocks(theirs)[1], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        assert muon.state[p].keys() == pair.adamw.state[q].keys()
    for p, q, r, first in zip(hidden, *(of_blocks(net)[0] for net in (theirs, exact, start)), strict=True):
        buffers = muon.state[p].get("momentum_buffer"), pair.muon.state[q].get("momentum_buffer")
        assert buffers == (None, None) or torch.equal(*buffers)
        moved = [x.detach().double() - first.detach() for x in (p, r, q)]
        assert not moved[1].any() or ratio_of(*moved, torch.bfloat16, mean=False) <= 1


@given(shapes, st.integers(2, 6), st.integers(0, 2**32), st.sampled_from([1e-3, 1.0, 1e6]))
def test_newton_schulz_equals_the_formula(shape: tuple[int, int, int], steps: int, seed: int, size: float) -> None:
    """One step in float32 is right for each matrix of the batch, and several steps are those one after another."""
    x = normalized(list(size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))), torch.float32)
    torch.testing.assert_close(torch.linalg.matrix_norm(x), torch.ones(len(x)))
    once = newton_schulz(x, 1)
    for one, matrix in zip(once, x, strict=True):
        exact, plain = formula(matrix.double()), (formula(matrix), formula(matrix.T).T)  # by X Xᵀ or by Xᵀ X
        assert error_ratio(one, exact, max(plain, key=lambda x: (x - exact).abs().max())) <= 1
    assert torch.equal(newton_schulz(x, steps), newton_schulz(once, steps - 1))


LEAST = 1e-3  # the least singular value that is to be brought to 1
CUSHION = 0.024  # a polynomial's range is no wider than from this share of its end: else it would amplify rounding
SAFETY = 1.01  # rounding may take a value above 1, by this factor at most


def best_quintic(low: float, high: float) -> np.ndarray:
    """(a, b, c) of the a x + b x³ + c x⁵ that is nearest to 1 on [low, high], by Remez's exchange.

    Its error has one size at both ends and at the two extrema between them, with alternating signs.
    """
    extrema = (3 * low + high) / 4, (low + 3 * high) / 4
    error, change = math.inf, math.inf
    while change > 1e-14:
        points = np.array([low, *extrema, high])
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        *triple, new_error = np.linalg.solve(system, np.ones(4))
        change, error = abs(new_error - error), new_error
        a, b, c = triple
        root = math.sqrt(9 * b**2 - 20 * a * c)
        extrema = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return np.array(triple)


def value(triple: np.ndarray, x: float) -> float:
    """The value of the polynomial at x."""
    return triple @ np.array([x, x**3, x**5])


def test_the_coefficients_are_those_of_the_papers_algorithm() -> None:
    """Each is the best for the range that the steps before it have left, and is scaled so that its values lie around 1.

    The last is the limit of best polynomials for a range that narrows to 1.
    """
    low, high = LEAST, 1.0
    for triple in POLAR_EXPRESS[:-1]:
        best = best_quintic(max(low, CUSHION * high), high)
        best = best * 2 / (value(best, low) + value(best, high))
        low = value(best, low)
        high = 2 - low
        np.testing.assert_allclose(triple, best / SAFETY ** np.array([1, 3, 5]), atol=5.1e-5, rtol=0)
    assert POLAR_EXPRESS[-1] == (15 / 8, -10 / 8, 3 / 8)


@pytest.mark.parametrize(("steps", "off"), [(5, 0.16), (6, 0.006), (7, 1e-6), (9, 1e-14)])
def test_singular_values_come_to_one(steps: int, off: float) -> None:
    """off: the largest distance from 1. Jordan's coefficients let large values vary between 0.68 and 1.21."""
    values = torch.logspace(math.log10(LEAST), math.log10(1.008), 2000, dtype=torch.float64)[:, None, None]
    ours, jordans = (newton_schulz(values, steps, triples) for triples in (POLAR_EXPRESS, COEFFICIENTS))
    assert (ours - 1).abs().max() < off < 0.3 < (jordans - 1).abs().max()


@given(st.integers(1, 9), st.lists(st.tuples(*3 * [st.floats(-2, 2)]), min_size=1, max_size=4), st.integers(0, 99))
def test_each_step_has_its_triple_and_the_last_goes_on(steps: int, triples: list[tuple[float, ...]], seed: int) -> None:
    x = normalized(list(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed))), torch.float64)
    expected = x
    for step in range(steps):
        expected = newton_schulz(expected, 1, triples[min(step, len(triples) - 1)])
    torch.testing.assert_close(newton_schulz(x, steps, triples), expected, rtol=0, atol=0, equal_nan=True)


def test_a_matrix_of_zeros_is_not_moved() -> None:
    for shape in ((3, 2), (0, 2), (2, 0)):
        assert not newton_schulz(normalized([torch.zeros(shape)], torch.bfloat16)).any()


@given(shapes, st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_singular_values_come_near_to_one(shape: tuple[int, int, int], seed: int, dtype: torch.dtype) -> None:
    """No drawn matrix is nearly singular. Singular vectors stay: Uᵀ Y V of the result Y has a positive diagonal."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    x = (u * (0.1 + torch.rand(u.shape[-1], generator=generator))) @ vh
    found = newton_schulz(normalized(list(x), dtype)).float()
    assert torch.linalg.svdvals(found).min() > 0.6 and torch.linalg.svdvals(found).max() < 1.3
    assert ((u.mT @ found @ vh.mT).diagonal(dim1=-2, dim2=-1) > 0.5).all()


@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32))
def test_a_matrix_has_the_same_bits_whichever_others_are_stepped(
    count: int, rows: int, columns: int, seed: int
) -> None:
    """Without batches (batched=False)."""
    step_alike(*torch.randn(2, count, rows, columns, generator=torch.Generator().manual_seed(seed)))


def test_matrices_of_one_shape_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has as many of these matrices as BATCH elements hold, and one at least."""
    params = [torch.randn(shape, requires_grad=True) for shape in ((2, 3), (3, 2), (2, 3), (2, 3))]
    for p in params:
        p.grad = torch.randn_like(p)
    sizes = []
    for limit in (BATCH, 12, 1):
        monkeypatch.setattr("lmsys.training.muon.BATCH", limit)
        sizes.append([len(bundle.params) for bundle in Muon(params)._plan(0)])
    assert sizes == [[3, 1], [2, 1, 1], [1, 1, 1, 1]]


def train(optimizer: torch.optim.Optimizer, net: nn.Module, steps: range) -> None:
    """Takes these steps, each with gradients of its own."""
    for step in steps:
        draw_gradients([net], 0.0, torch.Generator().manual_seed(step))
        optimizer.step()


@given(recipes, flags, st.integers(0, 99))
def test_a_resumed_or_copied_state_equals_an_uninterrupted_one(recipe: Recipe, batched: bool, seed: int) -> None:
    torch.manual_seed(seed)
    whole = Net(recipe)
    part = copy.deepcopy(whole)
    options: dict[str, Any] = {"lr": 0.1, "batched": batched, "ns_coefficients": POLAR_EXPRESS}
    uninterrupted, half = (Muon(groups_of(net), **options) for net in (whole, part))
    train(uninterrupted, whole, range(5))
    train(half, part, range(2))
    twin, its_part = copy.deepcopy((half, part))
    resumed = Muon(groups_of(part))
    resumed.load_state_dict(saved(half))
    for optimizer, net in ((resumed, part), (twin, its_part)):
        train(optimizer, net, range(2, 5))
        assert all(map(torch.equal, whole.parameters(), net.parameters()))
        assert all(group.items() >= options.items() for group in optimizer.param_groups)


def test_muon_and_adamw_may_have_different_learning_rates() -> None:
    net = Net(Recipe())
    optimizer = Muon(groups_of(net))
    for rates, expected in (((0.5,), {0.5}), ((0.5, 0.25), {0.5, 0.25})):
        set_lr(optimizer, *rates)
        assert {group["lr"] for group in optimizer.param_groups} == expected
    assert all(group["lr"] == 0.25 for group in optimizer.param_groups if group["use_muon"])


@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scaler_unscales_gradients_and_skips_overflows(overflow: bool) -> None:
    p, q = (torch.full((2, 2), 3.0, requires_grad=True) for _ in range(2))
    optimizer, plain = Muon([p], lr=0.1), Muon([q], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(p.square().sum()).backward()
    q.square().sum().backward()
    if overflow:
        p.grad[0, 0] = math.inf
    scaler.step(optimizer)
    plain.step()
    assert torch.equal(p, torch.full((2, 2), 3.0) if overflow else q)


def test_embeddings_and_shared_weights_of_blocks_are_left_to_adamw() -> None:
    net = nn.Module()
    net.layers = nn.ModuleList([nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 5)])
    net.layers[2].weight = net.layers[1].weight
    assert hidden_matrices(net) == {net.layers[3].weight}
    with pytest.raises(ValueError, match="Linear has no hidden matrices"):
        matrix_groups(nn.Linear(2, 2))


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 2)])
def test_other_shapes_than_matrices_are_refused(shape: tuple[int, ...]) -> None:
    p = torch.ones(shape, requires_grad=True)
    with pytest.raises(ValueError, match=r"Muon steps matrices, not shape \(.*\): .* needs use_muon=False"):
        Muon([p])
    optimizer = Muon([torch.ones(1, 1)])
    with pytest.raises(ValueError, match="Muon steps matrices"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [p], "use_muon": False})


def test_operations_are_as_many_as_torch_counts() -> None:
    """They are those of three products in each Newton-Schulz step."""
    from torch.utils.flop_counter import FlopCounterMode

    for rows, columns in ((3, 7), (7, 3), (4, 4)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(1, rows, columns), steps=5)
        assert newton_schulz_flops(rows, columns, 5) == counter.get_total_flops()
        assert Muon.cost(torch.ones(rows, columns)) == newton_schulz_flops(rows, columns, 5)
    assert Muon.cost(torch.ones(3, 7), use_muon=False) == 21 and Muon.cost(torch.ones(5)) == 5


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_gpu() -> None:
    net = Net(Recipe()).cuda()
    optimizer = Muon(groups_of(net))
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        torch.cuda.set_sync_debug_mode("error")
        try:
            scale_gradients(optimizer, clip_factor(grad_norm(list(net.parameters())), 1.0))
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
