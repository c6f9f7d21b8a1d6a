"""Decides how a training runs on this machine, and refuses settings with which it cannot run.

The pipeline calls `plan` before any work, so that settings are refused early; the training loop calls it again, and
acts on its result. The pipeline calls `check_text`, too. To refuse a setting that does not go with another, or with a
strategy's traits (facts about the strategy: `lmsys.traits`), add a line to `_check_strategy`, or where the setting is
used. To hand a setting to `prepare`, change `_execution`.
"""

from typing import Any

import torch

from lmsys import checkpointing, registry, values
from lmsys.attention import ATTENTION, AttentionCase, AttentionTraits, contract
from lmsys.config import ModelConfig
from lmsys.model import BLOCKS_PER_GRAPH, fused, transformer
from lmsys.parallel import STRATEGIES, StrategyTraits, collectives
from lmsys.tokenizer import Tokenizer
from lmsys.training import corpora, data, prepare
from lmsys.training.config import MATMUL_DTYPES, RunConfig


def plan(
    config: RunConfig, device: torch.device, group: collectives.Group = None
) -> tuple[ModelConfig, prepare.Execution]:
    """How a training with these settings runs: (the model's config, the argument of `prepare`). All ranks call it.

    If the config has checkpoint_blocks="fit", the plan has the levels of activation checkpointing that fit into memory.
    No data is read, and no model is made.
    ValueError with the setting and the reason where `device` or the ranks cannot train so.
    """
    train = config.train
    world_size, _ = collectives.size_and_rank(group)
    (row,) = STRATEGIES.select([train.strategy])
    traits, batch_size = StrategyTraits.of(row), train.sequences_at_once
    micro_batches = train.accumulation(world_size)
    check_attention(config, batch_size, device)
    execution = _execution(config, row, traits, group)
    model = _fitted(config, execution, batch_size, micro_batches, device)
    _check_strategy(config, row, traits, device, world_size)
    check_accumulation(config, world_size, able=traits.accumulates)
    return model, execution


def _execution(
    config: RunConfig, row: registry.Entry, traits: StrategyTraits, group: collectives.Group
) -> prepare.Execution:
    """The argument of `prepare` that says how to run a model, from the settings and the strategy's row and traits."""
    train, options = config.train, dict[str, Any]()
    if train.bucket_mb is not None:
        options["bucket_mb"] = train.bucket_mb
    if traits.compute_dtype and train.precision in prepare.AUTOCAST and not train.reproducible:
        options["compute_dtype"] = prepare.AUTOCAST[train.precision]
    return prepare.Execution(
        strategy=row,
        options=options,
        precision=train.precision,
        blocks="fused" if train.fused else "compiled" if train.compile else "eager",
        compiler={
            # A graph of several blocks sums in another order, and has no place for a strategy's hooks between blocks.
            "together": 1 if train.reproducible or traits.synchronizes else BLOCKS_PER_GRAPH,
            "fullgraph": config.data.packing != "documents",  # attention on packed documents breaks a graph
        },
        graph=train.graph,
        sharded_optimizer=train.sharded_optimizer,
        tree_sums=train.reproducible,
        group=group,
    )


def _check_strategy(
    config: RunConfig, row: registry.Entry, traits: StrategyTraits, device: torch.device, world_size: int
) -> None:
    """ValueError where settings do not go with the strategy, the device or each other."""
    train, packing, name = config.train, config.data.packing, f"strategy {row.name!r}"
    not_fused = fused.why_not(device) or traits.why_not_fused
    values.hold(
        (not (train.fused and not_fused), f"train.fused=true with {name}: {not_fused}"),
        (
            not train.graph or device.type == "cuda",
            f"train.graph=true: CUDA graphs need train.device=cuda, not {device.type}",
        ),
        (
            not train.graph or packing == "none",
            f"train.graph=true: each batch of data.packing={packing!r} has masks of its own, and is no replay",
        ),
        (not (train.graph and traits.why_not_graphed), f"train.graph=true: {name}: {traits.why_not_graphed}"),
        (
            world_size == 1 or traits.synchronizes,
            f"{name} lets ranks drift apart: it is for measuring, and trains on one rank only",
        ),
        (not traits.why_not_saved, f"{name}: {traits.why_not_saved}"),
        (
            not (train.reproducible and traits.why_not_reproducible),
            f"{name} with train.reproducible: {traits.why_not_reproducible}",
        ),
        (
            not row.peer or torch.distributed.is_initialized(),
            f"{name} needs a process group: start it by --ranks 1 or torchrun",
        ),
        (
            not (train.sharded_optimizer and traits.shards_gradients),
            f"{name} shards its optimizer itself: train.sharded_optimizer is false",
        ),
    )
    if train.fused:
        fused.check_levels(config.model)


