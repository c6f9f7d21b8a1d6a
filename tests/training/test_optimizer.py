"""`lmsys.training.optimizer`: AdamW, the schedule and clipping equal torch's; and what Muon has of AdamW.

`Case` draws parameters and gradients. AdamW steps in three ways, by torch's multi-tensor functions, by torch's fused
kernel, and by the Triton kernel. Each is compared with torch on equal cases. Tests with a `kind` are of AdamW and of
Muon, which derives from it. A new bad option is added to `test_bad_options_are_named`, with the message that it gives.
"""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

from lmsys.extremes.model import SIZES, extreme
from lmsys.testing import error_ratio
from lmsys.training.muon import Muon
from lmsys.training.optimizer import (
    HAS_TRITON,
    AdamW,
    _torch_step,
    _triton_step,
    clip_factor,
    clip_grad_norm,
    cosine_schedule,
    grad_norm,
    scale_gradients,
    set_lr,
    undecayed,
)
from tests.support.optimizers import saved

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
STATE = ["step", "exp_avg", "exp_avg_sq"]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
options = st.fixed_dictionaries(
    {
        "lr": st.floats(0, 0.1),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
    }
)


@dataclass(frozen=True)
class Case:
    """A training: parameters in param groups, and the gradients of each step, drawn by `seed`.

    groups   for each group: (shape, dtype) of its parameters
    options  for each group: its options
    missing  share of the gradients that are None in a step
    wide     True: all values in float64
    """

    groups: list[list[tuple[tuple[int, ...], torch.dtype]]]
    options: list[dict[str, Any]]
    num_steps: int
    missing: float
    seed: int
    device: str = "cpu"
    wide: bool = False

    def build(self, make: Callable[..., torch.optim.Optimizer], **more: Any) -> torch.optim.Optimizer:
        """An optimizer of new parameters."""
        generator = torch.Generator().manual_seed(self.seed)
        groups = [
            {"params": [self.draw(*spec, generator).requires_grad_() for spec in group], **chosen}
            for group, chosen in zip(self.groups, self.options, strict=True)
        ]
        return make(groups, **more)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device, dtype)
        return x.double() if self.wide else x

    def set_grads(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Draws the gradients of a step; with `wide`, the same values in float64."""
        generator = torch.Generator().manual_seed(self.seed + step)
        for p in parameters_of(optimizer):
            grad = self.draw(p.shape, torch.float32 if self.wide else p.dtype, generator)
            p.grad = None if torch.rand((), generator=generator) < self.missing else grad

    def run(self, optimizer: torch.optim.Optimizer, first: int = 0, last: int | None = None) -> torch.optim.Optimizer:
        """Takes the steps from `first` to before `last`, with a learning rate that falls."""
        for step in range(first, self.num_steps if last is None else last):
            self.set_grads(optimizer, step)
            for group, chosen in zip(optimizer.param_groups, self.options, strict=True):
                group["lr"] = chosen["lr"] / (1 + step)
            optimizer.step()
        return optimizer


cases = st.builds(
    Case,
    groups=st.lists(
        st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=4), min_size=2, max_size=2
    ),
    options=st.lists(options, min_size=2, max_size=2),
    num_steps=st.integers(1, 6),
    missing=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**32),
)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def torch_adamw(params: Any, **more: Any) -> torch.optim.AdamW:
    """torch's AdamW by multi-tensor functions. Ours calls them in the same order, so results are equal bit for bit."""
    return torch.optim.AdamW(params, foreach=True, **more)


def torch_fused(params: Any, **more: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **more)


def assert_identical(ours: torch.optim.Optimizer, peer: torch.optim.Optimizer) -> None:
    """AssertionError unless parameters and their state have equal bits, and the options of `ours` are those of `peer`.

    The peer may have options that ours has not.
    """
    for mine, theirs in zip(*(optimizer.state_dict()["param_groups"] for optimizer in (ours, peer)), strict=True):
        assert mine.items() <= theirs.items()
    pairs = list(zip(parameters_of(ours), parameters_of(peer), strict=True))
    for p, q in pairs:
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        assert ours.state[p].keys() == peer.state[q].keys()
        for name, value in peer.state[q].items():
            torch.testing.assert_close(ours.state[p][name], value, rtol=0, atol=0)


def assert_right(ours: torch.optim.Optimizer, plain: torch.optim.Optimizer, wide: torch.optim.Optimizer) -> None:
    """AssertionError unless `ours` is as exact, compared with `wide` in float64, as torch's optimizer `plain`."""
    for p, q, r in zip(*map(parameters_of, (ours, plain, wide)), strict=True):
        assert ours.state[p].get("step") == plain.state[q].get("step")
        moments = STATE[1:] if ours.state[p] else []
        tensors = [[x, *(of.state[x][name] for name in moments)] for of, x in ((ours, p), (plain, q), (wide, r))]
        for x, low, ref in zip(*tensors, strict=True):
            assert not x.numel() or error_ratio(x, ref.detach(), low) <= 1


def load(resumed: torch.optim.Optimizer, half: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Gives `resumed` the parameters of `half`, and the state that `half` saved."""
    resumed.load_state_dict(state_dict)
    for p, q in zip(parameters_of(resumed), parameters_of(half), strict=True):
        p.data.copy_(q.data)


@pytest.mark.parametrize("size", SIZES)
def test_extreme_gradients_give_the_steps_of_torch_on_a_cpu(size: str, device: str) -> None:
    """The Triton kernel is tested, too, if it can run. Each row of a parameter is judged alone."""
    case = Case([[((8, 3), torch.float32)]], [{"lr": 0.1}], num_steps=3, missing=0, seed=1)
    ours, kernel = (replace(case, device=where).build(AdamW) for where in ("cpu", device))
    plain, wide = case.build(torch.optim.AdamW, foreach=False), replace(case, wide=True).build(torch.optim.AdamW)
    for step in range(case.num_steps):
        for optimizer in (ours, kernel, plain, wide):
            case.set_grads(optimizer, step)
            for p in parameters_of(optimizer):
                # Not held by torch: torch's own kernels on a GPU would overflow, and are not called here.
                p.grad = extreme(p.grad.cpu(), size, held_by_torch=False).to(p)
        for optimizer in (ours, plain, wide):
            optimizer.step()
        # Bundles of param group 0: parameters that step together.
        for bundle in kernel._plan(0) if HAS_TRITON else ():
            _triton_step(bundle, kernel.param_groups[0], rounded=None, grad_scale=None, found_inf=None)
    for optimizer in (ours, kernel) if HAS_TRITON else (ours,):
        (p,), (low,), (ref,) = map(parameters_of, (optimizer, plain, wide))
        for name in STATE[1:]:
            rows = zip(optimizer.state[p][name].cpu(), plain.state[low][name], wide.state[ref][name], strict=True)
            assert all(_in_units(row, low, ref) <= 1 for row, low, ref in rows), name
        assert all(error_ratio(*row) <= 1 for row in zip(p.detach().cpu(), ref.detach(), low.detach(), strict=True))


def _in_units(x: Tensor, plain: Tensor, wide: Tensor) -> float:
    """The ratio of the error to its budget, after division by the largest value, or by the smallest normal number."""
    unit = max(wide.abs().max().item(), torch.finfo(torch.float32).tiny)
    return error_ratio(x.double() / unit, wide / unit, (plain.double() / unit).float())


@given(cases)
def test_adamw_is_that_of_torch(case: Case) -> None:
    assert_identical(case.run(case.build(AdamW)), case.run(case.build(torch_adamw)))


@given(cases, st.sampled_from([None, 4.0]), st.booleans())
def test_the_fused_step_is_that_of_torch(case: Case, scale: float | None, overflow: bool) -> None:
    """Our step on a GPU calls torch's fused kernel, which torch also has for CPUs."""
    ours, peer = case.build(AdamW), case.build(torch_fused)
    for step in range(case.num_steps):
        grad_scale = None if scale is None else torch.tensor(scale)
        found_inf = None if scale is None else torch.tensor(float(overflow and step == 1))
        case.set_grads(ours, step)
        for i, group in enumerate(ours.param_groups):
            for bundle in ours._plan(i):
                _torch_step(bundle, group, fused=True, grad_scale=grad_scale, found_inf=found_inf)
        case.set_grads(peer, step)
        peer.grad_scale, peer.found_inf = grad_scale, found_inf
        peer.step()
    assert_identical(ours, peer)


class Copies:
    """A stand-in for `RoundedWeights`, for parameters of any shape.

    Its copies are float16, since Triton's interpreter rounds to float16 correctly. views: they are not aligned to 16
    bytes.
    """

    def __init__(self, params: list[Tensor], views: bool):
        # With `views`, a copy begins 2 bytes after a multiple of 16.
        memory = [p.new_zeros(p.numel() + views, dtype=torch.float16) for p in params]
        self.copies = [(p, x[int(views) :].view_as(p)) for p, x in zip(params, memory, strict=True)]
        self.followed: list[Tensor] = []

    def of(self, weight: Tensor) -> Tensor | None:
        return next((copy for p, copy in self.copies if p is weight), None)

    def follow(self, weights: list[Tensor]) -> None:
        """An optimizer calls it once it has stepped these weights and written their copies."""
        self.followed = weights


@pytest.mark.skipif(not HAS_TRITON, reason="pip install triton to test its kernels")
@given(
    sizes=st.lists(shapes | st.sampled_from([(1,), (2049,), (3, 2731)]), min_size=1, max_size=4),
    chosen=options,
    num_steps=st.integers(1, 5),
    views=st.booleans(),
    scale=st.sampled_from([None, 4.0]),
    overflow=st.booleans(),
    clipped=st.sampled_from([None, 0.3]),
    copied=st.sampled_from([1, 2, None]),
    seed=st.integers(0, 2**32),
)
def test_the_triton_step_is_that_of_torch(
    sizes: list[tuple[int, ...]], chosen: dict[str, Any], num_steps: int, views: bool, scale: float | None,
    overflow: bool, clipped: float | None, copied: int | None, seed: int, device: str,
) -> None:  # fmt: skip
    """Gradients may be unaligned, scaled, clipped by the kernel, and new tensors in each step.

    A step that overflows does not count. Rounded copies of all parameters, or of every second one, must be written if
    no step can overflow.

    views   gradients and copies are unaligned; scale: the loss scale; clipped: the factor of clipping
    copied  every how many parameters have a rounded copy
    """
    case = Case([[(shape, torch.float32) for shape in sizes]], [chosen], num_steps, missing=0, seed=seed, device=device)
    ours, plain, wide = case.build(AdamW), case.build(torch_adamw), replace(case, wide=True).build(torch_adamw)
    for step in range(num_steps):
        skipped = scale is not None and overflow and step == 1
        for drawn, optimizer in ((case, plain), (replace(case, wide=True), wide)):
            drawn.set_grads(optimizer, step)
            for p in parameters_of(optimizer):
                p.grad = p.grad * (clipped or 1)
            if not skipped:
                optimizer.step()
        case.set_grads(ours, step)
        unscaled = [p.grad for p in parameters_of(ours)]
        for p in parameters_of(ours):
            memory = torch.zeros(p.numel() + views, device=device)  # a view begins 4 bytes after a multiple of 16
            p.grad = memory[int(views) :].view_as(p).copy_(p.grad * (scale or 1))
        factor = None if scale is None else torch.tensor(scale, device=device)
        found_inf = None if scale is None else torch.tensor(float(skipped), device=device)
        rounded = None if copied is None else Copies(parameters_of(ours)[::copied], views)
        for bundle in ours._plan(0):
            clip = None if clipped is None else torch.tensor(clipped, device=device)
            _triton_step(bundle, ours.param_groups[0], rounded, grad_scale=factor, found_inf=found_inf, factor=clip)
        if rounded is not None and scale is None:  # without a loss scale no step can overflow
            assert all(torch.equal(copy, p.half()) for p, copy in rounded.copies)
            assert rounded.followed == parameters_of(ours)
        if not skipped:  # a step divides gradients by the loss scale in place, but does not clip them there
            assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters_of(ours), unscaled, strict=True))
    assert_right(ours, plain, wide)


