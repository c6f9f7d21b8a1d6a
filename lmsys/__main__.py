"""`python -m lmsys` shows this machine, and which attention rows and strategies it can run, or why not."""

import argparse
import os
from types import SimpleNamespace

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; without a GPU it can only interpret

from lmsys.attention import ATTENTION, AttentionCase
from lmsys.measure import machine
from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry

FACTS = ("name", "cores", "memory_bytes", "gpu_count", "capability", "driver", "cuda", "python", "torch", "triton")


def main() -> None:
    argparse.ArgumentParser(prog="python -m lmsys", description=__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = machine.describe(device, command="", seed=0, sweep="")
    facts["memory_bytes"] = f"{facts['memory_bytes'] / 2**30:.1f} GiB" if facts["memory_bytes"] else None
    for fact in FACTS:
        if facts[fact] is not None:
            print(f"{fact.removesuffix('_bytes').replace('_', ' '):12} {facts[fact]}")
    print("\nattention rows (1 batch, 2 heads, 128 queries and keys, head dimension 64, causal, with gradients)")
    width = max(map(len, ATTENTION))
    for name, entry in ATTENTION.items():
        print(f"  {name:{width}}  {_verdict(entry, device)}")
    ranks = f"{facts['gpu_count']} GPUs, NCCL" if device == "cuda" else "processes on this CPU, gloo"
    print(f"\ndata-parallel strategies ({ranks})")
    for name, entry in STRATEGIES.items():
        print(f"  {name:{width}}  {entry.why_not(SimpleNamespace(device=device)) or entry.label}")


def _verdict(entry: Entry, device: str) -> str:
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    reasons = {}
    for dtype in ("float32", "float16", "bfloat16"):
        case = AttentionCase(1, 2, 2, 128, 128, 64, dtype, causal=True, grad=True, device=device, capability=capability)
        reasons[dtype] = entry.why_not(case)
    able = [dtype for dtype, reason in reasons.items() if reason is None]
    refused = dict.fromkeys(reason for reason in reasons.values() if reason is not None)
    return f"{'runs ' + ', '.join(able) if able else 'no'}{': ' if refused else ''}{'; '.join(refused)}"


if __name__ == "__main__":
    main()
