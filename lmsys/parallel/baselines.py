"""Strategies that the others are measured against: `none`, `naive` and `flat` of the table in `__init__.py`.

`NoSync` sends nothing; the others begin to communicate only when the backward has ended. They are the shortest examples
of a strategy: a new one of this kind derives from `AfterBackward` and fills in `_average`. If there are several ranks,
`Wrapper.finish_gradient_synchronization` (wrapper.py) calls `_synchronize`. Class attributes such as `halves_sums` are
traits, facts about a row of the table that other code reads: `lmsys.traits` and `lmsys.registry.Traits` explain each.
"""

from lmsys.parallel import buckets, collectives, structure, wrapper


class NoSync(wrapper.Wrapper):
    """Sends nothing: every rank trains for itself."""

    synchronizes = False  # a trait: there is no communication

    def _synchronize(self) -> None:
        """A no-op: nothing is sent."""


class AfterBackward(wrapper.Wrapper):
    """Base of the strategies that communicate only after the backward. A subclass fills in `_average`."""

    halves_sums = True  # a trait: the mean over two ranks is computed as half of their sum

    def _synchronize(self) -> None:
        missing = [index for index, p in enumerate(self.trainable) if p.grad is None]
        # `use` has a 1 for each gradient that this rank has, else a 0. From its mean over ranks `_conclude` learns
        # which gradients no rank has, and sets these to None again.
        use = self._use(missing)
        collectives.all_reduce_mean(use, self.group, async_op=False).wait()
        self._average()
        self._conclude(use, missing)

    def _average(self) -> None:
        """Makes every gradient its mean over ranks; a gradient that this rank lacks counts as zeros."""
        raise NotImplementedError


class Naive(AfterBackward):
    """One all-reduce for each gradient, one after another."""

    baseline = 1  # a trait: speedups are relative to the timed row with the largest number

    def _average(self) -> None:
        for p in self.trainable:
            collectives.all_reduce_mean(wrapper.dense(p), self.group, async_op=False).wait()


class Flat(AfterBackward):
    """One all-reduce for all gradients of a dtype and device: they become views of the flat tensor that is reduced."""

    def _average(self) -> None:
        for params in structure.by_kind(self.trainable):
            flat, views = buckets.pack(params, buckets.Layout.of(params), params[0].dtype)
            collectives.all_reduce_mean(flat, self.group, async_op=False).wait()
            buckets.set_gradients(params, views)
