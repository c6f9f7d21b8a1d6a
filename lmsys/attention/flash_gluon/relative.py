"""The cost of a case against a plainer one: `python -m lmsys.attention.flash_gluon.relative [OUT.jsonl]`.

The two of a pair are timed in turn, round after round; a line gives the median over rounds of their ratio of speeds:
FLOP rate over FLOP rate, or for short sequences the wall time of SDPA cuDNN over ours. bfloat16, H D = 2048.
`--candidates`: only short sequences, with every plan that `tune` would time.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmsys.attention.flash_gluon import kernels
from lmsys.attention.flash_gluon.tune import CALLS, TOKENS, candidates, inputs, milliseconds, ours, repeated, seconds

Pair = tuple[dict[str, Any], Callable[[], Any], Callable[[], Any], float]  # what, it, the plainer one, their work


def transposed(x: Tensor) -> Tensor:
    """The same in (B, S, H, D) memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def variants(head_dim: int, causal: bool) -> Iterator[Pair]:
    """Order of additions, ragged lengths, views, grouped heads."""
    what = {"head_dim": head_dim, "causal": causal}
    for length in (1024, 4096, 16384):
        x = inputs(head_dim, length)
        named = what | {"pair": "deterministic, default", "direction": "bwd", "length": length}
        yield named, ours("bwd", *x, causal, deterministic=True), ours("bwd", *x, causal), 1.0
    for length in (4096, 8192):
        x = inputs(head_dim, length)
        odd = [t[:, :, :-1].contiguous() for t in x]
        named = what | {"pair": f"S {length - 1}, S {length}", "length": length - 1}
        for direction in ("fwd", "bwd"):
            pair = ours(direction, *odd, causal), ours(direction, *x, causal)
            yield named | {"direction": direction}, *pair, ((length - 1) / length) ** 2
    x = inputs(head_dim, 4096)
    group = x[1].shape[1] // 8
    of_eight = [x[0], x[1][:, :group].contiguous(), x[2][:, :group].contiguous(), x[3]]
    for name, other in (("(B, S, H, D), contiguous", [transposed(t) for t in x]), ("8 to 1, full heads", of_eight)):
        for direction in ("fwd", "bwd"):
            pair = ours(direction, *other, causal), ours(direction, *x, causal)
            yield what | {"pair": name, "direction": direction, "length": 4096}, *pair, 1.0


def graph_of(call: Callable[[], Any]) -> Callable[[], None]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(CALLS)]  # their memory is the graph's

    def replay(_: Any = kept) -> None:
        graph.replay()

    return replay


def short(
    head_dim: int, causal: bool, length: int, batch: int, plan: Any = None
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """CALLS forwards of ours and of SDPA: one after another, or for a batch of 1 as a CUDA graph.

    Ours as users call it, or by a plan without autograd's part.
    """
    q, k, v, do = inputs(head_dim, length, batch)
    own = ours("fwd", q, k, v, do, causal, plan) if plan else lambda: kernels.flash_gluon(q, k, v, causal=causal)
    base = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    if batch == 1:
        return graph_of(own), graph_of(base)
    return repeated(own), repeated(base)


def compared(
    what: dict[str, Any], one: Callable[[], Any], plain: Callable[[], Any], work: float,
    timed: Callable[[Callable[[], Any]], float], rounds: int,
) -> dict[str, Any]:  # fmt: skip
    for call in (one, plain):
        call()
    ratios = []
    for number in range(rounds):
        turns = (plain, one) if number % 2 else (one, plain)
        times = {call: timed(call) for call in turns}
        ratios.append(work * times[plain] / times[one])
    return what | {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", help="JSON lines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--candidates", action="store_true")
    chosen = parser.parse_args(arguments)

    def tell(line: dict[str, Any]) -> None:
        print(*(line[name] for name in ("pair", "direction", "head_dim", "causal", "length")), end=" ")
        print(f"{line['ratio']:.3f}", *line.get("plan", {}).values())
        sys.stdout.flush()
        if chosen.out:
            with open(chosen.out, "a") as out:
                print(json.dumps(line), file=out)

    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for head_dim, causal in itertools.product((64, 128), (True, False)):
            for what, one, plain, work in () if chosen.candidates else variants(head_dim, causal):
                tell(compared(what, one, plain, work, milliseconds, chosen.rounds))
            for length, alone in itertools.product((128, 256, 512), (False, True)):
                pair = f"{CALLS} calls{' in a graph, B 1' if alone else ''}, SDPA cuDNN"
                what = {"pair": pair, "direction": "fwd", "head_dim": head_dim, "causal": causal, "length": length}
                for plan in candidates("fwd", head_dim, causal, length) if chosen.candidates else [None]:
                    calls = short(head_dim, causal, length, 1 if alone else TOKENS // length, plan)
                    line = what | ({"plan": asdict(plan)} if plan else {})
                    tell(compared(line, *calls, 1.0, seconds, 3 * chosen.rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
