"""The gates of other projects: their rules for accepting a result, restated, to find out which faults they see.

`table.py` asks GATES about each exhibit. Every rule compares float32 results of the fault with those of plain PyTorch,
on near-normal draws, as the other projects do. For an operation the results are outputs of its forward; for an
optimizer, parameters after a step with its usual settings; for a strategy and a sharded optimizer, weights after three
steps on two ranks. Loss curves are those of a mini model with the fault in it (`mini.py`). A fault that raises, hangs
or returns NaN is seen by every rule. A new rule is a function of a `Subject`, and an entry in GATES.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lmsys.check.optimizer_runs import claim_of
from lmsys.registry import Entry
from tests.museum.mini import OPERATIONS, MiniModel, drawn, plain_of, tokens_of
from tests.museum.ranks import Ranks, on_one

STEPS_ON_RANKS = 3  # steps of a training on two ranks, of which weights are compared
CURVE_STEPS, CURVE_RTOL, CURVE_ATOL = 32, 2e-5, 1e-8  # Liger-Kernel's convergence tests in float32
ROUNDS, WITHIN = 10, 0.99  # of `most_within`: draws, and the share of elements that must be right
TIMED_CALLS = {True: 10, False: 100}  # calls of `new_seeds`, {whether the fault needs ranks: number}: ranks are slow
OPTIMIZER_SETTINGS = {"lr": 1e-3, "weight_decay": 0.01, "momentum": 0.9}
Pair = tuple[list[Tensor], list[Tensor]]  # results of the fault, and of plain PyTorch
Curves = tuple[list[float], list[float]]  # losses with the fault, and of plain PyTorch


@dataclass(frozen=True)
class Subject:
    """A fault as gates see it.

    pair         pair(seed) is (results of the fault, of plain PyTorch) on normal inputs of this seed
    curves       curves() is (losses of a training with the fault, of a plain training)
    needs_ranks  True if the fault runs on two ranks

    Both functions return None if the fault raises or hangs.
    """

    pair: Callable[[int], Pair | None]
    curves: Callable[[], Curves | None]
    needs_ranks: bool = False


def subject(entry: Entry, kind: str, ranks: Ranks) -> Subject:
    """The subject of an implementation of this kind. ValueError for a kind that gates cannot run."""
    if kind in OPERATIONS:
        return _of_operation(entry, kind)
    if kind == "optimizer":
        return _of_optimizer(entry)
    if kind in ("strategy", "sharded_optimizer"):
        return _on_ranks(entry, kind, ranks)
    raise ValueError(f"{kind=} must be one of {', '.join([*OPERATIONS, 'optimizer', 'strategy', 'sharded_optimizer'])}")


def _of_operation(entry: Entry, kind: str) -> Subject:
    operation, plain = OPERATIONS[kind], plain_of(kind, entry.load())

    def pair(seed: int) -> Pair:
        arguments = operation.inputs(seed)
        with torch.no_grad():
            outputs = [operation.call(function, *arguments) for function in (entry.load(), plain)]
        return [outputs[0]], [outputs[1]]

    def curves() -> Curves:
        return _curve({kind: entry.load()}), _plain_curve() if plain is operation.plain else _curve({kind: plain})

    return Subject(_or_none(pair), _or_none(curves))


def _of_optimizer(entry: Entry) -> Subject:
    claim = claim_of(entry.load())
    settings = {name: x for name, x in OPTIMIZER_SETTINGS.items() if name in claim.settings}

    def stepped(make: Callable[..., torch.optim.Optimizer], seed: int) -> list[Tensor]:
        p = torch.nn.Parameter(drawn(seed, "parameter", 64, 64))
        p.grad = drawn(seed, "gradient", 64, 64)
        make([p], **settings).step()
        return [p.detach()]

    def curves() -> Curves:
        return _curve({}, entry.load(), settings), _curve({}, claim.plain, settings)

    return Subject(_or_none(lambda seed: (stepped(entry.load(), seed), stepped(claim.plain, seed))), _or_none(curves))


def _on_ranks(entry: Entry, kind: str, ranks: Ranks) -> Subject:
    """The subject of a strategy or a sharded optimizer. Weights are compared after momentum SGD, losses with AdamW."""

    def pair(seed: int) -> Pair | None:
        trained = ranks.train(entry, kind, seed, STEPS_ON_RANKS, "SGD")
        return None if trained is None else (trained[1], on_one(seed, STEPS_ON_RANKS, "SGD")[1])

    def curves() -> Curves | None:
        trained = ranks.train(entry, kind, 0, CURVE_STEPS, "AdamW")
        return None if trained is None else (trained[0], on_one(0, CURVE_STEPS, "AdamW")[0])

    return Subject(lru_cache(pair), curves, needs_ranks=True)


def _or_none(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, cached. It returns None if the fault raises an exception."""

    @lru_cache
    def called(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception:
            return None

    return called


@lru_cache
def _plain_curve() -> list[float]:
    """The losses of a training of the mini model with plain implementations alone."""
    return _curve({})


def _curve(
    replaced: dict[str, Any],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    settings: dict[str, Any] | None = None,
) -> list[float]:
    """The losses of a training of the mini model, whose implementations are `replaced`: {kind: implementation}."""
    model = MiniModel(0, replaced)
    stepper = optimizer(model.parameters(), **{**(settings or {}), "lr": 1e-4})
    losses = []
    for _ in range(CURVE_STEPS):
        value = model(tokens_of(0))
        value.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(value.item())
    return losses


def allclose(fault: Subject) -> bool:
    """KernelBench: torch.allclose with atol and rtol of 1e-2, on one draw."""
    pair = fault.pair(0)
    return pair is not None and _all(pair, lambda x, right: torch.allclose(x, right, rtol=1e-2, atol=1e-2))


def most_within(fault: Subject) -> bool:
    """flashinfer-bench: in each of ten rounds 99 % of the elements are within 1e-2, absolutely or relatively.

    The 99 % are a setting of that project.
    """

    def within(x: Tensor, right: Tensor) -> bool:
        error = (x - right).abs()
        wrong = (error > 1e-2) & (error / (right.abs() + 1e-8) > 1e-2) | ~x.isfinite()
        return 1 - wrong.float().mean().item() >= WITHIN

    pairs = (fault.pair(seed) for seed in range(ROUNDS))
    return all(pair is not None and _all(pair, within) for pair in pairs)


def new_seeds(fault: Subject) -> bool:
    """GPU MODE: each timed call has a new seed, and every result is compared.

    The tolerance is 1e-3, as in that project's tasks for narrow floats, which compare outputs of forwards.
    """
    seeds = range(0, 13 * TIMED_CALLS[fault.needs_ranks], 13)  # that project adds 13 to the seed of each call
    pairs = (fault.pair(seed) for seed in seeds)
    return all(
        pair is not None and _all(pair, lambda x, y: torch.allclose(x, y, rtol=1e-3, atol=1e-3)) for pair in pairs
    )


def cosine(fault: Subject) -> bool:
    """DeepGEMM's calc_diff: 1 - 2 Σ x y / Σ (x² + y²) is below 1e-3, with sums over the whole result."""

    def close(x: Tensor, right: Tensor) -> bool:
        x, right = x.double(), right.double()
        return (1 - 2 * (x * right).sum() / (x * x + right * right).sum()).item() < 1e-3

    pair = fault.pair(0)
    return pair is not None and _all(pair, close)


def loss_curve(fault: Subject) -> bool:
    """Liger-Kernel's convergence test: in 32 steps of AdamW at lr 1e-4, losses are within 2e-5, relatively."""
    curves = fault.curves()
    if curves is None:
        return False
    made, right = (torch.tensor(losses, dtype=torch.float64) for losses in curves)
    return torch.allclose(made, right, rtol=CURVE_RTOL, atol=CURVE_ATOL)


def _all(pair: Pair, passes: Callable[[Tensor, Tensor], bool]) -> bool:
    """True if all results have the right shapes and pass."""
    return all(x.shape == right.shape and passes(x, right) for x, right in zip(*pair, strict=True))


GATES: dict[str, Callable[[Subject], bool]] = {
    "allclose 1e-2": allclose,
    "99 % within": most_within,
    "new seeds": new_seeds,
    "cosine": cosine,
    "loss curve": loss_curve,
}


def seen_by(fault: Subject) -> Iterable[str]:
    """The names of the gates that refuse the fault."""
    return [name for name, passes in GATES.items() if not passes(fault)]
