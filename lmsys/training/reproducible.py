"""Fixes the order of all sums of a training, so that its weights do not depend on the number of ranks, bit for bit.

Floating-point sums depend on their order, and ranks add in an order of their own. With the setting train.reproducible
the training loop (loop.py) and gradients.py use this module to fix the order of all sums of a step:

    leaves  The batch is divided into train.leaves parts, the leaves, each a fixed set of sequences, and so of one shape
            on any number of ranks. The loss of each leaf is divided by their number before its backward.
    tree    The gradients of the leaves are added as one binary tree: (0 + 1) + (2 + 3). A rank adds those of its own
            leaves, then `collectives.TreeSums` adds over ranks. A strategy with the trait `sums_each_backward` adds
            over ranks first: there each rank has every world_size-th leaf, so that the sums are the same.
    norm    The squares of gradients are summed as whole numbers, for which the order does not matter (`exact_norm`).
    kernels They are deterministic, and on a CPU a rank has one thread. AdamW updates each element by itself.

The weights then depend only on the settings, the device, the versions, and on whether blocks are compiled. They do not
depend on the strategy; one that cannot take part says why in its trait `why_not_reproducible`. Any new sum over
elements, sequences or ranks in a step must have a fixed order, too.

Source for the norm: Demmel & Nguyen 2013, "Fast Reproducible Floating-Point Summation", here with two bins.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from lmsys.deterministic import deterministic_mode
from lmsys.kernels import HAS_TRITON
from lmsys.parallel.collectives import Group, size_and_rank, unwrapped

CPU = torch.device("cpu")
BITS = 62  # the most bits that a sum of whole numbers may have, so that int64 does not overflow


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """A context in which torch is in its deterministic mode, and on a CPU has one thread."""
    threads = torch.get_num_threads()
    with deterministic_mode():
        if device.type == "cpu":
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class Tree:
    """Adds lists of gradients in pairs, then the sums of pairs in pairs, and so on, in the order in which they come.

    If a training has one rank, `lmsys.training.gradients.Gradients` adds the gradients of each leaf to it.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[torch.Tensor | None]]] = []  # (how many leaves, their sum)

    def add(self, gradients: list[torch.Tensor | None]) -> None:
        """Adds the gradients of a leaf, by parameter; None: the leaf did not use the parameter."""
        count = 1
        while self._sums and self._sums[-1][0] == count:
            _, before = self._sums.pop()
            both = zip(before, gradients, strict=True)
            gradients, count = [b if a is None else a if b is None else a + b for a, b in both], 2 * count
        self._sums.append((count, gradients))

    @property
    def total(self) -> list[torch.Tensor | None]:
        """The sum of all lists, None for a parameter that no leaf used. The number of lists must be a power of two."""
        ((_, gradients),) = self._sums
        return gradients


def exact_norm(
    gradients: Sequence[torch.Tensor],
    count: int,
    group: Group = None,
    divided: bool = False,
    device: torch.device = CPU,
) -> float:
    """The L2 norm of all gradients as one vector, bitwise equal for any order and any division among ranks.

    count    the number of elements of the whole gradient, on all ranks; it may be too large, but not too small
    divided  True: the ranks of `group` have parts of the gradient, and their sums are added
    device   the device of the gradients, for a rank that has none
    The norm is inf where a gradient is not finite. Each square is rounded down, by less than 2^(-120) count² times the
    largest square of all.
    """
    gradients = [x for x in gradients if x.numel()]
    device = gradients[0].device if gradients else device
    largest = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        # Under some strategies gradients are of the class `Part`, a part of a gradient, which refuses norms.
        with torch._C.DisableTorchFunctionSubclass():
            largest = torch.stack(torch._foreach_norm(list(gradients), math.inf)).max().double()
        largest.nan_to_num_(nan=math.inf, posinf=math.inf)  # NCCL's maximum may pass over NaN
    if divided and size_and_rank(group)[0] > 1:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=unwrapped(group))
    top = largest.item()
    if top == 0 or not math.isfinite(top):
        return top
    room = BITS - math.ceil(math.log2(max(2, count)))  # bits of one square, so that the sum of `count` has BITS at most
    # Both scales make numbers below 2^room: `first` from squares, `second` from the fractions that these products have.
    first = math.ldexp(1.0, room - 2 * math.frexp(top)[1])
    second = math.ldexp(1.0, room)
    sums = _whole_squares(gradients, torch.tensor([first, second], dtype=torch.float64, device=device))
    if divided and size_and_rank(group)[0] > 1:
        torch.distributed.all_reduce(sums, group=unwrapped(group))
    high, low = sums.tolist()
    return math.sqrt((high * int(second) + low) / int(second) / first)


def _whole_squares(gradients: Sequence[torch.Tensor], scales: torch.Tensor) -> torch.Tensor:
    """(2,) int64: two sums over all elements.

    The square of each element is multiplied by scales[0]. The first sum is that of the whole parts of these products.
    The rest of each product, below 1, is multiplied by scales[1]; the second sum is that of the whole parts of the
    results. On CUDA one kernel does it (optimizer_triton.py), which must give the same sums.
    """
    if scales.is_cuda and HAS_TRITON and all(x.dtype == torch.float32 and x.is_contiguous() for x in gradients):
        from lmsys.training.optimizer_triton import whole_squares

        return whole_squares(gradients, scales)
    sums = torch.zeros(2, dtype=torch.int64, device=scales.device)
    for x in gradients:
        scaled = x.double().square_().mul_(scales[0])
        whole = scaled.trunc()
        sums[0] += whole.long().sum()
        sums[1] += scaled.sub_(whole).mul_(scales[1]).long().sum()
    return sums


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of the names and values of a state dict, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
