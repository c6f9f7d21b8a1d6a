"""benchmarks/bench_precision.py: its sums in narrow dtypes, and autocast's dtypes, are what theory predicts."""

import torch

from benchmarks.bench_precision import sums, tensors


def test_a_rounded_sum_loses_more_than_rounded_addends() -> None:
    """0.01 is added a thousand times. A rounded sum is `low`; the addends alone are rounded in `mixed` and `cast`."""
    float16, bfloat16 = (sums(dtype, "cpu")["sums"] for dtype in (torch.float16, torch.bfloat16))
    exact, low, mixed, cast = (abs(total["error"]) for total in float16)
    assert exact < 1e-3 < mixed == cast < 1e-2 < low and float16[1]["result"] == 9.953125
    assert abs(bfloat16[1]["error"]) > 5  # once the sum is 4, adding 0.01 rounds to 4 again: half a unit is larger


def test_autocast_keeps_parameters_norms_loss_and_gradients_wide() -> None:
    dtypes = {tensor["name"]: tensor["dtype"] for tensor in tensors(torch.bfloat16, "cpu")["tensors"]}
    narrow = {name for name, dtype in dtypes.items() if dtype == "bfloat16"}
    assert {"output of layers.0.attn.qkv", "output of layers.0.ffn.w1", "output of lm_head"} <= narrow
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
        "parameters", "output of token_embeddings", "output of layers.0", "loss", "gradients"
    }  # fmt: skip
