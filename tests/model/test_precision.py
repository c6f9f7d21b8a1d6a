"""The mixed-precision study says what rounding theory says."""

import subprocess
import sys
from pathlib import Path

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
