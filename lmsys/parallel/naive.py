"""One all-reduce per parameter, after the backward: CS336, assignment 2, "A naive implementation of DDP"."""

import torch

from lmsys.parallel.collectives import all_reduce_mean
from lmsys.parallel.wrapper import Wrapper, dense


class Naive(Wrapper):
    """Each gradient in turn, and the next when it is done."""

    all_reduces = True
    halves_sums = True
    baseline = 1

    def _synchronize(self) -> None:
        missing = self._missing()
        use = self._use(missing)
        all_reduce_mean(use, self.group, async_op=False).wait()
        for p in self.trainable:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            all_reduce_mean(dense(p), self.group, async_op=False).wait()
        self._conclude(use, missing)
