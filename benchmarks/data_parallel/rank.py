"""One rank's part of a data-parallel training: builds it, times its steps, and measures its memory and communication.

On the ranks `bench_data_parallel.py` calls `inspect`, which returns a `cases.Inspection`, and `take_pass`, which
returns a `Taken`. A new measurement is an attribute of one of these two results, set in the function that returns it.
`bench_steps.py` subclasses `Rig`. A *pass* is one series of training steps, untimed ones first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter
from typing import Any

import torch

from benchmarks.data_parallel import cases, passes
from benchmarks.models import RECOMPILE_LIMIT, build, matmuls
from lmsys.bench.ranks import on_part, release, subgroup, times
from lmsys.checkpointing import FIT, for_fewer
from lmsys.config import ModelConfig
from lmsys.measure import clock, memory, profile
from lmsys.measure.step import Step
from lmsys.parallel import group, overlapped
from lmsys.training import gradients, optimizer, prepare

INSPECTED = 3  # steps that `inspect` times to learn what one costs
_COMPILED: list[str] = []  # at most one name: the group of cases (`Case.group`) whose compiled graphs this rank holds


@contextmanager
def compiler_of(case: cases.ParallelCase) -> Iterator[None]:
    """A context in which the case's model may be compiled.

    Compiled graphs stay for other rows and passes of the case's group, whose models have the same blocks. Memory of
    earlier calls is released first, and so are graphs of another group. `optimize_ddp` is off: with it, torch would cut
    the graphs of blocks that are compiled inside of a DDP at its buckets, but not graphs that another row has compiled.
    """
    release()
    if case.group not in _COMPILED:
        _COMPILED[:] = [case.group]
        torch.compiler.reset()
    with (
        matmuls(case.precision),
        torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, optimize_ddp=False),
    ):
        yield


def blocks_of(case: cases.ParallelCase, num_layers: int) -> int | str:
    """The case's setting `checkpoint_blocks` for a model of `num_layers` blocks.

    FIT becomes the levels of checkpointing with which the model fits into the memory of every rank.
    """
    setting = case.runtime.get("checkpoint_blocks", 0)
    if setting == FIT:
        setting = prepare.fitted(
            replace(case.config, **case.runtime), execution(case), case.batch, prepare.gpu_memory()
        ).checkpoint_blocks
    return for_fewer(setting, case.config.num_layers, num_layers)


def config_of(case: cases.ParallelCase) -> ModelConfig:
    """The config of the model that the case trains."""
    return replace(case.config, checkpoint_blocks=blocks_of(case, case.config.num_layers), residual=case.residual)


def model_of(case: cases.ParallelCase, config: ModelConfig, seed: int) -> Any:
    """The model that the case trains, with the weights of this seed."""
    ours, other = build(config, str(group.device()), seed), case.whole_model
    return ours if other is None else other.load()(config, group.device()).take_weights(ours)


def execution(case: cases.ParallelCase, **changes: Any) -> prepare.Execution:
    """The strategy, options and precision by which the case runs its model, on the case's ranks.

    changes  attributes of `Execution` that differ
    """
    return replace(
        prepare.Execution(case.entry, case.options, case.precision, case.blocks, graph=case.replayed),
        sharded_optimizer=case.sharded_optimizer,
        group=subgroup(case.world_size),
        **changes,
    )


class Rig:
    """A model, its strategy, its optimizer and this rank's batches.

    Each rank draws weights of its own, so that a strategy is noticed that does not broadcast the weights of rank 0.

    asked  the pass, for the seed of the weights, the batches and their number
    adamw  settings of AdamW
    """

    def __init__(self, case: cases.ParallelCase, asked: passes.Pass, adamw: dict[str, Any] = passes.ADAMW):
        self.case, on, rank = case, str(group.device()), torch.distributed.get_rank()
        model = model_of(case, config_of(case), asked.seed + rank)
        cls: type[torch.optim.Optimizer] = optimizer.AdamW
        more: dict[str, Any] = {}
        if case.optimizer == "muon":
            from lmsys.training import muon  # here, as an earlier state of the code under --against may not have it

            cls = passes.TorchMuon if case.entry.peer else muon.Muon
            # Computed at the first call, after the strategy is built: FSDP2 puts other parameters in the model's place.
            groups = cache(muon.matrix_groups)
            more = passes.MUON | {"groups": lambda name, p: groups(model)(name, p)}
        elif case.traits.fused_adamw:
            cls, more = torch.optim.AdamW, {"fused": on != "cpu"}
        self.prepared = prepare.prepare(model, execution(case), cls, **more | adamw)
        self.strategy, self.optimizer, _ = self.prepared
        self.gradients = self.prepared.gradients()
        self.batches = passes.Batches(case.config, case.batch, asked)

    def loss(self) -> torch.Tensor:
        """The loss of a forward on the present batch."""
        return self.prepared.loss(self.batches.now.tokens, self.batches.now.targets)

    def warm(self) -> None:
        """Takes the untimed steps, which plan buckets, compile blocks and record the CUDA graph, if there is one."""
        if self.case.replayed:
            self.gradients = self.prepared.gradients(graph=True)
        for _ in range(passes.WARM_STEPS[group.device().type]):
            self.batches.advance()
            self.step()

    def step(self) -> torch.Tensor:
        """Takes a training step on the present batch. Returns its loss, before the update."""
        loss = self.gradients(self.batches.now.tokens, self.batches.now.targets)
        self.update()
        return loss

    def step_alone(self) -> None:
        """Takes a step without synchronization, with an update by this rank's gradients alone."""
        with self.strategy.no_sync():
            self.loss().backward()
            self.update()

    def update(self) -> None:
        """Steps the optimizer, and drops the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        """Waits for communication that goes on after a step, such as ZeRO-1's gather; a CUDA graph leaves none."""
        if not isinstance(self.gradients, gradients.GraphedGradients):
            self.strategy.wait()

    @property
    def can_stay_local(self) -> bool:
        """True if a step without synchronization differs from a step in nothing else.

        False if ranks hold or update only parts of the model. False also for a case that replays a CUDA graph: the step
        without synchronization would need a graph of its own.
        """
        is_divided = self.case.traits.zero_stage or self.case.sharded_optimizer
        return self.strategy.can_stay_local and not is_divided and not self.case.replayed

    @property
    def outside_bytes(self) -> int:
        """GPU memory that the strategy holds and torch's allocator does not count."""
        return getattr(self.strategy.wrapper, "outside_bytes", 0)

    def breakdown(self) -> dict[str, int]:
        """Bytes of parameters, gradients, optimizer state and buffers, by the names of a record's fields.

        ZeroRedundancyOptimizer keeps its share of the state in an optimizer of its own, `optim`.
        """
        return memory.breakdown(self.strategy.wrapper, getattr(self.optimizer, "optim", self.optimizer))

    def times(self, step: Callable[[], Any], count: int) -> list[float]:
        """Seconds of each of `count` calls of `step`, each on the next batch."""
        call, ranks = Step(lambda _: step(), redraw=self.batches.advance), subgroup(self.case.world_size)
        return times(call, range(count), ranks, finish=self.finish)[0]


