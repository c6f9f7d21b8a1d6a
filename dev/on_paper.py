"""Answers to the paper problems of CS336's assignment 2, as Markdown: one function for each problem.

CS336 is Stanford's course on language models. `dev/deliverables.py` lists these functions in its table COMPUTED, calls
them and writes their results into files. It passes its output folder to each function, which the functions here ignore.
The formulas are in `dev/paper_formulas.py` and `lmsys/cost/`. To add a problem, write a function here and name it in
COMPUTED, as `dev/deliverables.py` says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from dev import paper_formulas as formulas
from lmsys.config import model_config
from lmsys.cost import communication, memory

MIB, GIB = 2**20, 2**30


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with these column heads; `dev/deliverables.py` uses it, too."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def sizes(_: Path) -> str:
    """The memory of a training step, and of one tensor of the residual stream, for each model size of the handouts."""
    rows = []
    for size in ("small", "medium", "large", "xl", "2.7b", "10b"):
        config = model_config(size, context_length=512)
        footprint = asdict(memory.training_memory(config, 4, 512, "fp32"))
        residual = f"{4 * 512 * config.d_model * 4 / MIB:.4g}"  # batch, context, width, bytes
        rows.append((size, *(f"{value / GIB:.2f}" for value in footprint.values()), residual))
    heads = ("size", *(f"{name}, GiB" for name in footprint), "residual, MiB")
    return (
        "Context 512, batch 4, float32, and attention that keeps no scores. Residual: a tensor of the residual stream,"
        " batch x context x d_model x 4 bytes,"
        f" problem `memory_profiling` (d).\n\n{table(heads, rows)}"
    )


XXL = {"num_blocks": 126, "d_model": 16384, "d_ff": 53248}  # the model in the handout of 2025
V5P = 4.6e14, 2 * 9e10  # a TPU v5p by that handout: FLOP/s, and bytes/s of a link in both directions together


def accounting(_: Path) -> str:
    """The problem `communication_accounting` of 2025, on the memory and communication of the model XXL.

    The batch has 2**20 tokens: 1,024 sequences of 1,024 tokens.
    """
    tokens = 2**20
    state, activations = (
        formulas.stack_state_bytes(**XXL),
        formulas.stack_activation_bytes(**XXL, tokens=tokens),
    )
    devices = formulas.devices_needed(state + activations, 80e9)
    sharded = formulas.fsdp_bytes(**XXL, tokens=tokens, world_size=1)
    batch = formulas.compute_bound_batch(*V5P, XXL["d_ff"], fsdp_axes=2)
    rows = [
        ("a", "master weights, gradients and optimizer in float32", f"{state / 1e9:,.0f} GB"),
        ("a", f"saved for the backward in bfloat16, {tokens:,} tokens", f"{activations / 1e9:,.0f} GB"),
        ("a", "both, in GPUs of 80 GB", devices),
        ("b", "on each of N devices, half of the activations kept", f"{sharded / 1e9:,.0f} GB / N"),
        ("b", "N for devices of 95 GB", formulas.devices_needed(sharded, 95e9)),
        ("c", "tokens per device from which it is bound by computation", f"{batch:,.0f}"),
        ("c", "in all, on 16 x 4 devices", f"{64 * batch:,.0f}"),
    ]
    return f"{table(('part', 'what', 'answer'), rows)}\n\nPart (d) asks for words."


def buckets(_: Path) -> str:
    """The problem `ddp_bucketed_benchmarking` (b): the overhead of s bytes in n buckets, and the best bucket size.

    o is the latency of a collective in seconds, and w the bandwidth in bytes per second.
    """
    s, o, w = 8e9, 3e-5, 1e11
    best = communication.optimal_bucket_bytes(s, o, w)
    rows = [
        (n, f"{1e3 * communication.ddp_overhead(s, n, o, w):.4g}") for n in sorted((1, 10, 100, 1000, round(s / best)))
    ]
    return (
        "Overhead behind the backward: (s / n) / w + n o, as the last bucket waits for nobody, and each call costs o;"
        " it is smallest for n = sqrt(s / (w o)), that is for buckets of sqrt(s w o) bytes.\n\n"
        f"With s = {s:g} bytes, w = {w:g} bytes/s, o = {o:g} s the best bucket has {best / 1e6:.4g} MB.\n\n"
        + table(("buckets n", "overhead, ms"), rows)
    )


def parallel(_: Path) -> str:
    """The problems of 2026 on parallelism: up to how many devices each kind is bound by computation, for one layer."""
    layer = formulas.Layer(tokens=2**20, d_model=16384, d_ff=53248, flops_per_s=990e12, bytes_per_s=450e9)
    rows = [
        (
            kind,
            direction,
            f"{1e3 * layer.compute_seconds(direction, 8):.4g}",
            f"{1e3 * layer.communication_seconds(kind, direction, 8):.4g}",
            f"{layer.most_devices(kind, direction):.4g}",
        )
        for kind in ("data", "fsdp", "tensor")
        for direction in ("forward", "backward")
    ]
    heads = ("parallelism", "direction", "computation on 8 devices, ms", "communication, ms", "most devices")
    meshes = [
        (words, *(f"{n:.4g}" for n in layer.largest_mesh(words == "overlapped"))) for words in ("overlapped", "in turn")
    ]
    ring = (
        formulas.circulating_all_reduce_seconds(1e9, 8, 450e9),
        formulas.ring_seconds("all_reduce", 1e9, 8, 450e9),
    )
    return (
        f"{layer}\n\n`data_parallel_calcs`, `fsdp_calcs`, `tp_calcs`: with B tokens, F = d_ff, C operations and"
        " W bytes in a second, n may grow to 1 + B W / C (data, fsdp), and to 1 + 3 F W / (2 C) forward, 1 + 3 F W / C"
        f" backward (tensor).\n\n{table(heads, rows)}\n\n`fsdp_tp_calcs`:\n\n"
        f"{table(('collectives', 'FSDP devices', 'tensor devices'), meshes)}\n\n`alternate_ring_all_reduce`:"
        f" (n - 1) S / W, {1e3 * ring[0]:.4g} ms for 1 GB on 8 devices; a ring takes {1e3 * ring[1]:.4g} ms."
    )
