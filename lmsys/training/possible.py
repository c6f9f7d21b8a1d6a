"""Refuses a training that cannot run here, by its settings and the machine alone, before any work is done for it."""

import torch
import torch.distributed as dist

from lmsys.config import ModelConfig
from lmsys.model import fused
from lmsys.parallel import STRATEGIES
from lmsys.parallel.collectives import Group, size_and_rank
from lmsys.registry import Entry
from lmsys.training.config import RunConfig
from lmsys.training.fitted import fitted
from lmsys.training.packing import check_attention


def check(config: RunConfig, device: torch.device, group: Group = None) -> tuple[Entry, ModelConfig]:
    """(the row of the strategy, the model's config as `fitted` makes it).

    It reads no data and makes no model. All ranks call it. ValueError with the setting and the reason where `device` or
    the ranks cannot train so.
    """
    train = config.train
    world_size, _ = size_and_rank(group)
    (row,) = STRATEGIES.select([train.strategy])
    check_attention(config, device)
    model = fitted(config, row, device, group)
    if train.fused:
        if reason := fused.why_not(device) or row.trait("why_not_fused", ""):
            raise ValueError(f"train.fused=true with strategy {row.name!r}: {reason}")
        fused.check_levels(config.model)
    if reason := train.graph and _why_no_graph(config, row, device):
        raise ValueError(f"train.graph=true: {reason}")
    _check_strategy(config, row, world_size)
    return row, model


def _why_no_graph(config: RunConfig, row: Entry, device: torch.device) -> str:
    if device.type != "cuda":
        return f"CUDA graphs need train.device=cuda, not {device.type}"
    if config.data.packing != "none":
        return f"each batch of data.packing={config.data.packing!r} has masks of its own, and is no replay"
    reason = row.trait("why_not_graphed", "")
    return reason and f"strategy {row.name!r}: {reason}"


def _check_strategy(config: RunConfig, row: Entry, world_size: int) -> None:
    train = config.train
    if world_size > 1 and not row.trait("synchronizes", True):
        raise ValueError(
            f"strategy {row.name!r} lets ranks drift apart: it is for measuring, and trains on one rank only"
        )
    if reason := row.trait("why_not_saved", ""):
        raise ValueError(f"strategy {row.name!r}: {reason}")
    if train.reproducible and (reason := row.trait("why_not_reproducible", "")):
        raise ValueError(f"strategy {row.name!r} with train.reproducible: {reason}")
    if row.peer and not dist.is_initialized():
        raise ValueError(f"strategy {row.name!r} needs a process group: start it by --ranks 1 or torchrun")
    if not row.trait("accumulates", True):
        check_accumulation(config, row, world_size, able=False)
    if train.sharded_optimizer and row.trait("shards_gradients", False):
        raise ValueError(f"strategy {train.strategy!r} shards its optimizer itself: train.sharded_optimizer is false")


def check_accumulation(config: RunConfig, row: Entry, world_size: int, able: bool) -> None:
    """ValueError where ranks would accumulate micro-batches, and the strategy is not `able` to."""
    train = config.train
    if world_size > 1 and train.accumulation(world_size) > 1 and not able:
        raise ValueError(
            f"strategy {row.name!r} cannot accumulate micro-batches: train.micro_batch_size is to be"
            f" {train.batch_size // world_size}, train.batch_size over {world_size} ranks"
        )
