"""Collectives: time and bandwidth by size and number of ranks, with a fitted latency and bandwidth."""

from dataclasses import replace

from lmsys.bench.fields import Field, Record
from lmsys.reports import plots
from lmsys.reports.canvas import Plot
from lmsys.reports.tables import Block, Chapter, listing, pivot
from lmsys.reports.views import Style, View
from lmsys.reports.words import number, scaled

BANDWIDTH = "algorithm_bytes_per_s"
FITTED = (Field("latency_s", "s", "o", shown="µs"), Field("bytes_per_s", "B/s", "w", shown="GB/s"))


def chapters(view: View) -> list[Chapter]:
    view = view.checked(("megabytes", "world_size"), ("section", "backend"))
    view = view.labelled(impl="operation")
    sizes = {size: f"{size:,} MB" for size in view.values("megabytes")}
    view = view.read_as(megabytes=sizes).ordered("section", "backend", "impl", "world_size", "megabytes")
    parts = view.cut("collectives-{section}-{backend}", "{section}, {backend}")
    return [Chapter("Collectives", [_block(part) for part in parts])]


def _block(part: View) -> Block:
    fitted = [fit for own in part.groups("impl", "world_size").values() for fit in _fit(own)]
    fits = replace(part, cases=fitted, said=(*part.said, "megabytes")).with_fields(*FITTED)
    about = "o and w of t = o + bytes / w, least squares of relative errors over the sizes that were timed"
    table = listing(
        fits, ("impl", "world_size"), [one.name for one in FITTED], "fit", "Fitted latency and bandwidth", about
    )
    plots_ = [_bandwidth(own, fits) for own in part.cut("W{world_size}", "{world_size} ranks")]
    timed = part.only(lambda case: case["time_s"] is not None)
    rates = listing(timed, ("impl", "world_size", "megabytes"), timed.metrics(), "rates", "Bandwidth by size")
    return Block(part.title, [pivot(part, "time_s", ["impl", "world_size"], "megabytes"), table, *plots_], [rates])


def _fit(own: View) -> list[Record]:
    """Latency o and bandwidth w of t = o + bytes / w, where at least two sizes were timed: relative least squares."""
    timed = [(case["bytes"], case["time_s"]) for case in own.cases if case["time_s"]]
    if len({size for size, _ in timed}) < 2:
        return []
    total = sum(1 / time**2 for _, time in timed)
    size, time = (sum(one[place] / one[1] ** 2 for one in timed) / total for place in (0, 1))
    slope = sum((s - size) * (t - time) / t**2 for s, t in timed) / sum((s - size) ** 2 / t**2 for s, t in timed)
    fit = {**own.cases[0], "latency_s": max(time - slope * size, 0.0), "bytes_per_s": 1 / slope if slope > 0 else None}
    return [fit] if slope > 0 else []


def _bandwidth(own: View, fits: View) -> Plot | None:
    """Algorithm bandwidth against size, and that of the fit of all-reduce."""
    beside = []
    for fit in fits.cases:
        if fit["impl"] == "all_reduce" and fit["world_size"] == own.cases[0]["world_size"]:
            points = {
                mb: mb * 1e6 / (fit["latency_s"] + mb * 1e6 / fit["bytes_per_s"]) / 1e9
                for mb in own.values("megabytes")
            }
            rate = number(scaled(FITTED[1], fit["bytes_per_s"]))
            beside.append(
                (Style(f"all-reduce, o + bytes / w, w {rate} GB/s", "#9ca3af", dashed=True, marker="."), points)
            )
    return plots.lines(own, BANDWIDTH, "megabytes", word="bandwidth", xlabel="message, MB", beside=beside)
