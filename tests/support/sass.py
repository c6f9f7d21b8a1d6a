"""Compiles the Triton kernels of attention for any card, with or without a GPU, and counts instructions of binaries.

SASS is the assembly language of NVIDIA's GPUs.
`python -m tests.support.sass` prints one JSON line for each kernel: registers, spills (LDL, STL), tensor-core
instructions (HMMA; HGMMA, and the DEPBAR that wait for them; UTCHMMA), bulk tensor loads (UTMALDG), and in its loops
the spills and asynchronous copies (LDGSTS). Arguments choose cards (`sm_86`; else sm_90), dtypes (else bfloat16),
head dimensions (`128`) and masks (`causal`). `--table` prints the table of docs/flash_triton.md instead. It must run
without TRITON_INTERPRET, so the tests start it in a process of its own.

Kernels are compiled with the arguments that `lmsys.attention.flash_triton` and `flash_triton_decode` launch them with.
Edit `compile_kernel` or `compile_decoding` when these launches change: constants for a new constexpr, `types` or
POINTERS for a new argument, TILED_BY_QUERIES for a new kernel. A new mask is an entry of MASKS and, if the row has to
be asked about it, of `why_not`.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dev.targets.binary import disassembled, loops, number, registers_of
from dev.targets.cards import CARDS
from lmsys.attention import AttentionCase, flash_triton, flash_triton_decode
from lmsys.attention.tuning import Tile, candidates
from lmsys.kernels.launch import FUSED, Strided
from lmsys.values import choice

KERNELS = {name: kernel for name, (kernel, _) in flash_triton.KERNELS.items()}
TRITON_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TRITON_NAMES}
# {kernel: its tensors whose tiles have block_q rows}; tiles of all other tensors have block_k rows.
TILED_BY_QUERIES = {"fwd": ("q", "o"), "dq": ("q", "o", "do", "dq"), "dkdv": ("q", "do")}
# {mask: the kernel arguments that describe it}. "full" and "causal" need none: the constant CAUSAL tells them apart.
# "bounds" limits each query to an interval of keys, and "alibi" adds ALiBi's slopes to that.
MASKS = {
    "full": (),
    "causal": (),
    "bounds": flash_triton.EXTENT[:3],
    "alibi": (*flash_triton.EXTENT[:3], "slopes_ptr", "position_ptr", "dlse_ptr"),
}
# Types of the pointers that are not to float32.
POINTERS = {**dict.fromkeys(("first_ptr", "end_ptr", "position_ptr"), "*i32"), "spoilt_ptr": "*i1"}
DECODING = (64, 1), (64, 16), (128, 1), (128, 16), (256, 1)  # (head_dim, queries) for which decoding is compiled
TMA = 90, 100  # architectures on which kernels move tiles by TMA
# {architecture: bytes of shared memory that a block may have}. An architecture is a number, as 80 for sm_80.
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
    """The compiled kernel `name` of KERNELS, as `flash_triton` launches it with one query head per key head (G = 1).

    block_d    columns of a tile: the head dimension
    precision  `input_precision` of products of float32, as "ieee"
    extent     names of the arguments that describe the mask (a value of MASKS)
    clean      True: the second launch of a backward, which computes again the tiles that a NaN has reached
    """
    kernel = flash_triton.AGAIN[name] if clean else KERNELS[name]
    constants = {  # as in `flash_triton._Launch`; arguments that are None are constants, too
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "D": block_d,
        "CAUSAL": causal,
        "PRECISION": precision,
        "G": 1,
        **{name: None for name in flash_triton.EXTENT if name in kernel.arg_names and name not in extent},
        **({} if clean else {"ahead": None}),
        **({} if name == "fwd" else {"ONE_FLAG": False} if clean else {"CLEAN": False}),
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
    """The type of a tensor argument whose tiles have the shape `block`.

    A TMA descriptor, or elsewhere `Strided`: a pointer, four strides or sizes, and the number of columns.
    """
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

    Four query heads share a key head, and each batch entry has a key length.
    """
    kernel = flash_triton_decode._split_keys_kernel
    plan = flash_triton_decode.plan_of(
        owners=64, group=4, queries=queries, keys=32_768, tile_d=head_dim, dtype=dtype, gpu=(132, SHARED[arch])
    )
    constants = {
        "HEADS": plan.heads,
        "QUERIES": plan.queries,
        "BLOCK_K": plan.block_k,
        "D": head_dim,
        "COLUMNS": head_dim,
        "UNIT": 1.0,
        "PRECISION": "ieee",
        "CHAINED": arch >= 90,
        "softcap": None,
        "offset_ptr": None,
    }
    types: dict[str, Any] = {"lengths_ptr": "*i32", "scale": "fp32", "part_o_ptr": "*fp32", "part_lse_ptr": "*fp32"}
    types["q_desc"] = tiles(dtype, [1, plan.heads, plan.queries, head_dim], arch)
    types |= dict.fromkeys(("k_desc", "v_desc"), tiles(dtype, [1, 1, plan.block_k, head_dim], arch))
    return compiled(kernel, types, constants, head_dim, plan.num_warps, plan.num_stages, arch)