def check_accumulation(config: RunConfig, world_size: int, able: bool) -> None:
    """ValueError where ranks would have to accumulate micro-batches, and the strategy cannot.

    able  True: the strategy can accumulate. `plan` takes this from the strategy's traits; the training loop calls this
          function again, with what the strategy that it has made says
    """
    train = config.train
    values.hold(
        (
            able or world_size == 1 or train.accumulation(world_size) == 1,
            f"strategy {train.strategy!r} cannot accumulate micro-batches: train.micro_batch_size is to be"
            f" {train.batch_size // world_size}, train.batch_size over {world_size} ranks",
        )
    )


def _fitted(
    config: RunConfig, execution: prepare.Execution, batch_size: int, micro_batches: int, device: torch.device
) -> ModelConfig:
    """The model's config; if it has checkpoint_blocks="fit", levels that fit into memory take the place of "fit".

    batch_size     sequences of a rank's forward
    micro_batches  of a rank in a step
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
        ),
        (
            train.memory_gib is not None or device.type == "cuda",
            "model.checkpoint_blocks=fit needs train.memory_gib on a CPU, whose memory others use too; on a GPU it is"
            f" {prepare.MEMORY_SHARE:.0%} of its memory",
        ),
    )
    memory = prepare.gpu_memory() if train.memory_gib is None else train.memory_gib * 2**30
    return prepare.fitted(model, execution, batch_size, memory, accumulates=micro_batches > 1)


def check_attention(config: RunConfig, batch_size: int, device: torch.device) -> None:
    """ValueError where model.attention cannot train with these settings on this device; it names the rows that can.

    batch_size  sequences of a rank's forward
    """
    model, train, packed = config.model, config.train, config.data.packing == "documents"
    case = transformer.attention_case(
        model, batch_size, model.context_length, MATMUL_DTYPES[train.precision], device, grad=True, documents=packed
    )
    try:
        reason = _why_no_attention(ATTENTION.pick(model.attention, case), case)
    except ValueError as error:
        reason = str(error)
    if reason:
        with_what = "data.packing='documents'" if packed else f"train.precision={train.precision!r} on {device.type}"
        able = ", ".join(name for name in ATTENTION if not _why_no_attention(ATTENTION[name], case))
        raise ValueError(
            f"model.attention={model.attention!r} cannot train with {with_what}: {reason}; here these can: {able}"
        )


def _why_no_attention(row: registry.Entry, case: AttentionCase) -> str | None:
    """Why the row cannot train on the case; None: it can."""
    reason = row.why_not(case)  # also where the row cannot be loaded
    if reason or not case.documents:
        return reason
    if AttentionTraits.of(row).compiles:
        return "it compiles anew for the documents of each batch"
    return contract.why_not_given(contract.adapt(row.load()), case.options)


# A token has fewer bytes than this on average in any text. So a text with LONG bytes or more for each token of a
# sequence is long enough, and `check_text` need not tokenize it.
LONG = 100


def check_text(config: RunConfig, corpus: corpora.Corpus, tokenizer: Tokenizer | None = None) -> None:
    """ValueError where the text to train on, or that for validation, is shorter than a sequence.

    Without a tokenizer its bytes are counted, as each token has one or more of them.
    """
    least, unit = config.model.context_length + 1, "tokens" if tokenizer else "bytes"
    for part, files in (("to train on", corpus.train), ("for validation", corpus.valid)):
        size = sum(file.size for file in files)
        if tokenizer and size < LONG * least:
            size = sum(map(len, data.encode_files(tokenizer, files)))
        values.hold(
            (
                size >= least,
                f"corpus {config.data.corpus!r}: its text {part} has {size:,} {unit}, and a sequence takes {least:,}"
                " tokens: name a longer text, or set a smaller model.context_length",
            )
        )
