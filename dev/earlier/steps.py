"""Times training steps of data-parallel strategies today beside those of an earlier commit.

python -m dev.earlier.steps 6ddb582 --size small --compile compiled,graphed --strategy bucketed,zero1,fsdp --profile

Each rank holds two models, one of each package, whose steps take turns in rounds. `--against` of `lmsys bench` cannot
do this: it gives each state of the code its own processes, and two groups of ranks cannot take turns. So here the
process of a rank holds both. A line of the table has the median milliseconds of a step, the ratio with its interval of
95 % and its verdict, as `--against` has them, and the peak of memory. With `--profile` a second table has the functions
of Python whose time in a step has changed the most on rank 0: look there if the host bounds the time of a step.

`step_of` makes a step. To add an option, name its axis in AXES, and use its value in `step_of`. The table shows the
value if it is a part of `case.impl`; if not, add a column in `line_of` and in the head that `main` prints.
"""

import argparse
import gc
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from cProfile import Profile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pstats import Stats
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.data_parallel.cases import ParallelCase
from benchmarks.data_parallel.passes import ADAMW
from benchmarks.data_parallel.rank import compiler_of
from dev import earlier
from dev.steps import add_options, cases_of
from lmsys.bench import Grid, changes, record
from lmsys.bench.ranks import Ranks
from lmsys.bench.results import MARGIN_IN_TURNS
from lmsys.measure import clock, memory
from lmsys.parallel import STRATEGIES, group
from lmsys.training.prepare import autocast
from lmsys.values import one_of

PACKAGES = "lmsys", earlier.NAME
# The axes that are options here: `step_of` reads all but the last, which is the number of ranks that `main` starts.
AXES = "size", "context", "batch", "precision", "compile", "strategy", "world_size"
DEFAULTS = Grid(  # values of axes whose options are not given; world_size 0: as many ranks as GPUs, two on a CPU
    "earlier", size=("tiny",), context=(512,), batch=(4,), precision=("bf16",), strategy=("bucketed", "zero1", "fsdp"),
    world_size=(0,),
)  # fmt: skip
WARM_STEPS, STEPS, PROFILED = 4, 6, 10  # untimed steps; steps of a round; steps of a profile
FUNCTIONS = 25  # functions that a profile shows
COMPILED = re.compile("c[a-z0-9]{51}[.]py")  # a module that torch.compile wrote: its name is a hash of its text
LIMIT_S = 1200.0  # seconds that the ranks may take for one case


def step_of(package: str, case: ParallelCase) -> tuple[Callable[[], Any], Any]:
    """(a training step on this rank, the adapter of the strategy), both of `package`."""

    def module(name: str) -> Any:
        return import_module(f"{package}.{name}")

    device = group.device()
    config = replace(
        module("config").model_config(case.size), context_length=case.context, vocab_size=case.config.vocab_size
    )
    torch.manual_seed(0)
    model = module("model").TransformerLM(config, str(device))
    if case.blocks == "compiled":
        model.compile_blocks()
    elif case.blocks == "fused":
        model.fuse_blocks()
    gradients = module("training.gradients")
    if not hasattr(gradients, "backward_of"):
        gradients = module("training.graph")  # which had it, and CUDA graphs, until 2026-11-27
    strategies = module("parallel").STRATEGIES
    one_of("--strategy", case.entry.name, strategies)  # the earlier table may lack it
    with gradients.on_capture_stream() if case.replayed else nullcontext():
        loss = module("model").Loss(model)
        adapter = module("parallel.adapter").Adapter(strategies[case.entry.name].load(), loss, None, **case.options)
    adamw = module("training.optimizer").AdamW
    optimizer = adapter.make_optimizer(adamw, **ADAMW)
    if isinstance(optimizer, adamw):
        optimizer.rounded = model.rounded  # the optimizer also writes the model's rounded weights

    def loss_of(*inputs: torch.Tensor) -> Any:
        with autocast(case.precision, device.type):
            return adapter(*inputs)

    compute = gradients.backward_of(loss_of, adapter.finish)
    if case.replayed:
        warm_ups = gradients.warm_ups_of(adapter.wrapper)
        compute = gradients.GraphedGradients(compute, adapter.module.parameters(), warm_ups)
    tokens = torch.randint(config.vocab_size, (case.batch, case.context), device=device)

    def step() -> None:
        compute(tokens, tokens)
        optimizer.step()
        optimizer.zero_grad()

    return step, adapter


