"""Attention: an overview, then for each grid the tables and plots of each dtype, mask and direction."""

from dataclasses import replace

from lmsys.bench.fields import Field
from lmsys.reports import plots
from lmsys.reports.canvas import Plot
from lmsys.reports.page import Block, Chapter
from lmsys.reports.speedups import SPEEDUP, base_of, compared, is_compared
from lmsys.reports.tables import Table, endings, means, pivot
from lmsys.reports.views import View
from lmsys.reports.words import FILES, number

SECTIONS = {  # in page order
    "default": "Everyday shapes",
    "tokens16k": "16,384 tokens, by length",
    "leaderboard": "Leaderboard workload",
    "flash": "FlashAttention against naive, head dimension by length",
    "eager_compiled": "Eager against compiled, head dimension by length",
    "by_length": "By sequence length",
    "tiers": "Rectangular tiers, Q:K",
    "smoke": "Smoke test",
}
JOINED = {  # grids of many head dimensions: tables that hold several rows in one cell, as a / b / c
    "flash": ("naive", "flash_triton_torch_bwd", "flash_triton"),
    "eager_compiled": ("naive", "naive_compiled"),
}
BARS = ("tiers", "by_length")
GLANCE = ("tokens16k",)  # grids whose few cells, of both masks, stand in one table of rates
SHAPE = ("head_dim", "queries", "keys", "heads", "kv_heads", "batch")
DRAWN = ("time_s", "flops_per_s", "peak_bytes")  # by length

Items = list[Table | Plot | None]


def chapters(view: View) -> list[Chapter]:
    """An overview, then a chapter for each grid."""
    view = _shaped(view.checked(numbers=SHAPE, words=("section", "dtype", "direction")).read_as(section=SECTIONS))
    view = view.ordered("section", "dtype", "causal", "direction", "memory_limit_bytes", *SHAPE, "impl")
    rows = _rows(view)
    overview = [Block("", [rows])]
    found = [Chapter("Attention", overview)]
    for (section,), own in view.groups("section").items():
        name = own.text("section", section)
        if any(case["queries"] != case["keys"] for case in own.cases):
            lengths = own.ordered("queries", "keys").distinct("S")
            own = own.labelled(S="Q×K").read_as(S={value: own.text("S", value) for (value,) in lengths})
        parts = [
            _compared(part)
            for part in own.cut("{section}-{dtype}-{mask}-{direction}", "{direction}, {dtype}, {causal}")
        ]
        if summary := _summary(own, section, parts):
            overview.insert(-1, Block(name, [summary], chapter=f"Attention: {name}"))
        blocks = _glance(own) if section in GLANCE else []
        found.append(Chapter(f"Attention: {name}", blocks + [_block(part, section) for part in parts]))
    return found


def _rows(view: View) -> Table:
    """Which rows were run, and how their cases ended."""
    own = view.ordered("impl").with_fields(Field("name", of=lambda case: case["impl"])).labelled(peer="whose")
    own = own.read_as(peer={True: "peer", False: "ours"})
    return endings(own, "name", "label", "peer", word="attention-implementations", title="Implementations")


def _shaped(view: View) -> View:
    """With B, H, S and D for the six numbers of a shape, and the mask as names of files have it."""
    return (
        view.labelled(causal="mask")
        .quiet(*SHAPE)
        .with_fields(
            Field("B", role="axis", of=lambda case: case["batch"]),
            Field("H", role="axis", of=lambda case: _pair(case["heads"], case["kv_heads"], ":")),
            Field("S", role="axis", of=lambda case: _pair(case["queries"], case["keys"], "×")),
            Field("D", role="axis", of=lambda case: case["head_dim"]),
            Field("mask", role="detail", of=lambda case: "causal" if case["causal"] else "full"),
        )
    )


def _pair(one: int, other: int, sign: str) -> int | str:
    return one if one == other else f"{one:,}{sign}{other:,}"


def _compared(part: View) -> View:
    """With speedups, and with the products that hold where batch varies with length, or heads with head dimension."""
    held = []
    for one, other in (("B", "S"), ("H", "D")):
        products = {case[one] * case[other] for case in part.cases if type(case[one]) is type(case[other]) is int}
        held += [f"{one}·{other} = {products.pop():,}"] if part.varies(one) and len(products) == 1 else []
    return compared(replace(part, also=", ".join(held)), base_of(part))


