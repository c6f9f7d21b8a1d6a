"""`train.precision=fp16`: losses are scaled and steps skipped as in a loop with torch's GradScaler, on any ranks.

A plain loop of torch's own parts is the oracle. `scaled` makes scales that fall and grow within a few steps.
"""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from lmsys.model import TransformerLM
from lmsys.parallel.group import WorkerGroup
from lmsys.training import pipeline
from lmsys.training.config import RunConfig
from lmsys.training.loop import NonFiniteError, Trainer
from lmsys.training.optimizer import set_lr
from tests.support.training_runs import (
    MUON,
    config,
    copy_of,
    infinite_on_one_rank,
    on,
    read_lines,
    scaled,
    scales_on_rank,
    trainer,
    weights,
)
from tests.support.variants import few_by_default

FP16 = "train.precision=fp16"
ALONE = FP16, "train.strategy=none", "train.micro_batch_size=8"
STEPS = 12
# By the first scale, and the steps after which one grows: the first falls twice or more, and each grows.
SCALES = {"it falls": (2.0**26, 4), "it grows": (2.0**10, 3)}


def plain_loop(run: RunConfig, training: Trainer, first: float, growth: int) -> list[tuple[float, float, float]]:
    """(loss, norm, scale) by step of a training made of torch's parts alone, on the batches of `training`."""
    torch.manual_seed(run.train.seed)
    model, train = TransformerLM(run.model), run.train
    rules = {"betas": train.betas, "eps": train.eps, "weight_decay": train.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), **rules)
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=growth)
    made = []
    for step in range(STEPS):
        training.step = step
        set_lr(optimizer, training.schedule["the rate of the next step"])
        losses = []
        for micro in range(training.batches.accumulation):
            with torch.autocast("cpu", torch.float16):
                losses.append(model.loss(*training._batch(step, micro)))
            scaler.scale(losses[-1] / training.batches.accumulation).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), train.clip_norm or math.inf)
        made.append((torch.stack(losses).mean().item(), norm.item(), scaler.get_scale()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return made


@pytest.mark.parametrize("clip_norm", [0.0, 0.2])
@pytest.mark.parametrize("kind", [*SCALES])
def test_a_training_is_a_loop_with_torch_s_scaler(tmp_path: Path, kind: str, clip_norm: float) -> None:
    accumulating = "train.micro_batch_size=4", f"train.clip_norm={clip_norm}"
    run = config(tmp_path, *ALONE, f"train.steps={STEPS}", *accumulating)
    with scaled(*SCALES[kind]):
        training = trainer(run)
        steps = [training.train_step()[0] for _ in range(STEPS)]
    expected = plain_loop(run, trainer(run), *SCALES[kind])
    assert [step.scale for step in steps] == [scale for *_, scale in expected]
    assert [step.taken for step in steps] == [math.isfinite(norm) for _, norm, _ in expected]
    assert [step.loss for step in steps] == pytest.approx([loss for loss, *_ in expected], abs=2e-4)
    norms = [(step.norm, norm) for step, (_, norm, _) in zip(steps, expected, strict=True) if step.taken]
    assert len(norms) >= 6 and all(ours == pytest.approx(theirs, rel=1e-3) for ours, theirs in norms)
    assert (training.skipped >= 2) == (kind == "it falls") and training.in_a_row == 0
    assert len({step.scale for step in steps}) >= 3


@pytest.mark.parametrize("more", [(), MUON, ("model.residual=narrow",), ("model.checkpoint_blocks=attention",)])
def test_the_loss_is_near_that_of_bf16(tmp_path: Path, more: tuple[str, ...]) -> None:
    curves = {}
    for precision in ("fp32", "bf16", "fp16"):
        one_batch = "train.micro_batch_size=8", f"train.steps={STEPS}", f"train.precision={precision}"
        training = trainer(config(tmp_path, *one_batch, *more))
        curves[precision] = torch.tensor([training.train_step()[0].loss for _ in range(STEPS)])
        assert training.skipped == 0
    far = {name: (curve - curves["fp32"]).abs().max().item() for name, curve in curves.items()}
    assert 0 < far["fp16"] < far["bf16"] < 0.02  # float16 has three bits more of mantissa


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("it falls", ALONE),
        ("it grows", ALONE),
        ("it falls", ("train.reproducible=true", "train.leaves=2")),
        ("it grows", (*MUON, "train.micro_batch_size=8")),
    ],
)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted(tmp_path: Path, kind: str, more: tuple[str, ...]) -> None:
    """Cut while steps are skipped, and while a scale is about to grow."""
    run = config(tmp_path, FP16, f"train.steps={STEPS}", "checkpoint.interval=0", *more)
    with scaled(*SCALES[kind]):
        whole = trainer(run)
        expected = [whole.train_step()[0] for _ in range(STEPS)]
        steps = []
        for cut in (1, 5, STEPS):
            part = trainer(run, resume=True)
            steps += [part.train_step()[0] for _ in range(part.step, cut)]
            part.save(tmp_path / "checkpoints")
    assert json.dumps([vars(step) for step in steps]) == json.dumps([vars(step) for step in expected])
    assert part.scaler.state_dict() == whole.scaler.state_dict() and part.skipped == whole.skipped
    assert all(torch.equal(x, weights(tmp_path)[name]) for name, x in whole.model.state_dict().items())


