"""An optimizer whose state is divided among ranks: each steps its own parameters, then all gather all of them.

It works over any strategy that leaves every rank the mean gradients; `zero1` hands it the ownership that its own
communication follows. Parameters become views of flat buffers of world_size equal segments, so that gathering them
copies nothing. Source: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), P_os.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lmsys.parallel.buckets import Segmented, offsets, plan_segments
from lmsys.parallel.collectives import Group, Pending, all_gather, gather_objects, size_and_rank
from lmsys.parallel.packing import Layout

CHUNK = 2**26  # elements that one call gathers


@dataclass
class FlatBuffer:
    """A flat buffer (world_size · length,) that parameters live in, a segment for each rank's own."""

    flat: Tensor
    bucket: Segmented
    owners: dict[Any, int]  # the rank of each parameter

    def gather(self, rank: int, group: Group) -> Pending:
        length = self.bucket.length
        return all_gather(self.flat, self.flat[rank * length : (rank + 1) * length], group)


@torch.no_grad()
def flatten(
    params: Sequence[Tensor], bucket: Segmented, zeros: Callable[[Tensor, int], Tensor] = Tensor.new_zeros
) -> FlatBuffer:
    """Moves the bucket's parameters into one buffer, made by `zeros`, each rank's own into that rank's segment."""
    owners = {params[index]: rank for rank, owned in enumerate(bucket.members) for index in owned}
    layout = layout_of(params, bucket)
    flat = zeros(params[bucket.indices[0]], layout.length)
    for p, view in zip(owners, layout.views(flat), strict=True):
        view.copy_(p)
        p.data = view
    return FlatBuffer(flat, bucket, owners)


def owners_in(buffers: Sequence[FlatBuffer]) -> dict[Tensor, int]:
    """The rank that owns each parameter."""
    return {p: rank for buffer in buffers for p, rank in buffer.owners.items()}


def layout_of(params: Sequence[Tensor], bucket: Segmented) -> Layout:
    """Where each of the bucket's parameters lies in its flat buffer."""
    starts = []
    for rank, owned in enumerate(bucket.members):
        within, _ = offsets([params[index].numel() for index in owned])
        starts += [rank * bucket.length + start for start in within]
    return Layout.at([params[index] for index in bucket.indices], starts, len(bucket.members) * bucket.length)


class ShardedOptimizer(Optimizer):
    """`optimizer_cls` over the parameters that this rank owns, balanced by size; real param groups over all of them.

    params  tensors or param groups, the same on every rank
    flat_buffers  the buffers, and who owns what in them, where a strategy has made them; else made here
    `state_dict` is this rank's share; `full_state_dict` and `load_state_dict` go between any world sizes, and to and
    from `optimizer_cls` itself. All ranks call the constructor, `step` and `full_state_dict`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Any,
        process_group: Group = None,
        flat_buffers: Sequence[FlatBuffer] | None = None,
        **kwargs: Any,
    ):
        self.group = process_group
        self.world_size, self.rank = size_and_rank(process_group)
        self.flat_buffers = list(flat_buffers or [])
        self.owners = owners_in(self.flat_buffers)
        self._loads = [0] * self.world_size
        self._local: Any = None
        super().__init__(params, kwargs)
        self._local = optimizer_cls([self._own(group) for group in self.param_groups], **kwargs)
        self.defaults = self._local.defaults
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            group.update({name: value for name, value in local.items() if name != "params"})
        self.state = self._local.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        strangers = [p for p in group["params"] if p not in self.owners]
        if strangers:
            self._flatten(strangers)
        if self._local is not None:
            self._local.add_param_group(self._own(group))
            group.update({k: v for k, v in self._local.param_groups[-1].items() if k != "params"})

    def _flatten(self, params: list[Tensor]) -> None:
        kinds = [(p.device, p.dtype) for p in params]
        numels = [p.numel() for p in params]
        for bucket in plan_segments(numels, range(len(params)), CHUNK, self.world_size, kinds, self._loads):
            self.flat_buffers.append(flatten(params, bucket))
        self.owners = owners_in(self.flat_buffers)

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [p for p in group["params"] if self.owners[p] == self.rank]}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's parameters, then waits for everybody's."""
        loss = self.step_own(closure)
        for pending in [buffer.gather(self.rank, self.group) for buffer in self.flat_buffers]:
            pending.wait()
        torch.autograd.graph.increment_version(list(self.owners))  # which were written as parts of flat buffers
        return loss

    def step_own(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step without the gathering: until then this rank has the old values of others' parameters."""
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update({name: value for name, value in group.items() if name != "params"})  # schedules set it there
        return self._local.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """This rank's share: state by the parameter's number over all groups, the groups, and whose share it is."""
        numbers = _numbers(self.param_groups)
        groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups]
        state = {numbers[p]: dict(self.state[p]) for p in self.state}
        return {"state": state, "param_groups": groups, "shard": [self.rank, self.world_size]}

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of `optimizer_cls` without shards, on every rank, its tensors on the CPU."""
        return merge_shares(gather_objects(tree_map(_on_cpu, self.state_dict()), self.group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's part of a full state dict, or its own share. ValueError for another's share."""
        state, groups = state_dict["state"], state_dict["param_groups"]
        if (share := state_dict.get("shard", [self.rank, self.world_size])) != [self.rank, self.world_size]:
            raise ValueError(
                f"the state dict is the share of rank {share[0]} of {share[1]}, this is rank {self.rank} of"
                f" {self.world_size}: load a full one, by full_state_dict() or shards.load()"
            )
        found, here = ([len(group["params"]) for group in of] for of in (groups, self.param_groups))
        if found != here:
            raise ValueError(f"the state dict has param groups of {found} parameters, this optimizer of {here}")
        for saved, group in zip(groups, self.param_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        order = [number for group in groups for number in group["params"]]
        named = dict(zip(_numbers(self.param_groups), order, strict=True))
        numbers = _numbers(self._local.param_groups)
        own = {number: state[named[p]] for p, number in numbers.items() if named[p] in state}
        local_groups = [
            {**saved, "params": [numbers[p] for p in local["params"]]}
            for saved, local in zip(groups, self._local.param_groups, strict=True)
        ]
        self._local.load_state_dict({"state": own, "param_groups": local_groups})
        self.state = self._local.state


def merge_shares(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The shares of all ranks as one state dict, as the optimizer without shards would give it."""
    state = {number: values for share in shares for number, values in share["state"].items()}
    return {"state": dict(sorted(state.items())), "param_groups": shares[0]["param_groups"]}


def _numbers(groups: Sequence[dict[str, Any]]) -> dict[Tensor, int]:
    """Parameters in the order of the groups, numbered."""
    return {p: number for number, p in enumerate(p for group in groups for p in group["params"])}


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
