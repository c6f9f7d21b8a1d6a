"""The mixed-precision study says what rounding theory says."""

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lmsys.model import TransformerLM
from lmsys.model.precision import CONFIG, accumulation, autocast_dtypes


def test_a_rounded_sum_loses_more_than_rounded_addends() -> None:
    exact, low, mixed, cast = (abs(one.error) for one in accumulation())
    assert exact < 1e-3 < mixed == cast < 1e-2 < low
    assert abs(accumulation(torch.bfloat16)[1].error) > 5  # 0.01 is below half a unit of 4: the sum stands still


def test_autocast_keeps_parameters_norms_loss_and_gradients_wide() -> None:
    found = dict(autocast_dtypes(TransformerLM(CONFIG), torch.arange(16)[None], torch.bfloat16))
    narrow = {name for name, dtype in found.items() if dtype == "bfloat16"}
    assert {"output of layers.0.attn.qkv", "output of layers.0.ffn.w1", "output of lm_head"} <= narrow
    assert {name for name, dtype in found.items() if dtype == "float32"} == {
        "parameters", "output of token_embeddings", "output of layers.0", "loss", "gradients"
    }  # fmt: skip


def test_the_tables_are_printed_and_repeat() -> None:
    line = [sys.executable, "-m", "lmsys.model.precision"]
    first, second = (
        subprocess.run(line, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
        for _ in range(2)
    )
    assert first == second and "| output of layers.0.ln1 | bfloat16 |" in first and "9.95312" in first


def gradient_error(residual: str, compiled: bool, device: str) -> float:
    """The error of all gradients under autocast, against float64, as a share of their size."""
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
    found, right = (
        torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]) for one in (model, exact)
    )
    return ((found - right).norm() / right.norm()).item()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_narrow_residual_costs_less_than_half_of_the_error_that_is_there(compiled: bool, device: str) -> None:
    """Every block rounds the stream once more, to 8 bits."""
    wide, narrow = (gradient_error(residual, compiled, device) for residual in ("wide", "narrow"))
    assert wide < narrow < 1.5 * wide


def test_the_residual_is_narrow_where_matmuls_are() -> None:
    model, found = TransformerLM(replace(CONFIG, residual="narrow")), list[torch.dtype]()
    model.layers[0].register_forward_hook(lambda _, args, output: found.extend((args[0].dtype, output.dtype)))
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(torch.arange(16)[None])
    assert found == [torch.float32] * 2 + [torch.bfloat16] * 2