def test_the_log_has_the_scale(data: Path, tmp_path: Path) -> None:
    run = config(copy_of(data, tmp_path / "run"), *ALONE, "train.max_nonfinite=0")
    with scaled(2.0**26, 2000):
        assert pipeline.run(run, ("train",)) == 0
    logged = [line for line in read_lines(run.folder / "log.jsonl") if "loss" in line]
    assert logged[0]["loss_scale"] == 2.0**26 and logged[0]["grad_norm"] in ("Infinity", "NaN")
    halvings = [math.log2(logged[0]["loss_scale"] / line["loss_scale"]) for line in logged]
    assert halvings[1:] == [line["skipped"] for line in logged[:-1]] and halvings[-1] >= 2


def test_a_scale_that_is_too_large_ends_no_run(tmp_path: Path) -> None:
    """Skipped steps count towards train.max_nonfinite where the loss is NaN, or a scale of 1 is still too large."""
    run = config(tmp_path, *ALONE, "train.max_nonfinite=1", "train.steps=40", "evaluate.interval=0")
    said: list[str] = []
    with scaled(2.0**40, 2000):
        assert trainer(run).fit(tmp_path / "checkpoints", say=said.append)[0] == "done"
    assert any("loss scale 1.09951e+12: skipped; 0 of at most 1 in a row" in line for line in said)
    infinite = trainer(run)
    infinite_on_one_rank(infinite, range(99))
    with pytest.raises(NonFiniteError, match="2 steps in a row were not finite, up to step 18"):  # 2^16 falls to 1
        infinite.fit(tmp_path / "infinite")
    nan = trainer(run)
    loss_of = nan.model.loss
    nan.model.loss = lambda *batch: loss_of(*batch) * torch.nan  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match="2 steps in a row were not finite, up to step 2"):
        nan.fit(tmp_path / "nan")


def test_a_run_may_change_its_precision(tmp_path: Path) -> None:
    """Its scale begins anew, or is that of the checkpoint."""
    for precision, scale in (("bf16", 1.0), ("fp16", 2.0**12), ("fp32", 1.0)):
        with scaled(2.0**12, 2000):
            part = trainer(config(tmp_path, f"train.precision={precision}"), resume=True)
        assert part.train_step()[0].scale == scale
        part.save(tmp_path / "checkpoints")


STRATEGIES = "bucketed naive zero1 fsdp fsdp+muon zero1+muon torch_zero1 torch_ddp bucketed+sharded".split()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Any]:
    """A function that gives `scales_on_rank` of one process with these settings; it trains once for all tests."""
    folder = tmp_path_factory.mktemp("alone")
    return cache(lambda settings: scales_on_rank(config(folder, *settings, *on("none")), *SCALES["it falls"], STEPS))


@pytest.mark.parametrize("strategy", few_by_default(STRATEGIES, one_in=2))
def test_two_ranks_equal_one_and_resume(group: WorkerGroup, alone: Any, tmp_path: Path, strategy: str) -> None:
    name = strategy.removesuffix("+muon")
    settings = (FP16, f"train.steps={STEPS}", *(MUON if name != strategy else ()))
    run, one, (first, growth) = config(tmp_path, *settings, *on(name)), alone(settings), SCALES["it falls"]
    (losses, scales, digest), other = group.run(scales_on_rank, run, first, growth, STEPS, 2)
    assert other == (losses, scales, digest)
    assert scales == pytest.approx(one[1], rel=1) and scales[0] == first > min(scales)  # by rounding a step may differ
    assert losses == pytest.approx(one[0], abs=1e-2)
    for cut in (1, STEPS):  # the first step is skipped
        resumed = group.run(scales_on_rank, run, first, growth, cut, 2, str(tmp_path))
    assert resumed == [(losses[1:], scales[1:], digest)] * 2


APART = """
from torch import nn
class Apart(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
    def forward(self, *args):
        return self.module(*args)
    def finish_gradient_synchronization(self):
        pass
"""


@pytest.mark.parametrize("strategy", ["naive", "bucketed", "zero1", "fsdp", "bucketed+sharded", "torch_zero1", "apart"])
def test_an_infinity_on_one_rank_skips_the_step_on_all(group: WorkerGroup, tmp_path: Path, strategy: str) -> None:
    """Also where a strategy from elsewhere leaves it on that rank alone: gradients of another scale would be added."""
    (tmp_path / "apart.py").write_text(APART)
    settings = on(strategy)
    if strategy == "apart":
        settings = f"train.strategy={tmp_path / 'apart.py'}:Apart", "train.micro_batch_size=4"
    run = config(tmp_path, FP16, *settings)
    both: list[Any] = group.run(scales_on_rank, run, 2.0**10, 3, 5, 2, "", [1])
    assert [scales for _, scales, _ in both] == [[1024.0, 1024.0, 512.0, 512.0, 512.0]] * 2
