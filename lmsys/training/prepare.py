"""`prepare` makes a model ready for its first step. The training loop and benchmarks call it. Its order matters:

    1 weights    are float32; blocks keep for the backward what the model's config says, or what `fitted` has chosen
    2 blocks     are compiled, or run by fused kernels, before a strategy sets hooks around them
    3 strategy   wraps the loss. If steps will be a CUDA graph, this is done on the stream that captures it, since
                 torch's DDP keeps the stream that it is made on
    4 optimizer  is made by the strategy, or is a sharded one; our AdamW also writes the rounded weights of fused blocks
    5 forward    runs under autocast, as the precision says
    6 gradients  come from forward, backward and synchronization, call by call or as one CUDA graph

A new way to run a model is a field of `Execution`, on which `prepare` acts. possible.py sets it from a training's
settings, and `execution` in benchmarks/data_parallel/rank.py from a case of the benchmark. benchmarks/models.py says
what else a benchmark needs for it.

With the benchmarks' option `--against`, which also measures an earlier state of the code, this file as it is today runs
with that state's lmsys.model, lmsys.parallel and other modules (`lmsys.bench.checkout` lists them). So it may use only
names that these modules have in the earlier state, too, and what they import from it keeps its name.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from lmsys.config import ModelConfig
from lmsys.cost.memory import fit
from lmsys.model import Loss
from lmsys.parallel import adapter, collectives, sharded_optimizer, structure
from lmsys.registry import Entry
from lmsys.training import gradients, optimizer
from lmsys.traits import StrategyTraits
from lmsys.values import one_of

MEMORY_SHARE = 0.9  # of a GPU's memory; the rest is for libraries, fragments and what the prediction leaves out
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # with the other precisions matmuls read float32


@dataclass(frozen=True)
class Execution:
    """How a model is run in training.

    strategy           a row of `lmsys.parallel.STRATEGIES`
    options            arguments of the strategy
    precision          fp32, tf32, bf16 or fp16
    blocks             how blocks run: eager, compiled (torch.compile) or fused (lmsys.model.fused)
    compiler           arguments of `TransformerLM.compile_blocks`
    graph              True: a step will be replayed as one CUDA graph
    sharded_optimizer  True: the optimizer's state is divided among ranks, under a strategy that all-reduces gradients
    tree_sums          True: gradients are added in one order for any number of ranks, see `lmsys.training.reproducible`
    group              the ranks that train; None: all
    """

    strategy: Entry
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    blocks: str = "eager"
    compiler: dict[str, Any] = field(default_factory=dict)
    graph: bool = False
    sharded_optimizer: bool = False
    tree_sums: bool = False
    group: collectives.Group = None


def fitted(
    config: ModelConfig, execution: Execution, batch: int, memory: float, accumulates: bool = False
) -> ModelConfig:
    """The config with the levels of activation checkpointing that fit into the memory of every rank.

    batch        sequences of a micro-batch
    memory       bytes that this rank may use; the smallest of all ranks counts
    accumulates  True: gradients of earlier micro-batches are in memory during a backward
    All ranks call it, and get the same config. ValueError where nothing fits.
    """
    traits, group = StrategyTraits.of(execution.strategy), execution.group
    stage = max(traits.zero_stage or 0, int(execution.sharded_optimizer))
    return fit(
        config, batch, config.context_length, execution.precision, min(collectives.gather_objects(memory, group)),
        world_size=collectives.size_and_rank(group)[0], stage=stage,
        # Gradients are in memory before a backward: of earlier micro-batches, or in the buffers of a strategy.
        gradients_stay=accumulates or (traits.synchronizes and stage < 3),
    )  # fmt: skip


def gpu_memory() -> float:
    """Bytes that a training may take of this process's GPU."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return MEMORY_SHARE * torch.cuda.get_per_process_memory_fraction() * gpu.total_memory


class Prepared(NamedTuple):
    """A prepared model: the strategy around its loss, the optimizer, and a function that makes the autocast context.

    No reference cycle may hold it: a CUDA graph with NCCL's calls has to be freed before the process group ends, and a
    cycle is freed only later.
    """

    strategy: adapter.Adapter
    optimizer: torch.optim.Optimizer
    autocast: Callable[[], torch.autocast]

    def loss(self, *inputs: Any) -> torch.Tensor:
        """The model's loss under the strategy and autocast."""
        with self.autocast():
            return self.strategy(*inputs)

    def gradients(self, graph: bool = False) -> Callable[..., torch.Tensor]:
        """A function of a batch that sets gradients to the mean of all ranks' and returns the loss. Benchmarks call it.

        graph  True: it is a `GraphedGradients`, which replays one CUDA graph
        """
        compute = gradients.backward_of(self.loss, self.strategy.finish)
        return (
            gradients.GraphedGradients(
                compute, self.strategy.module.parameters(), gradients.warm_ups_of(self.strategy.wrapper)
            )
            if graph
            else compute
        )


def prepare(model: Any, execution: Execution, optimizer_cls: Any = optimizer.AdamW, **options: Any) -> Prepared:
    """Makes a `TransformerLM`, or another model with its methods, ready for its first step.

    options  of the optimizer; among them `groups`, as in `Wrapper.make_optimizer`
    ValueError for options that the strategy does not take, and blocks that cannot be fused.
    """
    device = next(model.parameters()).device
    run_blocks(model, execution.blocks, **execution.compiler)
    group = collectives.TreeSums(execution.group) if execution.tree_sums else execution.group
    with gradients.on_capture_stream() if execution.graph else nullcontext():
        strategy = adapter.Adapter(execution.strategy.load(), Loss(model), group, **execution.options)
    if execution.sharded_optimizer:
        stepper = sharded_optimizer.ShardedOptimizer(
            structure.grouped(model, options.pop("groups", None)), optimizer_cls, execution.group, **options
        )
    else:
        stepper = strategy.make_optimizer(optimizer_cls, **options)
    if isinstance(stepper, optimizer.AdamW):
        stepper.rounded = getattr(model, "rounded", None)  # a model that is not ours has no rounded weights
    return Prepared(strategy, stepper, partial(autocast, execution.precision, device.type))


def run_blocks(model: Any, blocks: str, **compiler: Any) -> None:
    """Makes the model run its blocks compiled or fused from now on; "eager" changes nothing.

    blocks, compiler  as in `Execution`
    ValueError for other blocks.
    """
    if one_of("blocks", blocks, ("eager", "compiled", "fused")) == "fused":
        model.fuse_blocks()
    elif blocks == "compiled":
        model.compile_blocks(**compiler)


def autocast(precision: str, device: str) -> torch.autocast:
    """The context of a forward on a device of this type, "cpu" or "cuda"."""
    # Where the precision needs no autocast, it is not enabled, and the dtype has no effect.
    return torch.autocast(device, AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)
