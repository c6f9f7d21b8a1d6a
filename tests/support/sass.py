"""Compiles the Triton kernels for sm_90, with or without a GPU, and reads what came out.

`python -m tests.support.sass` prints one JSON line for each kernel, dtype, head dimension (or of the one that is
named, as by `128`), mask and tile: registers, spills (LDL, STL), tensor-core instructions (HGMMA, and the DEPBAR that
wait for them; HMMA) and bulk tensor loads (UTMALDG). It must run without TRITON_INTERPRET, so the tests start it in a
process of its own.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmsys.attention import flash_triton, flash_triton_decode
from lmsys.attention.tuning import Tile, candidates
from lmsys.kernels.launch import FUSED

KERNELS = {name: kernel for name, (kernel, _) in flash_triton.KERNELS.items()}
TRITON_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TILED_BY_QUERIES = {"fwd": ("q", "o"), "dq": ("q", "o", "do", "dq"), "dkdv": ("q", "do")}


MASKS = {  # the last two: of patterns
    "full": (),
    "causal": (),
    "bounds": flash_triton.EXTENT[:3],
    "alibi": (*flash_triton.EXTENT[:3], "slopes_ptr", "position_ptr", "dlse_ptr"),
}
POINTERS = dict.fromkeys(("first_ptr", "end_ptr", "position_ptr"), "*i32")
DECODING = (64, 1), (64, 16), (128, 1), (128, 16), (256, 1)  # head_dim, queries
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MNEMONICS = {name: name for name in ("HGMMA", "HMMA", "UTMALDG", "LDL", "STL")} | {"waits": r"WARPGROUP\.DEPBAR"}


def compile_kernel(
    name: str,
    dtype: torch.dtype,
    block_d: int,
    causal: bool,
    tile: Tile,
    precision: str,
    extent: tuple[str, ...] = (),
) -> Any:
    """The compiled kernel, as `flash_triton` launches it with G = 1; `extent` names what it is given of a pattern."""
    kernel = KERNELS[name]
    constants = {
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "D": block_d,
        "CAUSAL": causal,
        "PRECISION": precision,
        "G": 1,
        **{name: None for name in flash_triton.EXTENT if name in kernel.arg_names and name not in extent},
        **({"CLEAN": False} if name == "dkdv" else {}),
    }
    signature = {}
    for argument in kernel.arg_names:
        stem = argument.rpartition("_")[0]
        block = tile.block_q if stem in TILED_BY_QUERIES[name] else tile.block_k
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("lse2_desc", "delta_desc"):
            signature[argument] = f"tensordesc<fp32[{tile.block_q}]>"
        elif argument.endswith("_desc"):
            signature[argument] = f"tensordesc<{TRITON_NAMES[dtype]}[1, 1, {block}, {block_d}]>"
        else:
            kind = "*fp32" if argument.endswith("_ptr") else "fp32" if argument in ("scale", "softcap") else "i32"
            signature[argument] = POINTERS.get(argument, kind)
    indices = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=indices, attrs={})
    options = FUSED | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_decoding(dtype: torch.dtype, head_dim: int, queries: int) -> Any:
    """`_split_keys_kernel` as `decode` launches it on an H200: four heads a group, caches of their own lengths."""
    kernel, gpu = flash_triton_decode._split_keys_kernel, (132, 227 * 1024)
    plan = flash_triton_decode.plan_of(64, 4, queries, 32_768, head_dim, dtype, gpu)
    sizes = {"HEADS": plan.heads, "QUERIES": plan.queries, "BLOCK_K": plan.block_k, "D": head_dim}
    constants = {**sizes, "COLUMNS": head_dim, "UNIT": 1.0, "PRECISION": "ieee", "CHAINED": True, "softcap": None}
    constants["offset_ptr"] = None
    name, types = TRITON_NAMES[dtype], {"lengths_ptr": "*i32", "scale": "fp32"}
    types["q_desc"] = f"tensordesc<{name}[1, {plan.heads}, {plan.queries}, {head_dim}]>"
    types |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{name}[1, 1, {plan.block_k}, {head_dim}]>")
    types |= dict.fromkeys(("part_o_ptr", "part_lse_ptr"), "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    indices = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=indices, attrs={})
    options = FUSED | {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def disassembled(kernel: Any) -> str:
    """The kernel's SASS, an instruction a line."""
    with _cubin(kernel) as path:
        command = [TOOLS / "nvdisasm", "-c", "-ndf", path]  # neither data nor where indirect branches lead
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count(mnemonics: Mapping[str, str], sass: str) -> dict[str, int]:
    """How often each of these patterns begins a word."""
    return {key: len(re.findall(rf"\b{mnemonic}", sass)) for key, mnemonic in mnemonics.items()}


def resources(kernel: Any, sass: str | None = None) -> dict[str, int]:
    """Registers a thread, shared memory in bytes, and counts of the instructions that tell a good build."""
    with _cubin(kernel) as path:
        command = [TOOLS / "cuobjdump", "-res-usage", path]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    counts = count(MNEMONICS, disassembled(kernel) if sass is None else sass)
    return {"registers": int(registers[1]), "shared": kernel.metadata.shared, **counts}


@contextmanager
def _cubin(kernel: Any) -> Iterator[str]:
    """A file with the kernel's binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        yield file.name


def main(dtypes: list[str], head_dims: list[int]) -> None:
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        for name in KERNELS:
            for block_d in (one for one in (64, 128) if one in head_dims and (one, dtype) != (128, torch.float32)):
                tile = candidates(name, dtype, block_d, "ieee")[0]
                for mask, extent in MASKS.items():
                    found = resources(compile_kernel(name, dtype, block_d, mask == "causal", tile, "ieee", extent))
                    line = {"kernel": name, "dtype": dtype_name, "head_dim": block_d, "mask": mask, **found}
                    print(json.dumps(line), flush=True)
        for head_dim, queries in (one for one in DECODING if one[0] in head_dims and dtype != torch.float32):
            found = resources(compile_decoding(dtype, head_dim, queries))
            line = {"kernel": "split_keys", "dtype": dtype_name, "head_dim": head_dim, "mask": f"Q{queries}", **found}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sizes, dtypes = ([name for name in sys.argv[1:] if name.isdigit() == digits] for digits in (True, False))
    main(dtypes or ["bfloat16"], [*map(int, sizes)] or [64, 128, 256])