class Measured(NamedTuple):
    """The measurements of a rank.

    seconds  by package: the seconds of a step in each round
    peaks    by package: the most bytes in use while its model was made and warmed up, above those in use before
    profile  the lines of the table of functions; empty without --profile
    """

    seconds: dict[str, list[float]]
    peaks: dict[str, int]
    profile: list[str]


def measure(folder: Path, case: ParallelCase, rounds: int, profile: bool) -> Measured:
    """Measures one case on this rank."""
    earlier.importable(folder)
    device = group.device().type
    steps, adapters, peaks = dict[str, Callable[[], Any]](), [], dict[str, int]()
    seconds: dict[str, list[float]] = {package: [] for package in PACKAGES}
    with compiler_of(case):
        for package in PACKAGES:

            def make(package: str = package) -> None:
                steps[package], adapter = step_of(package, case)
                adapters.append(adapter)
                for _ in range(WARM_STEPS):
                    steps[package]()

            peaks[package] = memory.peak_bytes(make, device)
        gc.collect()
        gc.disable()  # collecting takes longer than many steps do, and would hit one package or the other by chance
        for number in range(rounds):
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
        lines = profiled(steps) if profile else []
        gc.enable()
    for adapter in adapters:  # an earlier adapter has no `wait` of its own
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
            file = "compiled code" if COMPILED.fullmatch(Path(path).name) else Path(path).name
            function = file, name.replace(earlier.NAME, "lmsys")
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


def line_of(case: ParallelCase, commit: str, by_rank: Sequence[Measured]) -> str:
    """The table's line: of each round the slowest rank counts, and of memory the rank that needs the most."""
    now, before = (
        [max(times) for times in zip(*(rank.seconds[package] for rank in by_rank), strict=True)] for package in PACKAGES
    )
    today = {"benchmark": "steps", "id": case.id, "impl": case.impl, "label": case.impl, "outcome": "ok"}
    against = {"name": commit[:10], "commit": commit, "margin": MARGIN_IN_TURNS}
    records = today | {"samples_s": now}, record.earlier(today | {"samples_s": before}, against)
    (change,) = changes.compare_in_turns(records, MARGIN_IN_TURNS)
    cells = [
        *(case.size, case.compile, case.impl),
        *(f"{1e3 * statistics.median(times):.3f}" for times in (now, before)),
        *change.texts,
        change.verdict,
        *(f"{max(rank.peaks[package] for rank in by_rank) / 2**20:,.0f}" for package in PACKAGES),
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dev.earlier.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", metavar="REF", help="the earlier commit, a git reference")
    add_options(parser, AXES)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--profile", action="store_true", help="also the functions of Python that take longer or less")
    options = vars(parser.parse_args(arguments))
    if options["rounds"] < changes.FEWEST_ROUNDS:
        parser.error(f"--rounds {options['rounds']}: an interval needs {changes.FEWEST_ROUNDS} or more")
    cases = cases_of(parser, options, DEFAULTS)
    if not cases:
        parser.error("no case can run here")
    for case in cases:
        if case.entry.name not in STRATEGIES or case.entry.peer:
            parser.error(f"--strategy {case.entry.name}: it is not of this package, so no commit changes it")
    with tempfile.TemporaryDirectory() as name, closing(Ranks(timeout_s=LIMIT_S)) as ranks:
        folder = Path(name)
        try:
            commit = earlier.unpack(options["ref"], folder)
        except ValueError as error:
            parser.error(str(error))
        print(f"steps in ms beside {commit[:10]}, on {cases[0].world_size} ranks by {cases[0].backend}")
        print("| size | compile | strategy | ms | ms before | ratio | 95 % | verdict | MiB | MiB before |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        for case in cases:
            by_rank = ranks.run(
                case.world_size, case.backend, measure, folder, case, options["rounds"], options["profile"]
            )
            print("\n".join([line_of(case, commit, by_rank), *by_rank[0].profile]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
