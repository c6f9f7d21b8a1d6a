"""The chapter on collectives: time and bandwidth by size and number of ranks, with a fitted latency and bandwidth."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.load import InputError, Machine, file_name
from lmsys.reports.metrics import Metric, timing
from lmsys.reports.page import Block, Chapter
from lmsys.reports.plots import Plot, assign_looks, lines
from lmsys.reports.tables import Footnotes, Table, number

OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]  # in reading order
SECTIONS = {"default": "Everyday sizes", "sizes": "By number of ranks", "smoke": "Smoke test"}
SETTING = ["section", "backend", "memory_limit_bytes"]
SHAPE = ["megabytes", "world_size"]
NUMBERS = (
    "time_s mean_s std_s p20_s p80_s rounds loop_s loop_fraction algorithm_bytes_per_s bus_bytes_per_s bytes"
    " sm_clock_mhz memory_limit_bytes"
).split()
TEXT = "section impl backend outcome reason comparison clock".split()
TIME = Metric("time", "time_s", "Median time of a call, of the slowest rank", "Time", "ms", 1e3, True)
BUS = Metric("bus", "bus_bytes_per_s", "Bus bandwidth: what a link of a ring carries", "Bus bandwidth", "GB/s", 1e-9)


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """`machine` holds records of collectives only."""
    machine = replace(machine, frame=_typed(machine.frame))
    return [Chapter("Collectives", list(_blocks(machine)))]


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.reindex(columns=["run", "id", *TEXT, "samples_s", *SHAPE, *NUMBERS])
    for field in [*SHAPE, *NUMBERS]:
        frame[field] = pd.to_numeric(frame[field], errors="coerce").astype(float)
    for case in frame[frame[["section", "backend", *SHAPE]].isna().any(axis=1)].itertuples():
        raise InputError(f"record {case.id!r}: a record of a collective needs a section, backend, size and world size")
    frame[SHAPE] = frame[SHAPE].astype(int)
    frame["memory_limit_bytes"] = frame["memory_limit_bytes"].fillna(0)
    frame["place"] = frame["impl"].map(lambda impl: OPERATIONS.index(impl) if impl in OPERATIONS else len(OPERATIONS))
    frame["section_place"] = frame["section"].map(lambda name: [*SECTIONS, name].index(name))
    order = ["section_place", "section", "backend", "place", "impl", "world_size", "megabytes", "id"]
    return frame.sort_values(order, kind="stable").reset_index(drop=True)


def _blocks(machine: Machine) -> Iterator[Block]:
    for (section, backend, _), own in machine.frame.groupby(SETTING, sort=False):
        heading = f"{SECTIONS.get(section, section)}, {backend}"
        stem = file_name(f"{machine.slug}-collectives-{section}-{backend}")
        fits = _fits(own)
        figures: list[Table | Plot] = [_by_size(machine, own, stem, heading)]
        if not fits.empty:
            figures.append(_fitted(machine, own, fits, stem, heading))
        plots = [_bandwidth(machine, own, fits, stem, heading, world) for world in sorted(set(own["world_size"]))]
        yield Block(heading, figures + [plot for plot in plots if plot], [_rates(machine, own, stem, heading)])


def _by_size(machine: Machine, own: pd.DataFrame, stem: str, heading: str) -> Table:
    """Rows: operations by numbers of ranks; columns: sizes."""
    cases, notes = tables.by_key(own, ["impl", "world_size", "megabytes"]), Footnotes()
    sizes, rows = sorted(set(own["megabytes"])), []
    for impl, world in tables.distinct(own, ["impl", "world_size"]):
        found = [cases.get((impl, world, size)) for size in sizes]
        rows.append([impl, str(world), *(tables.cell(c, c.time_s * 1e3 if c else float("nan"), notes) for c in found)])
    return Table(
        name=f"{stem}-time",
        title=f"Time by size · {heading}",
        caption=f"{TIME.title}, ms; float32, MB of 10⁶ bytes. {heading}. {timing(own)}{machine.about(own)}",
        columns=["operation", "ranks", *(f"{size:,} MB" for size in sizes)],
        rows=rows,
        frame=own[["impl", "world_size", "megabytes", "outcome", *NUMBERS[:-2]]],
        notes=[*notes.notes(), *tables.legend(rows)],
        keys=2,
    )


def _rates(machine: Machine, own: pd.DataFrame, stem: str, heading: str) -> Table:
    rows = []
    for case in own[own["time_s"].notna()].itertuples(index=False):
        shown = [case.time_s * 1e3, case.std_s * 1e3, case.algorithm_bytes_per_s / 1e9, case.bus_bytes_per_s / 1e9]
        rows.append([case.impl, str(case.world_size), f"{case.megabytes:,}", *map(number, shown)])
        rows[-1].append(number(100 * case.loop_fraction))
    return Table(
        name=f"{stem}-rates",
        title=f"Bandwidth by size · {heading}",
        caption="Algorithm bandwidth: bytes over median time. Bus bandwidth: that times what a link of a ring carries "
        "of it (all-reduce 2 (n - 1) / n, reduce-scatter and all-gather (n - 1) / n). Of a plain loop: the time of a "
        f"call in a loop of torch's own calls with one wait at its end, over ours. {heading}. {machine.about(own)}",
        columns=[
            "operation",
            "ranks",
            "MB",
            "time, ms",
            "std, ms",
            "algorithm, GB/s",
            "bus, GB/s",
            "of a plain loop, %",
        ],
        rows=rows,
        frame=own[["impl", "world_size", "megabytes", *NUMBERS[:-2]]],
        keys=3,
    )


def _fits(own: pd.DataFrame) -> pd.DataFrame:
    """Latency o and bandwidth w of t = o + bytes / w, where at least two sizes were timed: relative least squares."""
    found = []
    for (impl, world), rows in own[own["time_s"].notna()].groupby(["impl", "world_size"], sort=False):
        if rows["bytes"].nunique() < 2:
            continue
        weights = 1 / rows["time_s"] ** 2
        size, time = ((weights * rows[field]).sum() / weights.sum() for field in ("bytes", "time_s"))
        slope = (weights * (rows["bytes"] - size) * (rows["time_s"] - time)).sum()
        slope /= (weights * (rows["bytes"] - size) ** 2).sum()
        if slope > 0:
            found.append((impl, world, max(time - slope * size, 0.0), 1 / slope))
    return pd.DataFrame(found, columns=["impl", "world_size", "latency_s", "bytes_per_s"])


def _fitted(machine: Machine, own: pd.DataFrame, fits: pd.DataFrame, stem: str, heading: str) -> Table:
    rows = [
        [fit.impl, str(fit.world_size), number(fit.latency_s * 1e6), number(fit.bytes_per_s / 1e9)]
        for fit in fits.itertuples(index=False)
    ]
    return Table(
        name=f"{stem}-fit",
        title=f"Fitted latency and bandwidth · {heading}",
        caption="o and w of t = o + bytes / w, least squares of relative errors over the sizes that were timed. "
        f"{heading}. {machine.about(own)}",
        columns=["operation", "ranks", "o, µs", "w, GB/s"],
        rows=rows,
        frame=fits,
        keys=2,
    )


def _bandwidth(
    machine: Machine, own: pd.DataFrame, fits: pd.DataFrame, stem: str, heading: str, world: int
) -> Plot | None:
    """Algorithm bandwidth against size, and that of the fit of all-reduce."""
    timed = own[(own["world_size"] == world) & own["time_s"].notna()]
    series: dict[str, dict[int, float]] = {
        impl: dict(zip(rows["megabytes"], rows["algorithm_bytes_per_s"] / 1e9, strict=True))
        for impl, rows in timed.groupby("impl", sort=False)
    }
    named: dict[str, tuple[str, bool]] = {impl: (impl.replace("_", "-"), False) for impl in series}
    for fit in fits[fits["world_size"] == world].itertuples(index=False):
        name = f"{fit.impl} fit"
        if fit.impl == "all_reduce":
            series[name] = {
                mb: mb * 1e6 / (fit.latency_s + mb * 1e6 / fit.bytes_per_s) / 1e9 for mb in series[fit.impl]
            }
            named[name] = (f"all-reduce, o + bytes / w, w {number(fit.bytes_per_s / 1e9)} GB/s", True)
    looks: Any = assign_looks(named, OPERATIONS)
    return lines(
        name=f"{stem}-W{world}-bandwidth",
        title=f"Algorithm bandwidth by size · {heading}, {world} ranks",
        caption=f"Bytes over median time by size of the message, {world} ranks. {heading}. {machine.about(own)}",
        series=series,
        style=looks,
        unit="GB/s",
        xlabel="message, MB",
    )
