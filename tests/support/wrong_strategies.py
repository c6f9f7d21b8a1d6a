"""Strategies and sharded optimizers with a known mistake, for tests of `lmsys check`. Ranks import this file.

tests/check/test_strategy.py lets `lmsys check` judge each class of WRONG (strategies) and WRONG_OPTIMIZERS, and looks
for the words that stand beside it there in the mistake that is reported. To add one, override a method of the right
strategy `Container`, or of the right optimizer `Sharded`, and add its line. Published implementations with mistakes are
in `tests/museum/`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.museum.containers import Container, mean_
from tests.museum.sharded_optimizer import Sharded


class WeightedByTokens(Container):
    """Weights each rank's gradient by its number of tokens; right is the plain mean over ranks."""

    def forward(self, tokens: Tensor, **kwargs: Any) -> Any:
        self.tokens = torch.tensor(float(tokens.numel()))
        return super().forward(tokens, **kwargs)

    def reduce(self, name: str, grad: Tensor) -> None:
        total = self.tokens.clone()
        dist.all_reduce(total)
        grad *= self.tokens / total
        dist.all_reduce(grad)


class OneLayerForgotten(Container):
    """Reduces all gradients except one layer's. The model is the check's, `Probe` in lmsys/extremes/strategy.py."""

    def reduce(self, name: str, grad: Tensor) -> None:
        if name != "layers.1.weight":
            mean_(grad)


class AccumulatedStaysLocal(Container):
    """Synchronizes only what the last micro-batch has added, not the gradients of earlier ones."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self.before = {name: p.grad.clone() for name, p in self.named.items() if p.grad is not None}

    def reduce(self, name: str, grad: Tensor) -> None:
        before = getattr(self, "before", {}).get(name, torch.zeros_like(grad))
        grad -= before
        mean_(grad)
        grad += before


class SumsInFloat16(Container):
    """Rounds gradients to float16 before they are summed."""

    def reduce(self, name: str, grad: Tensor) -> None:
        sent = grad.half()
        mean_(sent)
        grad.copy_(sent)


class LeftWhereUnused(Container):
    """Divides a gradient's sum by the number of ranks that use the parameter, not by that of all ranks."""

    def finish_gradient_synchronization(self) -> None:
        self.users = {name: torch.tensor(float(p.grad is not None)) for name, p in self.named.items()}
        super().finish_gradient_synchronization()

    def reduce(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(self.users[name])
        dist.all_reduce(grad)
        grad /= self.users[name].clamp(min=1)


class MovesWhatIsFrozen(Container):
    """Halves parameters that need no gradient, after each backward."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        for p in self.module.parameters():
            if not p.requires_grad:
                p.data.mul_(0.5)


class EndsApart(Container):
    """Scales the mean gradient by a factor that differs between ranks, so that their weights drift apart."""

    def reduce(self, name: str, grad: Tensor) -> None:
        mean_(grad)
        grad *= 1 + dist.get_rank() / 8


class DividesByTwo(Container):
    """Divides sums by 2, which is right on two ranks alone."""

    def reduce(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad)
        grad /= 2


class BufferOfTheFirstDtype(Container):
    """Packs all gradients in one flat buffer of the first parameter's dtype."""

    def finish_gradient_synchronization(self) -> None:
        named = list(self.named.values())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in named]
        flat = torch.cat([grad.reshape(-1).to(named[0].dtype) for grad in grads])
        mean_(flat)
        for p, part in zip(named, flat.split([p.numel() for p in named]), strict=True):
            p.grad = part.view(p.shape).to(p.dtype)


class LeavesOutBfloat16(Container):
    """Averages the gradients of float32 parameters alone."""

    def reduce(self, name: str, grad: Tensor) -> None:
        if grad.dtype == torch.float32:
            mean_(grad)


class BroadcastsInTheFirstDtype(Container):
    """Sends the initial weights in the first parameter's dtype, which may round them."""

    def prepare(self) -> None:
        first = next(self.module.parameters()).dtype
        for x in self.module.state_dict().values():
            x.copy_(x.to(first))


class RaisesInItsSecondStep(Container):
    """Raises on rank 1 in its second step. It is not in WRONG, since an exception is no mistake that has a name."""

    def reduce(self, name: str, grad: Tensor) -> None:
        self.count = getattr(self, "count", 0) + 1
        if dist.get_rank() == 1 and self.count > len(self.named):  # a step reduces each parameter once
            raise IndexError("there are no more buckets")
        mean_(grad)


class NotShared(Sharded):
    """Updates each parameter on its owner alone, and sends it to no other rank."""

    def share(self) -> None:
        pass


class LeavesAParameter(Sharded):
    """Gives all ranks equally many parameters, so that those left over have no owner."""

    def own(self) -> list[dict[str, Any]]:
        groups = super().own()
        for whole, mine in zip(self.param_groups, groups, strict=True):
            mine["params"] = mine["params"][: len(whole["params"]) // self.size]
        return groups


class LosesItsState(Sharded):
    """Forgets its momenta before each step."""

    def step(self, closure: Any = None) -> None:
        self.local.state.clear()
        super().step(closure)


# {a class's name: a part of the mistake that `lmsys check` must report}
WRONG = {
    "WeightedByTokens": "weighted by the number of tokens",
    "OneLayerForgotten": "the gradients of layers.1.weight are never synchronized",
    "AccumulatedStaysLocal": "synchronized for the last micro-batch only: gradients made under no_sync() stay local",
    "SumsInFloat16": "communicated in float16",
    "LeftWhereUnused": "divided by the number of ranks that use the parameter",
    "MovesWhatIsFrozen": "frozen parameters or buffers are changed by training: frozen.weight, frozen.bias",
    "DividesByTwo": "are divided by 2, not by the number of ranks",
    "BufferOfTheFirstDtype": "are communicated in bfloat16",
    "LeavesOutBfloat16": "the gradients of narrow are never synchronized",
    "BroadcastsInTheFirstDtype": "initial weights are not rank 0's, though equal on all ranks: rounded, or",
    "EndsApart": "ranks end with different weights: embed.weight",
}
WRONG_OPTIMIZERS = {
    "NotShared": "brings the updated weights to all ranks: rank 1 keeps its old embed.weight",
    "LeavesAParameter": "no rank updates",
    "LosesItsState": "state is lost between steps (from step 2 on)",
}