@pytest.mark.parametrize(("before", "after"), ["ours ours".split(), "torch ours".split(), "ours torch".split()])
@given(case=cases, stop=st.integers(0, 6))
def test_a_run_is_resumed_from_a_state_dict(before: str, after: str, case: Case, stop: int) -> None:
    makes, stop = {"ours": AdamW, "torch": torch_adamw}, min(stop, case.num_steps)
    half = case.run(case.build(makes[before]), last=stop)
    resumed = case.build(makes[after])
    load(resumed, half, saved(half))
    for group in resumed.param_groups:
        group["foreach"] = True  # torch loads its options from the state dict; our AdamW ignores this one
    assert_identical(case.run(resumed, first=stop), case.run(case.build(torch_adamw)))


@given(cases, st.booleans())
def test_a_loaded_state_replaces_the_one_in_use(case: Case, is_old: bool) -> None:
    """AdamW keeps lists of tensors between steps. They must be made again when the state is replaced.

    is_old  the number of steps is an int, as in checkpoints of early versions of torch
    """
    used, peer = case.run(case.build(AdamW)), case.run(case.build(torch_adamw))
    for optimizer in (used, peer):
        state_dict = saved(case.run(case.build(torch_adamw), last=1))
        for state in state_dict["state"].values() if is_old else ():
            state["step"] = int(state["step"])
        optimizer.load_state_dict(state_dict)
        case.run(optimizer)
    assert_identical(used, peer)


