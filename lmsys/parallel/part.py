"""Classes of tensors that are not whole on this rank: parameters without their values, and parts of gradients.

While a parameter's values are on another rank or still arriving, `zero1` gives it the class `Absent`, and `fsdp` the
subclass `Freed` of flat_shard.py, so that nobody reads freed memory or old values. Whatever reads it calls its strategy
first, which brings the values back or raises. The parameter's identity, hooks, module and shape stay as they are.
Autograd and the kernels of a forward never see this class: by then the values are back.

A gradient of which this rank has only a part has the class `Part`. A function that would take the part for the whole,
such as a norm, raises, or reduces over all ranks.

To let an attribute of an `Absent` be read without its values, add its name to `_FACTS`, and to `_SETTERS` if it can be
set; for a method, add its name to `_METHODS`. If the result of a function of a `Part` is still a part, add the function
to `STILL_PARTS`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lmsys.parallel.collectives import Group, unwrapped

# Names of what can be read, called or set of a Tensor without its values: attributes, methods, settable attributes.
_FACTS = (
    "dtype device shape layout ndim names nbytes itemsize grad grad_fn requires_grad is_leaf is_cpu is_cuda is_meta"
    " is_sparse is_quantized is_nested retains_grad output_nr _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "size stride dim numel nelement element_size get_device is_floating_point is_complex is_contiguous __len__"
    " requires_grad_ register_hook register_post_accumulate_grad_hook"
)
_SETTERS = "grad requires_grad _backward_hooks _post_accumulate_grad_hooks"
WITHOUT_VALUES = {  # the functions of these names, as __torch_function__ gets them: calling one reads no values
    *(getattr(Tensor, name).__get__ for name in _FACTS.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name).__set__ for name in _SETTERS.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS.split()),
}


class Absent(nn.Parameter):
    """The class of a parameter without values. `leave` gives it this class, and `appear` its ordinary one again."""

    on_read: Callable[["Absent"], None]  # called with the parameter when it is read: brings the values back, or raises
    present: type[nn.Parameter]  # its class when its values are here
    home: Any  # whatever its strategy stores with it, such as the flat shard in fsdp; None in zero1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__repr__:
            return f"{args[0].present.__name__} of {tuple(args[0].shape)}, whose values are not here"
        if func not in WITHOUT_VALUES:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Absent):
                    x.on_read(x)
        with torch._C.DisableTorchFunctionSubclass():  # else func would call this method again
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        self.on_read(self)  # after which its class is the ordinary one: the next line does not come here again
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.on_read(self)
        return self.__reduce_ex__(protocol)


def addresses(params: Iterable[Tensor]) -> list[int]:
    """The address of each parameter's memory, whether its values are there or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.data_ptr() for p in params]


def leave(
    params: Sequence[nn.Parameter],
    on_read: Callable[[Absent], None],
    kind: type[Absent] = Absent,
    homes: Sequence[Any] | None = None,
) -> None:
    """Marks parameters as without values: from now on reading one calls on_read(parameter) first.

    kind   the class that the parameters get
    homes  for each parameter its attribute `home`; None: None for all
    A parameter that is marked already keeps its class and home, and only gets the new `on_read`.
    """
    for p, home in zip(params, homes or [None] * len(params), strict=True):
        if "on_read" not in p.__dict__:  # isinstance() of a parameter's class is slow, and this runs for each parameter
            p.__dict__.update(present=type(p), home=home)
            p.__class__ = kind
        p.__dict__["on_read"] = on_read


def appear(params: Iterable[nn.Parameter]) -> None:
    """Undoes `leave`, once the values are here: the parameters get their ordinary classes again."""
    for p in params:
        if "on_read" in p.__dict__:
            p.__class__ = p.__dict__.pop("present")
            del p.__dict__["on_read"], p.__dict__["home"]


UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # GradScaler's function, which notes where it finds an inf
STILL_PARTS = {  # functions that return a `Part` when they are called with one
    Tensor.data.__get__,
    *(getattr(Tensor, name) for name in "detach flatten reshape view ravel float double mul div __getitem__".split()),
    *(torch.cat, torch.concat, torch.flatten, torch.ravel, torch.reshape),
}


class Part(Tensor):
    """A part of a gradient. It behaves as an ordinary tensor, except in these cases.

    Functions with "norm" in their names are refused with RuntimeError, `normal_` and `layer_norm` too. A deep or
    pickled copy is no `Part`. When GradScaler looks for an inf, an inf on one rank counts on all. The results of
    `STILL_PARTS` are parts, too.

    group  the ranks that have the other parts
    """

    group: Group

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if "norm" in name:  # as in all of torch's functions of norms, and in a few others
            raise RuntimeError(
                "this rank has a part of the gradients, whose norm is not that of the whole: clip_grad_norm(wrapper,"
                " max_norm), of lmsys.training.optimizer, clips by the norm of all, and gives it; max_norm=math.inf"
                " only measures"
            )
        with torch._C.DisableTorchFunctionSubclass():
            as_given = func not in (Tensor.__deepcopy__, Tensor.__reduce_ex__)  # a copy is an ordinary tensor
            result = func(*args if as_given else (args[0].as_subclass(Tensor), *args[1:]), **(kwargs or {}))
        if name == UNSCALE:  # its arguments: gradients, found_inf (1,), scale. An inf on one rank counts on all
            dist.all_reduce(args[1], dist.ReduceOp.MAX, group=unwrapped(args[0][0].group))
        if func in STILL_PARTS:
            as_part(result, next(x.group for x in tree_leaves((args, kwargs)) if isinstance(x, Part)))
        return result


def as_part(x: Tensor, group: Group) -> Tensor:
    """Makes x a `Part`, in place, and returns it."""
    x.__class__, x.__dict__["group"] = Part, group
    return x


def divided(x: Tensor, group: Group) -> Tensor:
    """x, which is equal on all ranks, as a DTensor sharded along its first dimension, as torch's FSDP2 has parameters.

    `Fsdp.sharded_state_dict` calls it for torch.distributed.checkpoint. This rank's part is in memory of its own.
    Without a process group the result is a copy of x.
    """
    if not dist.is_initialized():
        return x.clone()
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh: Any = DeviceMesh.from_group(unwrapped(group) or dist.group.WORLD, x.device.type)
    # src_data_rank=None: nothing is sent, and the part is a view of x until it is cloned.
    return distribute_tensor(x, mesh, [Shard(0) if x.dim() else Replicate()], src_data_rank=None).clone()
