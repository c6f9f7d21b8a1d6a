"""`save_checkpoint` and `load_checkpoint`: a loaded training goes on as the saved one, and a bad file is named."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lmsys.training.checkpoint import load_checkpoint, save_checkpoint
from lmsys.training.optimizer import AdamW


def made(seed: int, width: int = 4) -> tuple[nn.Module, AdamW]:
    """A small model whose inputs have this width, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 3), nn.Linear(3, 1))
    return model, AdamW(model.parameters(), lr=0.1)


def trained(model: nn.Module, optimizer: AdamW, steps: int) -> list[torch.Tensor]:
    """The model's parameters after so many more steps."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step + 1))).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [str, Path, "file"])
def test_a_loaded_training_goes_on_as_the_saved_one(tmp_path: Path, kind: type | str) -> None:
    path = tmp_path / "new" / "checkpoint.pt"
    out = io.BytesIO() if kind == "file" else kind(path)
    model, optimizer = made(0)
    trained(model, optimizer, 3)
    save_checkpoint(model, optimizer, 3, out)
    expected = trained(model, optimizer, 2)
    other, its_optimizer = made(1)
    if isinstance(out, io.BytesIO):
        out.seek(0)
    else:
        assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]  # nothing temporary is left
    assert load_checkpoint(out, other, its_optimizer) == 3
    assert all(map(torch.equal, expected, trained(other, its_optimizer, 2)))


def test_a_rate_of_numpy_is_saved_as_a_number(tmp_path: Path) -> None:
    model, optimizer = made(0)
    trained(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = np.float64(0.25)  # as np.cos of a schedule gives it
    save_checkpoint(model, optimizer, np.int64(3), tmp_path / "checkpoint.pt")  # type: ignore[arg-type]
    other, its_optimizer = made(1)
    assert load_checkpoint(tmp_path / "checkpoint.pt", other, its_optimizer) == 3
    assert its_optimizer.param_groups[0]["lr"] == 0.25 and type(its_optimizer.param_groups[0]["lr"]) is float


class WithRandomState(nn.Linear):
    """Has a state that `load_checkpoint` refuses."""

    def get_extra_state(self) -> Any:
        return np.random.default_rng(0).integers(9, size=3)

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_state_that_could_not_be_loaded_is_refused_before_it_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(*made(0), 3, path)
    with pytest.raises(ValueError, match=r"checkpoint.pt: a state must hold tensors and plain values alone.*numpy"):
        save_checkpoint(WithRandomState(2, 2), made(0)[1], 4, path)
    assert load_checkpoint(path, *made(1)) == 3


def test_a_file_that_does_not_fit_or_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.pt: .* loading it gives No such file or directory"):
        load_checkpoint(tmp_path / "nowhere.pt", *made(0))
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(*made(0), 0, path)
    with pytest.raises(ValueError, match=r"checkpoint.pt: does not fit this model and optimizer: Error"):
        load_checkpoint(path, *made(0, width=5))
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match=r"checkpoint.pt: must have 'optimizer'"):
        load_checkpoint(path, *made(0))
    path.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"checkpoint.pt: must hold tensors and plain values alone"):
        load_checkpoint(path, *made(0))
    with pytest.raises(ValueError, match="iteration=-1 must be at least 0"):
        save_checkpoint(*made(0), -1, path)
    assert path.read_bytes() == b"no checkpoint"
