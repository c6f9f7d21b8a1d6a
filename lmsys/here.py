"""`lmsys` without a command: shows this machine, the rows that it can run, and what the other rows need.

A *row* is an implementation in the table of attention or of data-parallel strategies. If a row cannot run here, the
reason that is shown comes from its `why_not`. `lmsys.__main__` runs this module. To show another fact of the machine,
add its name to FACTS; to show the row that `impl="auto"` chooses in another use, add the use to USES. `remedy` depends
on words in the reasons of rows: ANOTHER_GPU, and " needs ".
"""

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; without a GPU it can only interpret

from lmsys.attention import ATTENTION, AttentionCase, is_measured
from lmsys.measure import machine
from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry

GPUS = ((8, 0), (9, 0), (10, 0))  # compute capabilities: Ampere, Hopper, Blackwell
ANOTHER_GPU = "this GPU has"  # a row's reason has these words if another kind of GPU may run the case
CUDA_TORCH = "python -m pip install --force-reinstall torch, on Linux"  # how to get a torch that can use a GPU
# Uses for which the choice of impl="auto" is shown: {use: fields in which its case differs from that of a training}.
USES: dict[str, dict[str, Any]] = {
    "training": {},
    "inference": {"grad": False},
    "training in windows": {"window": 64},
    "decoding": {"grad": False, "queries": 1, "offset": 127},
}
# Facts of the machine that are shown, by their names in `machine.describe`.
FACTS = ("name", "cores", "memory_bytes", "gpu_count", "capability", "driver", "cuda", "python", "torch", "triton")


def main() -> None:
    """Prints the facts, then the rows of both tables, then what is missing, each with the rows that need it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = machine.describe(device, command="", seed=0, sweep="")
    facts["memory_bytes"] = f"{facts['memory_bytes'] / 2**30:.1f} GiB" if facts["memory_bytes"] else None
    for fact in FACTS:
        if facts[fact] is not None:
            print(f"{fact.removesuffix('_bytes').replace('_', ' '):12} {facts[fact]}")
    print("\nattention rows (1 batch, 2 heads, 128 queries and keys, head dimension 64, causal, with gradients)")
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    case, width = _case(device, capability), max(map(len, ATTENTION))
    rows: dict[str, list[str]] = {}  # by what is missing, in words: the names of the rows that need it
    for name, entry in ATTENTION.items():
        reasons = {dtype: entry.why_not(replace(case, dtype=dtype)) for dtype in ("float32", "float16", "bfloat16")}
        print(f"  {name:{width}}  {_verdict(reasons)}")
        if (reason := reasons["bfloat16"]) and all(reasons.values()):
            rows.setdefault(remedy(entry, reason, device, _case), []).append(name)
    print(f'\nimpl="auto" in bfloat16: {evidence(device, capability)}')
    for use, changes in USES.items():
        print(f"  {use:{width}}  {ATTENTION.pick('auto', replace(case, **changes)).name}")
    ranks = f"{facts['gpu_count']} GPUs, NCCL" if device == "cuda" else "processes on this CPU, gloo"
    print(f"\ndata-parallel strategies ({ranks})")
    for name, entry in STRATEGIES.items():
        reason = entry.why_not(SimpleNamespace(device=device))
        print(f"  {name:{width}}  {reason or entry.label}")
        if reason:
            rows.setdefault(remedy(entry, reason, device, SimpleNamespace), []).append(name)
    if rows:
        print("\nwhat would bring the others")
    for answer, names in rows.items():
        print(f"  {', '.join(names)}: {answer}")
    # `remedy` begins with these words where a GPU is missing.
    if device == "cpu" and torch.version.cuda is None and any(answer.startswith("a GPU") for answer in rows):
        print(f"  for a GPU also a CUDA build of torch, which {torch.__version__} is not: {CUDA_TORCH}")


def evidence(device: str, capability: tuple[int, int] | None) -> str:
    """The grounds on which "auto" chooses rows on this machine, in words."""
    return (
        "what needs no compiler"
        if device == "cpu"
        else "the order was measured on GPUs of this kind"
        if is_measured(capability)
        else "our rows were never timed on a GPU of this kind: PyTorch's own choice, or flash_triton for a mask tensor"
    )


def _case(device: str, capability: tuple[int, int] | None = None) -> AttentionCase:
    """The case that rows are asked about, in bfloat16."""
    return AttentionCase(
        batch=1,
        heads=2,
        kv_heads=2,
        queries=128,
        keys=128,
        head_dim=64,
        dtype="bfloat16",
        causal=True,
        grad=True,
        device=device,
        capability=capability,
    )


def _verdict(reasons: dict[str, str | None]) -> str:
    """A line with the dtypes that run, and the reasons against the others. reasons: by dtype; None: it runs."""
    able = [dtype for dtype, reason in reasons.items() if reason is None]
    refused = dict.fromkeys(reason for reason in reasons.values() if reason is not None)
    return f"{'runs ' + ', '.join(able) if able else 'no'}{': ' if refused else ''}{'; '.join(refused)}"


def remedy(entry: Entry, reason: str, device: str, case: Callable[..., Any]) -> str:
    """Says what the row `entry`, which cannot run here for this `reason`, needs.

    A reason that names a missing thing is the answer itself. Otherwise the row is asked about GPUs of other kinds.

    case  a function of `device` and `capability`, which returns the case that the row is asked about
    """
    needs_another = ANOTHER_GPU in reason
    # Reasons that name what is missing have the word "needs", such as that of `Entry` for a missing package.
    if not needs_another and (device == "cuda" or " needs " in reason):
        return reason.removeprefix(f"{entry.name} ")
    reasons = {capability: _why_not_elsewhere(entry, case(device="cuda", capability=capability)) for capability in GPUS}
    able = [capability for capability, why in reasons.items() if ANOTHER_GPU not in (why or "")]  # GPUs that suffice
    gpu = "a GPU"
    if able and (needs_another or len(able) < len(GPUS)):
        gpu += f" of compute capability {'.'.join(map(str, able[0]))}{' or later' if able[-1] == GPUS[-1] else ''}"
    return "; ".join(
        [gpu, *dict.fromkeys(why.removeprefix(f"{entry.name} ") for capability in able if (why := reasons[capability]))]
    )


def _why_not_elsewhere(entry: Entry, case: Any) -> str | None:
    """The row's reason not to run a case on a GPU that may not be in this machine; None: it has none, or cannot say."""
    try:
        return entry.why_not(case)
    except (RuntimeError, AssertionError):  # torch, which answers for some rows, knows only of GPUs that are here
        return None


if __name__ == "__main__":
    main()
