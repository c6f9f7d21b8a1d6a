"""A gradient of which other ranks have other parts: what would take it for the whole asks all ranks, or is refused."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lmsys.parallel.collectives import Group, unwrapped

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # of GradScaler: it notes an inf that it has found
STILL_PARTS = {
    Tensor.data.__get__,
    *(getattr(Tensor, name) for name in "detach flatten reshape view ravel float double __getitem__".split()),
    *(torch.cat, torch.concat, torch.flatten, torch.ravel, torch.reshape),
}


class Part(Tensor):
    """A tensor as all others, but for norms, copies and GradScaler. group: of the ranks that have the other parts."""

    group: Group

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if "norm" in name:
            raise RuntimeError(
                "this rank has a part of the gradients, whose norm is not that of the whole: clip_grad_norm(wrapper,"
                " max_norm), of lmsys.training.optimizer, clips by the norm of all, and gives it; max_norm=math.inf"
                " only measures"
            )
        with torch._C.DisableTorchFunctionSubclass():
            as_given = func not in (Tensor.__deepcopy__, Tensor.__reduce_ex__)  # a copy is no part of anything
            result = func(*args if as_given else (args[0].as_subclass(Tensor), *args[1:]), **(kwargs or {}))
        if name == UNSCALE:  # what one rank has found holds for all
            dist.all_reduce(args[1], dist.ReduceOp.MAX, group=unwrapped(args[0][0].group))
        if func in STILL_PARTS:
            as_part(result, next(x.group for x in tree_leaves(args) if isinstance(x, Part)))
        return result


def as_part(x: Tensor, group: Group) -> Tensor:
    """x itself, which is a Part from now on."""
    x.__class__, x.__dict__["group"] = Part, group
    return x
