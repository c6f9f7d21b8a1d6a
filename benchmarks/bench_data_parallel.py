"""Times a data-parallel training step of the language model, by strategy, size, batch, number of ranks, bucket size.

A *row* is a strategy of `lmsys.parallel.STRATEGIES` with its options. A *pass* is a series of training steps of one
row; the rows take turns pass by pass. This file runs in the bench's process and calls functions on the ranks:
`data_parallel/check.py` checks a row before timing, `data_parallel/rank.py` times a pass, `data_parallel/passes.py`
judges it. A new field of records is declared in `DataParallel.fields`, and computed in `data_parallel/cases.py`.

The runner calls the methods of `DataParallel`: they override hooks of `lmsys.bench.Benchmark`, which says when each is
called and what it returns. `ask(case, function, *args)` of `runner.ranks` returns what the function returns on each of
the case's ranks, as a list.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from benchmarks import axes, models
from benchmarks.data_parallel import check
from benchmarks.data_parallel.cases import (
    WRONG,
    ParallelCase,
    Row,
    Steps,
    agreement,
    communication,
    memory,
    pairs,
    why_not,
)
from benchmarks.data_parallel.layout import DATA_PARALLEL as LAYOUT
from benchmarks.data_parallel.passes import Pass, holds, judge_pass
from benchmarks.data_parallel.rank import inspect, take_pass
from lmsys import parallel, traits
from lmsys.bench import Axis, Candidate, Field, Grid, OnRanks, Record, Settings, bench, fields, ranks
from lmsys.cost.operations import model_flops, model_parameters

# The number of passes of each row, by backend. A GPU's clock moves between passes, so rows are compared within one.
PASSES = {"gloo": 2, "nccl": 3}
# After the timed steps, reading the weights may take as long as these steps and so many seconds more. A row that takes
# longer has put off work of the steps.
LATE_S = 0.05


def memory_field(name: str, label: str, about: str, role: str = "metric") -> Field:
    """The declaration of a field of bytes, shown in GiB; records hold the largest value of any rank."""
    return Field(name, "B", label, role, f"{about}, on the rank with most", "GiB")


class ParallelBenchmark(OnRanks):
    """Steps of models that strategies train on ranks: the base of `DataParallel` and of `bench_steps.TrainingSteps`."""

    tables = {"strategy": parallel.STRATEGIES}

    def why_not(self, case: ParallelCase) -> str | None:
        return why_not(case)

    def metrics(self, case: ParallelCase, record: Record, machine: Record) -> Record:
        """Numbers of parameters and nodes, and rates if the record has a time.

        Operations of a step and tokens/s are of all ranks together. The rate, and its shares of measured and stated
        peaks, are of one rank.
        """
        work: Record = {"num_parameters": model_parameters(case.config), "num_nodes": ranks.num_nodes()}
        if time_s := record.get("time_s"):
            tokens = case.world_size * case.batch * case.context
            flops = model_flops(case.config, tokens=tokens, context=case.context, mode="step")
            rates = models.model_rates(flops / case.world_size, time_s, case.precision, machine)
            work |= {"flops": flops, "tokens_per_s": tokens / time_s, **rates}
        return work


class DataParallel(ParallelBenchmark):
    """Training steps of each strategy, after two kinds of checks.

    Before timing, each row alone is compared with training in one process, tuned, and inspected for memory and
    communication. Then all rows are timed, pass after pass in turns. After a pass all ranks must have the same weights.
    In one pass, which is chosen at random afterwards, they must also be the weights that *plain steps* lead to: the
    steps of a plain training on the same batches, without the strategy (`data_parallel/passes.py`).
    """

    name = "data_parallel"
    layout = LAYOUT
    case_type = ParallelCase
    axes: tuple[Axis, ...] = axes.named(
        "--size --context --batch --precision --compile --strategy",
        "--world-size --bucket-mb --comm-dtype --sharded-optimizer --optimizer",
        "--checkpoint --residual",
        world_size=(1, 0),  # one rank, which scaling is measured against, and 0: as many as there are
    )
    fields: tuple[Field, ...] = fields.columns(
        "strategy size context batch precision compile",
        Field("world_size", label="ranks", role="axis"),
        Field("asked_bucket_mb", "MiB", "bucket size", "axis", "Size of a bucket that the case asks for"),
        "comm_dtype sharded_optimizer optimizer backend",
        models.WHAT_IS_KEPT,  # the fields of --checkpoint and --residual
        Field("num_nodes", label="nodes", role="axis"),
        Field("num_parameters", label="parameters", role="axis"),
        fields.TIME.called(about="Time of a training step, of the slowest rank"),
        Field("tokens_per_s", "tokens/s", "Rate", about="Tokens of all ranks' batches over the median time of a step"),
        # The tokens/s are divided by those of one rank alone times the number of ranks.
        Field(
            "scaling_efficiency",
            label="Scaling",
            about="Tokens/s over those of as many ranks alone",
            shown="%",
        ),
        Field(
            "exposed_s",
            "s",
            "Exposed communication",
            about="Median step time less that of the same step without synchronization (for strategies that shard: "
            "less that of the row that does not synchronize)",
            shown="ms",
            of=lambda record: record["time_s"] - record["unsynchronized_s"],
        ),
        Field(
            "predicted_exposed_s",
            "s",
            "Predicted exposed",
            about="Exposed communication by n o + s / (n w): n buckets of s bytes in all, the fitted latency o and "
            "bandwidth w of an all-reduce",
            shown="ms",
        ),
        # The rank that waits least comes last to its collectives: the others wait there for it, not for the network.
        Field(
            "communication_s",
            "s",
            "Communication",
            about="Time of a step with a collective in flight, on the rank that waits least",
            shown="ms",
        ),
        Field(
            "communication_fraction",
            label="Of the step",
            about="Communication as a share of the median step time",
            shown="%",
            of=lambda record: record["communication_s"] / record["time_s"],
        ),
        Field(
            "overlap_fraction",
            label="Overlapped",
            about="The share of communication that computation hides",
            shown="%",
        ),
        Field(
            "improvement",
            label="Gained on the baseline",
            about="Time gained on the baseline row, as a share of the baseline's communication",
            shown="%",
        ),
        fields.PEAK.called(about="Peak memory of a step, on the rank with most", shown="GiB"),
        memory_field("init_bytes", "After init", "Memory held once model, strategy and optimizer are made"),
        memory_field("before_step_peak_bytes", "Before step", "Peak memory of forward and backward"),
        memory_field("after_step_peak_bytes", "After step", "Peak memory of the optimizer's step"),
        memory_field("parameters_bytes", "Parameters", "Memory of parameters after a step"),
        memory_field("gradients_bytes", "Gradients", "Memory of gradients after a step"),
        memory_field("optimizer_bytes", "Optimizer state", "Memory of the optimizer's state after a step"),
        memory_field("activations_bytes", "Activations", "Memory of activations after a forward"),
        Field(
            "optimizer_fraction",
            label="State, of whole",
            about="The optimizer's state as a share of that of one process alone",
            shown="%",
        ),
        [
            memory_field(
                f"predicted_{kind}_bytes",
                f"predicted {kind}",
                f"Memory of {kind} at the strategy's stage of ZeRO",
                "detail",
            )
            for kind in ("parameters", "gradients", "optimizer")
        ],
        memory_field(
            "init_peak_bytes", "init peak", "Peak memory while model, strategy and optimizer are made", "detail"
        ),
        memory_field("before_step_bytes", "before step", "Memory held before the optimizer's step", "detail"),
        memory_field("buffers_bytes", "buffers", "Memory of buffers", "detail"),
        Field("bucket_mb", "MiB", "bucket size", "detail", "Size of a bucket, as the strategy has chosen or got it"),
        Field(
            "unsynchronized_s", "s", role="detail", about="Median time of a step without synchronization", shown="ms"
        ),
        Field("latency_s", "s", role="detail", about="Fitted latency of an all-reduce", shown="us"),
        Field("bandwidth_bytes_per_s", "B/s", role="detail", about="Fitted bandwidth of an all-reduce", shown="GB/s"),
        fields.MFU,
        fields.MATMUL_FRACTION.called(
            about="The arithmetic of the formula on a rank over median time, as a share of the large matmul measured in"
            " this run"
        ),
        fields.SUSTAINED_FRACTION.called(role="metric"),
        fields.RATE.called(role="detail", about="The arithmetic of the formula on a rank over median time"),
        fields.details("num_buckets", "unsynchronized_by", "timeline"),
        Field("unchecked", role="detail", about="Why the timed steps were not held to plain ones"),
        Field("held_by", role="detail", about="By other row: whether the steps of a pass led to the same bits"),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[ParallelCase]:
        """A case for each model, number of ranks, row and combination of the options that the row takes.

        On one rank there are only rows without synchronization: the scaling of the others is measured against these.
        """
        for model, world_size, entry in product(
            grid.product("size", "context", "batch", "precision", "compile"),
            ranks.world_sizes(grid, ranks.backend_of(settings.device)),
            parallel.STRATEGIES.select(grid["strategy"] or parallel.STRATEGIES),
        ):
            strategy = traits.StrategyTraits.of(entry)
            ways = product(
                grid["bucket_mb"] if strategy.takes_bucket_mb else (None,),
                grid["comm_dtype"] if strategy.comm_dtypes else ("float32",),
                # A ShardedOptimizer needs all mean gradients on every rank.
                grid["sharded_optimizer"] if strategy.zero_stage == 0 and strategy.synchronizes else (False,),
                grid.product("checkpoint", "residual", "optimizer"),
            )
            for *options, (kept, stream, optimizer) in ways if world_size > 1 or not strategy.synchronizes else ():
                asked = grid.name, entry, settings.device, *model, world_size, *options
                yield ParallelCase(*asked, checkpoint=kept, residual=stream, optimizer=optimizer)

    def contends(self, case: ParallelCase) -> bool:
        """True for a row that synchronizes. Other rows do less work, so they cannot be called the fastest."""
        return bool(case.traits.synchronizes)

    def check_all(self, candidates: Sequence[Candidate], setup: Any, runner: Any) -> None:
        """Checks, tunes and inspects each row once: `candidate.state` becomes a `Row`, or the candidate fails."""
        # The largest world size comes first: its ranks are started once, and smaller ones use some of them.
        new = sorted((row for row in candidates if row.state is None), key=lambda row: -row.case.world_size)
        for number, candidate in enumerate(new, start=1):
            start = time.perf_counter()
            candidate.attempt(self._check_and_profile, candidate, runner)
            ending = candidate.outcome if candidate.reason is None else f"{candidate.outcome}: {candidate.reason}"
            runner.say(f"  [{number}/{len(new)}] {candidate.case.id}: {ending}, {time.perf_counter() - start:.1f} s")

    def _check_and_profile(self, candidate: Candidate, runner: Any) -> None:
        """Judges a row by `check`. If it is right, and rows are timed, tunes its buckets and sets its `state`."""
        case, settings, ask = candidate.case, runner.settings, runner.ranks.ask
        if case.world_size > 1 and case.traits.synchronizes:
            candidate.judge(ask(case, check.gate, settings.seed)[0], "float32")
            check.judge_by_trials(candidate, ask, settings.seed)
        if candidate.outcome != "ok" or not settings.timed:
            return
        if case.traits.tuned_bucket_mb:
            # Sizes of buckets in MiB, of which a tuned row takes the fastest.
            sized = [
                replace(case, asked_bucket_mb=mb) for mb in ((1, 25) if case.backend == "gloo" else (10, 25, 100, 400))
            ]
            asked = Pass(seed=settings.seed, draw=settings.seed, key=0, steps=4)  # not judged, so any draw and key do
            case = min(sized, key=lambda case: max(sum(rank.samples) for rank in ask(case, take_pass, asked)))
        candidate.state = Row(case, ask(case, inspect, settings.seed))
        if not all(seen.finite for seen in candidate.state.seen):
            candidate.failed("wrong", "the loss holds NaN or inf after a few steps")

    def sample(self, turn: Sequence[ParallelCase], trial: Any) -> None:
        """Runs all passes, the rows in turns, then compares one of them with plain steps."""
        number_of_passes = PASSES[turn[0].backend]
        # Each step of a row is compared with the same step of other rows, so all rows take the same number of steps.
        steps = min(trial.candidate(case).state.steps(trial.settings, number_of_passes) for case in turn)
        # All strategies begin with the same weights, by the seed, and take the same batches. No strategy can foresee
        # the batches, which `draw` decides, nor which rows of the weight matrices are judged, which `key` decides.
        draw, key = _entropy(turn, trial), _entropy(turn, trial)
        passes = [Pass(trial.settings.seed + number, draw, key, steps) for number in range(number_of_passes)]
        for (number, asked), case in product(enumerate(passes), turn):
            candidate = trial.candidate(case)
            if candidate.outcome == "ok":
                candidate.attempt(self._run_pass, candidate, asked, number, trial.runner)
        self._check_pass(turn, passes, trial)
        rows = {case.id: trial.candidate(case).state for case in turn if trial.candidate(case).outcome == "ok"}
        for name, row in rows.items():
            trial.measurements[name].samples = row.samples
            trial.measurements[name].record = communication(row, list(rows.values())) | memory(row)

    def _run_pass(self, candidate: Candidate, asked: Pass, number: int, runner: Any) -> None:
        """Runs pass `number` of a row. Keeps in `candidate.state` its times, of the slowest rank, and its `bits`.

        `bits` is the sha256 of slices of the weights. A pass that is run again replaces its times and bits; the times
        of its steps without synchronization (`alone`) are added to those of the first run. The row is wrong if ranks
        end with different parameters, or if its weights come so late that work must have been put off until after the
        timed steps.
        """
        row = candidate.state
        taken = runner.ranks.ask(row.case, take_pass, asked)
        # Appends the pass, or replaces the one of this number.
        row.passes[number : number + 1] = [ranks.slowest(rank.samples for rank in taken)]
        row.alone += ranks.slowest(rank.alone for rank in taken)
        row.bits[number] = taken[0].bits
        if len({rank.model for rank in taken}) > 1 and row.case.traits.synchronizes:
            candidate.failed("wrong", "after the timed steps ranks have different parameters")
        elif late := [rank.late_s for rank in taken if rank.late_s > sum(rank.samples) + LATE_S]:
            candidate.failed(
                "wrong",
                f"reading the weights after the timed steps took {max(late):.2g} s, longer than all timed steps:"
                " the row had postponed their work",
            )

    def _check_pass(self, turn: Sequence[ParallelCase], passes: Sequence[Pass], trial: Any) -> None:
        """Compares all rows with plain steps, in one pass, which is chosen only now, after all passes have run.

        Then rows are compared with one another: `held_by` says for each pair how their weights agree
        (`cases.agreement`).
        """
        number, taken = _entropy(turn, trial) % len(passes), list[Steps]()
        for case in turn:
            candidate = trial.candidate(case)
            if candidate.outcome != "ok":
                continue
            if case.world_size > 1 and not case.traits.synchronizes:
                candidate.notes["unchecked"] = "each rank trains for itself"
                continue
            ratios = candidate.attempt(self._judge_pass, case, candidate, passes[number], number, trial)
            if candidate.outcome == "ok":
                taken.append(Steps(case, candidate.state.bits[number], ratios))
        # Plain steps agree with both rows of a pair within the tolerance. Where their bits differ and must not, the
        # earlier row is the reference, as tables go from plain rows to involved ones: the later row is wrong.
        for first, second in pairs(taken):
            held_by, why = agreement(first, second)
            trial.candidate(first.case).notes.setdefault("held_by", {})[second.case.impl] = held_by
            trial.candidate(second.case).notes.setdefault("held_by", {})[first.case.impl] = held_by
            if held_by == WRONG:
                trial.candidate(second.case).failed("wrong", f"after the timed steps of {first.case.impl} and it {why}")

    def _judge_pass(
        self, case: ParallelCase, candidate: Candidate, asked: Pass, number: int, trial: Any
    ) -> dict[str, float] | None:
        """{parameter: its error over its budget} of the worst parameter; None if the steps cannot be judged.

        asked, number  the pass that is judged, and its number
        """
        row, ask = candidate.state, trial.runner.ranks.ask
        # When a row fails, its ranks end, and with them the weights that passes of other rows have left there. Then the
        # pass is run again.
        if not all(ask(row.case, holds, asked)):
            self._run_pass(candidate, asked, number, trial.runner)
            if candidate.outcome != "ok":
                return None
        answers = ask(row.case, judge_pass, asked)
        if answers[0] is None:
            candidate.notes["unchecked"] = "plain steps, which divide nothing among ranks, do not fit in this memory"
            return None
        worst = dict(
            [
                max(
                    (pair for ratios in answers for pair in ratios.items()),
                    key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1],
                )
            ]
        )
        # The index of the pass's last step in `row.samples`, which has the first steps of all passes, then the second
        # steps of all passes, ...
        call = (asked.steps - 1) * len(row.passes) + number
        trial.measurements[case.id].proof.append({"call": call, "error_ratios": worst} | asdict(asked))
        before = candidate.error_ratio or 0.0
        candidate.judge(worst)
        candidate.error_ratio = max(before, candidate.error_ratio or 0.0)
        if candidate.outcome != "ok":
            candidate.reason = (
                f"right before it was timed, not in the timed steps of pass {number + 1}: {candidate.reason}"
            )
        return worst


def _entropy(turn: Sequence[ParallelCase], trial: Any) -> int:
    """A number that the first rank draws now: no row can foresee it."""
    return int(trial.runner.ranks.run(max(case.world_size for case in turn), turn[0].backend, ranks.entropy)[0])


test_data_parallel = bench(DataParallel)
