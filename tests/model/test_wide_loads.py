"""The model's kernels in Triton, compiled for sm_90 without a GPU: a thread moves 16 bytes at once, and nothing spills.

A mask can hide from the compiler that a load is aligned. The kernel is as right as before then, and loads numbers one
by one: SwiGLU took more than twice as long so.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.processes import compiling

pytest.importorskip("triton", reason="pip install triton==3.6.0 to compile its kernels")

# Loads and stores of 16 bytes in the code of a thread, of all tensors together, as a small model launches it: one for 8
# numbers of two bytes, or for 4 of four bytes. A thread has 8, 16 or 40 numbers of a tensor.
EXPECTED = {
    "loss, two tiles": (5, 5),
    "loss, two passes": (4, 2),
    "add_norm forward": (5, 3),
    "add_norm backward": (7, 5),
    "swiglu forward": (4, 2),
    "swiglu backward": (6, 4),
    "rotation": (4, 2),
}


def build(
    kernel: Any, types: Mapping[str, str], num_warps: int, maxnreg: int | None = None, **constants: Any
) -> dict[str, int]:
    """Resources of a kernel for sm_90, and its wide loads and stores; not in the interpreter.

    What has no type is a whole number. As `launch` does, pointers and numbers that are specialised on are multiples
    of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.support.sass import resources

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {name: (index,) for index, name in enumerate(signature)}
    special = [
        p.name for p in kernel.params if not p.do_not_specialize and signature[p.name] not in ("constexpr", "fp32")
    ]
    aligned = {places[name]: [["tt.divisibility", 16]] for name in special}
    values = {places[name]: value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": num_warps, "maxnreg": maxnreg}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    wide = {name: compiled.asm["ptx"].count(f"{name}.global.v4") for name in ("ld", "st")}
    return resources(compiled) | wide


def builds() -> dict[str, dict[str, int]]:
    """Each kernel as a model of 768 channels in 12 heads launches it in bfloat16, with a stream in float32."""
    from lmsys.config import IGNORED
    from lmsys.model import fused_triton, loss_triton

    found = {}
    types = {
        "logits_ptr": "*bf16",
        "labels_ptr": "*i64",
        "losses_ptr": "*fp32",
        "lses_ptr": "*fp32",
        "factors_ptr": "*fp32",
    }
    absent = "label_smoothing", "z_loss", "softcap"
    for name, vocabulary in (("loss, two tiles", 10_000), ("loss, two passes", 32_000)):
        options = loss_triton.row_options(vocabulary, vector=8) | dict.fromkeys(absent)
        found[name] = build(loss_triton._cross_entropy_kernel, types, IGNORED=IGNORED, GRADIENT=True, **options)

    narrow = (
        "BRANCH",
        "NORMALISED",
        "D_NORMALISED",
        "D_BRANCH",
        "D_PRODUCT",
        "HALVES",
        "PRODUCT",
        "D_HALVES",
    )
    wide = ("X", "WEIGHT", "TOTAL", "RSTD", "D_TOTAL", "DX", "D_WEIGHTS", "COS", "SIN")
    types = dict.fromkeys(narrow, "*bf16") | dict.fromkeys(wide, "*fp32") | {"eps": "fp32"}
    row, rows = fused_triton.norm_options(768), fused_triton.norm_backward_options(768)
    found["add_norm forward"] = build(fused_triton._add_norm_forward_kernel, types, **row, ADDS=True)
    found["add_norm backward"] = build(fused_triton._add_norm_backward_kernel, types, **rows, ADDS=True, BOTH=True)
    part = fused_triton.swiglu_options(3072)
    found["swiglu forward"] = build(fused_triton._swiglu_forward_kernel, types, **part)
    found["swiglu backward"] = build(fused_triton._swiglu_backward_kernel, types, **part)

    types |= dict.fromkeys(("HEADS", "Q", "K", "V"), "*bf16")
    heads = {"H": 12, "HKV": 12, "D": 64, "BLOCK_H": 32, "BLOCK_D": 64, "BACKWARD": False, "IN_PLACE": True}
    found["rotation"] = build(fused_triton._rotate_kernel, types, 4, **heads)
    return found


@pytest.mark.long
def test_for_hopper_kernels_move_16_bytes_at_once_and_do_not_spill() -> None:
    (found,) = compiling("tests.model.test_wide_loads")
    assert {name: (one["ld"], one["st"]) for name, one in found.items()} == EXPECTED
    assert not any(one["LDL"] + one["STL"] for one in found.values()), "registers spill to local memory"


if __name__ == "__main__":
    print(json.dumps(builds()))
