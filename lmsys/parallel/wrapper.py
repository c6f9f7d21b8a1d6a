"""The contract of a strategy, and what all of them share.

    wrapper = Strategy(module, process_group=None, **options)
    optimizer = wrapper.make_optimizer(AdamW, lr=1e-3)
    loss = wrapper(batch of this rank); loss.backward()
    wrapper.finish_gradient_synchronization()      # gradients are now the mean over ranks
    optimizer.step(); optimizer.zero_grad()

Every rank has the same module; rank 0's parameters and buffers are everybody's from the start. Buffers that a forward
changes are each rank's own from then on. A parameter without a gradient on some ranks counts there as zero; one that
has none on any rank keeps none, so that an optimizer leaves it alone. The mean is over ranks: ranks with equally
large batches train as one process does on all of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from lmsys.parallel.collectives import Group, broadcast_, gather_objects, size_and_rank
from lmsys.parallel.traits import Traits
from lmsys.parallel.units import weakly


class Wrapper(Traits, nn.Module):
    """Base of the strategies: agreement, broadcast, hooks, `no_sync`. A strategy fills in `_synchronize`.

    Facts about a strategy are class attributes: `Traits` lists them with their defaults.

    process_group  None: the default one, or a single rank where there is none
    ValueError when ranks hold different modules, and at the first forward to be trained for a parameter that came into
    the module after it was wrapped; RuntimeError for a forward after a backward that was not finished.
    """

    def __init__(self, module: nn.Module, process_group: Group = None):
        super().__init__()
        self.module, self.group = module, process_group
        self.world_size, self.rank = size_and_rank(process_group)
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self._prepare()
        self._synchronizing, self._unfinished, self._is_checked = True, False, False
        _agree(module, process_group)
        for x in (*module.parameters(), *module.buffers()):
            broadcast_(x, process_group)
        for index, p in enumerate(self.trainable):
            p.register_post_accumulate_grad_hook(weakly(self._on_grad, index))

    def _prepare(self) -> None:
        """Runs on all ranks before anything is sent. ValueError where the strategy cannot run there."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._unfinished:
            raise RuntimeError(
                "a backward was not followed by finish_gradient_synchronization(): call it before the optimizer's step,"
                " or run backwards that only accumulate gradients under no_sync()"
            )
        if not self._is_checked and torch.is_grad_enabled():
            self._check_parameters()
            self._is_checked = True
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave their gradients on this rank, for a later one to add to and to synchronize."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """Makes every gradient the mean over ranks. All ranks call it between backward and the optimizer's step."""
        if self.world_size > 1 and self.trainable:
            self._synchronize()
        self._unfinished = False

    def make_optimizer(self, optimizer_cls: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The optimizer that steps what this strategy trains."""
        return optimizer_cls(self.parameters(), **kwargs)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state dict, whole, on every rank. All ranks call it."""
        return self.module.state_dict()

    def _check_parameters(self) -> None:
        known = set(map(id, self.trainable))
        for name, p in self.module.named_parameters():
            if p.requires_grad and id(p) not in known:
                raise ValueError(
                    f"the parameter {name} came into the module, or was set to be trained, after the module was"
                    " wrapped: no gradient of it would be synchronized; wrap the module as it is now"
                )

    def _on_grad(self, index: int, _: Tensor) -> None:
        """Called when a backward has accumulated `trainable[index].grad`."""
        if self._synchronizing:
            if not self._unfinished:  # a module's attributes are slow to set, and this runs once a parameter
                self._unfinished = True
            self._gradient_is_ready(index)

    def _gradient_is_ready(self, index: int) -> None:
        """Called as `_on_grad` for a gradient to be synchronized: communication may begin during the backward."""

    def _synchronize(self) -> None:
        raise NotImplementedError

    def _missing(self) -> list[int]:
        """The indices of parameters without a gradient on this rank."""
        return [index for index, p in enumerate(self.trainable) if p.grad is None]

    def _use(self, missing: list[int]) -> Tensor:
        """Mask of present gradients, 1 or 0; its mean over ranks is 0 for parameters that no rank has used."""
        use = torch.ones(len(self.trainable), device=self.trainable[0].device)
        if missing:
            use[missing] = 0.0
        return use

    def _forget_unused(self, use: Tensor, missing: list[int]) -> None:
        """Drops gradients that no rank had. `use` is the mean over ranks; the host waits only where one is missing."""
        if missing:
            for index, share in zip(missing, use[missing].tolist(), strict=True):
                if share == 0:
                    self.trainable[index].grad = None


def check_floating(name: str, dtype: Any) -> None:
    """ValueError unless it is a floating-point dtype, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name}={dtype!r} must be a floating-point dtype, such as torch.bfloat16, or None")


def dense(p: Tensor) -> Tensor:
    """The gradient of p, contiguous: collectives take no other."""
    assert p.grad is not None
    if not p.grad.is_contiguous():
        p.grad = p.grad.contiguous()
    return p.grad


def _agree(module: nn.Module, group: Group) -> None:
    """ValueError on every rank that names the first difference between what ranks hold."""
    own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    own += [(name, tuple(x.shape), str(x.dtype), None) for name, x in module.named_buffers()]
    first, *others = gather_objects(own, group)
    for rank, other in enumerate(others, start=1):
        for here, there in zip_longest(first, other):
            if here != there:
                raise ValueError(
                    f"ranks hold different modules: rank 0 has {_words(here)} where rank {rank} has {_words(there)}"
                )


def _words(found: tuple[Any, ...] | None) -> str:
    if found is None:
        return "nothing more"
    name, shape, dtype, trained = found
    kind = {None: "buffer", True: "parameter", False: "frozen parameter"}[trained]
    return f"the {kind} {name} {shape} {dtype.removeprefix('torch.')}"
