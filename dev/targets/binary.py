"""Reads the binaries that Triton's compiler makes: instructions, registers and shared memory.

`answers.py` calls `read`; tests of our own kernels count instructions by `count`, `loops` and `number`.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"  # NVIDIA's tools that come with Triton
# DOT is a regular expression of a matmul in Triton's intermediate language, SPILLS are mnemonics. NVIDIA and AMD have
# regular expressions of mnemonics, by the field that they count for.
DOT = r"\b(?:tt\.dot|tt\.dot_scaled|ttng\.warp_group_dot|ttng\.tc_gen5_mma\w*)\b"
SPILLS = "LDL", "STL"
NVIDIA = {
    "tensor_cores": r"(?:[HIDQO]MMA|[HIQ]GMMA|UTC[HIQO]MMA)\b",
    "copies": r"(?:LDGSTS|UTMALDG|UBLKCP)\b",  # asynchronous, so that the next tiles load while others are computed
}
# MFMA, the matmul instructions of AMD's data center cards (CDNA); other cards of AMD have other ones.
AMD = {"tensor_cores": "v_s?mfmac?", "copies": r"(?:buffer|global)_load_\w*lds"}


def read(kernel: Any) -> dict[str, Any]:
    """The facts about a compiled kernel, by fields of `answers.Answer`.

    Spills are instructions in loops on NVIDIA's cards, and spilled registers on AMD's.
    """
    if "cubin" in kernel.asm:
        sass = disassembled(kernel)
        counts = count(NVIDIA, sass)
        registers, spills = registers_of(kernel), sum(number(loop, *SPILLS) for loop in loops(sass))
    else:
        code = kernel.asm["amdgcn"]
        counts = count(AMD, code)
        registers, spills = _number(r"\.vgpr_count:\s+(\d+)", code), _number(r"\.vgpr_spill_count:\s+(\d+)", code)
    source = kernel.asm.get("ttir") or kernel.asm["ttgir"]  # Gluon's kernels have only the latter
    return {
        "needs": kernel.metadata.shared,
        "registers": registers,
        "spills": spills,
        "tensor_cores": counts["tensor_cores"] > 0 if re.search(DOT, source) else None,
        "copies": counts["copies"],
    }


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern!r}")
    return int(match[1])


def disassembled(kernel: Any) -> str:
    """The kernel's SASS (NVIDIA's machine code), with an instruction in each line."""
    # -c: code sections alone. -ndf: no dataflow analysis; it would add the targets of indirect branches, may fail, and
    # `loops` reads direct branches only.
    return _printed(kernel, "nvdisasm", "-c", "-ndf")


def registers_of(kernel: Any) -> int:
    """The registers of a thread."""
    return _number(r"REG:(\d+)", _printed(kernel, "cuobjdump", "-res-usage"))


def _printed(kernel: Any, tool: str, *options: str) -> str:
    """The output of one of CUDA's tools on the kernel's binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def count(mnemonics: Mapping[str, str], sass: str) -> dict[str, int]:
    """By key, how many words of the code `sass`, which may also be AMD's, begin with its pattern."""
    return {key: len(re.findall(rf"\b{mnemonic}", sass)) for key, mnemonic in mnemonics.items()}


def loops(sass: str) -> Iterator[list[str]]:
    """The loops: the instructions, without addresses, from each label to a branch back to it."""
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