def count(mnemonics: Mapping[str, str], sass: str) -> dict[str, int]:
    """By key, how many words of the code begin with its pattern."""
    return {key: len(re.findall(rf"\b{mnemonic}", sass)) for key, mnemonic in mnemonics.items()}


def resources(kernel: Any, sass: str | None = None) -> dict[str, int]:
    """{"registers": of a thread, "shared": bytes of shared memory, key of MNEMONICS: number of these instructions}.

    sass  the kernel's disassembly, if the caller has it
    """
    counts = count(MNEMONICS, disassembled(kernel) if sass is None else sass)
    return {"registers": registers_of(kernel), "shared": kernel.metadata.shared, **counts}


def in_loops(sass: str) -> dict[str, int]:
    """{"loop_spills": spills in all loops, "copies": asynchronous copies, "products": tensor-core instructions}.

    Copies and products are those of the main loop: the shortest one with more than one product.
    """
    every = list(loops(sass))
    main = min((loop for loop in every if number(loop, *PRODUCT) > 1), key=len, default=[])
    spills = sum(number(loop, "LDL", "STL") for loop in every)
    return {"loop_spills": spills, "copies": number(main, "LDGSTS"), "products": number(main, *PRODUCT)}


def counted(kernel: Any) -> dict[str, int]:
    """The counts of `resources` and of `in_loops` together."""
    sass = disassembled(kernel)
    return resources(kernel, sass) | in_loops(sass)


def why_not(arch: int, mask: str) -> str | None:
    """The reason why the row `flash_triton` refuses a mask on a card, or None.

    mask  a key of MASKS, or "Q1", "Q16": decoding with so many queries
    """
    queries = int(mask[1:]) if mask.startswith("Q") else 4096
    case = AttentionCase(
        batch=1,
        heads=4,
        kv_heads=1,
        queries=queries,
        keys=4096,
        head_dim=64,
        dtype="bfloat16",
        causal=mask != "full",
        device="cuda",
        capability=divmod(arch, 10),
    )
    options: dict[str, dict[str, Any]] = {"bounds": {"window": 64}, "alibi": {"alibi": True}}
    return flash_triton.flash_triton_supports(replace(case, **options.get(mask, {})))


def lines(arch: int, dtype_name: str, head_dims: list[int], masks: list[str]) -> Iterator[dict[str, Any]]:
    """Yields a line, {key: value}, for each kernel with the first tile of `candidates`, and for decoding.

    Left out are kernels that the row refuses, and float32 at head dimension 128, which no test or table needs.
    """
    dtype = DTYPES[dtype_name]
    card = {"arch": arch, "dtype": dtype_name, "room": SHARED[arch]}
    for name, head_dim, mask in product(KERNELS, head_dims, masks):
        if (head_dim, dtype) == (128, torch.float32) or why_not(arch, mask):
            continue
        tile = candidates(name, dtype, head_dim, "ieee", arch in TMA)[0]
        kernel = compile_kernel(name, dtype, head_dim, mask == "causal", tile, "ieee", MASKS[mask], arch)
        # HMMA instructions of a warp for a pair of tiles, if each matmul is made once.
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


@dataclass
class Selection:
    """The kernels that words choose: `Selection.of(["sm_86", "128", "causal"])`."""

    archs: list[int]
    dtypes: list[str]
    head_dims: list[int]
    masks: list[str]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Selection":
        """ValueError for a word that chooses nothing."""
        cards = {f"sm_{arch}": arch for arch in SHARED}
        for word in words:
            if not word.isdigit():
                choice(word, [*cards, *DTYPES, *MASKS], f"{word!r} is no head dimension; any other word ")
        return cls(
            archs=[cards[word] for word in words if word in cards] or [90],
            dtypes=[word for word in words if word in DTYPES] or ["bfloat16"],
            head_dims=[int(word) for word in words if word.isdigit()] or [64, 128],
            masks=[word for word in words if word in MASKS] or list(MASKS),
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.sass", description=__doc__)
    parser.add_argument("words", nargs="*", help="cards, dtypes, head dimensions, masks")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    try:
        selection = Selection.of(options.words)
    except ValueError as error:
        parser.error(str(error))
    for arch, dtype in product(selection.archs, selection.dtypes):
        for line in lines(arch, dtype, selection.head_dims, selection.masks):
            if not options.table:
                print(json.dumps(line), flush=True)
            elif "tile" in line:
                print(row(line), flush=True)


if __name__ == "__main__":
    main()
