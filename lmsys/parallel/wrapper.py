"""The contract of data-parallel strategies, and `Wrapper`, the base class of this project's strategies.

A strategy is an nn.Module around the module that is trained. It averages gradients over ranks:

    wrapper = Strategy(module, process_group=None, **options)
    optimizer = wrapper.make_optimizer(AdamW, lr=1e-3)
    loss = wrapper(batch of this rank); loss.backward()
    wrapper.finish_gradient_synchronization()      # gradients are now the mean over ranks
    optimizer.step(); optimizer.zero_grad()

Every rank passes the same module. The constructor copies rank 0's parameters and buffers to all ranks; buffers that a
forward changes later stay different on each rank. If a parameter has no gradient on some ranks, it counts as zero
there. If it has none on any rank, it stays without one, so that an optimizer leaves it alone. The mean is over ranks:
if the batches of all ranks are equally large, they train as one process does on all batches together.

baselines.py, overlapped.py, zero1.py and fsdp.py derive from `Wrapper` and say how gradients are averaged. The training
loop and benchmarks use a strategy through `adapter.Adapter`, which takes torch's and users' strategies too. To add a
strategy, derive from `Wrapper`, override `_synchronize`, and add a row to `lmsys.parallel.STRATEGIES`; CONTRIBUTING.md
says what else it needs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from lmsys.parallel import StrategyTraits, collectives, part, structure
from lmsys.parallel.sharded_optimizer import is_unused
from lmsys.values import hold, instance


class Wrapper(nn.Module):
    """Base class of the strategies: compares the ranks' modules, broadcasts rank 0's, and sets hooks.

    A subclass overrides `_synchronize`, or `finish_gradient_synchronization` as `Fsdp` does. Facts about a strategy are
    class attributes: `StrategyTraits` lists them with their defaults. The gradients of several backwards add up, with
    or without a synchronization between them.

    process_group  None: the default group, or a single rank where no process group was made

    ValueError if ranks hold different modules, or if a rank later replaces, adds, removes or freezes a parameter, or
    sets one to be trained. RuntimeError for a forward or an optimizer's step if a backward was not followed by
    `finish_gradient_synchronization`, and if ranks have made different forwards. Errors that only a comparison of ranks
    can find are raised by `finish_gradient_synchronization` on all ranks, on GPUs one step later.
    """

    zero_stage = 0
    synchronizes = StrategyTraits.synchronizes
    _walk: Any = None  # during a forward of Fsdp: its `flat_shard.Walk`

    def __init__(self, module: nn.Module, process_group: collectives.Group = None):
        super().__init__()
        self.module, self.group = instance("module", module, nn.Module), process_group
        self.world_size, self.rank = collectives.size_and_rank(process_group)
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self._synchronizing, self._unfinished, self._in_backward = True, False, False
        self._is_local = False  # True once a backward under no_sync() has left gradients on this rank
        self._history = 0  # a hash of this rank's forwards and collectives in this step; ranks must have the same
        self._structure, self._change = structure.Structure(module), ""
        self._norms = {  # batch norms, which in training mode would normalize by this rank's batch alone
            name: child
            for name, child in module.named_modules()
            if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm) and self.world_size > 1
        }
        # `_use` makes its entries as history ** exponents: 1 for each parameter and for the flag, the history, its
        # square.
        self._exponents = torch.tensor([0.0] * (len(self.trainable) + 1) + [1.0, 2.0], dtype=torch.float64)
        self._flags_before: tuple[Tensor, torch.cuda.Event] | None = None  # on GPUs, the flags of the step before
        self._look_for_changes()
        _agree(module, process_group, divides=self.zero_stage > 0)
        for x in chain(module.parameters(), module.buffers()):
            collectives.broadcast_(x, process_group)
        handles = [
            p.register_post_accumulate_grad_hook(structure.weakly(self._on_grad, index))
            for index, p in enumerate(self.trainable)
        ]
        # For each trained parameter: (the dict of its hooks of this kind, the key of this wrapper's hook in it).
        self._hooks: list[tuple[Any, int]] = [
            (p._post_accumulate_grad_hooks, handle.id) for p, handle in zip(self.trainable, handles, strict=True)
        ]
        self._whole = frozenset(map(id, module.parameters()))  # tells `before_step` which optimizers are concerned
        structure.watch(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._prepare()
        self._look_for_changes()
        if torch.is_grad_enabled() and self._synchronizing:
            self._note(0)  # a forward
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._watch(*structure.tensors_in(output))
        return output

    def _watch(self, tensors: list[Tensor], hidden: bool) -> None:
        """Has `_enter_backward` called before a backward that begins from `tensors`, outputs of the module.

        hidden  the output may hold other tensors, which `structure.tensors_in` cannot see
        """
        structure.before_backward(tensors, structure.weakly(self._enter_backward, self._walk))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any optimizer of this process, by the hooks of `structure.watch`.

        RuntimeError if the optimizer would use gradients that are not averaged over ranks yet.
        """
        if (
            # Also where only no_sync() has left gradients, and where a hook steps in the midst of a backward.
            self._unfinished
            or (self._synchronizing and (self._is_local or (self._in_backward and structure.is_in_backward())))
        ) and structure.holds_any(optimizer, self._whole):
            self._unfinished = True
            self._refuse_unfinished()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer of this process, by the hooks of `structure.watch`."""

    def _prepare(self) -> None:
        """Called at the start of a forward. RuntimeError as in `_refuse_unfinished`."""
        if not structure.is_in_backward():  # in a backward it is checkpointing that runs the forward again
            self._refuse_unfinished()
            self._leave_backward(late=True)

    def _refuse_unfinished(self) -> None:
        """RuntimeError if a backward was not followed by `finish_gradient_synchronization`."""
        hold(
            (
                not self._unfinished,
                "a backward was not followed by finish_gradient_synchronization(): call it before the optimizer's step"
                " and the next forward, after a backward that has failed too; or run backwards that only accumulate"
                " gradients under no_sync()",
            ),
            error=RuntimeError,
        )

    def _look_for_changes(self) -> None:
        """ValueError for a batch norm that is not synchronized; notes in `_change` how the module has changed.

        On a single rank, and for a strategy that never synchronizes, such a change is a ValueError too.
        """
        alone = next((name or "the module" for name, norm in self._norms.items() if norm.training), "")
        hold(
            (
                not alone,
                f"{alone} normalizes by each rank's own batch, and not by that of all: wrap"
                " nn.SyncBatchNorm.convert_sync_batchnorm(module), or keep this layer in eval()",
            )
        )
        if torch.is_grad_enabled() and (self._change or not self._structure.is_as_it_was()):
            self._change = self._structure.change()
            # On several ranks the error waits until they compare (`_heed`), so that all of them raise it.
            if self._change and (self.world_size == 1 or not self.synchronizes):
                raise _changed([self._change])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for gradient accumulation: backwards inside of it do not communicate.

        They leave their gradients on this rank; the next backward outside adds to them, and the sum is synchronized.
        """
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """Makes every gradient the mean over ranks. All ranks call it between backward and the optimizer's step."""
        self._leave_backward(late=True)
        self._unfinished = self._is_local = False
        if self.world_size > 1 and self.trainable:
            self._synchronize()

    def make_optimizer(
        self, optimizer_cls: Any, groups: structure.Groups | None = None, **kwargs: Any
    ) -> torch.optim.Optimizer:
        """The optimizer that steps what this strategy trains.

        groups  called as groups(name, parameter) for each trained parameter of the module; returns the options that
                replace `kwargs` for this parameter, such as {"weight_decay": 0.0}, or {}
        """
        return instance("optimizer_cls", optimizer_cls, Callable)(structure.grouped(self.module, groups), **kwargs)

    def parameters_in(self, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
        """The module's parameters, by the optimizer's param groups."""
        return [group["params"] for group in optimizer.param_groups]

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's whole state dict, with parameters' names in place of numbers. All ranks call it.

        The form is that of torch's `get_optimizer_state_dict`. If no rank has optimizer state or gradients yet, the
        result has a state of zeros all the same, so that torch.distributed.checkpoint can load into it; the optimizer
        itself keeps none. ValueError if the state has keys that are not parameters.
        """
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        begun = any(
            collectives.gather_objects(
                bool(optimizer.state)
                or any(p.grad is not None for group in optimizer.param_groups for p in group["params"]),
                self.group,
            )
        )
        if not begun:
            before = [dict(group) for group in optimizer.param_groups]
            try:
                _init_optim_state(optimizer)
            except BaseException:
                optimizer.state.clear()
                optimizer.zero_grad()
                raise
            finally:
                # The step above had lr=0, and the optimizer may have counted it.
                structure.set_options(optimizer.param_groups, before)
        others = [repr(key) for key in optimizer.state if not isinstance(key, Tensor)]
        others = list(chain(*collectives.gather_objects(others, self.group)))
        if others and not begun:
            optimizer.state.clear()
        hold(
            (
                not others,
                f"the optimizer's state has the key {' or '.join(others[:1])}, where a whole state has names of"
                " parameters",
            )
        )
        names, state = list(chain(*self._names_in(optimizer))), self._whole_state(optimizer)
        if not begun:  # zeros in place of the values that the step of torch's function has left
            optimizer.state.clear()
            state["state"] = tree_map(lambda x: 0 * x if isinstance(x, Tensor | int | float) else x, state["state"])
        return {
            "state": {names[number]: x for number, x in state["state"].items()},
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
            ],
        }

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Loads what `full_optimizer_state_dict` gives, also of another strategy or FSDP2.

        All ranks call it, with the same state. After a state that no step has used (`is_unused`), the optimizer is as
        before its first step. ValueError for a state of other trained parameters, or of other groups of them.
        """
        mine = self._names_in(optimizer)
        # Frozen parameters may be missing on either side: zero1's optimizers hold none of them.
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        fitting = [
            next((group for group in state_dict["param_groups"] if set(names) - frozen <= set(group["params"])), None)
            for names in mine
        ]
        numbers = {name: number for number, name in enumerate(chain(*mine))}
        hold(
            (
                None not in fitting and state_dict["state"].keys() - frozen <= numbers.keys(),
                f"the state has other parameters, or other groups of them, than this optimizer: {mine}",
            )
        )
        state: dict[str, Any] = {
            "state": {numbers[name]: tree_map(whole, x) for name, x in state_dict["state"].items() if name in numbers},
            "param_groups": [
                {**(group or {}), "params": [numbers[name] for name in names]}
                for group, names in zip(fitting, mine, strict=True)
            ],
        }
        # A plain number that is not 0, such as a count of steps, may be all the state there is.
        begun = any(x for x in tree_leaves(state["state"]) if not isinstance(x, Tensor)) or not all(
            map(is_unused, state["state"].values())
        )
        optimizer.load_state_dict(self._own_state(optimizer, state if begun else {**state, "state": {}}))

    def _names_in(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of the parameters that `parameters_in` lists."""
        names = {p: name for name, p in self.module.named_parameters()}
        return [[names[p] for p in params] for params in self.parameters_in(optimizer)]

    def _whole_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's whole state dict. A parameter's number is its place in `parameters_in`, over all groups."""
        return getattr(optimizer, "full_state_dict", optimizer.state_dict)()

    def _own_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a whole state dict that this rank's optimizer loads: here all of it, unlike in `Fsdp`."""
        return state

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's whole state dict, on every rank. All ranks call it."""
        return self.module.state_dict()

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """The module's state dict for torch.distributed.checkpoint: DTensors where it is sharded. All ranks call it."""
        return self.full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the module's state, whole or as `sharded_state_dict` gives it, also from another strategy or FSDP2.

        All ranks call it, with the same state. Names may begin with "module.", as a wrapper's own do.
        """
        hold((not assign, "assign=True puts other parameters into the module than those that are synchronized"))
        prefixed = bool(instance("state_dict", state_dict, Mapping)) and all(
            name.startswith("module.") for name in state_dict
        )
        state = {name.removeprefix("module.") if prefixed else name: x for name, x in state_dict.items()}
        return self._load(state, strict)

    def _load(self, state: dict[str, Any], strict: bool) -> Any:
        """Loads a state under the module's own names, and returns what torch's `load_state_dict` does."""
        return self.module.load_state_dict({name: whole(x) for name, x in state.items()}, strict)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """ValueError if `.to`, `.half` or the like, which call this, would move or cast a parameter or a buffer."""
        with torch.no_grad():
            for name, x in chain(self.named_parameters(), self.named_buffers()):
                hold((fn(x) is x, f"{name} would move or change its dtype: do that to the module, and wrap it then"))
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or saved as a whole, as it holds a process group and hooks: copy"
            " or save its full_state_dict(), which a module like its own loads"
        )

    def _note(self, what: int) -> None:
        """Adds an event to this rank's history: -1 for a backward that failed, 0 for a forward.

        `Fsdp` also notes the numbers of its collectives. The history stays below 4093, so that the means over ranks of
        it and of its square show a difference of 1 (`_heed`).
        """
        # nn.Module.__setattr__ is slow, and this runs for every collective of fsdp.
        self.__dict__["_history"] = (31 * self._history + what + 2) % 4093

    def _enter_backward(self, walk: Any, *_: Any) -> None:
        """Called when a backward comes to the output of a forward of this wrapper; `walk` is that forward's `_walk`."""
        if not self._in_backward:
            self._in_backward = True
            # Autograd calls `_leave_backward` when this backward has ended, but not if it fails.
            torch.autograd.Variable._execution_engine.queue_callback(structure.weakly(self._leave_backward))
            self._begin_backward()

    def _leave_backward(self, late: bool = False) -> None:
        """Called by autograd when a backward has ended, unless the backward fails.

        The next forward and `finish_gradient_synchronization` also call it, with `late`, and so find a failed backward.
        """
        if late and self._in_backward:
            self._note(-1)
        self._in_backward = False

    def _begin_backward(self) -> None:
        """Called when a backward begins, before it changes a gradient. Subclasses may override it."""

    def _on_grad(self, index: int, _: Tensor) -> None:
        """Called when a backward has accumulated `trainable[index].grad`."""
        if self._synchronizing:
            if not self._unfinished:  # nn.Module.__setattr__ is slow, and this runs once for each parameter
                self._unfinished = True
            self._gradient_is_ready(index)
        elif not (self._is_local or structure.shares_a_backward(self)):
            self._is_local = True

    def _gradient_is_ready(self, index: int) -> None:
        """Called for each gradient to be synchronized: a subclass may begin its communication during the backward."""

    def _synchronize(self) -> None:
        """Makes every gradient the mean over ranks, waits for it, and calls `_conclude`.

        `finish_gradient_synchronization` calls it where there are several ranks and trained parameters.
        """
        raise NotImplementedError

    def _use(self, missing: list[int]) -> Tensor:
        """(parameters + 3,): 1 for each gradient that is here and 0 for each `missing` one, then `_flags`.

        A subclass's `_synchronize` averages this tensor over ranks and hands the mean to `_conclude`. There an entry of
        0 says that no rank has the gradient.
        """
        changed, history, _ = self._flags()
        self._exponents = self._exponents.to(self.trainable[0].device)
        use = torch.pow(history, self._exponents)  # one kernel makes the ones, the history and its square
        use[-3].fill_(changed)
        if missing:
            use[missing] = 0.0
        return use

    def _flags(self) -> tuple[float, float, float]:
        """(1 where this rank's module has changed, else 0; its history; the square of it). Begins a new history."""
        history, self._history = self._history, 0
        return float(bool(self._change)), history, history**2

    def _conclude(self, use: Tensor, missing: list[int]) -> None:
        """Drops gradients that no rank had, and checks the flags. The host waits only if a gradient is missing here.

        use      the mean over ranks of what `_use` gives
        missing  the indices of parameters without a gradient on this rank
        """
        if missing:
            for index, share in zip(missing, use[missing].tolist(), strict=True):
                if share == 0:
                    self.trainable[index].grad = None
        self._heed(use[-3:])

    def _heed(self, flags: Tensor) -> list[float] | None:
        """Checks the means over ranks of `_flags`, the first three of `flags`. Returns all means; None: not known yet.

        On a GPU it checks the flags of the step before, for which the host does not have to wait. ValueError on all
        ranks if a module has changed; RuntimeError if the histories of ranks differ, so that their variance is not 0.
        """
        if flags.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return None
            before = self._flags_before
            self._flags_before = flags.to("cpu", non_blocking=True), torch.cuda.current_stream().record_event()
            if before is None:
                return None
            flags, arrived = before
            arrived.synchronize()
        means = flags.tolist()
        changed, history, square = means[:3]
        # One rank that differs by 1 gives a variance of at least 0.5 / world_size; 0.1 leaves room for rounding.
        if changed > 0 or square - history**2 > 0.1 / self.world_size:
            self._flags_before = None
            changes = collectives.gather_objects(self._change, self.group) if changed > 0 else []
            raise _changed(changes) if changes else RuntimeError(collectives.APART)
        return means


def whole(x: Any) -> Any:
    """x itself, or the whole tensor if x is a DTensor: then all ranks must call this."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _changed(changes: list[str]) -> ValueError:
    """The error about modules that have changed. changes: by rank, in words; empty where there is none."""
    return ValueError(
        "; ".join(f"on rank {rank} {change}" for rank, change in enumerate(changes) if change)
        + ", after the module was wrapped: no gradient of it would be synchronized; wrap the module as it is now"
    )


def check_floating(name: str, dtype: Any) -> None:
    """ValueError unless it is a floating-point dtype, or None."""
    hold(
        (
            dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
            f"{name}={dtype!r} must be a floating-point dtype, such as torch.bfloat16, or None",
        )
    )


def dense(p: Tensor) -> Tensor:
    """Makes p.grad contiguous, as collectives need it, and returns it; zeros if p has no gradient.

    A gradient may also carry a conjugation or a negation that torch applies only when it is read: it is applied here.
    """
    grad = p.grad = (torch.zeros_like(p) if p.grad is None else p.grad.resolve_conj().resolve_neg()).contiguous()
    return grad


def _agree(module: nn.Module, group: collectives.Group, divides: bool) -> None:
    """ValueError on all ranks for a module that no strategy takes, and for the first difference between ranks' modules.

    Ranks must hold parameters and buffers of equal names, shapes and dtypes, and train the same ones.

    divides  True: the strategy moves parameters to other memory, so no two of them may share memory
    """
    on_meta = [name for name, x in chain(module.named_parameters(), module.named_buffers()) if x.is_meta]
    sparse = [name or "the module" for name, child in module.named_modules() if getattr(child, "sparse", False) is True]
    # A parameter without values, which `broadcast_` refuses by a message of its own, has no address.
    memory, buffers = (
        part.addresses(x for x in tensors if x.numel() and x.layout is torch.strided and not isinstance(x, part.Absent))
        for tensors in (module.parameters(), module.buffers())
    )
    renormed = [
        name or "the module"
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None
    ]
    hold(
        (
            not on_meta,
            f"{', '.join(on_meta[:1])} is on the meta device, without values: module.to_empty(device=...) comes first",
        ),
        (not sparse, f"{', '.join(sparse[:1])} makes sparse gradients: strategies add dense ones; set sparse=False"),
        (
            not renormed,
            f"{', '.join(renormed[:1])} has max_norm, by which a forward changes weights by its rank's own batch: set"
            " max_norm=None, and scale the weights between steps",
        ),
        (
            not hasattr(module, "_ddp_params_and_buffers_to_ignore"),
            "the module names parameters that DDP is to ignore: hold them in another module",
        ),
        (
            not divides or (len(set(memory)) == len(memory) and set(memory).isdisjoint(buffers)),
            "two parameters share their memory, as by a.data = b.data, or a buffer shares that of a parameter, which"
            " this strategy would end: tie parameters as one, a = b, and clone() what a buffer is made of",
        ),
    )
    mine = [
        (name, tuple(x.shape), str(x.dtype), x.requires_grad if isinstance(x, nn.Parameter) else None)
        for name, x in chain(module.named_parameters(), module.named_buffers())
    ]
    first, *others = collectives.gather_objects(mine, group)
    for rank, other in enumerate(others, start=1):
        hold(
            *(
                (
                    here == there,
                    f"ranks hold different modules: rank 0 has {_words(here)} where rank {rank} has {_words(there)}",
                )
                for here, there in zip_longest(first, other)
            )
        )


def _words(entry: tuple[Any, ...] | None) -> str:
    """A parameter or buffer, (name, shape, dtype, whether it is trained), as a message names it."""
    if entry is None:
        return "nothing more"
    name, shape, dtype, trained = entry
    kind = {None: "buffer", True: "parameter", False: "frozen parameter"}[trained]
    return f"the {kind} {name} {shape} {dtype.removeprefix('torch.')}"
