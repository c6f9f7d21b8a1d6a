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
from lmsys.kernels.launch import FUSED, Strided

KERNELS = {name: kernel for name, (kernel, _) in flash_triton.KERNELS.items()}
TRITON_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TILED_BY_QUERIES = {"fwd": ("q", "o"), "dq": ("q", "o", "do", "dq"), "dkdv": ("q", "do")}


MASKS = {"full": (), "causal": (), "bounds": flash_triton.EXTENT[:3]}  # the last: a pattern's
POINTERS = {"first_ptr": "*i32", "end_ptr": "*i32"}
DECODING = (64, 1), (64, 16), (128, 1), (128, 16), (256, 1)  # head_dim, queries
TMA = 90, 100  # architectures on which kernels move tiles by it
SHARED = {arch: 1024 * kib for arch, kib in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()}  # of a block
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
    arch: int = 90,
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
        **dict.fromkeys(flash_triton.EXTENT[len(extent) :]),
        **({"CLEAN": False} if name == "dkdv" else {}),
    }
    types: dict[str, Any] = {"scale": "fp32", "softcap": "fp32", **POINTERS}
    for argument in kernel.arg_names:
        stem, _, kind = argument.rpartition("_")
        block = tile.block_q if stem in TILED_BY_QUERIES[name] else tile.block_k
        if stem in ("lse2", "delta") and kind == "desc":
            types[argument] = f"tensordesc<fp32[{tile.block_q}]>" if arch in TMA else "*fp32"
        elif kind == "desc":
            types[argument] = tiles(dtype, [1, 1, block, block_d], arch)
        elif kind == "ptr":
            types.setdefault(argument, "*fp32")
    return compiled(kernel, types, constants, block_d, tile.num_warps, tile.num_stages, arch)


def tiles(dtype: torch.dtype, block: list[int], arch: int) -> Any:
    """The type of an argument whose tiles have that shape: a descriptor, or `Strided`."""
    name = TRITON_NAMES[dtype]
    return f"tensordesc<{name}{block}>" if arch in TMA else Strided(f"*{name}", *4 * ["i32"], "constexpr")


def compiled(
    kernel: Any, types: dict[str, Any], constants: dict[str, Any], head_dim: int, warps: int, stages: int, arch: int
) -> Any:
    """A kernel compiled for `arch`; arguments that have neither a type nor a value are int32."""
    types |= dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    strided = [i for i, kind in enumerate(signature.values()) if isinstance(kind, Strided)]
    values |= {(i, Strided._fields.index("columns")): head_dim for i in strided}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs={})
    options = FUSED | {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_decoding(dtype: torch.dtype, head_dim: int, queries: int, arch: int = 90) -> Any:
    """`_split_keys_kernel` as `decode` launches it on a GPU as large as an H200, but for its shared memory.

    Four heads are a group, and caches have lengths of their own.
    """
    kernel, gpu = flash_triton_decode._split_keys_kernel, (132, SHARED[arch])
    plan = flash_triton_decode.plan_of(64, 4, queries, 32_768, head_dim, dtype, gpu)
    sizes = {"HEADS": plan.heads, "QUERIES": plan.queries, "BLOCK_K": plan.block_k, "D": head_dim}
    chained = arch >= 90
    constants = {**sizes, "COLUMNS": head_dim, "UNIT": 1.0, "PRECISION": "ieee", "CHAINED": chained, "softcap": None}
    types: dict[str, Any] = {"lengths_ptr": "*i32", "scale": "fp32", "part_o_ptr": "*fp32", "part_lse_ptr": "*fp32"}
    types["q_desc"] = tiles(dtype, [1, plan.heads, plan.queries, head_dim], arch)
    types |= dict.fromkeys(("k_desc", "v_desc"), tiles(dtype, [1, 1, plan.block_k, head_dim], arch))
    return compiled(kernel, types, constants, head_dim, plan.num_warps, plan.num_stages, arch)


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
