"""Times every candidate plan, interleaved with SDPA cuDNN: `python -m lmsys.attention.flash_gluon.tune [OUT.jsonl]`.

B S = 16,384 tokens, H D = 2048, bfloat16. In a cell, all candidates and cuDNN are timed in turn, round after round,
so that they see one clock; a line gives the median over rounds and the median of the ratios to cuDNN within a round.
Forwards of up to 512 keys are timed by the wall, 100 calls one after another, as their claim is.
`--direction`, `--head-dim`, `--causal`, `--length` narrow the cells, `--planned` times the plans of `plans.py` alone.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmsys.attention.flash_gluon import kernels
from lmsys.attention.flash_gluon.plans import BackwardPlan, ForwardPlan, backward_plan, forward_plan

TOKENS, WIDTH = 16384, 2048
SHORT = 512  # keys, up to which a forward has few key tiles to hide the beginning and the end of a tile behind
SMALL_TILES = 1024  # keys, up to which tiles of 64 of them may win
CALLS = 100  # calls of a short sequence, back to back
LIMIT_S = 20.0  # for what takes milliseconds
COMPILE_LIMIT_S = 300.0
Cell = tuple[str, int, bool, int]  # direction, head_dim, causal, length


def candidates(direction: str, head_dim: int, causal: bool, length: int) -> list[Any]:
    """The plans worth timing: settings that once won such a cell, and their neighbours."""
    if direction == "bwd":
        sizes = (5, 11, 22) if causal else (0,)
        return [BackwardPlan(*plan) for plan in itertools.product((False, True), sizes)]
    sizes = (0, 32) if causal and length <= SHORT else (32,) if causal else (0,)
    two = [
        ForwardPlan(2, stages, *flags, l2_mib, chained=length <= SHORT)
        for flags in itertools.product((False, True), repeat=3)
        for stages in ((2, 3) if head_dim == 64 else (2,))
        for l2_mib in sizes
    ]
    three = [
        ForwardPlan(3, stages, ping_pong, named, dynamic, sizes[0])
        for stages, ping_pong, named, dynamic in itertools.product((2, 3), *[(False, True)] * 3)
        if not (stages == 3 and ping_pong and named)  # wants more named barriers than there are
    ]
    small = [replace(plan, stages=3, tile_k=64, ctas=2 if head_dim == 64 else 1, chained=True) for plan in two]
    room = head_dim == 64 and length > SHORT  # three of them want more registers than there are at 128
    plans = [*two, *(three if room else []), *(small if length <= SMALL_TILES else [])]
    return list(dict.fromkeys(plans))


def planned(direction: str, head_dim: int, causal: bool, length: int) -> Any:
    return (forward_plan if direction == "fwd" else backward_plan)(head_dim, causal, length)


def inputs(head_dim: int, length: int, batch: int = 0) -> list[Tensor]:
    shape = batch or TOKENS // length, WIDTH // head_dim, length, head_dim
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]


def cudnn(direction: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> Callable[[], Any]:
    if direction == "fwd":
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def ours(
    direction: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool,
    plan: Any = None, deterministic: bool = False,
) -> Callable[[], Any]:  # fmt: skip
    scale = q.shape[-1] ** -0.5
    if direction == "fwd":
        return lambda: kernels._forward(q, k, v, causal, scale, plan)
    o, lse = kernels._forward(q, k, v, causal, scale)
    return lambda: kernels._backward(q, k, v, o, lse, do, causal, scale, deterministic, plan)


@contextmanager
def time_limit(what: str, limit_s: float = LIMIT_S) -> Iterator[None]:
    """If the GPU hangs, prints `what` and ends the process: no exception reaches a thread that waits for the GPU."""

    def give_up() -> None:
        print(f"no end after {limit_s:g} s: {what}", file=sys.__stderr__, flush=True)
        os._exit(1)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def repeated(call: Callable[[], Any]) -> Callable[[], list[Any]]:
    return lambda: [call() for _ in range(CALLS)]


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def milliseconds(call: Callable[[], Any]) -> float:
    return triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median")


def time_cell(cell: Cell, plans: list[Any], rounds: int) -> Iterator[dict[str, Any]]:
    direction, head_dim, causal, length = cell
    drawn = inputs(head_dim, length)
    samples: list[list[float]] = [[] for _ in range(1 + len(plans))]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        rows = [("cudnn", cudnn(direction, *(x.clone() for x in drawn), causal))]
        rows += [(plan, ours(direction, *drawn, causal, plan)) for plan in plans]
        short = direction == "fwd" and length <= SHORT
        if short:
            rows = [(row, repeated(call)) for row, call in rows]
            for row, call in rows:  # loads its binary, finds memory
                with time_limit(f"first {CALLS} calls of {row} in {cell}"):
                    seconds(call)
        timed = list(zip(rows, samples, strict=True))
        for number in range(rounds):
            random.Random(number).shuffle(timed)  # nobody is always the first, when the GPU is cool, or after a hot one
            for (row, call), times in timed:
                with time_limit(f"{row} in {cell}"):
                    times.append(seconds(call) / CALLS if short else milliseconds(call) / 1e3)
    flops = 4 * TOKENS * WIDTH * length * (0.5 if causal else 1) * (1 if direction == "fwd" else 2.5)
    for (row, _), times in zip(rows, samples, strict=True):
        ratio = statistics.median(base / own for base, own in zip(samples[0], times, strict=True))
        time_s = statistics.median(times)
        yield {
            "direction": direction, "head_dim": head_dim, "causal": causal, "length": length,
            "plan": row if row == "cudnn" else asdict(row), "time_s": time_s, "tflops": flops / time_s / 1e12,
            "speedup_over_cudnn": ratio,
        }  # fmt: skip


def compile_plans(job: tuple[Cell, list[Any]]) -> None:
    """Compiles plans in a process of its own, into Triton's cache on disk."""
    (direction, head_dim, causal, _), plans = job
    drawn = inputs(head_dim, 128, batch=1)
    for plan in plans:
        with time_limit(f"{plan}, {direction} {head_dim=} {causal=}", COMPILE_LIMIT_S):
            ours(direction, *drawn, causal, plan)()
            torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", help="JSON lines of all that was timed")
    parser.add_argument("--direction", default="fwd,bwd")
    parser.add_argument("--head-dim", default="64,128")
    parser.add_argument("--causal", default="yes,no")
    parser.add_argument("--length", default="1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--planned", action="store_true")
    chosen = parser.parse_args(arguments)
    cells = [
        (direction, int(head_dim), causal == "yes", int(length))
        for direction, head_dim, causal, length in itertools.product(
            *(getattr(chosen, name).split(",") for name in ("direction", "head_dim", "causal", "length"))
        )
    ]
    jobs = [(cell, [planned(*cell)] if chosen.planned else candidates(*cell)) for cell in cells]
    batches = {(cell[:3], plan): (cell, [plan]) for cell, plans in jobs for plan in plans}
    with ProcessPoolExecutor(min(12, len(batches)), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_plans, batches.values(), chunksize=max(1, len(batches) // 12)))  # raises where one ended
    for cell, plans in jobs:
        lines = list(time_cell(cell, plans, chosen.rounds))
        for line in lines:
            if chosen.out:
                with open(chosen.out, "a") as out:
                    print(json.dumps(line), file=out)
        best = sorted(lines, key=lambda line: line["time_s"])
        for line in [x for x in lines if x["plan"] == "cudnn"] + [x for x in best if x["plan"] != "cudnn"][:3]:
            plan = line["plan"] if line["plan"] == "cudnn" else list(line["plan"].values())
            print(*cell, f"{line['tflops']:.0f} TFLOP/s x{line['speedup_over_cudnn']:.3f}", plan, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