@given(cases)
def test_a_copied_or_unpickled_optimizer_goes_on(case: Case) -> None:
    whole = case.run(case.build(AdamW))
    half = case.run(case.build(AdamW), last=1)
    for clone in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert_identical(case.run(clone, first=1), whole)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parameters_and_state_may_be_replaced_between_steps(device: str) -> None:
    """Another parameter group may join, too."""

    def run(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> torch.optim.Optimizer:
        factory = {"device": device, "dtype": dtype, "requires_grad": True}
        first, second, third = (torch.full((3,), x, **factory) for x in (1.0, 2.0, 3.0))
        optimizer = make([first])
        for step in range(6):
            for p in (first, second, third):
                p.grad = torch.full_like(p, step - 1.5)
            if step == 1:
                optimizer.add_param_group({"params": [second], "lr": 0.1})
            if step == 2:
                optimizer.param_groups[0]["params"][0] = third
            if step == 3:
                optimizer.state.clear()
            if step == 4:
                optimizer.state[third]["exp_avg"] = torch.full_like(third, 2.0)
            if step == 5:
                optimizer.state[second] = {name: x + 1 for name, x in optimizer.state[second].items()}
            optimizer.step()
        return optimizer

    assert_right(run(AdamW, torch.float32), *(run(torch_adamw, dtype) for dtype in (torch.float32, torch.float64)))


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {  # parts of the memory of a tensor (6, 8)
    "whole": lambda x: x,
    "transposed": lambda x: x.mT,
    "every other column": lambda x: x[:, ::2],
    "every other row": lambda x: x[::2],
    "columns inside": lambda x: x[:, 1:5],
}


@given(of_weight=st.sampled_from([*MEMORY]), of_gradient=st.sampled_from([*MEMORY]), seed=st.integers(0, 99))
def test_weights_and_gradients_may_lie_anywhere_in_memory(of_weight: str, of_gradient: str, seed: int) -> None:
    """A kernel that takes all memory for contiguous would step memory beside a weight, as torch's for CPUs does."""

    def run(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> torch.optim.Optimizer:
        around = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
        p = MEMORY[of_weight](around).requires_grad_()
        gradient = MEMORY[of_gradient](torch.empty(6, 8, dtype=dtype))
        if gradient.shape != p.shape:
            gradient = torch.empty_like(p)
        p.grad, optimizer = gradient.copy_(p.detach().sin()), make([p])
        for _ in range(3):
            optimizer.step()
        return optimizer

    assert_right(run(AdamW, torch.float32), *(run(torch_adamw, dtype) for dtype in (torch.float32, torch.float64)))


def test_betas_may_be_whole_numbers() -> None:
    steps = []
    for betas in ((0, 0), (0.0, 0.0)):
        p = torch.ones(3, requires_grad=True)
        p.grad = torch.ones(3)
        AdamW([p], betas=betas).step()
        steps.append(p)
    assert torch.equal(*steps)


KINDS = pytest.mark.parametrize("kind", [AdamW, Muon])


@KINDS
def test_closures_schedulers_hooks_and_added_groups_work(kind: type[AdamW]) -> None:
    """They do so as with any optimizer of torch."""
    p, q = torch.ones(3, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer, rates = kind([p], lr=0.1, weight_decay=0.0), []
    optimizer.add_param_group({"params": [q], "lr": 0.01, "use_muon": False})
    optimizer.register_step_post_hook(lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum() + q.square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert (
        losses[0] == 12
        and losses == sorted(losses, reverse=True)
        and rates == [[0.1, 0.01], [0.05, 0.005], [0.025, 0.0025]]
    )
    optimizer.zero_grad()
    assert optimizer.step() is None  # without gradients it does nothing


@pytest.mark.parametrize("make", [AdamW, Muon])
def test_a_compiled_step_is_the_eager_one(make: Any) -> None:
    """torch.compile of it, or of a training step around it, ended in a TorchRuntimeError about fake tensors."""
    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    steps = [make([p]).step for p in parameters]
    for p, step in zip(parameters, (torch.compile(steps[0], backend="eager"), steps[1]), strict=True):
        for number in range(3):
            p.grad = torch.eye(4) + number
            step()
    assert torch.equal(*parameters) and not torch.equal(parameters[0], torch.ones(4, 4))


WRONG_OPTIONS: dict[type[AdamW], list[tuple[dict[str, Any], str]]] = {
    AdamW: [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": torch.tensor(0.5)}, r"lr=tensor\(0.5000\) must be a finite number"),  # to read it, the host would wait
        ({"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\)"),
        ({"betas": (0.9, -0.1)}, r"betas=\(0.9, -0.1\)"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\)"),
        ({"betas": 0.9}, "betas=0.9 must be two numbers"),
        ({"betas": ("0.9", "0.95")}, "must be two numbers"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"eps": math.inf}, "eps=inf"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
    Muon: [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\)"),
        ({"momentum": "0.9"}, "momentum='0.9' must be a finite number"),
        ({"nesterov": "no"}, "nesterov='no' must be True or False"),
        ({"use_muon": None}, "use_muon=None must be True or False"),
        ({"batched": 1}, "batched=1 must be True or False"),
        ({"adjust_lr_fn": "moonshot"}, "adjust_lr_fn='moonshot' must be one of original, match_rms_adamw"),
        ({"ns_steps": 0}, "ns_steps=0 must be at least 1 and at most 99"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1.0, 2.0\) must be three numbers"),
        ({"ns_coefficients": (1.0, 2.0, math.inf)}, "ns_coefficients=inf must be a finite number"),
        ({"ns_coefficients": ()}, r"ns_coefficients=\(\) must be three numbers, or several triples of them"),
        ({"ns_coefficients": ((1.0, 2.0, 3.0), (1.0, 2.0))}, r"\(1.0, 2.0\)\) must be three numbers, or several"),
        ({"ns_coefficients": ((1.0, 2.0, 3.0), 1.0)}, "must be three numbers, or several triples"),
        ({"ns_coefficients": ((1.0, 2.0, "3"),)}, "ns_coefficients='3' must be a finite number"),
        ({"ns_dtype": torch.int64}, "ns_dtype=torch.int64 must be a floating-point dtype"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "wrong", "message"), [(kind, *case) for kind, cases in WRONG_OPTIONS.items() for case in cases]
)
def test_bad_options_are_named(kind: type[AdamW], wrong: dict[str, Any], message: str) -> None:
    """They are, where an optimizer is made, where a group is added, and in a step, which then changes nothing."""
    p = torch.ones(1, 1, requires_grad=True)
    p.grad = torch.ones(1, 1)
    with pytest.raises(ValueError, match=message):
        kind([p], **wrong)
    with pytest.raises(ValueError, match=message):
        kind([{"params": [p], **wrong}])
    optimizer = kind([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.ones(1, 1)], **wrong})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0].update(wrong)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(p, torch.ones(1, 1)) and not optimizer.state


@KINDS
def test_sparse_and_complex_gradients_are_refused_and_nothing_moves(kind: type[AdamW]) -> None:
    dense, sparse = torch.ones(3, 1, requires_grad=True), torch.ones(4, 1, requires_grad=True)
    dense.grad, sparse.grad = torch.ones(3, 1), torch.ones(4, 1).to_sparse()
    with pytest.raises(ValueError, match=r"takes dense .* one is torch.sparse_coo of torch.float32, shape \(4, 1\)"):
        kind([{"params": [dense]}, {"params": [sparse]}]).step()
    assert torch.equal(dense, torch.ones(3, 1))
    z = torch.ones(2, 2, dtype=torch.complex64, requires_grad=True)
    z.grad = torch.ones_like(z)
    with pytest.raises(ValueError, match="takes dense floating-point gradients, .*complex64"):
        kind([z]).step()


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        (AdamW, partial(torch.optim.AdamW, amsgrad=True), "amsgrad=True"),
        (AdamW, partial(torch.optim.AdamW, maximize=True), "maximize=True"),
        (AdamW, torch.optim.Adam, "decoupled_weight_decay=False"),
        (AdamW, Muon, "the state dict is not AdamW's: its param group has use_muon=True"),
        (AdamW, torch.optim.SGD, "the state dict is not AdamW's: its param group lacks betas, eps"),
        (Muon, AdamW, "use_muon=None, where this one has True"),
        (Muon, partial(Muon, use_muon=False), "use_muon=False, where this one has True"),
        (Muon, partial(torch.optim.AdamW, amsgrad=True), "use_muon=None"),
    ],
)
def test_the_state_of_another_algorithm_is_refused(kind: Any, other: Any, message: str) -> None:
    p = torch.ones(1, 1, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        kind([p]).load_state_dict(other([p]).state_dict())


@given(st.floats(1e-6, 10), st.floats(0, 1), st.integers(0, 50), st.integers(1, 100))
def test_the_schedule_is_that_of_torch_and_then_stays(top: float, share: float, warmup: int, decay: int) -> None:
    optimizer = AdamW([torch.ones(1, requires_grad=True)], lr=top)
    climb = LambdaLR(optimizer, lambda step: step / warmup if warmup else 1.0)
    fall = CosineAnnealingLR(optimizer, decay, eta_min=top * share)
    scheduler = SequentialLR(optimizer, [climb, fall], milestones=[warmup]) if warmup else fall
    schedule = partial(cosine_schedule, max_lr=top, min_lr=top * share, warmup_steps=warmup, total_steps=warmup + decay)
    for step in range(warmup + decay + 1):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(schedule(step), abs=1e-9 * top)
        optimizer.step()
        scheduler.step()
    assert schedule(warmup + decay) == schedule(warmup + decay + 1) == schedule(10 * (warmup + decay)) == top * share


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": -1}, "step=-1"),
        ({"max_lr": 0.01}, "min_lr=0.1 must be at least 0 and at most 0.01"),
        ({"min_lr": -0.1}, "min_lr=-0.1"),
        ({"max_lr": math.nan}, "max_lr=nan"),
        ({"max_lr": math.inf}, "max_lr=inf"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 20}, "warmup_steps=20 must be at least 0 and at most 19"),
        ({"step": 1.5}, "step=1.5 must be a whole number"),
        ({"total_steps": "20"}, "total_steps='20' must be a whole number"),
        ({"max_lr": None}, "max_lr=None must be a finite number"),
        ({"warmup_steps": 0, "total_steps": 0}, "total_steps=0"),
    ],
    ids=lambda x: None if isinstance(x, dict) else x.replace(" ", "_"),
)
def test_a_nonsense_schedule_is_named(wrong: dict[str, Any], message: str) -> None:
    right = {"step": 3, "max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "total_steps": 20}
    with pytest.raises(ValueError, match=message):
        cosine_schedule(**(right | wrong))


def parameters_with_grads(specs: list[tuple[tuple[int, ...], torch.dtype]], seed: int, std: float) -> list[Tensor]:
    """Parameters of these (shape, dtype) with random gradients, and a last one without a gradient."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in specs]
    for p in parameters:
        p.grad = (std * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype)
    return [*parameters, torch.zeros(2, requires_grad=True)]


@given(
    specs=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6),
    seed=st.integers(0, 2**32),
    std=st.sampled_from([1e-4, 1.0, 100.0]),
    max_norm=st.sampled_from([0.0, 0.5, 1.0, 30.0, math.inf]),
)
def test_clipping_is_that_of_torch(specs: list[Any], seed: int, std: float, max_norm: float) -> None:
    """Norms and gradients are compared in the coarsest dtype of the parameters."""
    ours, peer = (parameters_with_grads(specs, seed, std) for _ in range(2))
    whole = torch.cat([torch.zeros(1), *(p.grad.double().flatten() for p in ours[:-1])]).norm()
    norm, expected = clip_grad_norm(iter(ours), max_norm), torch.nn.utils.clip_grad_norm_(peer, max_norm)
    torch.testing.assert_close(norm.float(), whole.float())
    coarse = min((dtype for _, dtype in specs), key=lambda dtype: -torch.finfo(dtype).eps, default=torch.float32)
    torch.testing.assert_close(norm.to(coarse), expected.to(coarse))
    for p, q in zip(ours[:-1], peer[:-1], strict=True):
        torch.testing.assert_close(p.grad.to(coarse), q.grad.to(coarse))
    assert ours[-1].grad is None


def muon(groups: list[dict[str, Any]]) -> Muon:
    """Muon for the matrices of these groups, and AdamW for their other parameters."""
    params = [p for group in groups for p in group["params"]]
    others = {"params": [p for p in params if p.dim() != 2], "use_muon": False}
    return Muon([{"params": [p for p in params if p.dim() == 2]}, others], lr=0.1, momentum=0.5)


@given(case=cases, max_norm=st.sampled_from([0.0, 0.5, 30.0]), make=st.sampled_from([AdamW, muon, torch_adamw]))
def test_a_step_on_scaled_gradients_is_one_after_clipping(case: Case, max_norm: float, make: Any) -> None:
    """Our optimizers apply the factor in their next step, and leave gradients as they are; others' are multiplied."""
    ours, clipped = case.build(make), case.build(make)
    for step in range(case.num_steps):
        for optimizer in (ours, clipped):
            case.set_grads(optimizer, step)
        before = [None if p.grad is None else p.grad.clone() for p in parameters_of(ours)]
        if step != 1:
            scale_gradients(ours, clip_factor(grad_norm(parameters_of(ours)), max_norm))
            clip_grad_norm(parameters_of(clipped), max_norm)
        ours.step()
        clipped.step()
        for p, other, grad in zip(parameters_of(ours), parameters_of(clipped), before, strict=True):
            expected = other.grad if make is torch_adamw else grad
            assert p.grad is expected is None or torch.equal(p.grad, expected)
    assert_identical(ours, clipped)


def test_the_norm_of_half_precision_gradients_does_not_overflow() -> None:
    p = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    p.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert clip_grad_norm(p, 1200.0).item() == pytest.approx(120000)
    torch.testing.assert_close(p.grad, torch.full((4,), 600.0, dtype=torch.float16))


@pytest.mark.parametrize(("bad", "left"), [(math.nan, [math.nan] * 2), (math.inf, [0.0, math.nan])], ids=["nan", "inf"])
def test_a_norm_that_is_not_finite_is_returned(bad: float, left: list[float]) -> None:
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.tensor([1.0, bad])
    torch.testing.assert_close(clip_grad_norm([p], 1.0), torch.tensor(bad), equal_nan=True)
    torch.testing.assert_close(p.grad, torch.tensor(left), equal_nan=True)


@pytest.mark.parametrize("parts", ["", "weight|", "|weight", "bias"])
def test_a_part_of_no_name_or_of_every_name_is_refused(parts: str) -> None:
    """The empty text is a part of every name: no parameter at all would decay."""
    with pytest.raises(ValueError, match="undecayed='.*': '.*' is empty, or in no parameter's name"):
        undecayed(torch.nn.Linear(2, 2, bias=False), parts)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_infinite_max_norm_only_measures(bad: float) -> None:
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.tensor([1.0, bad])
    torch.testing.assert_close(clip_grad_norm([p], math.inf), torch.tensor(bad), equal_nan=True)
    torch.testing.assert_close(p.grad, torch.tensor([1.0, bad]), equal_nan=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"max_norm": math.nan}, "max_norm=nan"),
        ({"max_norm": None}, "max_norm=None"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"parameters": {torch.ones(1)}}, "parameters=.* must be a list or tuple: a set has no order"),
    ],
)
def test_bad_arguments_of_clipping_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip_grad_norm(**{"parameters": [torch.ones(1)], "max_norm": 1.0, **wrong})


