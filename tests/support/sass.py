"""Compiles the Triton kernels of attention for any card, with or without a GPU, and counts instructions of binaries.

`python -m tests.support.sass` prints one JSON line for each kernel: registers, spills (LDL, STL), tensor-core
instructions (HMMA; HGMMA, and the DEPBAR that wait for them; UTCHMMA), bulk tensor loads (UTMALDG), and in its loops
the spills and asynchronous copies (LDGSTS). Arguments choose cards (`sm_86`; else sm_90), dtypes (else bfloat16),
head dimensions (`128`) and masks (`causal`). `--table` prints the table of docs/flash_triton.md instead. It must run
without TRITON_INTERPRET, so the tests start it in a process of its own.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dev.targets.binary import count, disassembled, loops, number, registers_of
from dev.targets.cards import CARDS
from lmsys.attention import AttentionCase, flash_triton, flash_triton_decode
from lmsys.attention.tuning import Tile, candidates
from lmsys.kernels.launch import FUSED, Strided

KERNELS = {name: kernel for name, (kernel, _) in flash_triton.KERNELS.items()}
TRITON_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TILED_BY_QUERIES = {"fwd": ("q", "o"), "dq": ("q", "o", "do", "dq"), "dkdv": ("q", "do")}


MASKS = {  # by name: the arguments that kernels are given of a pattern; the last two are patterns
    "full": (),
    "causal": (),
    "bounds": flash_triton.EXTENT[:3],
    "alibi": (*flash_triton.EXTENT[:3], "slopes_ptr", "position_ptr", "dlse_ptr"),
}
POINTERS = {**dict.fromkeys(("first_ptr", "end_ptr", "position_ptr"), "*i32"), "spoilt_ptr": "*i1"}
DECODING = (64, 1), (64, 16), (128, 1), (128, 16), (256, 1)  # head_dim, queries
TMA = 90, 100  # architectures on which kernels move tiles by TMA
SHARED = {arch: CARDS[f"sm_{arch}"].block_bytes for arch in (80, 86, 89, 90, 100, 120)}
PRODUCT = "HMMA", "HGMMA", "UTCHMMA"  # matmuls of floating-point numbers on tensor cores
MNEMONICS = {name: name for name in (*PRODUCT, "UTMALDG", "LDL", "STL")} | {"waits": r"WARPGROUP\.DEPBAR"}
PRODUCTS = {"fwd": 2, "dq": 3, "dkdv": 4}  # matmuls of a kernel for a pair of tiles
HMMA_MACS = 16 * 8 * 16  # multiply-adds of one instruction


def compile_kernel(
    name: str,
    dtype: torch.dtype,
    block_d: int,
    causal: bool,
    tile: Tile,
    precision: str,
    extent: tuple[str, ...] = (),
    arch: int = 90,
    clean: bool = False,
) -> Any:
    """The compiled kernel, as `flash_triton` launches it with G = 1.

    `extent`: its arguments for a pattern. `clean`: the kernel that computes again what NaN has reached.
    """
    kernel = flash_triton.AGAIN[name] if clean else KERNELS[name]
    constants = {
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "D": block_d,
        "CAUSAL": causal,
        "PRECISION": precision,
        "G": 1,
        **{name: None for name in flash_triton.EXTENT if name in kernel.arg_names and name not in extent},
        **({} if name == "fwd" or clean else {"CLEAN": False, "ahead": None}),
        **({} if name == "fwd" or extent else {"spoilt_ptr": None}),
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
    """The type of an argument whose tiles have the shape `block`: a descriptor, or `Strided`."""
    name = TRITON_NAMES[dtype]
    return f"tensordesc<{name}{block}>" if arch in TMA else Strided(f"*{name}", *4 * ["i32"], "constexpr")


def compiled(
    kernel: Any, types: dict[str, Any], constants: dict[str, Any], head_dim: int, warps: int, stages: int, arch: int
) -> Any:
    """The kernel compiled for `arch`. Arguments that have neither a type nor a constant value are int32."""
    types |= dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    strided = [i for i, kind in enumerate(signature.values()) if isinstance(kind, Strided)]
    values |= {(i, Strided._fields.index("columns")): head_dim for i in strided}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs={})
    options = FUSED | {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_decoding(dtype: torch.dtype, head_dim: int, queries: int, arch: int = 90) -> Any:
    """`_split_keys_kernel` as `decode` launches it on a GPU with 132 multiprocessors and the shared memory of `arch`.

    Heads are in groups of four, and each batch entry has a key length.
    """
    kernel, gpu = flash_triton_decode._split_keys_kernel, (132, SHARED[arch])
    plan = flash_triton_decode.plan_of(64, 4, queries, 32_768, head_dim, dtype, gpu)
    sizes = {"HEADS": plan.heads, "QUERIES": plan.queries, "BLOCK_K": plan.block_k, "D": head_dim}
    chained = arch >= 90
    constants = {**sizes, "COLUMNS": head_dim, "UNIT": 1.0, "PRECISION": "ieee", "CHAINED": chained, "softcap": None}
    constants["offset_ptr"] = None
    types: dict[str, Any] = {"lengths_ptr": "*i32", "scale": "fp32", "part_o_ptr": "*fp32", "part_lse_ptr": "*fp32"}
    types["q_desc"] = tiles(dtype, [1, plan.heads, plan.queries, head_dim], arch)
    types |= dict.fromkeys(("k_desc", "v_desc"), tiles(dtype, [1, 1, plan.block_k, head_dim], arch))
    return compiled(kernel, types, constants, head_dim, plan.num_warps, plan.num_stages, arch)


def resources(kernel: Any, sass: str | None = None) -> dict[str, int]:
    """Registers of a thread, shared memory in bytes, and counts of the instructions in MNEMONICS."""
    counts = count(MNEMONICS, disassembled(kernel) if sass is None else sass)
    return {"registers": registers_of(kernel), "shared": kernel.metadata.shared, **counts}


def in_loops(sass: str) -> dict[str, int]:
    """Spills in all loops together; products and asynchronous copies in the shortest loop that has products."""

    every = list(loops(sass))
    main = min((loop for loop in every if number(loop, *PRODUCT) > 1), key=len, default=[])
    spills = sum(number(loop, "LDL", "STL") for loop in every)
    return {"loop_spills": spills, "copies": number(main, "LDGSTS"), "products": number(main, *PRODUCT)}


def counted(kernel: Any) -> dict[str, int]:
    """All counts of a binary that a line has."""
    sass = disassembled(kernel)
    return resources(kernel, sass) | in_loops(sass)


def why_not(arch: int, mask: str) -> str | None:
    """None, or why the row refuses a mask on a card, such as a pattern that Triton cannot compile for it."""
    few = int(mask[1:]) if mask.startswith("Q") else 4096
    case = AttentionCase(1, 4, 1, few, 4096, 64, "bfloat16", mask != "full", device="cuda", capability=divmod(arch, 10))
    options: dict[str, dict[str, Any]] = {"bounds": {"window": 64}, "alibi": {"alibi": True}}
    return flash_triton.flash_triton_supports(replace(case, **options.get(mask, {})))


def lines(arch: int, dtype_name: str, head_dims: list[int], masks: list[str]) -> Iterator[dict[str, Any]]:
    """A line for the first tile of each kernel, and for decoding."""
    dtype = getattr(torch, dtype_name)
    card = {"arch": arch, "dtype": dtype_name, "room": SHARED[arch]}
    for name, head_dim, mask in product(KERNELS, head_dims, masks):
        if (head_dim, dtype) == (128, torch.float32) or why_not(arch, mask):
            continue
        tile = candidates(name, dtype, head_dim, "ieee", arch in TMA)[0]
        kernel = compile_kernel(name, dtype, head_dim, mask == "causal", tile, "ieee", MASKS[mask], arch)
        needed = PRODUCTS[name] * tile.block_q * tile.block_k * head_dim // HMMA_MACS // tile.num_warps
        size = {"tile": f"{tile.block_q} × {tile.block_k}, {tile.num_warps}, {tile.num_stages}", "needed": needed}
        yield {"kernel": name, "head_dim": head_dim, "mask": mask, **card, **size, **counted(kernel)}
        if name != "fwd" and mask == "bounds":  # the second launch, which has the same tile
            kernel = compile_kernel(name, dtype, head_dim, False, tile, "ieee", MASKS[mask], arch, clean=True)
            yield {"kernel": f"clean {name}", "head_dim": head_dim, "mask": mask, **card, **size, **counted(kernel)}
    for head_dim, queries in DECODING:
        if head_dim in head_dims and dtype != torch.float32 and not why_not(arch, mask := f"Q{queries}"):
            kernel = compile_decoding(dtype, head_dim, queries, arch)
            yield {"kernel": "split_keys", "head_dim": head_dim, "mask": mask, **card, **counted(kernel)}


def row(line: dict[str, Any]) -> str:
    """A row of the table in docs/flash_triton.md."""
    moved = f"{line['copies']} LDGSTS" if line["arch"] not in TMA else f"{line['UTMALDG']} UTMALDG"
    shared = f"{line['shared'] / 1024:.0f} of {line['room'] // 1024}"
    names = "kernel", "head_dim", "tile", "registers"
    cells = f"sm_{line['arch']}", *(line[name] for name in names), shared, line["loop_spills"], moved
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.sass", description=__doc__)
    parser.add_argument("what", nargs="*", help="cards, dtypes, head dimensions, masks")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    archs = [int(word[3:]) for word in options.what if word.startswith("sm_")]
    head_dims = [int(word) for word in options.what if word.isdigit()]
    masks = [word for word in options.what if word in MASKS]
    dtypes = [word for word in options.what if hasattr(torch, word)]
    for arch, dtype in product(archs or [90], dtypes or ["bfloat16"]):
        for line in lines(arch, dtype, head_dims or [64, 128], masks or list(MASKS)):
            if not options.table:
                print(json.dumps(line), flush=True)
            elif "tile" in line:
                print(row(line), flush=True)


if __name__ == "__main__":
    main()
