"""A training step of one row that has the GPUs to itself: models too large to stand beside another. Runs on the ranks.

The row trains on one batch, again and again, with clipping, and with a learning rate by width. So its loss must fall:
what is timed trains. Time, memory and kernels are those of the same model, one run after another.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.data_parallel import cases, passes, rank
from benchmarks.models import LR_BY_WIDTH
from lmsys.attention import ATTENTION
from lmsys.bench.ranks import on_part, release, subgroup, times
from lmsys.measure import clock, memory
from lmsys.measure.profile import KINDS, Profile, communication_of, part, profile_call, register_kernels
from lmsys.measure.sensors import Reading, sensors_of
from lmsys.measure.step import Step
from lmsys.parallel.group import device
from lmsys.training.optimizer import clip_factor, scale_gradients, whole_norm

MAX_NORM = 1.0
LR_SHARE = 0.25  # of the rate by width: there is no warm-up
UPDATE = "optimizer"  # a part of the step: clipping too
STAGES = 4  # of the losses' fall


class TrainingRig(rank.Rig):
    """A rig that clips, and trains on its first batch."""

    def __init__(self, case: cases.ParallelCase, seed: int):
        adamw = {"lr": LR_SHARE * LR_BY_WIDTH / case.config.d_model, "betas": (0.9, 0.95)}
        super().__init__(case, passes.Pass(seed, seed, 0, 0), adamw)
        self.divided = case.entry.trait("shards_gradients", False) and case.world_size > 1
        self.group = subgroup(case.world_size)

    def update(self) -> None:
        with part(UPDATE):
            if self.case.entry.trait("fused_adamw", False):  # DTensors, whose norm torch knows
                torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            else:
                norm = whole_norm(self.parameters, self.group, self.divided)
                scale_gradients(self.optimizer, clip_factor(norm, MAX_NORM))
            super().update()

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def finite(self) -> bool:
        """True where no weight of this rank's is NaN or inf."""
        own = (p.to_local() if isinstance(p, DTensor) else p for p in map(Tensor.detach, self.parameters))
        return all(math.isfinite(torch.linalg.vector_norm(p, math.inf).item()) for p in own if p.numel())


@dataclass
class Alone:
    """Findings on this rank.

    levels          of checkpointing, as the model has them
    most            first_step_s, with compiling and tuning; held_bytes, weights and optimizer state before a step;
                    total_bytes, the most that is live in one: a record has the largest of any rank
    samples, losses of each step: seconds, and the loss of all ranks
    times           fields of a record: seconds of a step's kernels by kind, without those of the optimizer, and others
    readings        of the device's sensors, of a GPU while it is at work on the timed steps
    """

    levels: str
    most: dict[str, float]
    samples: list[float]
    losses: list[float]
    finite: bool
    times: dict[str, float]
    readings: list[Reading]


@on_part
def train_alone(case: cases.ParallelCase, seed: int, steps: int) -> Alone:
    """Builds the row, takes its steps, and looks into some more."""
    for row in ATTENTION.values():
        register_kernels(row.trait("kernels", ""), "attention")
    register_kernels(case.entry.trait("kernels", ""), "communication")
    kind, group = device().type, subgroup(case.world_size)
    with rank.prepared(case):
        rigs: list[TrainingRig] = []
        took: list[float] = []

        def step() -> None:
            rigs[0].step()
            rigs[0].finish()

        def first() -> None:
            start = perf_counter()
            step()
            clock.synchronize(kind)
            took.append(perf_counter() - start)

        phases = {"init": lambda: rigs.append(TrainingRig(case, seed)), "first": first, "step": step}
        found = memory.phases(phases, kind)
        (rig,) = rigs
        inner = getattr(rig.optimizer, "optim", rig.optimizer)  # where ZeroRedundancyOptimizer keeps its share
        held = sum(memory.breakdown(rig.strategy.wrapper, inner).values())
        release()
        losses, readings, sensors = list[Tensor](), list[Reading](), sensors_of(kind)

        def timed(_: object) -> None:
            losses.append(rig.step())
            if kind == "cuda":  # the host is ahead of it; on a CPU reading would count as a part of the step
                readings.append(sensors.read())

        samples, _ = times(Step(timed), range(steps), group, finish=rig.finish)
        if kind == "cpu":
            readings.append(sensors.read())
        told = torch.stack(losses).double()
        dist.all_reduce(told, group=group)
        finite = rig.finite()
        sent = communication_of(rig.step, rig.finish, partial(dist.barrier, group), kind)
        dist.barrier(group)
        profile = profile_call(step, kind, steps=1)
    kinds, optimizer_s = by_kind(profile)
    most = {
        "first_step_s": took[0],
        "held_bytes": held + rig.outside_bytes,
        "total_bytes": found["step"]["peak_bytes"] + rig.outside_bytes,
    }
    times_s = {f"{name}_s": seconds for name, seconds in kinds.items()} | {
        "optimizer_s": optimizer_s,
        "profiled_s": profile.profiled_s,
        "communication_s": sent.time_s,
        "exposed_s": sent.time_s * (1 - (sent.overlap_fraction or 0.0)),
    }
    levels, losses_of_all = str(rank.config_of(case).checkpoint_blocks), (told / case.world_size).tolist()
    return Alone(levels, most, samples, losses_of_all, finite, times_s, readings)


def by_kind(profile: Profile) -> tuple[dict[str, float], float]:
    """(seconds by kind without the optimizer's, the optimizer's), of one step."""
    total = {kind: profile.shares[kind] * profile.kernel_s for kind in KINDS}
    own: Mapping[str, float] = next((one.kinds for one in profile.parts if one.name == UPDATE), {})
    return {kind: max(0.0, total[kind] - own.get(kind, 0.0)) for kind in KINDS}, sum(own.values())


def why_wrong(ranks: list[Alone]) -> str | None:
    """None, or why these steps do not train: a weight or loss that is no number, or losses that do not fall."""
    if not all(one.finite for one in ranks):
        return "after the timed steps a weight is NaN or inf"
    losses = ranks[0].losses
    if bad := [number for number, loss in enumerate(losses, start=1) if not math.isfinite(loss)]:
        return f"the loss of timed step {bad[0]} is NaN or inf"
    size = -(-len(losses) // STAGES)
    means = [math.fsum(part) / len(part) for part in (losses[at : at + size] for at in range(0, len(losses), size))]
    if not all(later < earlier for earlier, later in zip(means, means[1:], strict=False)):
        told = ", ".join(f"{mean:.4f}" for mean in means)
        return f"on one batch the loss must fall, and its means over {size} steps each are {told}"
    return None
