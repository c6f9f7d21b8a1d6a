"""Collectives: all-reduce, reduce-scatter, all-gather and broadcast, by size, number of ranks and backend.

The result of each is checked. Then it is timed through our own calls, and in a plain loop of torch's.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks import axes
from benchmarks.collectives.rank import CollectiveCase, measure
from lmsys.bench import (
    Axis,
    Entry,
    Field,
    Grid,
    Record,
    Settings,
    Table,
    bench,
    fields,
    one_of,
    positive,
)
from lmsys.bench.ranks import OnRanks, world_sizes
from lmsys.cost.communication import bus_factor
from lmsys.parallel.group import BACKENDS

OPERATIONS = Table(
    "operation",
    [
        Entry("all_reduce", "lmsys.parallel.collectives:all_reduce_mean", "all-reduce"),
        Entry("reduce_scatter", "lmsys.parallel.collectives:reduce_scatter_mean", "reduce-scatter"),
        Entry("all_gather", "lmsys.parallel.collectives:all_gather", "all-gather"),
        Entry("broadcast", "torch.distributed:broadcast", "broadcast"),
    ],
)


class Collectives(OnRanks):
    """Each operation is checked, and timed on the ranks; one after another, since they share the wires."""

    name = "collectives"
    case_type = CollectiveCase
    tables = {"operation": OPERATIONS}
    streams = True
    axes: tuple[Axis, ...] = (
        *axes.named("--world-size"),
        Axis("megabytes", positive),
        Axis("operation", one_of(*OPERATIONS), tuple(OPERATIONS)),
        Axis("backend", one_of(*BACKENDS)),
    )
    fields: tuple[Field, ...] = (
        Field("megabytes", label="MB", role="axis", about="Size of the whole tensor, float32, in MB of 10⁶ bytes"),
        Field("world_size", label="ranks", role="axis"),
        *fields.axes("backend"),
        fields.TIME.called(about="Median time of a call, of the slowest rank"),
        Field(
            "algorithm_bytes_per_s",
            "B/s",
            "Algorithm bandwidth",
            about="Algorithm bandwidth: bytes of the whole tensor over median time",
            shown="GB/s",
        ),
        Field(
            "bus_bytes_per_s",
            "B/s",
            "Bus bandwidth",
            about="Bus bandwidth: the bytes that a link of a ring carries over median time (all-reduce 2 (n - 1) / n, "
            "reduce-scatter and all-gather (n - 1) / n of the tensor)",
            shown="GB/s",
        ),
        Field(
            "loop_fraction",
            label="Of a plain loop",
            about="Time of a call in a loop of torch's own calls with one wait at its end, over the time of ours",
            shown="%",
        ),
        Field("loop_s", "s", "plain loop", "detail", "Time of a call in a plain loop of torch's own calls", shown="ms"),
        Field("bytes", "B", "size", "detail", shown="MiB"),
        fields.ERROR.called(role="detail"),  # 0: results are exact
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[CollectiveCase]:
        """Two ranks or more, for each backend of the grid, else for each that this machine has."""
        for backend in grid["backend"] or (("nccl", "gloo") if settings.device == "cuda" else ("gloo",)):
            on, sizes = "cuda" if backend == "nccl" else "cpu", world_sizes(grid, backend)
            rows = OPERATIONS.select(grid["operation"])
            for size, operation, megabytes in product([one for one in sizes if one > 1], rows, grid["megabytes"]):
                yield CollectiveCase(grid.name, operation, on, megabytes, size, backend)

    def contends(self, case: CollectiveCase) -> bool:
        return False  # each row is another operation

    def sample(self, turn: Sequence[CollectiveCase], trial: Any) -> None:
        """Checks the only case of the turn, and takes its samples: seconds of each call, of the slowest rank."""
        (case,) = turn
        settings, candidate = trial.settings, trial.candidate(case)
        arguments = case, settings.seconds_per_row if settings.timed else None, settings.min_rounds, settings.seed
        found = candidate.attempt(trial.runner.ranks.run, case.world_size, case.backend, measure, *arguments) or ()
        if wrong := [one.wrong for one in found if one.wrong]:
            candidate.failed("wrong", wrong[0])
        elif found and settings.timed:
            measurement, ratios = trial.measurements[case.id], {"result": 0.0}
            measurement.samples = [max(calls) for calls in zip(*(one.samples for one in found), strict=True)]
            measurement.proof = [
                {"call": number, "draw": draw, "error_ratios": ratios} for number, draw in found[0].checked
            ]
            candidate.judge(ratios)
            candidate.notes["loop_s"] = max(one.loop_s for one in found)

    def metrics(self, case: CollectiveCase, record: Record, machine: Record) -> Record:
        found: Record = {"bytes": 4 * case.numel}
        if time_s := record.get("time_s"):
            found["algorithm_bytes_per_s"] = found["bytes"] / time_s
            found["bus_bytes_per_s"] = found["algorithm_bytes_per_s"] * bus_factor(case.impl, case.world_size)
            found["loop_fraction"] = record["loop_s"] / time_s
        return found


test_collectives = bench(Collectives)
