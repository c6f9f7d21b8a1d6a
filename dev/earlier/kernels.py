"""Says whether the kernels of `flash_triton` have the same machine code today as at an earlier commit.

python -m dev.earlier.kernels 6ddb582 --head-dim 64,128

It needs no GPU: launches are recorded and compiled as `dev.targets` does it, for one card (kind of GPU) and with every
tile that the row would time. Kernels with equal instructions take equal time for equal tiles. So if `--against` of
`lmsys bench` then shows a difference, it comes from another tile or from the host. The exit code is 1 if a kernel
differs. A new constant that tells the kernels of one name apart is added to TILE.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import axes
from dev import earlier
from dev.targets.answers import ENVIRONMENT
from dev.targets.cards import CARDS
from lmsys import processes

SHAPE = 1, 16, 16384  # batch, heads, tokens of the recorded calls
LIMIT_S = 600.0  # for one package and one case
TILE = "BLOCK_Q", "BLOCK_K", "num_warps", "num_stages"  # constants that tell the kernels of a call apart
Programs = dict[str, tuple[str, ...]]  # by a kernel's name and tile, as text: its instructions


def programs(package: str, folder: Path, card: str, head_dim: int, causal: bool) -> Programs:
    """The machine code of all kernels of a forward and a backward of a package's `flash_triton`, in bfloat16.

    It must run in a new process, which can be patched for one package and one card only.
    """
    import torch

    from dev.targets import recording
    from lmsys.check import laptop

    earlier.importable(folder)
    recording.install(CARDS[card])
    laptop.running.append((package,))  # so that the backward runs in `Laptop`, too
    launch: Any = import_module(f"{package}.kernels.launch")
    # What `recording.install` does for today's package: every launch goes through Triton's public interface.
    vars(launch).update(Kernel=launch.PublicKernel, DirectKernel=launch.PublicKernel, raw_stream=lambda *_: 0)
    row = import_module(f"{package}.attention.flash_triton").flash_triton
    with laptop.Laptop():
        q, k, v = (
            torch.empty(*SHAPE, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)
        )
        o = row(q, k, v, causal=causal)
        o.backward(torch.empty_like(o))
    made = {}
    for kernel, compiled in recording.launches.values():
        tile = ", ".join(f"{name} {kernel['constants'].get(name)}" for name in TILE)
        made[f"{kernel['kernel']}: {tile}"] = _instructions(compiled())
    return made


def _instructions(kernel: Any) -> tuple[str, ...]:
    """The lines of a kernel's SASS, without addresses, encodings and the names of source files."""
    from dev.targets import binary

    lines = (re.sub(r"/\*[0-9a-fx]+\*/", "", line).strip() for line in binary.disassembled(kernel).splitlines())
    return tuple(line for line in lines if line and not line.startswith((".", "//")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.earlier.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("ref", metavar="REF", help="the earlier commit, a git reference")
    cards = [name for name, card in CARDS.items() if card.is_nvidia and "bfloat16" not in card.lacks]
    parser.add_argument("--card", choices=cards, default="sm_90")
    parser.add_argument("--head-dim", default="64,128", metavar="D", help="head dimensions; default: 64,128")
    options = parser.parse_args(arguments)
    differs = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            (head_dims,) = (axis.values(options.head_dim) for axis in axes.named("--head-dim"))
            commit = earlier.unpack(options.ref, folder)
        except ValueError as error:
            parser.error(str(error))
        for head_dim, causal in ((head_dim, causal) for head_dim in head_dims for causal in (True, False)):
            today, before = (
                _in_new_process(package, folder, options.card, head_dim, causal) for package in ("lmsys", earlier.NAME)
            )
            changed = sorted(kernel for kernel in today.keys() | before if today.get(kernel) != before.get(kernel))
            mask = "causal" if causal else "full"
            print(f"head dimension {head_dim}, {mask}: {len(today)} kernels, {len(changed)} differ from {commit[:10]}")
            print("".join(f"  {kernel}\n" for kernel in changed), end="", flush=True)
            differs += len(changed)
    return int(differs > 0)


def _in_new_process(*arguments: Any) -> Programs:
    """`programs` of these arguments, in a new process that sees no GPU and no tile that was chosen before."""
    caches = {"LMSYS_CACHE_DIR": str(arguments[1] / "cache")}
    with processes.Worker(ENVIRONMENT | caches) as worker:
        return worker.call("dev.earlier.kernels:programs", *arguments, timeout_s=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
