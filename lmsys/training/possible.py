"""Refuses a training that cannot run here, by its settings and the machine alone, before any work is done for it.

`fitted` also finds the levels of checkpointing that fit into the memory of a rank's device.
"""

import torch

from lmsys import checkpointing, registry, values
from lmsys.attention import ATTENTION, AttentionCase, contract
from lmsys.config import ModelConfig
from lmsys.cost.memory import fit
from lmsys.model import fused, transformer
from lmsys.parallel import STRATEGIES, collectives
from lmsys.tokenizer import Tokenizer
from lmsys.training import corpora, data
from lmsys.training.config import RunConfig
from lmsys.traits import AttentionTraits, StrategyTraits


def check(
    config: RunConfig, device: torch.device, group: collectives.Group = None
) -> tuple[registry.Entry, ModelConfig]:
    """(the row of the strategy, the model's config as `fitted` makes it).

    It reads no data and makes no model. All ranks call it. ValueError with the setting and the reason where `device` or
    the ranks cannot train so.
    """
    train = config.train
    world_size, _ = collectives.size_and_rank(group)
    (row,) = STRATEGIES.select([train.strategy])
    traits = StrategyTraits.of(row)
    check_attention(config, device)
    model = fitted(config, row, device, group)
    name, not_graphed = f"strategy {row.name!r}", train.graph and _why_no_graph(config, row, device)
    not_fused = train.fused and (fused.why_not(device) or traits.why_not_fused)
    not_reproducible = train.reproducible and traits.why_not_reproducible
    doubly_sharded = train.sharded_optimizer and traits.shards_gradients
    drifts_apart = world_size > 1 and not traits.synchronizes
    values.hold(
        (not not_fused, f"train.fused=true with {name}: {not_fused}"),
        (not not_graphed, f"train.graph=true: {not_graphed}"),
        (not drifts_apart, f"{name} lets ranks drift apart: it is for measuring, and trains on one rank only"),
        (not traits.why_not_saved, f"{name}: {traits.why_not_saved}"),
        (not not_reproducible, f"{name} with train.reproducible: {not_reproducible}"),
        (
            not row.peer or torch.distributed.is_initialized(),
            f"{name} needs a process group: start it by --ranks 1 or torchrun",
        ),
        (not doubly_sharded, f"{name} shards its optimizer itself: train.sharded_optimizer is false"),
    )
    if train.fused:
        fused.check_levels(config.model)
    check_accumulation(config, row, world_size, able=traits.accumulates)
    return row, model


def _why_no_graph(config: RunConfig, row: registry.Entry, device: torch.device) -> str:
    if device.type != "cuda":
        return f"CUDA graphs need train.device=cuda, not {device.type}"
    if config.data.packing != "none":
        return f"each batch of data.packing={config.data.packing!r} has masks of its own, and is no replay"
    reason = StrategyTraits.of(row).why_not_graphed
    return reason and f"strategy {row.name!r}: {reason}"


def check_accumulation(config: RunConfig, row: registry.Entry, world_size: int, able: bool) -> None:
    """ValueError where ranks would accumulate micro-batches, and the strategy is not `able` to."""
    train = config.train
    values.hold(
        (
            able or world_size == 1 or train.accumulation(world_size) == 1,
            f"strategy {row.name!r} cannot accumulate micro-batches: train.micro_batch_size is to be"
            f" {train.batch_size // world_size}, train.batch_size over {world_size} ranks",
        )
    )


MEMORY_SHARE = 0.9  # of a GPU's: the rest is for libraries, fragments and what the prediction leaves out


def fitted(
    config: RunConfig, strategy: registry.Entry, device: torch.device, group: collectives.Group = None
) -> ModelConfig:
    """The model's config, where it says "fit" with the levels that the least memory of any rank allows.

    All ranks call it, and get the same. ValueError where nothing fits, or the device's memory is not known.
    """
    model, train = config.model, config.train
    if model.checkpoint_blocks != checkpointing.FIT:
        return model
    values.hold(
        (
            not train.fused,
            "model.checkpoint_blocks=fit with train.fused=true: fused blocks keep all that their backward reads, so it"
            " must be none",
        )
    )
    world_size, _ = collectives.size_and_rank(group)
    memory = min(collectives.gather_objects(_memory(train.memory_gib, device), group))
    traits = StrategyTraits.of(strategy)
    stage = max(traits.zero_stage or 0, int(train.sharded_optimizer))
    return fit(
        model, train.held, model.context_length, train.precision, memory, world_size=world_size, stage=stage,
        gradients_stay=(traits.synchronizes and stage < 3) or train.accumulation(world_size) > 1,
    )  # fmt: skip


def _memory(gib: float | None, device: torch.device) -> float:
    if gib is not None:
        return gib * 2**30
    values.hold(
        (
            device.type == "cuda",
            "model.checkpoint_blocks=fit needs train.memory_gib on a CPU, whose memory others use too; on a GPU it is"
            f" {MEMORY_SHARE:.0%} of its memory",
        )
    )
    return MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory


def check_attention(config: RunConfig, device: torch.device) -> None:
    """ValueError, with the rows that can, where model.attention cannot train here, or not on packed documents."""
    model, train, packed = config.model, config.train, config.data.packing == "documents"
    dtype = "bfloat16" if train.precision == "bf16" else "float32"
    case = transformer.attention_case(
        model, train.held, model.context_length, dtype, device, grad=True, documents=packed
    )
    try:
        reason = _why_no_attention(ATTENTION.pick(model.attention, case), case)
    except ValueError as error:
        reason = str(error)
    if reason:
        able = ", ".join(name for name in ATTENTION if not _why_no_attention(ATTENTION[name], case))
        with_what = "data.packing='documents'" if packed else f"train.precision={train.precision!r} on {device.type}"
        told = f"model.attention={model.attention!r} cannot train with {with_what}: {reason}"
        raise ValueError(f"{told}; here these can: {able}")


def _why_no_attention(row: registry.Entry, case: AttentionCase) -> str | None:
    if reason := row.why_not(case):
        return reason
    if not case.documents:
        return None
    if AttentionTraits.of(row).compiles:
        return "it compiles anew for the documents of each batch"
    try:
        return contract.why_not_told(contract.adapt(row.load()), case.options)
    except ImportError as error:
        return str(error)


LONG = 100  # bytes of a token, on average over a text, that none has


def check_text(config: RunConfig, corpus: corpora.Corpus, tokenizer: Tokenizer | None = None) -> None:
    """ValueError where the text to train on, or for validation, has less than a sequence.

    Without a tokenizer it is known by the bytes, of which each token has one or more.
    """
    least, unit = config.model.context_length + 1, "tokens" if tokenizer else "bytes"
    for part, files in (("to train on", corpus.train), ("for validation", corpus.valid)):
        size = sum(file.size for file in files)
        if tokenizer and size < LONG * least:
            size = sum(map(len, data.encode_files(tokenizer, files)))
        if size < least:
            raise ValueError(
                f"corpus {config.data.corpus!r}: its text {part} has {size:,} {unit}, and a sequence takes {least:,}"
                " tokens: name a longer text, or set a smaller model.context_length"
            )
