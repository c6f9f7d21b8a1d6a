"""Whether a strategy trains as one process does on the batch of all ranks. Runs on the ranks.

The reference is three steps of SGD with momentum in float64 on the whole batch, the budget what the same steps lose in
float32: `lmsys.testing.error_ratio` of how far each parameter has moved, in units of the farthest. Models of two blocks
stand for all, with the widths of the case. What communicates or computes in a narrower dtype is first held to that
without it, and then to a budget of the same steps with gradients, or parameters, rounded alike.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.model_gate import NUM_BLOCKS, Batch, build, matmuls, ratio_of
from benchmarks.parallel_cells import Cell
from benchmarks.parallel_workbench import Gradients, on_part, options_of, wrap
from benchmarks.ranks import subgroup
from lmsys.config import ModelConfig
from lmsys.model import Loss
from lmsys.parallel.group import device
from lmsys.parallel.sharded_optimizer import ShardedOptimizer

STEPS = 3
SGD = {"lr": 0.1, "momentum": 0.9}
BATCH, CONTEXT = 2, 64
NARROW = ("comm_dtype", "compute_dtype")
Narrow = tuple[str, torch.dtype] | None  # which of these, and what it is


@on_part
def gate(cell: Cell, seed: int) -> dict[str, float]:
    """Errors over their budgets, by parameter, on the rank where they are worst; on every rank the same."""
    options = options_of(cell)
    wide = {name: value for name, value in options.items() if name not in NARROW}
    with matmuls("fp32"):
        ratios = _ratios(cell, wide, seed, None)
        if narrow := [options[name] for name in NARROW if name in options]:
            kind = next(name for name in NARROW if name in options)
            more = _ratios(cell, options, seed, (kind, narrow[0]))
            ratios = {name: max(ratio, more[name]) for name, ratio in ratios.items()}
    return ratios


def _ratios(cell: Cell, options: dict[str, object], seed: int, narrow: Narrow) -> dict[str, float]:
    config = _config(cell)
    start, exact, plain = _references(config, cell.world_size, seed, narrow)
    found = _trained(cell, config, options, seed)
    dtype = torch.float32 if narrow is None else narrow[1]
    ratios = {}
    for name, first in start.items():
        moved = [x[name].double() - first.double() for x in (found, exact, plain)]
        ratios[name] = ratio_of(moved[0], moved[1], moved[2].to(torch.float32), dtype) if moved[1].any() else 0.0
    worst = torch.tensor([*ratios.values()], dtype=torch.float64, device=device())
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=subgroup(cell.world_size))
    return dict(zip(ratios, worst.tolist(), strict=True))


def _config(cell: Cell) -> ModelConfig:
    layers, context = min(cell.config.num_layers, NUM_BLOCKS), min(cell.context, CONTEXT)
    return replace(cell.config, num_layers=layers, context_length=context, attention="naive")


def _batches(config: ModelConfig, world_size: int, seed: int) -> Iterator[Batch]:
    """Of every step, all ranks' examples, rank by rank."""
    for step in range(STEPS):
        yield Batch.draw(config, BATCH * world_size, str(device()), seed + step)


def _of_rank(data: Batch, rank: int) -> tuple[Tensor, Tensor]:
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    return data.tokens[mine], data.targets[mine]


def _trained(cell: Cell, config: ModelConfig, options: dict[str, object], seed: int) -> dict[str, Tensor]:
    rank, group = dist.get_rank(), subgroup(cell.world_size)
    strategy = wrap(cell, build(config, str(device()), seed + rank), options)
    if cell.sharded:
        optimizer: torch.optim.Optimizer = ShardedOptimizer(
            strategy.wrapper.parameters(), torch.optim.SGD, group, **SGD
        )
    else:
        optimizer = strategy.make_optimizer(torch.optim.SGD, **SGD)
    gradients = Gradients(strategy, "fp32")
    if cell.compile == "graphed":
        gradients.record()
    for data in _batches(config, cell.world_size, seed):
        gradients(*_of_rank(data, rank))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {name.removeprefix("module."): x.detach().clone() for name, x in strategy.full_state_dict().items()}


@lru_cache(maxsize=2)
def _references(
    config: ModelConfig, world_size: int, seed: int, narrow: Narrow
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The parameters at the start, after training in float64, and in float32 with what is narrow rounded."""
    start = {name: x.detach().clone() for name, x in Loss(build(config, str(device()), seed)).named_parameters()}
    exact = _alone(config, world_size, seed, None, torch.float64)
    return start, exact, _alone(config, world_size, seed, narrow, torch.float32)


def _alone(config: ModelConfig, world_size: int, seed: int, narrow: Narrow, dtype: torch.dtype) -> dict[str, Tensor]:
    module = Loss(build(config, str(device()), seed)).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), **SGD)
    for data in _batches(config, world_size, seed):
        if narrow is None:
            module(data.tokens, data.targets).backward()
        else:
            _rounded_backward(module, data, world_size, *narrow)
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach().clone() for name, x in module.named_parameters()}


def _rounded_backward(module: nn.Module, data: Batch, world_size: int, kind: str, dtype: torch.dtype) -> None:
    """Gradients as ranks make and add them up one after another: of rounded parameters, or themselves rounded."""
    named = dict(module.named_parameters())
    total: list[Tensor] = []
    for rank in range(world_size):
        used = {name: p.to(dtype) if kind == "compute_dtype" else p for name, p in named.items()}
        loss = torch.func.functional_call(module, used, _of_rank(data, rank))
        grads = torch.autograd.grad(loss, [*used.values()])
        grads = [g.to(dtype) if kind == "comm_dtype" else g.float() for g in grads]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else list(grads)
    for p, grad in zip(named.values(), total, strict=True):
        p.grad = (grad / world_size).to(p.dtype)
