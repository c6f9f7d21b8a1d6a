"""Compares versions of a training step: bit by bit if their bits must agree, else within a tolerance.

python -m dev.steps --size tiny --context 32 --strategy naive,fsdp --checkpoint none,whole

A version is one choice of the axes of `benchmarks/bench_data_parallel.py` (strategy, compilation, checkpointing, number
of ranks, ...); each axis is an option here. Nothing is timed. It prints a table in Markdown with a line for each pair
of versions. The line says if their weights after the steps have equal bits; if not, if the weights of each are within
the tolerance of plain steps (without a strategy) in float64. It also has the error of each over the error allowed.
`pairs` and `agreement` of `benchmarks/data_parallel/cases.py` decide which versions make pairs, and which pairs must
have equal bits. The exit code is 1 if a pair does not agree. `dev/earlier/steps.py` uses `add_options` and `cases_of`.
"""

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from benchmarks.bench_data_parallel import DataParallel
from benchmarks.data_parallel.cases import UNKNOWN, WRONG, ParallelCase, Steps, agreement, pairs
from benchmarks.data_parallel.passes import Pass, judge_pass
from benchmarks.data_parallel.rank import take_pass
from lmsys.bench import Grid, Settings
from lmsys.bench.fields import filled, given_axes
from lmsys.bench.ranks import Ranks

DEFAULTS = Grid(  # values of axes whose options are not given; world_size 0: as many ranks as GPUs, two on a CPU
    "step", size=("tiny",), context=(32,), batch=(2,), precision=("fp32",), strategy=("naive",), world_size=(0,)
)


def steps_of(case: ParallelCase, asked: Pass, ranks: Ranks) -> Steps:
    """Runs the steps of a version on its ranks, and judges the weights after them.

    Returns a hash of the weights that are looked at, and their errors against plain steps in float64; the errors are
    None if plain steps do not fit in the memory of some rank.

    asked  the seeds, and the number of steps
    """
    start = case.world_size, case.backend
    taken = ranks.run(*start, take_pass, case, asked)
    by_rank = ranks.run(*start, judge_pass, case, asked)
    fits = all(ratios is not None for ratios in by_rank)
    worst = {name: max(ratios[name] for ratios in by_rank) for name in by_rank[0]} if fits else None
    return Steps(case, taken[0].bits, worst)


def name_of(case: ParallelCase) -> str:
    """The version in words, such as "naive, eager, 2 ranks"."""
    return f"{case.impl}, {case.compile}, {case.world_size} rank{'s' * (case.world_size > 1)}"


def table(judged: Iterable[tuple[Steps, Steps]]) -> str:
    """The table in Markdown, with a line for each pair of versions.

    The column "held by" is "bits" or "tolerance", or "wrong" or "unknown" with the reason.
    """
    lines = ["| version | and | held by | errors / allowed |", "|---|---|---|---|"]
    for first, second in judged:
        ratios = " and ".join(
            "unknown" if steps.ratios is None else f"{max(steps.ratios.values()):.3f}" for steps in (first, second)
        )
        held = ": ".join(filter(None, agreement(first, second)))
        lines.append(f"| {name_of(first.case)} | {name_of(second.case)} | {held} | {ratios} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Adds --device, and an option for each axis of the benchmark; with `names`, only for the axes of these names."""
    for axis in DataParallel.axes:
        if axis.option and (names is None or axis.name in names):
            parser.add_argument(axis.option, dest=axis.option, help=axis.help.replace("%", "%%"), metavar=axis.metavar)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")


def cases_of(parser: argparse.ArgumentParser, options: Mapping[str, Any], defaults: Grid) -> list[ParallelCase]:
    """The cases that the options of `add_options` choose and that can run here.

    A case that cannot run is named on standard error, with the reason. `parser.error` ends the program if a value is
    wrong.

    defaults  values of axes whose options are not given
    """
    benchmark, texts = DataParallel(), {name: text for name, text in options.items() if text and name.startswith("--")}
    try:
        grid = filled(defaults, DataParallel.axes, given_axes(DataParallel.axes, texts))
        cases = list(benchmark.cases(grid, Settings(device=options["device"])))
    except ValueError as error:
        parser.error(str(error))
    reasons = [(case, benchmark.why_not(case)) for case in cases if case.traits.synchronizes or case.world_size == 1]
    for case, reason in reasons:
        if reason:
            print(f"{name_of(case)}: left out, as {reason}", file=sys.stderr)
    return [case for case, reason in reasons if not reason]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.steps", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps that are taken, after the first few")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, batches and the rows looked at")
    options = vars(parser.parse_args(arguments))
    if options["steps"] < 1:
        parser.error(f"--steps {options['steps']}: must be at least 1")
    cases, seed = cases_of(parser, options, DEFAULTS), options["seed"]
    asked_pass = Pass(seed, seed, seed, options["steps"])
    with closing(Ranks()) as ranks:
        versions = [steps_of(case, asked_pass, ranks) for case in cases]
    all_pairs = pairs(versions)
    if not all_pairs:
        parser.error(
            "there must be two versions or more on as many ranks, of one model and batch, and"
            f" {len(versions)} can run here: name several values of an axis; on one rank the strategy is none"
        )
    print(table(all_pairs))
    return int(any(agreement(*pair)[0] in (WRONG, UNKNOWN) for pair in all_pairs))


if __name__ == "__main__":
    sys.exit(main())
