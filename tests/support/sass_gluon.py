"""Compiles the kernels of `flash_gluon` for sm_90a, with or without a GPU, and counts instructions of their binaries.

`python -m tests.support.sass_gluon` prints one JSON line for each kernel; with `every` for each kernel that any plan
launches; with 64 or 128 only for that head dimension; with `float16` for that dtype, else for bfloat16. Tests compare
the counts with what is expected. Besides the counts of `tests.support.sass` there are reductions by TMA (UTMAREDG) and
from registers (REDG), stores of 16 bytes (STG), bulk stores (UTMASTG), barriers, fences that reach other CTAs, and
counts of faults of the compiler: `hazards`, `reused` and `restarts`. It must run without TRITON_INTERPRET.

`forward` and `backward` compile kernels with the arguments that `lmsys.attention.flash_gluon.launch` launches them
with. When a kernel has a new argument, edit the signature there, or BOUNDS and POINTERS. A new count is an entry of
MNEMONICS; its key is the key of the JSON line.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from dev.plan_cases import SHORT, candidates
from dev.targets.binary import disassembled
from lmsys.attention.flash_gluon.backward import backward_kernel
from lmsys.attention.flash_gluon.forward import forward_kernel
from lmsys.attention.flash_gluon.launch import BLOCK_Q, ROWS, TILE_K, backward_options, forward_options, layout
from lmsys.attention.flash_gluon.plans import (
    BACKWARD,
    FORWARD,
    BackwardPlan,
    ForwardPlan,
    bounded_plans,
    forward_plan,
)
from lmsys.attention.flash_gluon.preprocess import postprocess_kernel, preprocess_kernel
from lmsys.kernels.launch import FUSED
from lmsys.values import choice
from tests.support.sass import TRITON_NAMES, count, resources

# {argument: type} of the pointers that are not to float32; BOUNDS are those of a pattern.
BOUNDS = {**dict.fromkeys(("first_ptr", "end_ptr", "query_end_ptr"), "*i32"), "spoilt_ptr": "*i64"}
POINTERS = {"dq_semaphore": "*i32", "counter": "*i32", "parameters": "*i64"}
# {key of the JSON line: pattern of the instructions that it counts}; ADDS are additions and stores to dq.
ADDS = {"UTMAREDG": "UTMAREDG", "REDG": r"REDG\.E\.ADD\.F32x4", "STG": r"STG\.E\.128"}
MNEMONICS = ADDS | {"UTMASTG": "UTMASTG", "SYNCS": "SYNCS", "BAR": r"BAR\.(?:SYNC|ARV)", "fences": r"MEMBAR\.\w+\.GPU"}
MNEMONICS |= {"ACQBULK": "ACQBULK", "PREEXIT": "PREEXIT"}  # griddepcontrol.wait and .launch_dependents


def descriptor(block: list[int], dtype: torch.dtype) -> str:
    """The type of a TMA descriptor whose tiles have the shape `block`."""
    return f"tensordesc<{TRITON_NAMES[dtype]}[{', '.join(map(str, block))}],{layout(block, dtype)!r}>"


def compile_kernel(function: Any, signature: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """The kernel compiled for sm_90a.

    signature  {argument: type}; others have types by their names: *_ptr is a pointer to float32, *scale a float32, all
               others are int32
    constants  {argument: value}
    options    of the compiler, such as maxnreg
    """
    types = {}
    for name in function.arg_names:
        plain = "fp32" if name.endswith("scale") else "*fp32" if name.endswith("_ptr") else "i32"
        types[name] = "constexpr" if name in constants else signature.get(name) or POINTERS.get(name) or plain
    indices = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = (GluonASTSource if function.is_gluon() else ASTSource)(function, types, indices, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **FUSED, **options})


def forward(
    dtype: torch.dtype, head_dim: int, causal: bool, ragged: bool, plan: ForwardPlan, bounded: bool = False
) -> Any:
    """The compiled forward kernel.

    ragged   the number of keys is no multiple of a tile
    bounded  a pattern limits which keys a query sees
    """
    q, k = (descriptor([1, 1, rows, head_dim], dtype) for rows in (ROWS, plan.tile_k))
    options = forward_options(head_dim, causal, ragged, plan, bounded)
    constants = {name: options.pop(name) for name in list(options) if name in forward_kernel.arg_names}
    signature = {"q_desc": q, "k_desc": k, "v_desc": k, "o_desc": q, **BOUNDS}
    return compile_kernel(forward_kernel, signature, constants, **options)


def backward(
    dtype: torch.dtype, head_dim: int, causal: bool, ragged: bool, plan: BackwardPlan,
    deterministic: bool = False, grouped: bool = False, bounded: bool = False, down: bool = False,
) -> Any:  # fmt: skip
    """The compiled backward kernel.

    grouped  several query heads share a key head; other options are as in `forward` and `backward_options`
    """
    queries = BLOCK_Q[head_dim]
    q, k, out = (descriptor([1, 1, rows, head_dim], dtype) for rows in (queries, TILE_K, 64))
    row = descriptor([queries], torch.float32)
    signature = {
        "q_desc": q, "k_desc": k, "v_desc": k, "do_desc": q, "lse_desc": row, "delta_desc": row,
        "dk_desc": out, "dv_desc": out, **BOUNDS,
    }  # fmt: skip
    constants = backward_options(head_dim, causal, ragged, grouped, deterministic, plan, bounded, down)
    return compile_kernel(backward_kernel, signature, constants, maxnreg=168)


def pre_and_postprocess(dtype: torch.dtype, head_dim: int) -> Iterator[tuple[str, Any]]:
    """Yields (name, kernel) of the two small kernels that run before and after a backward."""
    half = "*" + TRITON_NAMES[dtype]
    constants = {"ROWS": 4096 // head_dim, "D": head_dim, "BOUNDED": False}
    yield "preprocess", compile_kernel(preprocess_kernel, dict.fromkeys(("o_ptr", "do_ptr"), half), constants)
    constants = {"ROWS": ROWS, "D": head_dim, "spoilt_ptr": None}
    yield "postprocess", compile_kernel(postprocess_kernel, {"dq_ptr": half}, constants)


def read(kernel: Any) -> dict[str, int]:
    """{key of a JSON line: count} of a compiled kernel."""
    sass = disassembled(kernel)
    counts = resources(kernel, sass) | count(MNEMONICS, sass)
    read_from = {
        "hazards": hazards(sass),
        "reused": reused(kernel.asm["ptx"]),
        "restarts": restarts(kernel.asm["ttgir"]),
    }
    return counts | read_from


def restarts(ttgir: str) -> int:
    """How many loops over tiles, inside of another loop, begin at a constant: a fault of the compiler.

    Triton 3.6.0 once replaced a counter, which the outer loop carries on, by the constant that it began with. The steps
    of each head then began at 0, and their barriers waited for ever.
    """
    open_at: list[int] = []  # indentations of the loops that a line is in
    number = 0
    for line in ttgir.splitlines():
        indentation = len(line) - len(line.lstrip())
        while open_at and indentation <= open_at[-1]:
            open_at.pop()
        if match := re.search(r"scf\.for %\w+ = (%\w+) to .*tensor<", line):
            number += bool(open_at) and re.match(r"%c\d", match[1]) is not None
            open_at.append(indentation)
    return number


def reused(ptx: str) -> int:
    """How many barriers share their place in shared memory with another barrier, or with the result of an atomic.

    Triton reuses the memory of a barrier that no thread waits at, without mbarrier.inval. Forwards then hung, or left
    tiles out, if processes took turns on a GPU.
    """
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    made = [offsets[name] for name in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)]
    stored = {offsets.get(name) for name in re.findall(r"st\.shared\.\S+ \[ *(%r\d+) *\+ 0 *\]", ptx)}
    stored |= set(re.findall(r"(?:st|ld)\.shared\.\S+.*\[global_smem\+(\d+)\]", ptx))
    return len(made) - len(set(made) - stored)


def hazards(sass: str) -> int:
    """How many instructions write to a register of a matmul's operand A before a wait has retired the matmul.

    Matmuls retire in order of their groups, and a `DEPBAR` with n leaves the last n groups in flight. A group ends at
    the matmul that carries `gsb0`. The text is read in order, without branches: there are none between a matmul and its
    wait.
    """
    in_flight: list[set[int]] = []
    group: set[int] = set()
    number = 0
    for line in sass.splitlines():
        code = line.split("*/", 1)[-1].strip()
        if match := re.search(r"\bHGMMA\S*\s+R\d+,\s*(\S+?),\s*(.*)", code):
            if operand := re.fullmatch(r"R(\d+)(?:\.reuse)?", match[1]):
                group |= set(range(int(operand[1]), int(operand[1]) + 4))
            if "gsb0" in code:
                in_flight.append(group)
                group = set()
        elif "WARPGROUP.DEPBAR" in code:
            left = int(re.search(r"gsb0,\s*(0x[0-9a-f]+)", code)[1], 16)  # type: ignore[index]
            in_flight = in_flight[len(in_flight) - left :] if left else []
        elif match := re.match(r"(?:@!?U?P\d+\s+)?([A-Z0-9.]+)\s+R(\d+)", code):  # noqa: SIM102
            if not match[1].startswith(("ST", "RED", "BAR", "SYNCS", "R2UR", "ISETP", "FSETP")):
                width = 4 if ".128" in match[1] else 2 if ".64" in match[1] or ".WIDE" in match[1] else 1
                written = set(range(int(match[2]), int(match[2]) + width))
                number += any(written & operand for operand in [*in_flight, group])
    return number


def main(dtypes: list[str], every: bool, head_dims: list[int]) -> None:
    """Prints a line for each kernel, dtype, head dimension and mask.

    The forwards are those of the plans for long and for short sequences, and those under a pattern. The backwards are
    those of the plan for long sequences, default and deterministic, and if causal also with grouped heads. With head
    dimension 128 there are also a backward under a pattern, and a ragged one with grouped heads.

    every  prints the kernels of all plans and candidates, also ragged and with grouped heads
    """
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)

        def report(kernel: str, binary: Any, name: str = dtype_name, **what: Any) -> None:
            print(json.dumps({"kernel": kernel, "dtype": name, **what, **read(binary)}), flush=True)

        for head_dim in head_dims:
            for name, binary in pre_and_postprocess(dtype, head_dim):
                report(name, binary, head_dim=head_dim)
            for causal in (True, False):
                what = {"head_dim": head_dim, "causal": causal}
                for ragged in (False, True) if every and not causal else (False,):
                    plans = _some({plan: None for _, plan in FORWARD[head_dim, causal]}, every)
                    shorts = candidates("fwd", head_dim, causal, SHORT) if every else []
                    for plan in dict.fromkeys([forward_plan(head_dim, causal, 256), *plans, *shorts]):
                        fields = {name: getattr(plan, name) for name in ("consumers", "tile_k", "ctas", "chained")}
                        report("forward", forward(dtype, head_dim, causal, ragged, plan), **what, ragged=ragged,
                               **fields)  # fmt: skip
                    for plan in _some({plan: None for _, plan in BACKWARD[head_dim, causal]}, every):
                        modes = [{}, {"deterministic": True}]
                        modes += [{"grouped": True}] if every or causal else []
                        modes += [{"grouped": True, "down": True}] if causal else []
                        for mode in modes:
                            report("backward", backward(dtype, head_dim, causal, ragged, plan, **mode), **what,
                                   ragged=ragged, peeled=plan.peeled, **mode)  # fmt: skip
            for plan in bounded_plans(head_dim):
                binary = forward(dtype, head_dim, True, False, plan, bounded=True)
                fields = {name: getattr(plan, name) for name in ("consumers", "tile_k", "ctas", "chained")}
                report("forward", binary, head_dim=head_dim, causal=True, ragged=False, bounded=True, **fields)
            if head_dim == 64 and not every:
                continue
            for plan in _some({plan: None for _, plan in BACKWARD[head_dim, True]}, every):
                for mode in ({}, {"deterministic": True, "grouped": True})[not every :]:
                    binary = backward(dtype, head_dim, True, False, plan, bounded=True, **mode)
                    report("backward", binary, head_dim=head_dim, causal=True, ragged=False, bounded=True, **mode)
            plan = BACKWARD[head_dim, False][-1][1]
            for mode in ({}, {"deterministic": True}):
                binary = backward(dtype, head_dim, False, True, plan, grouped=True, **mode)
                report("backward", binary, head_dim=head_dim, causal=False, ragged=True, grouped=True, **mode)


def _some(plans: dict[Any, None], every: bool) -> list[Any]:
    """All plans (keys of the dictionary) if `every`, else the last one alone, which is for the longest sequences."""
    return list(plans) if every else list(plans)[-1:]


def chosen(words: list[str]) -> tuple[list[str], bool, list[int]]:
    """The arguments of `main` that words choose. ValueError for a word that chooses nothing."""
    for word in words:
        choice(word, ["bfloat16", "float16", "every", "64", "128"], f"{word!r} ")
    dtypes = [word for word in words if word.endswith("float16")]
    return dtypes or ["bfloat16"], "every" in words, [int(word) for word in words if word.isdigit()] or [64, 128]


if __name__ == "__main__":
    main(*chosen(sys.argv[1:]))
