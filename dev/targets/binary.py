"""Reads the binaries that Triton's compiler makes: instructions, registers and shared memory.

`recording.py` calls `read`; tests of our own kernels count instructions by `loops` and `number`. A fact that
`python -m dev.targets` is to print begins in `read`; instructions of a new kind of GPU go into the patterns below.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import triton

TOOLS = "ptxas", "cuobjdump", "nvdisasm"  # NVIDIA's tools; Triton's wheels bring them, and Triton itself calls ptxas
# DOT matches a matmul in Triton's intermediate language. The other patterns match instructions: first those of NVIDIA's
# cards, then those of AMD's data center cards (CDNA; other cards of AMD have other instructions).
DOT = r"\b(?:tt\.dot|tt\.dot_scaled|ttng\.warp_group_dot|ttng\.tc_gen5_mma\w*)\b"
TENSOR_CORES = r"\b(?:(?:[HIDQO]MMA|[HIQ]GMMA|UTC[HIQO]MMA)\b|v_s?mfmac?)"
# Asynchronous copies from global to shared memory, by which the next tiles arrive during a computation.
COPIES = r"\b(?:(?:LDGSTS|UTMALDG|UBLKCP)\b|(?:buffer|global)_load_\w*lds)"
SPILLS = "LDL", "STL"  # NVIDIA's loads and stores of local memory, to which registers are spilled


def read(kernel: Any) -> dict[str, Any]:
    """Facts about a compiled kernel, by names of `answers.ANSWER`.

    needs         bytes of shared memory of a block
    registers     registers of a thread
    spills        NVIDIA: instructions in loops that move registers to local memory or back; AMD: spilled registers
    tensor_cores  True if matmuls run on tensor cores; None for a kernel without matmuls
    copies        asynchronous copies in the binary
    """
    if "cubin" in kernel.asm:
        code = disassembled(kernel)
        registers, spills = registers_of(kernel), sum(number(loop, *SPILLS) for loop in loops(code))
    else:
        code = kernel.asm["amdgcn"]
        registers, spills = _number(r"\.vgpr_count:\s+(\d+)", code), _number(r"\.vgpr_spill_count:\s+(\d+)", code)
    source = kernel.asm.get("ttir") or kernel.asm["ttgir"]  # Gluon's kernels have only the latter
    return {
        "needs": kernel.metadata.shared,
        "registers": registers,
        "spills": spills,
        "tensor_cores": re.search(TENSOR_CORES, code) is not None if re.search(DOT, source) else None,
        "copies": len(re.findall(COPIES, code)),
    }


def _number(pattern: str, text: str) -> int:
    """The number in the first match of a pattern. The text is the compiler's output, which always has a match."""
    return int(re.findall(pattern, text)[0])


def disassembled(kernel: Any) -> str:
    """The kernel's SASS (NVIDIA's machine code), with an instruction in each line."""
    # -c prints code sections alone. -ndf leaves out the dataflow analysis, which finds the targets of indirect
    # branches: it may fail, and `loops` reads direct branches only.
    return _printed(kernel, "nvdisasm", "-c", "-ndf")


def registers_of(kernel: Any) -> int:
    """How many registers a thread of the kernel has."""
    return _number(r"REG:(\d+)", _printed(kernel, "cuobjdump", "-res-usage"))


def tool(name: str) -> str:
    """The path of one of TOOLS, as Triton finds it. ValueError if Triton finds none."""
    try:
        return str(getattr(triton.knobs.nvidia, name).path)
    except RuntimeError:
        raise ValueError(
            f"this Triton has no {name}, which its wheels on PyPI bring: install one of them, or name"
            f" a {name} of CUDA's toolkit by TRITON_{name.upper()}_PATH"
        ) from None


def _printed(kernel: Any, name: str, *options: str) -> str:
    """The output of one of TOOLS for the kernel's binary, with these options."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool(name), *options, file.name], capture_output=True, text=True, check=True).stdout


def loops(sass: str) -> Iterator[list[str]]:
    """Yields each loop of a kernel's SASS: its instructions, from a label to a branch back to it, without addresses.

    An inner loop is also part of its outer loop.
    """
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if match := re.match(r"\s*(\.L_\w+):", line):
            labels[match[1]] = len(code)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(match[1])
            branch = re.search(r"\bBRA\S*\s.*?`\((\.L_\w+)\)", match[1])
            if branch and branch[1] in labels:
                yield code[labels[branch[1]] :]


def number(loop: list[str], *mnemonics: str) -> int:
    """How many instructions of a loop have one of these mnemonics."""
    return sum(1 for instruction in loop if re.search(rf"\b(?:{'|'.join(mnemonics)})\b", instruction))