@on_part
def inspect(case: cases.ParallelCase, seed: int) -> cases.Inspection:
    """Measures the network, the memory of each phase of a training's first steps, a step's time and communication."""
    ranks = subgroup(case.world_size)
    with compiler_of(case):
        network = overlapped.latency_and_bandwidth(ranks, group.device()) if case.world_size > 1 else None
        rig, bytes_of_phases = _phases(case, passes.Pass(seed=seed, draw=seed, key=0, steps=INSPECTED))
        rig.warm()
        seconds = min(rig.times(rig.step, INSPECTED))
        profile.register_kernels(case.traits.kernels, "communication")
        sent = profile.communication_of(
            rig.step, rig.finish, lambda: torch.distributed.barrier(ranks), group.device().type
        )
        finite = bool(rig.step().isfinite())
    buckets, size = (getattr(rig.strategy.wrapper, name, None) for name in ("buckets", "bucket_mb"))
    return cases.Inspection(
        memory=bytes_of_phases,
        communication=sent,
        step_s=seconds,
        bucket_mb=float(size) if size else None,
        num_buckets=len(buckets) if buckets else None,
        finite=finite,
        network=network,
    )


def _phases(case: cases.ParallelCase, asked: passes.Pass) -> tuple[Rig, dict[str, int]]:
    """(a rig, bytes by field) after its first two steps, which run without a CUDA graph.

    A graph sets aside all of its memory at once, so that phases within it would not show. "first" is the first step,
    which makes the optimizer's state; the phases after it are those of the second.
    """
    rigs, made = list[Rig](), dict[str, Any]()

    def init() -> None:
        rigs.append(Rig(case, asked))
        made["outside at init"] = rigs[0].outside_bytes

    def forward() -> None:
        made["loss"] = rigs[0].loss()

    def backward() -> None:
        made.pop("loss").backward()
        rigs[0].strategy.finish()

    def update() -> None:
        (rig,) = rigs
        rig.optimizer.step()
        made["held"] = rig.breakdown()
        rig.optimizer.zero_grad(set_to_none=True)
        rig.finish()

    phases = memory.phases(
        {
            "init": init,
            "first": lambda: clock.in_turn(forward, backward, update),
            "forward": forward,
            "backward": backward,
            "optimizer": update,
        },
        group.device().type,
    )
    rig = rigs[0]
    outside = {name: made["outside at init"] if name == "init" else rig.outside_bytes for name in phases}
    live, peak = (
        {name: levels[kind] + outside[name] for name, levels in phases.items()} for kind in ("live_bytes", "peak_bytes")
    )
    return rig, {
        "init_bytes": live["init"],
        "init_peak_bytes": peak["init"],
        "before_step_peak_bytes": max(peak["forward"], peak["backward"]),
        "before_step_bytes": live["backward"],
        "after_step_peak_bytes": peak["optimizer"],
        "peak_bytes": max(peak["forward"], peak["backward"], peak["optimizer"]),
        "activations_bytes": live["forward"] - live["first"],
        **made["held"],
    }


