"""Times training steps of data-parallel strategies today beside those of an earlier commit.

python -m dev.earlier.steps 6ddb582 --size small --compile compiled,graphed --strategy bucketed,zero1,fsdp --profile

Each rank holds two models, one of each package, whose steps take turns in rounds. `--against` of a benchmark cannot do
this: it gives each state processes of its own, and two groups of ranks cannot take turns. A line of the table has the
median seconds of a step, the ratio with its interval of 95 %, a verdict by a margin of 2 %, and the peak of memory.
With `--profile` a second table has the functions of Python whose time in a step has changed the most on rank 0: that
is where to look when a step is bounded by the host. A new kind of step is a branch in `step_of`.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from cProfile import Profile
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from pstats import Stats
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.data_parallel.passes import ADAMW
from dev import earlier
from lmsys import traits
from lmsys.bench import changes
from lmsys.bench.ranks import release
from lmsys.config import SIZES
from lmsys.measure import clock, memory
from lmsys.parallel import STRATEGIES, group

PACKAGES = "lmsys", earlier.NAME
WARM_STEPS, STEPS, PROFILED = 4, 6, 10  # untimed steps; steps of a round; steps of a profile
MARGIN = 0.02  # a smaller change of the time is none
FUNCTIONS = 25  # functions that a profile shows


def step_of(package: str, setting: Mapping[str, Any]) -> tuple[Callable[[], Any], Any]:
    """(a training step on this rank, the strategy's adapter) of a package.

    setting  what `main` has made of its options
    """

    def module(name: str) -> Any:
        return import_module(f"{package}.{name}")

    device, graphed = group.device(), setting["compile"] == "graphed"
    config = replace(module("config").model_config(setting["size"]), context_length=setting["context"])
    torch.manual_seed(0)
    model = module("model").TransformerLM(config, str(device))
    if setting["compile"] != "eager":
        model.compile_blocks()
    gradients = module("training.gradients")
    if not hasattr(gradients, "GraphedGradients") or not hasattr(gradients, "backward_of"):
        gradients = module("training.graph")  # which had them until 2026-11-28
    # The dtype of FSDP's all-gathers is an option of the strategy, as in the benchmarks.
    half = setting["bf16"] and traits.StrategyTraits.of(STRATEGIES[setting["strategy"]]).compute_dtype
    options = {"compute_dtype": torch.bfloat16} if half else {}
    with gradients.on_capture_stream() if graphed else nullcontext():
        entry, loss = module("parallel").STRATEGIES[setting["strategy"]], module("model").Loss(model)
        adapter = module("parallel.adapter").Adapter(entry.load(), loss, None, **options)
    adamw = module("training.optimizer").AdamW
    optimizer = adapter.make_optimizer(adamw, **ADAMW)
    if isinstance(optimizer, adamw):
        optimizer.rounded = model.rounded  # the optimizer also writes the model's rounded weights

    def loss_of(*inputs: torch.Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=setting["bf16"]):
            return adapter(*inputs)

    compute = gradients.backward_of(loss_of, adapter.finish)
    if graphed:
        warm_ups = gradients.warm_ups_of(adapter.wrapper)
        compute = gradients.GraphedGradients(compute, adapter.module.parameters(), warm_ups)
    tokens = torch.randint(config.vocab_size, (setting["batch"], setting["context"]), device=device)

    def step() -> None:
        compute(tokens, tokens)
        optimizer.step()
        optimizer.zero_grad()

    return step, adapter


class Measured(NamedTuple):
    """What a rank has measured: by package the seconds of a step in each round and the peak bytes; a profile's lines.

    The second model's peak does not count what the first one holds.
    """

    seconds: dict[str, list[float]]
    peaks: dict[str, int | None]
    profile: list[str]


def measure(folder: Path, setting: Mapping[str, Any]) -> Measured:
    """Measures one case on this rank."""
    earlier.importable(folder)
    device = group.device().type
    release()
    torch.compiler.reset()
    steps, adapters, peaks = dict[str, Callable[[], Any]](), [], dict[str, int | None]()
    for package in PACKAGES:

        def make(package: str = package) -> None:
            steps[package], adapter = step_of(package, setting)
            adapters.append(adapter)
            for _ in range(WARM_STEPS):
                steps[package]()

        peaks[package] = memory.peak_bytes(make, device)
    seconds: dict[str, list[float]] = {package: [] for package in PACKAGES}
    for number in range(setting["rounds"]):
        for package in PACKAGES if number % 2 else PACKAGES[::-1]:
            steps[package]()  # brings back what the other package's steps have pushed out of caches
            clock.synchronize(device)
            dist.barrier()
            clock.synchronize(device)
            start = perf_counter()
            for _ in range(STEPS):
                steps[package]()
            clock.synchronize(device)
            seconds[package].append((perf_counter() - start) / STEPS)
    lines = profiled(steps) if setting["profile"] else []
    for adapter in adapters:
        getattr(adapter, "wait", getattr(adapter.wrapper, "wait", lambda: None))()
    return Measured(seconds, peaks, lines)


def profiled(steps: Mapping[str, Callable[[], Any]]) -> list[str]:
    """Lines of a table: the functions whose own time in a step of Python differs the most between the packages."""
    totals, by_function = [], dict[tuple[str, str], dict[str, tuple[float, float]]]()
    for package, step in steps.items():
        dist.barrier()
        with Profile() as profile:
            for _ in range(PROFILED):
                step()
        stats: Any = Stats(profile)
        totals.append(f"{stats.total_calls / PROFILED:.0f} calls, {1e3 * stats.total_tt / PROFILED:.2f} ms")
        for (path, _, name), (_, calls, own_s, *_) in stats.stats.items():
            function = Path(path).name, name.replace(earlier.NAME, "lmsys")
            before = by_function.setdefault(function, {}).get(package, (0.0, 0.0))
            by_function[function][package] = before[0] + calls / PROFILED, before[1] + 1e6 * own_s / PROFILED
    rows = []
    for (path, name), found in by_function.items():
        (calls, now_us), (calls_before, before_us) = (found.get(package, (0.0, 0.0)) for package in PACKAGES)
        cells = f"{path} {name}", f"{calls:.1f}", f"{calls_before:.1f}", f"{now_us:.0f}", f"{before_us:.0f}"
        rows.append((-abs(now_us - before_us), f"| {' | '.join(cells)} |"))
    heads = "| function | calls | calls before | us | us before |", "|---|---|---|---|---|"
    return [
        f"profiled, a step: {totals[0]}; before: {totals[1]}",
        *heads,
        *(row for _, row in sorted(rows)[:FUNCTIONS]),
    ]


def line_of(setting: Mapping[str, Any], by_rank: Sequence[Measured]) -> str:
    """The table's line: of each round the slowest rank counts, and of memory the rank that needs the most."""
    now, before = (
        [max(times) for times in zip(*(rank.seconds[package] for rank in by_rank), strict=True)] for package in PACKAGES
    )
    shift = changes.paired([math.log(new / old) for new, old in zip(now, before, strict=True)])
    low, high = map(math.exp, shift.interval)
    if low > 1 + MARGIN or high < 1 - MARGIN:
        verdict = changes.SLOWER if low > 1 else changes.FASTER
    else:
        verdict = changes.SAME if low >= 1 - MARGIN and high <= 1 + MARGIN else changes.UNCLEAR
    peaks = [max(rank.peaks[package] or 0 for rank in by_rank) / 2**20 for package in PACKAGES]
    cells = [
        *(setting[name] for name in ("size", "compile", "strategy")),
        *(f"{1e3 * statistics.median(times):.3f}" for times in (now, before)),
        f"{math.exp(shift.estimate):.3f} ({low:.3f} to {high:.3f})",
        verdict,
        *(f"{mib:,.0f}" for mib in peaks),
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dev.earlier.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", metavar="REF", help="the earlier commit, a git reference")
    for name, default, known in (
        ("size", "tiny", SIZES),
        ("compile", "eager", ("eager", "compiled", "graphed")),
        ("strategy", "bucketed,zero1,fsdp", STRATEGIES),
    ):
        parser.add_argument(f"--{name}", default=default, metavar="A,B", help=f"of {', '.join(known)}; {default}")
    for name, number in {"world-size": 2, "context": 512, "batch": 4, "rounds": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=number, metavar="N", help=f"default: {number}")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--profile", action="store_true", help="also the functions of Python that take longer or less")
    options = vars(parser.parse_args(arguments))
    if options["rounds"] < changes.FEWEST_ROUNDS:
        parser.error(f"--rounds {options['rounds']}: an interval needs {changes.FEWEST_ROUNDS} or more")
    shared = {name: options[name] for name in ("context", "batch", "rounds", "profile")}
    shared["bf16"] = options["precision"] == "bf16"
    with tempfile.TemporaryDirectory() as name, group.WorkerGroup(options["world_size"], timeout_s=1200.0) as ranks:
        try:
            commit = earlier.unpack(options["ref"], Path(name))
        except ValueError as error:
            parser.error(str(error))
        print(f"steps in ms beside {commit[:10]}, on {options['world_size']} ranks by {ranks.backend}")
        print("| size | compile | strategy | ms | ms before | ratio (95 %) | verdict | MiB | MiB before |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for case in product(*(options[name].split(",") for name in ("size", "compile", "strategy"))):
            setting = shared | dict(zip(("size", "compile", "strategy"), case, strict=True))
            by_rank = ranks.run(measure, Path(name), setting)
            print("\n".join([line_of(setting, by_rank), *by_rank[0].profile]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