@pytest.mark.gpu
@given(cases)
def test_adamw_on_a_gpu_is_torchs_fused(case: Case) -> None:
    """Float32 is left out: `test_the_triton_step_is_that_of_torch` tests it."""
    others = {torch.float32: torch.float16, torch.float64: torch.float64, torch.bfloat16: torch.bfloat16}
    case = replace(case, device="cuda", groups=[[(shape, others[dtype]) for shape, dtype in g] for g in case.groups])
    assert_identical(case.run(case.build(AdamW)), case.run(case.build(torch_fused)))


def test_torchs_fused_kernel_gets_gradients_that_lie_in_memory_as_parameters_do() -> None:
    """On CUDA it refuses others; on a CPU it mixes up their elements."""
    case = Case([[((5, 3), torch.float32)]], [{"lr": 0.1}], 1, missing=0, seed=0)
    results = []
    for fused in (True, False):
        optimizer = case.build(AdamW)
        case.set_grads(optimizer, 0)
        (p,) = parameters_of(optimizer)
        p.grad = p.grad.mT.contiguous().mT
        (bundle,) = optimizer._bundles([p], optimizer.param_groups[0])
        with torch.no_grad():
            _torch_step(bundle, optimizer.param_groups[0], fused, None, None)
        results.append(p.detach())
    torch.testing.assert_close(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", ["neither", "both", "gradient"])
def test_adamw_on_a_gpu_takes_any_layout(transposed: str) -> None:
    """Parameters and gradients that are not contiguous go to torch's kernel."""
    case = Case([[((5, 3), torch.float32), ((7,), torch.float32)]], [{"lr": 0.1}], 3, missing=0, seed=0, device="cuda")
    ours, plain, wide = case.build(AdamW), case.build(torch_fused), replace(case, wide=True).build(torch_adamw)
    for step in range(3):
        for drawn, optimizer in ((case, ours), (case, plain), (replace(case, wide=True), wide)):
            drawn.set_grads(optimizer, step)
            p = parameters_of(optimizer)[0]
            if transposed == "both":
                p.data, p.grad = (x.mT.contiguous().mT for x in (p.data, p.grad))
            if transposed == "gradient" and optimizer is not plain:  # torch's fused kernel refuses it
                p.grad = p.grad.mT.contiguous().mT
            optimizer.step()
    assert_right(ours, plain, wide)


@pytest.mark.gpu
def test_step_counts_that_torch_kept_on_the_host_move_to_the_gpu() -> None:
    case = Case([[((5, 3), torch.float32)]], [{"lr": 0.1}], 3, missing=0, seed=0, device="cuda")
    half = case.run(case.build(torch_fused), last=1)
    state_dict = saved(half)
    state_dict["param_groups"][0]["fused"] = None
    state_dict["state"][0]["step"] = state_dict["state"][0]["step"].cpu()
    resumed, wide = case.build(AdamW), replace(case, wide=True)
    load(resumed, half, state_dict)
    assert_right(case.run(resumed, first=1), case.run(case.build(torch_fused)), wide.run(wide.build(torch_adamw)))


@pytest.mark.gpu
def test_scaled_gradients_are_unscaled_and_overflows_skipped_in_the_kernel() -> None:
    case = Case([[((5, 3), torch.float32), ((7,), torch.float32)]], [{"lr": 0.1}], 4, missing=0, seed=0, device="cuda")

    def run(case: Case, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        optimizer, scaler = case.build(make), torch.amp.GradScaler("cuda", init_scale=64.0)
        for step in range(case.num_steps):
            case.set_grads(optimizer, step)
            scaler.scale(torch.ones((), device="cuda"))
            if step == 1:
                parameters_of(optimizer)[0].grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        return optimizer

    ours = run(case, AdamW)
    assert_right(ours, run(case, torch_fused), run(replace(case, wide=True), torch_adamw))
    assert {state["step"].item() for state in ours.state.values()} == {3}


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_gpu() -> None:
    case = Case([[((5, 3), torch.float32), ((7,), torch.bfloat16)]], [{"lr": 0.1}], 3, missing=0, seed=0, device="cuda")
    optimizer = case.run(case.build(AdamW))
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_grad_norm(parameters_of(optimizer), 1.0)
        set_lr(optimizer, 0.05)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