def _keys(part: View) -> list[str]:
    return [name for name in ("causal", "D", "S") if part.varies(name)] or ["S"]


def _summary(own: View, section: str, parts: list[View]) -> Table | None:
    """The geometric mean of the speedups of each part, by row."""
    parts = [part for part in parts if is_compared(part)]
    bases = list(dict.fromkeys(part.text("impl", part.base) for part in parts))
    found = {}
    for part in parts:
        head = part.title if len(bases) == 1 else f"{part.title}, over {part.text('impl', part.base)}"
        for impl in own.values("impl"):
            found[own.text("impl", impl), head] = [case[SPEEDUP] for case in part.cases if case["impl"] == impl]
    title = f"Speedup over {' or '.join(bases)}, geometric mean · {own.text('section', section)}"
    return means(own, found, f"{section}-summary", title)


def _glance(own: View) -> list[Block]:
    """The rates of all cells of both masks, of the rows that were timed."""
    timed = {case["impl"] for case in own.cases if case["time_s"] is not None}
    parts = own.only(lambda case: case["impl"] in timed).cut(
        "{section}-{dtype}-{direction}", "{direction}, {dtype}, both masks"
    )
    return [
        Block(part.title, [pivot(_compared(part), "flops_per_s", _keys(part))])
        for part in parts
        if part.varies("causal")
    ]


def _block(part: View, section: str) -> Block:
    facets, keys = _facets(part), _keys(part)
    tables = {metric: pivot(part, metric, keys) for metric in part.metrics()}
    time: Items = [tables.pop("time_s"), pivot(part, SPEEDUP, keys) if is_compared(part) else None]
    rest: Items = list(tables.values())
    heat = [plots.heat_map(facet, _keys(facet)) for facet in (facets if part.varies("S") else [part])]
    roofline: Items = [_roofline(facet) for facet in facets]
    if joined := _by_dim(part, section):
        lead = [*joined, *_by_length(part, DRAWN[:1]), *heat]
        return Block(part.title, lead, [*time, *rest, *_by_length(part, DRAWN[1:]), *roofline])
    bars = [plots.bars(facet, ["time_s"], "S", word="bars") for facet in facets] if section in BARS else []
    lead = [*time, *bars, *_by_length(part, DRAWN), *heat]
    # One shape is a handful of points in one place: its roofline says little more than the table.
    single = len(part.distinct(*SHAPE)) == 1
    return Block(part.title, lead if single else lead + roofline, rest + roofline if single else rest)


def _by_dim(part: View, section: str) -> Items:
    """The tables of time and of what is saved, of square shapes."""
    wanted = JOINED.get(section, ())
    own = part.only(lambda case: case["impl"] in wanted and case["queries"] == case["keys"])
    tables: Items = [
        pivot(own, metric, ["D"], "S", "impl", f"{FILES[metric]}-by-dim") for metric in ("time_s", "saved_bytes")
    ]
    return tables if own.varies("impl") else []


def _facets(part: View) -> list[View]:
    """A part for each plot against length: by head dimension, and by heads and batch where these tell cases apart."""
    names = part.telling(["D"] if part.varies("D") else [], "S", "impl", "causal")
    return part.cut("-".join(f"{n}{{{n}}}" for n in names), ", ".join(f"{n} {{{n}}}" for n in names), tail=True)


def _by_length(part: View, metrics: tuple[str, ...]) -> Items:
    """One plot for each metric and head dimension, of square shapes."""
    found: Items = []
    for facet in _facets(part.only(lambda case: case["queries"] == case["keys"])):
        peak = facet.machine.ceiling(facet.cases, facet.cases[0]["dtype"])
        ceiling = (f"matmul {number(peak / 1e12)} TFLOP/s", peak / 1e12) if peak else None
        for metric in metrics:
            of_rates = ceiling if metric == "flops_per_s" else None
            found.append(plots.lines(facet, metric, "S", xlabel="sequence length S", ceiling=of_rates))
    return found


def _roofline(facet: View) -> Plot | None:
    ceiling = facet.machine.ceiling
    return plots.roofline(facet, ceiling(facet.cases, facet.cases[0]["dtype"]), ceiling(facet.cases))
