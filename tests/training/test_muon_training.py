"""Trainings by Muon: its settings, its checkpoints, and copies of its weights in bfloat16.

Muon steps the matrices of hidden layers; AdamW steps all other parameters. That any number of ranks trains the same
weights is tested in test_reproducible.py.
"""

from pathlib import Path

import pytest

from lmsys.model import fused
from lmsys.parallel.group import WorkerGroup
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


@pytest.mark.parametrize("strategy", ["bucketed+sharded", "zero1", "fsdp", "torch_ddp", "torch_zero1"])
def test_a_resumed_run_equals_an_uninterrupted_one(group: WorkerGroup, tmp_path: Path, strategy: str) -> None:
    """It resumes on two ranks, as before. By default Muon steps several matrices in one batch. test_muon.py has a
    process alone."""
    run = config(tmp_path, *MUON, *on(strategy))
    uninterrupted = group.run(reproduced, run, 2, STEPS)
    for steps in (2, STEPS):
        resumed = group.run(reproduced, run, 2, steps, str(tmp_path))
    assert resumed == uninterrupted and len({*resumed}) == 1


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
