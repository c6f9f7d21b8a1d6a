"""Strategies that the others are measured against: `none`, `naive` and `flat` of the table in `__init__.py`.

They send nothing, or begin to communicate when the backward has ended. They are the shortest examples of a strategy.
If there are several ranks, `Wrapper.finish_gradient_synchronization` calls `_synchronize`. Class attributes such as
`halves_sums` are traits, facts about the row that other code reads: `lmsys.traits` and `lmsys.registry.Traits` explain
each of them.
"""

from lmsys.parallel import buckets, collectives, structure, wrapper


class NoSync(wrapper.Wrapper):
    """Sends nothing: every rank trains for itself."""

    synchronizes = False

    def _synchronize(self) -> None:
        """A no-op: nothing is sent."""


class AfterBackward(wrapper.Wrapper):
    """Base of the strategies that communicate only after the backward. A subclass fills in `_average`."""

    halves_sums = True

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
    """One all-reduce for all gradients of a dtype: they are copied into a flat tensor, and become views of it."""

    def _average(self) -> None:
        for params in structure.by_kind(self.trainable):
            flat, views = buckets.pack(params, buckets.Layout.of(params), params[0].dtype)
            collectives.all_reduce_mean(flat, self.group, async_op=False).wait()
            buckets.set_gradients(params, views)
