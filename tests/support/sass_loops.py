"""Counts the instructions of `flash_gluon`'s backward by kind: `python -m tests.support.sass_loops [wide by_query]`.

Arguments are boolean fields of a `BackwardPlan`, which are set. The command prints a JSON line for each head dimension
and mask: the instructions that a warp issues for a tile of keys and a tile of queries, in the shorter loop of the two
consumers. Code for masks is counted as well, although most tiles branch around it. With the path of a cubin instead,
it reads another kernel, such as FlashAttention-4's. Maintainers use it when they compare plans; no test does.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import torch

from dev.targets.binary import disassembled, loops, tool
from lmsys.attention.flash_gluon.plans import BackwardPlan, backward_plan
from tests.support.sass_gluon import backward

MATMULS = 16  # the main loop has at least so many matmuls
LENGTH = 4096  # the number of keys of the plan from which prefetching and the L2 budget are taken


def main_loop(sass: str) -> list[str]:
    """The instructions of the shortest loop that has MATMULS matmuls."""
    return min((loop for loop in loops(sass) if sum("HGMMA" in line for line in loop) >= MATMULS), key=len)


def kinds(loop: list[str]) -> Counter[str]:
    """How many instructions a loop has, by opcode."""
    return Counter(re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0] for instruction in loop)


def main(arguments: list[str]) -> None:
    if arguments and Path(arguments[0]).exists():
        command = [tool("nvdisasm"), "-c", "-ndf", arguments[0]]
        texts = {"": subprocess.run(command, capture_output=True, text=True, check=True).stdout}
    else:
        step = dict.fromkeys(arguments, True)
        texts = {}
        for head_dim, causal in product((64, 128), (False, True)):
            own = backward_plan(head_dim, causal, LENGTH)
            plan = BackwardPlan(own.prefetch, own.l2_mib, **step)
            kernel = backward(torch.bfloat16, head_dim, causal, False, plan)
            texts[f"{head_dim} {'causal' if causal else 'full'}"] = disassembled(kernel)
    for name, sass in texts.items():
        loop = main_loop(sass)
        print(json.dumps({"kernel": name, "instructions": len(loop), **dict(kinds(loop).most_common())}))


if __name__ == "__main__":
    main(sys.argv[1:])
