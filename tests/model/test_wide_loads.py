"""The model's Triton kernels, compiled for sm_90 without a GPU, load and store 16 bytes at once, and do not spill.

A mask can hide from the compiler that a load is aligned. The kernel is then still right, but loads single numbers,
which made SwiGLU more than twice as slow. A new kernel has an entry in `builds` and EXPECTED. Run as a module, this
file prints the counts as JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.processes import compiling

pytest.importorskip("triton", reason="pip install triton==3.6.0 to compile its kernels")

# {kernel: (loads, stores) of 16 bytes in the code of a thread}. Each moves 8 numbers of two bytes, or 4 of four bytes.
# A thread has 8, 16 or 40 numbers of each tensor.
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
    """Resources of a kernel compiled for sm_90, and the numbers of its wide loads ("ld") and stores ("st").

    types  {argument: type}; others are int32. Pointers and numbers that Triton specialises on are multiples of 16, as
           in a launch.
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
    """{kernel: its counts}, as a model of 768 channels in 12 heads launches it in bfloat16, with a float32 stream."""
    from lmsys.config import IGNORED
    from lmsys.model import fused_triton, loss_triton

    counts = {}
    types = {
        "logits_ptr": "*bf16",
        "labels_ptr": "*i64",
        "losses_ptr": "*fp32",
        "lses_ptr": "*fp32",
        "factors_ptr": "*fp32",
    }
    absent = "label_smoothing", "z_loss", "softcap"  # options that are None; without weights factors are, too
    for name, vocabulary, more in (("loss, two tiles", 10_000, ("factors_ptr",)), ("loss, two passes", 32_000, ())):
        options = loss_triton.row_options(vocabulary, vector=8) | dict.fromkeys((*absent, *more))
        counts[name] = build(loss_triton._cross_entropy_kernel, types, IGNORED=IGNORED, GRADIENT=True, **options)

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
    counts["add_norm forward"] = build(fused_triton._add_norm_forward_kernel, types, **row, ADDS=True)
    counts["add_norm backward"] = build(fused_triton._add_norm_backward_kernel, types, **rows, ADDS=True, BOTH=True)
    part = fused_triton.swiglu_options(3072)
    counts["swiglu forward"] = build(fused_triton._swiglu_forward_kernel, types, **part)
    counts["swiglu backward"] = build(fused_triton._swiglu_backward_kernel, types, **part)

    types |= dict.fromkeys(("HEADS", "Q", "K", "V"), "*bf16")
    heads = {"H": 12, "HKV": 12, "D": 64, "BLOCK_H": 32, "BLOCK_D": 64, "BACKWARD": False, "IN_PLACE": True}
    counts["rotation"] = build(fused_triton._rotate_kernel, types, 4, **heads)
    return counts


@pytest.mark.long
def test_for_hopper_kernels_move_16_bytes_at_once_and_do_not_spill() -> None:
    (counts,) = compiling("tests.model.test_wide_loads")
    assert {name: (kernel["ld"], kernel["st"]) for name, kernel in counts.items()} == EXPECTED
    assert not any(kernel["LDL"] + kernel["STL"] for kernel in counts.values()), "registers spill to local memory"


if __name__ == "__main__":
    print(json.dumps(builds()))
