"""Parameters whose values are elsewhere, or still on their way: whatever reads one asks its strategy first.

Meanwhile a parameter has another class. Its identity, its hooks and the module that holds it stay as they are, and so
does its shape: a strategy of parts would otherwise leave freed memory to be read, or old values. What autograd and the
kernels of a forward see is the parameter as it was made, for by then its strategy has brought it back.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
