"""torch's own data parallelism behind the contract of our strategies: DDP, ZeroRedundancyOptimizer, FSDP2.

These are the rows `torch_...` of the table in `__init__.py`. Our strategies are compared with them, so they are set up
as their users would set them up. To add another strategy of torch, add a class here, a row there, and a line in the
table of docs/strategy.md.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lmsys.parallel import collectives, structure, traits, wrapper


class _Peer(nn.Module):
    """The base of torch's own strategies, whose backward averages gradients by itself.

    `wrapped` is torch's module, and `module` the user's. Class attributes, here and in the classes below, are traits,
    facts about the row that other code reads, unless a comment says otherwise: `lmsys.traits.StrategyTraits` explains
    each. The methods are those of the contract in wrapper.py.
    """

    zero_stage = 0
    why_not_reproducible = "torch adds gradients in an order of its own: take a strategy of ours, such as bucketed"
    wrapped: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """A no-op: when the backward ends, torch has averaged the gradients already."""

    def make_optimizer(
        self, optimizer_cls: Any, groups: structure.Groups | None = None, **kwargs: Any
    ) -> torch.optim.Optimizer:
        return optimizer_cls(structure.grouped(self.module, groups), **kwargs)

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: wrapper.whole(x) for name, x in self.module.state_dict().items()}


class TorchDDP(_Peer):
    """DistributedDataParallel with its default options."""

    why_not_unused = "torch DDP without find_unused_parameters raises an error for a parameter without a gradient"
    # No trait, but how many calls come before the capture of a CUDA graph: DDP's reducer times the first ten steps, and
    # these cannot be captured.
    warm_ups_before_graph = 11

    def __init__(self, module: nn.Module, process_group: collectives.Group = None, **options: Any):
        super().__init__()
        device = next(module.parameters()).device
        self.wrapped = DistributedDataParallel(
            module, device_ids=[device.index] if device.type == "cuda" else None, process_group=process_group, **options
        )
        self.module, self.group = module, process_group

    def no_sync(self) -> Any:
        """DDP's no_sync. The forward must run inside of it, too: there DDP decides if the backward synchronizes."""
        return self.wrapped.no_sync()


class TorchDDPTuned(TorchDDP):
    """DDP with options for a model whose graph never changes. bucket_mb: MiB of a bucket, which users tune."""

    tuned_bucket_mb = True  # benchmarks choose bucket_mb by timing a few sizes
    why_not_unused = ""  # a static graph finds unused parameters in the first step
    accumulates = False  # a static graph does not know backwards under no_sync(): torch ends with an assertion

    def __init__(self, module: nn.Module, process_group: collectives.Group = None, bucket_mb: float = 25):
        for x in module.buffers():  # once, here; with broadcast_buffers=True DDP would do it in every forward
            collectives.broadcast_(x, process_group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers
            super().__init__(
                module, process_group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True,
                broadcast_buffers=False,
            )  # fmt: skip


class TorchZero1(TorchDDP):
    """DDP with ZeroRedundancyOptimizer: each rank steps the parameters that it owns, and broadcasts them.

    torch no longer maintains ZeroRedundancyOptimizer.
    """

    zero_stage = 1
    # Fused blocks round a parameter to bfloat16 again when its version counter has risen.
    why_not_fused = "its optimizer receives parameters with no change of version, so that bfloat16 copies would be old"

    def __init__(self, module: nn.Module, process_group: collectives.Group = None):
        super().__init__(module, process_group, gradient_as_bucket_view=True)

    def make_optimizer(
        self, optimizer_cls: Any, groups: structure.Groups | None = None, **kwargs: Any
    ) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            structure.grouped(self.module, groups), optimizer_cls, self.group, parameters_as_bucket_view=True, **kwargs
        )


class TorchFSDP2(_Peer):
    """fully_shard on every block and on the rest of the module.

    compute_dtype  dtype of the gathered parameters, while gradients are reduced in float32; None: the parameters' own
    """

    zero_stage = 3
    compute_dtype = True  # the trait: the constructor has the option compute_dtype
    why_not_unequal = "FSDP2 reduces the gradients that a rank has: with other ones on another rank it hangs"
    fused_adamw = True
    why_not_graphed = traits.RESIZES_PARAMETERS
    why_not_fused = traits.SURROUNDS_BLOCKS
    why_not_saved = "its DTensors are not saved by this loop; fsdp shards as much, and is saved"
    reshards_after_forward: bool | None = None  # no trait. None is torch's choice: all but the root

    def __init__(
        self, module: nn.Module, process_group: collectives.Group = None, compute_dtype: torch.dtype | None = None
    ):
        super().__init__()
        for x in chain(module.parameters(), module.buffers()):
            collectives.broadcast_(x, process_group)
        mesh = DeviceMesh.from_group(
            torch.distributed.group.WORLD if process_group is None else process_group,
            next(module.parameters()).device.type,
        )
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=None if compute_dtype is None else torch.float32
        )
        for part in chain(structure.blocks_of(module), [module]):  # the module comes last, so `wrapped` is the whole
            self.module = self.wrapped = fully_shard(
                part, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshards_after_forward
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave their gradients on this rank."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


class TorchFSDP2Zero2(TorchFSDP2):
    """FSDP2 whose parameters stay whole from a block's forward to its backward: they are gathered once in a step."""

    reshards_after_forward = False
