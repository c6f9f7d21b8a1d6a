"""Strategies that the others are measured against: they do nothing, or wait for the backward to end."""

import torch

from lmsys.parallel import buckets, collectives, structure, wrapper


class NoSync(wrapper.Wrapper):
    """Gradients stay each rank's own."""

    synchronizes = False

    def _synchronize(self) -> None:
        """A no-op: nothing is sent."""


class AfterBackward(wrapper.Wrapper):
    """Base of those that begin when the backward has ended. They fill in `_average`."""

    halves_sums = True

    def _synchronize(self) -> None:
        missing = self._missing()
        use = self._use(missing)
        collectives.all_reduce_mean(use, self.group, async_op=False).wait()
        self._average()
        self._conclude(use, missing)

    def _average(self) -> None:
        """Makes every gradient the mean over ranks, one of zeros where this rank has none."""
        raise NotImplementedError


class Naive(AfterBackward):
    """Each gradient in turn, and the next when it is done."""

    baseline = 1

    def _average(self) -> None:
        for p in self.trainable:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            collectives.all_reduce_mean(wrapper.dense(p), self.group, async_op=False).wait()


class Flat(AfterBackward):
    """One flat tensor per dtype; the gradients are views of it from then on."""

    def _average(self) -> None:
        for params in structure.by_kind(self.trainable):
            flat, views = buckets.pack(params, buckets.Layout.of(params), params[0].dtype)
            collectives.all_reduce_mean(flat, self.group, async_op=False).wait()
            buckets.set_gradients(params, views)
