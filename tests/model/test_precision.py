"""`residual="narrow"`: the residual stream has the dtype of the matmuls, and gradients lose little by that.

With "wide", the default, the stream is float32.
"""

import copy
from dataclasses import replace

import pytest
import torch

from lmsys.config import ModelConfig
from lmsys.model import TransformerLM

CONFIG = ModelConfig(64, 128, 1, 2, vocab_size=97, context_length=16, attention="sdpa_math")


def gradient_error(residual: str, compiled: bool, device: str) -> float:
    """The relative error, in the L2 norm, of all gradients under bfloat16 autocast."""
    torch.manual_seed(0)
    config = replace(CONFIG, num_layers=6, residual=residual)
    model, tokens = TransformerLM(config, device=device), torch.randint(97, (4, 17)).to(device)
    exact = copy.deepcopy(model).double()
    exact.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    if compiled:
        model.compile_blocks()
    with torch.autocast(device, torch.bfloat16):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    gradients, right = (
        torch.cat([p.grad.flatten() for p in trained.parameters() if p.grad is not None]) for trained in (model, exact)
    )
    return ((gradients - right).norm() / right.norm()).item()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_narrow_residual_adds_less_than_half_to_the_error(compiled: bool, device: str) -> None:
    """Every block of a narrow model rounds the stream once more, to the 8 bits of bfloat16's mantissa."""
    wide, narrow = (gradient_error(residual, compiled, device) for residual in ("wide", "narrow"))
    assert wide < narrow < 1.5 * wide


def test_the_residual_is_narrow_where_matmuls_are() -> None:
    model, dtypes = TransformerLM(replace(CONFIG, residual="narrow")), list[torch.dtype]()
    model.layers[0].register_forward_hook(lambda _, args, output: dtypes.extend((args[0].dtype, output.dtype)))
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(torch.arange(16)[None])
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2
