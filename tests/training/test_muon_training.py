"""Trainings by Muon: its settings, its checkpoints, and copies of its weights in bfloat16.

Muon steps the matrices of hidden layers; AdamW steps all other parameters. That any number of ranks trains the same
weights is tested in test_reproducible.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from lmsys.model import fused
from lmsys.parallel.group import WorkerGroup
from lmsys.training.config import TrainConfig
from lmsys.training.muon import Muon
from lmsys.training.optimizer import AdamW
from lmsys.training.reproducible import weights_sha256
from tests.support import training_runs
from tests.support.ranks import use
from tests.support.training_runs import config, on, reproduced, trainer

STEPS = 5
MUON = *training_runs.MUON, f"train.steps={STEPS}"


def test_by_default_adamw_steps_all_parameters(tmp_path: Path) -> None:
    optimizer = trainer(config(tmp_path)).optimizer
    (group,) = optimizer.param_groups
    assert type(optimizer) is AdamW and group.keys() == {"params", "lr", "betas", "eps", "weight_decay"}


def test_settings_reach_the_param_groups(tmp_path: Path) -> None:
    settings = "train.matrix_lr=0.5", "train.momentum=0.7", "train.adjust_lr_fn=match_rms_adamw", "train.lr=0.25"
    training = trainer(config(tmp_path, *MUON, *settings, "train.warmup_steps=2"))
    names = {p: name for name, p in training.model.named_parameters()}
    assert type(training.optimizer) is Muon and len(training.optimizer.param_groups) == 3
    for rate in (0.0, 0.5, 1.0):  # of the full learning rate, which is reached after two steps
        taken, _ = training.train_step()
        assert taken.lr == rate * 0.25
        for group in training.optimizer.param_groups:
            assert group["lr"] == rate * (0.5 if group["use_muon"] else 0.25)
    for group in training.optimizer.param_groups:
        held = {names[p] for p in group["params"]}
        hidden = {name for name in held if name.startswith("layers.") and ".ln" not in name}
        assert hidden == (held if group["use_muon"] else set())
        assert (group["momentum"], group["adjust_lr_fn"], group["batched"]) == (0.7, "match_rms_adamw", True)
        assert group["weight_decay"] == (0.0 if any("ln" in name or "embeddings" in name for name in held) else 0.1)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("none", 1), ("bucketed+sharded", 2), ("zero1", 2), ("fsdp", 2), ("torch_ddp", 2), ("torch_zero1", 2)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    ranks: WorkerGroup, tmp_path: Path, strategy: str, world_size: int
) -> None:
    """It resumes on as many ranks as before. By default Muon steps several matrices in one batch."""
    run = config(tmp_path, *MUON, *on(strategy))
    uninterrupted = ranks.run(reproduced, run, world_size, STEPS)
    for steps in (2, STEPS):
        resumed = ranks.run(reproduced, run, world_size, steps, str(tmp_path))
    assert resumed == uninterrupted and len(set(resumed[:world_size])) == 1


def test_a_checkpoint_of_the_other_optimizer_is_refused(tmp_path: Path) -> None:
    for saved, resumed in ((("train.optimizer=muon",), ()), ((), ("train.optimizer=muon",))):
        folder = tmp_path / ("muon" if saved else "adamw")
        trainer(config(folder, *saved)).save(folder / "checkpoints")
        with pytest.raises(ValueError, match=r"saved with train\.optimizer=.*; this run has "):
            trainer(config(folder, *resumed), resume=True)


def test_a_resumed_run_takes_its_new_settings(tmp_path: Path) -> None:
    trainer(run := config(tmp_path, *MUON)).save(tmp_path / "checkpoints")
    changed = run.changed(["train.momentum=0.5", "train.adjust_lr_fn=match_rms_adamw", "train.reproducible=true"])
    for group in trainer(changed, resume=True).optimizer.param_groups:
        assert (group["momentum"], group["adjust_lr_fn"], group["batched"]) == (0.5, "match_rms_adamw", False)


def test_a_step_with_nan_gradients_is_not_taken(tmp_path: Path) -> None:
    training = trainer(config(tmp_path, *MUON, "train.warmup_steps=0"))
    before = training.model.state_dict()["layers.0.ffn.w1.weight"].clone()
    loss_of = training.model.loss
    training.model.loss = lambda *batch: loss_of(*batch) * torch.nan
    assert not training.train_step()[0].taken
    assert torch.equal(training.model.state_dict()["layers.0.ffn.w1.weight"], before)
    training.model.loss = loss_of
    assert training.train_step()[0].taken


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer='sgd' must be one of adamw, muon"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn='none' must be one of original, match_rms_adamw"),
        ({"momentum": 1.0}, "momentum=1.0 must be less than 1"),
        ({"matrix_lr": -1.0}, "matrix_lr=-1.0 must be at least 0"),
        ({"optimizer": "muon", "lr": 0.0, "min_lr": 0.0}, "lr=0 with optimizer=muon: it must be above 0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)


def test_fused_blocks_read_current_copies_of_matrices(tmp_path: Path) -> None:
    """A training in bfloat16 that keeps copies of weights has the bits of one that casts them in each step."""
    settings = *MUON, "train.precision=bf16", "train.strategy=none", "train.fused=true"
    with use((fused, "why_not", lambda _: lambda device: "")):  # on a CPU they are computed by PyTorch
        copying, casting = (trainer(config(tmp_path, *settings)) for _ in range(2))
        casting.model.rounded = casting.optimizer.rounded = None
        for _ in range(3):
            assert copying.train_step() == casting.train_step()
        assert copying.model.rounded.of(copying.model.layers[0].ffn.w2.weight) is not None
    assert weights_sha256(copying.model.state_dict()) == weights_sha256(casting.model.state_dict())
