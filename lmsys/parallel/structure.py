"""Functions about the structure of an nn.Module: its parameters, its blocks, and hooks around forwards and backwards.

A block is an entry of an outermost ModuleList, such as a Transformer's layer: ZeRO-1 and FSDP gather the parameters of
a block together. A strategy is a data-parallel wrapper around a module. Callers are wrapper.py, the strategies of this
folder, adapter.py and sharded_optimizer.py, the optimizers and prepare.py of `lmsys.training`, and
benchmarks/data_parallel/passes.py. To change what counts as a block, change `blocks_of`.
"""

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, which imports the compiler when it is called
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from lmsys import values

Groups = Callable[[str, nn.Parameter], dict[str, Any]]  # (name, parameter) -> its own options for the optimizer
Sets = Sequence[Collection[nn.Parameter]]  # several sets of parameters, such as those of each param group

_PLAIN = (  # types that hold no tensors, and Tensor itself
    Tensor,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
)


class Structure:
    """Remembers which modules and parameters `module` has, and which are trained, to detect changes."""

    def __init__(self, module: nn.Module):
        self.module, self._parameters = module, _parameters(module)
        self._held: list[Any] = [held for child in module.modules() for held in (child._parameters, child._modules)]
        # The dicts that are not empty: only their entries are compared. An entry that is added to an empty dict later
        # shows in the dict's length.
        self._full = list(filter(None, self._held))
        # The number of entries of each dict in `_held`, then the names of all entries, then the entries themselves.
        self._before = list(map(len, self._held)), list(chain(*self._held)), list(chain(*map(dict.values, self._held)))
        self._trained = [(p, p.requires_grad) for p in module.parameters()]

    def is_as_it_was(self) -> bool:
        """True if nothing has changed. It runs in every forward, so its only Python loop is over parameters."""
        lengths, names, entries = self._before
        # A parameter whose values are elsewhere has the class `Absent` (part.py). Its `__torch_function__` would take
        # 1.5 µs each time that `requires_grad` is read.
        with torch._C.DisableTorchFunctionSubclass():
            return (
                list(map(len, self._held)) == lengths
                and list(chain.from_iterable(self._full)) == names
                and all(map(operator.is_, chain.from_iterable(map(dict.values, self._full)), entries))
                and all(p.requires_grad is trained for p, trained in self._trained)
            )

    def change(self) -> str:
        """The first change of a parameter, such as "the parameter w was frozen"; empty where there is none."""
        before, now, trained = self._parameters, _parameters(self.module), dict(self._trained)
        kinds = {
            "removed": [name for name in before if name not in now],
            "replaced": [name for name, p in before.items() if now.get(name, p) is not p],
            "added": sorted(now.keys() - before.keys()),
            "frozen": [name for name, p in now.items() if trained.get(p) and not p.requires_grad],
            "set to be trained": [name for name, p in now.items() if p.requires_grad and not trained.get(p)],
        }
        for change, names in kinds.items():
            if names:
                return f"the parameter {names[0]} was {change}"
        return ""


def grouped(module: nn.Module, groups: Groups | None) -> list[Any]:
    """The argument `params` for an optimizer: a param group for each set of options that trained parameters have.

    groups  as in `Wrapper.make_optimizer`; None: the result is a list of all parameters, frozen ones too
    """
    if groups is None:
        return list(module.parameters())
    values.instance("groups", groups, Callable)
    by_options: dict[str, dict[str, Any]] = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            options = groups(name, p)
            by_options.setdefault(repr(sorted(options.items())), {**options, "params": []})["params"].append(p)
    return list(by_options.values())