@dataclass
class Taken:
    """Results of a pass on this rank.

    samples  seconds of each step
    alone    seconds of each step without synchronization; [] where there are none
    model    fingerprint of the weights: it is equal on ranks that have one model
    late_s   seconds that reading the weights took after the steps; long if the strategy has put off its work until then
    bits     sha256 of the kept slices of the weights
    """

    samples: list[float]
    alone: list[float]
    model: str
    late_s: float
    bits: str = ""


@on_part
def take_pass(case: cases.ParallelCase, asked: passes.Pass) -> Taken:
    """Takes the steps of a pass and keeps slices of the weights. No step can tell whether these will be judged."""
    alone: list[float] = []
    with compiler_of(case):
        rig = Rig(case, asked)
        rig.warm()
        samples = rig.times(rig.step, asked.steps)
        begin, state, _, end = clock.in_turn(
            perf_counter, rig.strategy.full_state_dict, lambda: clock.synchronize(group.device().type), perf_counter
        )
        bits = passes.keep(case, asked, state)
        del state
        model = rig.strategy.fingerprint()
        if case.world_size > 1 and rig.can_stay_local:
            rig.batches.advance()
            rig.step_alone()
            alone = rig.times(rig.step_alone, -(-asked.steps // 2))  # half as many, rounded up
    return Taken(samples=samples, alone=alone, model=model, late_s=end - begin, bits=bits)
