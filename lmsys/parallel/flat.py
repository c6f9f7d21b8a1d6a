"""One all-reduce of all gradients, copied side by side after the backward: CS336, "Reducing the number of calls"."""

from collections import defaultdict

from lmsys.parallel.collectives import all_reduce_mean
from lmsys.parallel.packing import Layout, pack
from lmsys.parallel.wrapper import Wrapper


class Flat(Wrapper):
    """One flat tensor per dtype; the gradients are views of it from then on."""

    all_reduces = True
    halves_sums = True

    def _synchronize(self) -> None:
        missing = self._missing()
        use = self._use(missing)
        all_reduce_mean(use, self.group, async_op=False).wait()
        kinds = defaultdict(list)
        for p in self.trainable:
            kinds[p.device, p.dtype].append(p)
        for params in kinds.values():
            flat, views = pack(params, Layout.of(params), params[0].dtype)
            all_reduce_mean(flat, self.group, async_op=False).wait()
            for p, view in zip(params, views, strict=True):
                p.grad = view
        self._conclude(use, missing)