def set_options(groups: Iterable[dict[str, Any]], given: Iterable[Mapping[str, Any]]) -> None:
    """Gives each param group the options of the group at the same place in `given`; it keeps its parameters."""
    for group, options in zip(groups, given, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name; a tied parameter has several names."""
    return dict(module.named_parameters(remove_duplicate=False))


_watching: "weakref.WeakSet[Any]" = weakref.WeakSet()  # the strategies that `_tell` calls
_hooks: list[Any] = []  # torch's handles of the two hooks that call `_tell`, made once


def watch(strategy: nn.Module) -> None:
    """Has the strategy's `before_step` and `after_step` called around each step of every optimizer of this process."""
    if not _hooks:
        _hooks.extend(
            (
                register_optimizer_step_pre_hook(partial(_tell, "before_step")),
                register_optimizer_step_post_hook(partial(_tell, "after_step")),
            )
        )
    _watching.add(strategy)


def shares_a_backward(strategy: Any) -> bool:
    """True if another strategy is in a backward whose gradients it sends, and trains a parameter that this one trains.

    Both would then send the gradient of that parameter, so `Overlapped` (overlapped.py), which calls this, raises an
    error. A strategy whose `synchronizes` is False, such as the baseline `none`, never sends gradients. Under
    `no_sync()`, where its `_synchronizing` is False, no strategy sends any.
    """
    return any(
        other is not strategy
        and other._in_backward
        and other.synchronizes
        and other._synchronizing
        and not set(map(id, strategy.trainable)).isdisjoint(map(id, other.trainable))
        for other in list(_watching)
    )


def _tell(method: str, optimizer: Optimizer, *_: Any) -> None:
    """The hook that torch calls around each optimizer step: calls the method `method` of each watched strategy."""
    for strategy in list(_watching):
        getattr(strategy, method)(optimizer)


def holds_any(optimizer: Optimizer, ids: Collection[int]) -> bool:
    """True if the optimizer holds a parameter with one of these ids.

    Every step of every optimizer may call this: it must be fast.
    """
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The entries of the outermost ModuleLists, in order, such as a Transformer's layers.

    A ModuleList among the entries is replaced by its own entries.
    """
    blocks: list[nn.Module] = []
    for child in module.children():
        entry = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        blocks += [child] if entry else blocks_of(child)
    return list(dict.fromkeys(blocks))


def parameters_by_block(module: nn.Module) -> list[list[nn.Parameter]]:
    """Lists of parameters: first those in no block or in several blocks, then those of each block in turn.

    Each parameter of the module is in exactly one list.
    """
    blocks = blocks_of(module)
    within, holders = set[nn.Module](), Counter[nn.Parameter]()
    for block in blocks:
        within.update(block.modules())
        holders.update(block.parameters())
    holders.update(_held_by(set(module.modules()) - within))
    of_block = [[p for p in block.parameters() if holders[p] == 1] for block in blocks]
    inside = set(chain(*of_block))
    return [[p for p in module.parameters() if p not in inside], *of_block]


def flats_by_block(module: nn.Module, sets: Sets = ()) -> list[list[list[nn.Parameter]]]:
    """The lists of `parameters_by_block`, each divided into lists whose parameters can share one flat tensor.

    The parameters of one such list have the same dtype and device, and are all trained or all frozen. Either all of
    them are in the set `read_rounded(module)` or none; likewise for `read_as_kept(module)` and for each one of `sets`.
    """
    marks = [read_rounded(module), read_as_kept(module), *sets]
    return [by_kind(params, marks) for params in parameters_by_block(module)]


def read_rounded(module: nn.Module) -> set[nn.Parameter]:
    """The float32 parameters that, under autocast, are only read as a rounded copy, such as one in bfloat16.

    A module whose attribute `reads_rounded` is True, such as a linear layer of `TransformerLM`, reads the copy in the
    parameter's attribute `rounded`, if there is one, in place of the parameter. A parameter counts only if all modules
    that hold it have a true `reads_rounded`.
    """
    readers = {child for child in module.modules() if getattr(child, "reads_rounded", False)}
    read = set(_held_by(readers)) - set(_held_by(set(module.modules()) - readers))
    return {p for p in read if p.dtype == torch.float32}


def read_as_kept(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that must be read in the dtype they are kept in, such as those of a norm that computes in float32.

    At least one of the modules that hold such a parameter has a true attribute `reads_own_dtype`.
    """
    return set(_held_by(child for child in module.modules() if getattr(child, "reads_own_dtype", False)))


def by_kind(tensors: Iterable[Any], marks: Sets = ()) -> list[list[Any]]:
    """Sorts tensors into lists that agree in dtype, device, `requires_grad`, and in which sets of `marks` they are."""
    kinds = (((x.dtype, x.device, x.requires_grad, *(x in mark for mark in marks)), x) for x in tensors)
    return list(values.grouped(kinds).values())


def _held_by(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yields each module's own parameters, without those of its children; a shared one comes once for each module."""
    for child in modules:
        yield from child.parameters(recurse=False)


def surround(block: nn.Module, before: Callable[..., None], after: Callable[..., None] | None = None) -> None:
    """Runs before(block, args) and after(block, args, output) around the block's forward.

    If the block is not compiled yet, they become hooks, which a later `block.compile()` does not trace. If it is
    compiled, they are called around what the compiler has made of it.
    """
    compiled = block._compiled_call_impl  # where torch keeps what `block.compile()` has made; None without it
    if compiled is None:
        block.register_forward_pre_hook(_disable_dynamo(before))
        if after is not None:
            block.register_forward_hook(_disable_dynamo(after))
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        before(block, args)
        output = compiled(*args, **kwargs)
        if after is not None:
            after(block, args, output)
        return output

    block._compiled_call_impl = call


def is_in_backward() -> bool:
    """True inside of a backward: a forward that runs here is one that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1  # torch's number of the backward that runs; -1 for none


def tensors_in(output: Any) -> tuple[list[Tensor], bool]:
    """(the tensors of a forward's output that a backward can begin from, True if the output may hold others).

    The search goes through the containers that torch's pytree knows, and one level deep into other objects. If there
    are such objects, the output may hold others, deeper inside of them. It may also if no tensor was found at all,
    since the forward may have stored its result elsewhere.
    """
    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
    others = [x for x in leaves if not isinstance(x, _PLAIN)]
    # To pytree an instance of a class derived from list or tuple (except a namedtuple) is one leaf, like other objects.
    for x in others:
        leaves += tree_leaves(list(x) if isinstance(x, tuple | list) else getattr(x, "__dict__", None))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return [x for x in tensors if x.requires_grad], bool(others) or not tensors


def before_backward(tensors: Sequence[Tensor], hook: Callable[..., Any]) -> None:
    """Calls hook(gradient) once in each backward that reaches one of the tensors, before it goes on from there."""
    if len(tensors) == 1:  # a tensor's own hook takes half as much host time as a multi-grad hook
        tensors[0].register_hook(hook)
    elif tensors:
        torch.autograd.graph.register_multi_grad_hook(tensors, hook, mode="any")


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A hook that calls method(*first, *the hook's arguments), and does not keep the method's object alive.

    It does nothing, and returns None, once that object is gone.
    """
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def hook(*args: Any) -> Any:
        self = owner()  # a module may outlive its wrapper
        return None if self is None else function(self, *first, *args)

    return hook
