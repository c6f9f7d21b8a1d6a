"""`train.fused`: a training by fused blocks has the bits of an eager one, also resumed; and what it needs is named."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmsys.model import fused
from lmsys.parallel.group import WorkerGroup
from lmsys.training.loop import Trainer
from lmsys.training.reproducible import weights_sha256
from tests.support.training_runs import config, fused_anywhere, scaled, trainer

ALONE = "train.strategy=none", "train.batch_size=4"


def digest(training: Trainer, steps: int, skips: bool = False) -> str:
    """The sha256 of the weights after so many more steps. skips: steps may be skipped."""
    for _ in range(steps):
        assert training.train_step()[0].taken or skips
    return weights_sha256(training.strategy.full_state_dict())


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows fused blocks on a CPU, where PyTorch computes them; users' trainings refuse that."""
    monkeypatch.setattr(fused, "why_not", lambda device: "")


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("strategy", ["none", "naive", "bucketed"])
def test_on_a_cpu_a_fused_training_has_the_bits_of_an_eager_one(tmp_path: Path, strategy: str) -> None:
    settings = "train.batch_size=4", f"train.strategy={strategy}"
    eager, other = (trainer(config(tmp_path, *settings, f"train.fused={way}")) for way in ("false", "true"))
    assert digest(eager, 3) == digest(other, 3)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_resumed_training_reads_no_old_copies(tmp_path: Path, precision: str) -> None:
    """A training reads rounded copies of weights; a resumed one makes them again from the checkpoint."""
    run = config(tmp_path, *ALONE, "train.fused=true", f"train.precision={precision}")
    whole, casting, first = trainer(run), trainer(run), trainer(run)
    casting.model.rounded = casting.optimizer.rounded = None
    expected = digest(whole, 4)
    assert whole.model.rounded.of(whole.model.lm_head.weight) is not None
    assert digest(casting, 4) == expected
    digest(first, 2)
    first.save(tmp_path / "checkpoints")
    resumed = trainer(run, resume=True)
    assert resumed.step == 2
    assert digest(resumed, 2) == expected


def test_copies_follow_what_other_ranks_have_stepped(group: WorkerGroup, tmp_path: Path) -> None:
    """Parameters from other ranks arrive as parts of flat buffers."""
    settings = "train.strategy=naive", "train.fused=true", "train.precision=bf16"
    runs = (config(tmp_path, *settings, f"train.sharded_optimizer={way}") for way in ("false", "true"))
    whole, sharded = (group.run(fused_anywhere, run, 2, 3) for run in runs)
    assert whole == sharded and len({*whole}) == 1


@pytest.mark.parametrize(
    ("device", "strategy", "triton", "message"),
    [
        ("cpu", "none", True, "strategy 'none': fused blocks are kernels for a CUDA device, and this is cpu"),
        ("cuda", "none", False, "fused blocks are kernels in Triton: pip install triton"),
        ("cuda", "zero1", True, "strategy 'zero1': it waits for the parameters of a block when that is called"),
    ],
)
def test_what_it_needs_is_named(
    device: str, strategy: str, triton: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "HAS_TRITON", triton)
    why_not = fused.why_not
    monkeypatch.setattr(fused, "why_not", lambda _: why_not(SimpleNamespace(type=device)))
    with pytest.raises(ValueError, match=f"train.fused=true with .*{message}"):
        trainer(config(tmp_path, f"train.strategy={strategy}", "train.fused=true"))


@pytest.mark.usefixtures("anywhere")
def test_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint_blocks='matmuls' must be 0"):
        trainer(config(tmp_path, *ALONE, "train.fused=true", "model.checkpoint_blocks=matmuls"))
    with pytest.raises(ValueError, match="checkpoint_blocks=fit with train.fused=true: .* it must be none"):
        fit = "train.memory_gib=1", "model.checkpoint_blocks=fit"
        trainer(config(tmp_path, *ALONE, "train.fused=true", *fit))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_replayed_fused_training_has_the_bits_of_its_launches(tmp_path: Path, precision: str) -> None:
    """In fp16 the first steps are skipped, so that the loss scale of a replay is another than that of the capture."""
    settings = *ALONE, "train.fused=true", f"train.precision={precision}", "train.reproducible=true"
    runs = (config(tmp_path, *settings, "train.device=cuda", f"train.graph={way}") for way in ("false", "true"))
    with scaled(2.0**30, 2):
        launched, replayed = (trainer(run, device=torch.device("cuda")) for run in runs)
        digests = {digest(training, 8, skips=precision == "fp16") for training in (launched, replayed)}
    assert len(digests) == 1 and launched.scaler.state_dict() == replayed.scaler.state_dict()
    assert (launched.skipped >= 2) == (precision == "fp16")
