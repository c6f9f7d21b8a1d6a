"""model.checkpoint_blocks=fit in training: the levels of checkpointing that fit into the memory of a rank's device."""

import torch

from lmsys.checkpointing import FIT
from lmsys.config import ModelConfig
from lmsys.cost.memory import fit
from lmsys.parallel.collectives import Group, gather_objects, size_and_rank
from lmsys.registry import Entry
from lmsys.training.config import RunConfig

MEMORY_SHARE = 0.9  # of a GPU's: the rest is for libraries, fragments and what the prediction leaves out


def fitted(config: RunConfig, strategy: Entry, device: torch.device, group: Group = None) -> ModelConfig:
    """The model's config, where it says "fit" with the levels that the least memory of any rank allows.

    All ranks call it, and get the same. ValueError where nothing fits, or the device's memory is not known.
    """
    model, train = config.model, config.train
    if model.checkpoint_blocks != FIT:
        return model
    if train.fused:
        raise ValueError(
            "model.checkpoint_blocks=fit with train.fused=true: fused blocks keep all that their backward reads, so it"
            " must be none"
        )
    world_size, _ = size_and_rank(group)
    memory = min(gather_objects(_memory(train.memory_gib, device), group))
    stage = max(strategy.trait("zero_stage", 0), int(train.sharded_optimizer))
    in_buffers = strategy.trait("synchronizes", True) and stage < 3
    return fit(
        model, train.held, model.context_length, train.precision, memory, world_size=world_size, stage=stage,
        gradients_stay=in_buffers or train.accumulation(world_size) > 1,
    )  # fmt: skip


def _memory(gib: float | None, device: torch.device) -> float:
    if gib is not None:
        return gib * 2**30
    if device.type != "cuda":
        raise ValueError(
            "model.checkpoint_blocks=fit needs train.memory_gib on a CPU, whose memory others use too; on a GPU it is"
            f" {MEMORY_SHARE:.0%} of its memory"
        )
    return MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
