"""Unusual arguments that are right, and that the checks of arguments (tests/test_wrong_arguments.py) must not refuse.

Layers take the arguments of torch's layers. Wrapped models, derived configurations and the like are taken as well,
since they can do what is needed, though their classes are others.
"""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lmsys.config import ModelConfig
from lmsys.model import TransformerLM, transformer
from lmsys.training import checkpoint, config, generation, sampling
from lmsys.training.config import RunConfig
from lmsys.training.optimizer import AdamW

CONFIG = ModelConfig(8, 16, 1, 2, vocab_size=300, context_length=16, attention="naive")


def test_an_embedding_and_a_norm_take_torchs_positional_arguments() -> None:
    assert transformer.Embedding(4, 8, 0).padding_idx == 0
    assert torch.equal(transformer.Embedding(4, 8, 2).weight.any(dim=1), torch.tensor([True, True, False, True]))
    assert transformer.Embedding(4, 8, device="meta").weight.is_meta
    assert transformer.RMSNorm(8, 1e-5, False).weight is None
    assert transformer.RMSNorm(8, 1e-5, True, "meta", torch.bfloat16).weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind, sizes", [(transformer.Embedding, (4, 8)), (transformer.RMSNorm, (8,))])
def test_an_embedding_and_a_norm_are_made_without_initialization(kind: Any, sizes: tuple[int, ...]) -> None:
    assert nn.utils.skip_init(kind, *sizes).weight.shape == sizes  # skip_init needs a parameter `device`


class Proxy(nn.Module):
    """Passes on what it does not have itself, as torch's OptimizedModule does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), Proxy])
def test_a_wrapped_model_generates(wrap: Any) -> None:
    model = TransformerLM(CONFIG)
    assert generation.generate(wrap(model), [[1, 2]], 3) == generation.generate(model, [[1, 2]], 3)


def test_a_config_may_be_of_a_derived_class() -> None:
    @dataclass(frozen=True)
    class Larger(ModelConfig):
        remark: str = ""

    @dataclass(frozen=True)
    class Longer(config.TrainConfig):
        pass

    model = Larger(8, 16, 1, 2, vocab_size=300, context_length=16, attention="naive", remark="mine")
    run = RunConfig(model=model, train=Longer())
    assert run.model is model and isinstance(run.changed(["train.lr=1e-2"]).train, Longer)


class Both:
    """Two optimizers with one state dict, which is a list."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def state_dict(self) -> list[Any]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[Any]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def test_a_checkpoint_takes_any_object_with_a_state_dict() -> None:
    first, second = (Both(AdamW([nn.Parameter(torch.ones(2))], lr=lr), AdamW([nn.Parameter(torch.ones(3))]))
                     for lr in (0.5, 0.1))  # fmt: skip
    file = io.BytesIO()
    checkpoint.save_checkpoint(nn.Linear(2, 2), first, 3, file)  # type: ignore[arg-type]
    file.seek(0)
    assert checkpoint.load_checkpoint(file, nn.Linear(2, 2), second) == 3  # type: ignore[arg-type]
    assert second.optimizers[0].param_groups[0]["lr"] == 0.5


def test_get_batch_takes_the_number_of_a_device() -> None:
    assert sampling.get_batch(np.arange(50), 2, 4, None)[0].device.type == "cpu"
    if torch.cuda.is_available():
        assert sampling.get_batch(np.arange(50), 2, 4, 0)[0].is_cuda
    else:
        with pytest.raises(RuntimeError, match="accelerator|CUDA"):  # torch's own: the number is taken
            sampling.get_batch(np.arange(50), 2, 4, 0)
