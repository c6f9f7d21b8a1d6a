"""Tensors that are not whole on this rank: parameters without their values, and gradients of which others have parts.

Whatever reads a parameter whose values are elsewhere, or still on their way, asks its strategy first. Meanwhile it has
another class. Its identity, its hooks and the module that holds it stay as they are, and so does its shape: a strategy
of parts would otherwise leave freed memory to be read, or old values. What autograd and the kernels of a forward see is
the parameter as it was made, for by then its strategy has brought it back.

What would take a part of a gradient for the whole asks all ranks, or is refused.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lmsys.parallel.collectives import Group, size_and_rank, unwrapped

_FACTS = (
    "dtype device shape layout ndim names nbytes itemsize grad grad_fn requires_grad is_leaf is_cpu is_cuda is_meta"
    " is_sparse is_quantized is_nested retains_grad output_nr _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size stride dim numel nelement element_size get_device is_floating_point is_complex is_contiguous __len__"
    " requires_grad_ register_hook register_post_accumulate_grad_hook"
)
_SETTERS = "grad requires_grad _backward_hooks _post_accumulate_grad_hooks"
WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _FACTS.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name).__set__ for name in _SETTERS.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS.split()),
}


class Absent(nn.Parameter):
    """The class of a parameter without values. `on_read` brings them back, or raises; it is set by `leave`."""

    on_read: Callable[["Absent"], None]
    present: type[nn.Parameter]  # what it is when its values are here
    home: Any  # whatever its strategy has to know of it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__repr__:
            return f"{args[0].present.__name__} of {tuple(args[0].shape)}, whose values are not here"
        if func not in WITHOUT_VALUES:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Absent):
                    x.on_read(x)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        self.on_read(self)  # a copy is of the class that the original has then
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.on_read(self)
        return self.__reduce_ex__(protocol)


def address(p: nn.Parameter) -> int:
    """The address of p's memory, whether its values are there or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return p.data_ptr()


def leave(
    params: Sequence[nn.Parameter],
    on_read: Callable[[Absent], None],
    kind: type[Absent] = Absent,
    homes: Sequence[Any] | None = None,
) -> None:
    """From now on reading one of them calls `on_read` with it first."""
    for p, home in zip(params, homes or [None] * len(params), strict=True):
        if not isinstance(p, Absent):
            p.__dict__.update(present=type(p), home=home)
            p.__class__ = kind
        p.__dict__["on_read"] = on_read


def appear(params: Iterable[nn.Parameter]) -> None:
    """Their values are here: they are parameters as all others."""
    for p in params:
        if isinstance(p, Absent):
            p.__class__ = p.present
            del p.on_read, p.present, p.home


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


def divided(x: Tensor, group: Group) -> Tensor:
    """x, the same on every rank, as a DTensor divided by its first dimension, as torch's FSDP2 does.

    This rank's part is in memory of its own. On one rank without a process group it is a copy of x.
    """
    world_size, rank = size_and_rank(group)
    if not dist.is_initialized():
        return x.clone()
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh: Any = DeviceMesh.from_group(dist.group.WORLD if group is None else group, x.device.type)
    if not x.dim():
        return DTensor.from_local(x.clone(), mesh, [Replicate()], run_check=False)
    parts = x.chunk(world_size)
    part = parts[rank].clone() if rank < len(parts) else x.new_empty((0, *x.shape[1:]))
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())
