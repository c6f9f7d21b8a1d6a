"""The gradients of a training step: of all micro-batches of a rank, synchronized with those of the other ranks."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lmsys.parallel.adapter import Adapter
from lmsys.training.graph import GraphedGradients, warm_ups_of
from lmsys.training.reproducible import Tree


class Gradients:
    """Forward and backward of micro-batches under a strategy, which leave the mean over the global batch in `.grad`.

    autocast  makes the context of a forward
    divisor   of the loss of a micro-batch
    tree      the parameters whose gradients are added in pairs of micro-batches, as ranks would add theirs; None: each
              backward adds to the gradients that are there
    """

    def __init__(
        self,
        strategy: Adapter,
        autocast: Callable[[], AbstractContextManager[Any]],
        divisor: int,
        tree: Iterable[torch.nn.Parameter] | None = None,
    ):
        self._strategy, self._autocast, self._divisor = strategy, autocast, divisor
        self._tree = None if tree is None else list(tree)

    def __call__(self, batches: Sequence[tuple[Any, ...]], weights: Sequence[float]) -> Tensor:
        """The mean of the losses. `batches`: the arguments of the model's loss, by micro-batch; `weights`: theirs."""
        losses = (self._add_in_pairs if self._tree is not None else self._accumulate)(batches, weights)
        return torch.stack(losses).mean()

    def _accumulate(self, batches: Sequence[tuple[Any, ...]], weights: Sequence[float]) -> list[Tensor]:
        losses, last = [], len(batches) - 1
        for number, (inputs, weight) in enumerate(zip(batches, weights, strict=True)):
            with nullcontext() if number == last else self._strategy.no_sync():
                losses.append(self._backward(inputs, weight))
        self._strategy.finish()
        return losses

    def _add_in_pairs(self, batches: Sequence[tuple[Any, ...]], weights: Sequence[float]) -> list[Tensor]:
        """The same on one rank alone."""
        losses, sums, parameters = [], Tree(), self._tree or []
        for inputs, weight in zip(batches, weights, strict=True):
            losses.append(self._backward(inputs, weight))
            self._strategy.finish()
            sums.add([p.grad for p in parameters])
            for p in parameters:
                p.grad = None
        for p, gradient in zip(parameters, sums.total, strict=True):
            p.grad = gradient
        return losses

    def _backward(self, inputs: tuple[Any, ...], weight: float) -> Tensor:
        """The loss of a micro-batch, whose gradients are added to those that are there."""
        with self._autocast():
            loss = self._strategy(*inputs)
        if weight != 1:
            loss = loss * weight
        (loss / self._divisor).backward()
        return loss.detach()


class ReplayedGradients:
    """The same as one CUDA graph, which the first call records: see `GraphedGradients`.

    A micro-batch is (tokens, targets), and its weight is 1: ValueError for another. Drop it before the process group
    ends.
    """

    def __init__(self, gradients: Gradients, strategy: Adapter):
        def compute(*flat: Tensor) -> Tensor:
            batches = list(zip(flat[0::2], flat[1::2], strict=True))
            return gradients(batches, [1.0] * len(batches))

        self._graph = GraphedGradients(compute, strategy.module.parameters(), warm_ups_of(strategy.wrapper))

    def __call__(self, batches: Sequence[tuple[Any, ...]], weights: Sequence[float]) -> Tensor:
        if any(weight != 1 for weight in weights):
            raise ValueError(f"a CUDA graph takes micro-batches of weight 1, not {list(weights)}")
        return self._graph(*chain(*batches))
