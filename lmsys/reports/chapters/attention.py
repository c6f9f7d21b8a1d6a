"""Attention: an overview, then for each grid the tables and plots of each dtype, mask and direction."""

from dataclasses import replace

from lmsys.bench.fields import Field
from lmsys.reports import plots, versus
from lmsys.reports.cells import SPEEDUP, base_of, compared, is_compared
from lmsys.reports.tables import Block, Chapter, Plot, Table, endings, pivot
from lmsys.reports.views import LIMIT, View
from lmsys.reports.words import FILES, number

JOINED = {  # grids of many head dimensions: tables that hold several rows in one cell, as a / b / c
    "flash": ("naive", "flash_triton_torch_bwd", "flash_triton"),
    "eager_compiled": ("naive", "naive_compiled"),
}
TOGETHER = ("dtypes",)  # grids of few shapes: a table of each part would have one line
GLANCE = ("tokens16k",)  # grids whose few cells, of both masks, stand in one table of rates
SHAPE = ("head_dim", "queries", "keys", "heads", "kv_heads", "batch")
PASSES = {  # what o depends on, and what the gradients depend on
    "forward": lambda case: case["direction"] == "fwd",
    "forward and backward": lambda case: case["direction"] != "fwd",
}
DRAWN = ("flops_per_s", "time_s", "peak_bytes")  # by length
PART = "{direction}, {dtype}, "  # the heading of a part begins so


def chapters(view: View) -> list[Chapter]:
    """A chapter for each grid, then one of all rows."""
    view = view.checked(numbers=SHAPE, words=("section", "dtype", "direction")).labelled(causal="mask", peer="whose")
    view = view.quiet(*SHAPE).with_fields(
        Field("B", role="axis", of=lambda case: case["batch"]),
        Field("H", role="axis", of=lambda case: _pair(case["heads"], case["kv_heads"], ":")),
        Field("S", role="axis", of=lambda case: _pair(case["queries"], case["keys"], "×")),
        Field("D", role="axis", of=lambda case: case["head_dim"]),
        Field("mask", role="detail", of=lambda case: "causal" if case["causal"] else "full"),
        Field("visible", role="detail", of=lambda case: f"{100 * case['visible_share']:.3g} %"),
        Field("name", role="detail", of=lambda case: case["impl"]),
    )
    view = view.ordered("section", "dtype", "causal", "direction", LIMIT, *SHAPE, "impl")
    rows = view.ordered("impl").read_as(peer={True: "peer", False: "ours"})
    last = endings(rows, "name", "label", "peer", word="attention-implementations", title="Implementations")
    usual = rows.only(lambda case: not case.get("deterministic"))
    rows_alone = Block("", [last], [versus.same_bits(usual, "attention-same-bits", PASSES)])
    found = [
        Chapter(f"Attention: {own.text('section', section)}", _section(section, own))
        for (section,), own in view.groups("section").items()
    ]
    return [*found, Chapter("Attention: all rows", [rows_alone])]


def _pair(one: int, other: int, sign: str) -> int | str:
    return one if one == other else f"{one:,}{sign}{other:,}"


def _section(section: str, own: View) -> list[Block]:
    """A grid's rates or mean speedups, seen at a glance, then its parts."""
    if any(case["queries"] != case["keys"] for case in own.cases):
        lengths = own.ordered("queries", "keys").distinct("S")
        own = own.labelled(S="Q×K").read_as(S={value: own.text("S", value) for (value,) in lengths})
    parts = [_compared(part) for part in _cut(own, "{section}-{dtype}-{mask}-{direction}", PART + "{causal}")]
    summary = Block("", [_summary(own, section, parts)])
    if section in TOGETHER:
        return [*(_lines(part) for part in _cut(own, "{section}", "by dtype")), summary]
    timed = {case["impl"] for case in own.cases if case["time_s"] is not None}
    shown = own.only(lambda case: section in GLANCE and case["impl"] in timed)
    masks = _cut(shown, "{section}-{dtype}-{direction}", PART + "both masks")
    rates = [
        Block(one.title, [pivot(_compared(one), "flops_per_s", _keys(one))]) for one in masks if one.varies("causal")
    ]
    return [*rates, *map(_block, parts), summary]


def _lines(part: View) -> Block:
    """Tables with a line for each direction, dtype, mask and shape."""
    part = _compared(part)
    keys = [name for name in ("direction", "dtype", "causal", "D", "S") if part.varies(name)] or ["S"]
    time, *rest = (pivot(part, metric, keys) for metric in part.metrics())
    return Block(part.title, [time, pivot(part, SPEEDUP, keys)], rest)


def _cut(own: View, stem: str, heading: str) -> list[View]:
    """The parts of the usual mode of torch, then those of its deterministic one."""
    fixed = own.only(lambda case: case.get("deterministic"))
    usual = own.only(lambda case: not case.get("deterministic"))
    return usual.cut(stem, heading) + fixed.cut(stem + "-deterministic", heading + ", {deterministic}")


def _compared(part: View) -> View:
    """Adds speedups, and the products that hold where batch varies with length, or heads with head dimension."""
    held = []
    for one, other in (("B", "S"), ("H", "D")):
        products = {case[one] * case[other] for case in part.cases if type(case[one]) is type(case[other]) is int}
        held += [f"{one}·{other} = {products.pop():,}"] if part.varies(one) and len(products) == 1 else []
    return compared(replace(part, also=", ".join(held)), base_of(part))


def _keys(part: View) -> list[str]:
    told = [name for name in ("causal", "D", "S") if part.varies(name)] or ["S"]
    return [*told, "visible"] if part.has("visible") else told


def _summary(own: View, section: str, parts: list[View]) -> Table | None:
    """The geometric mean of the speedups of each part, by row."""
    parts = [part for part in parts if is_compared(part)]
    bases = list(dict.fromkeys(part.text("impl", part.base) for part in parts))
    cases = []
    for part in parts:
        head = part.title if len(bases) == 1 else f"{part.title}, over {part.text('impl', part.base)}"
        cases += [{**case, "part": head} for case in part.cases]
    return versus.means(
        replace(own, cases=cases),
        "impl",
        "part",
        f"{section}-summary",
        f"Speedup over {' or '.join(bases)}, geometric mean · {own.text('section', section)}",
    )


def _block(part: View) -> Block:
    keys = _keys(part)
    square = part.only(lambda case: case["queries"] == case["keys"])
    time, *rest = (pivot(part, metric, keys) for metric in part.metrics())
    joined = square.only(lambda case: case["impl"] in JOINED.get(part.cases[0]["section"], ()))
    names = ("time_s", "saved_bytes") if joined.varies("impl") else ()
    by_dim = [pivot(joined, name, ["D"], "S", "impl", f"{FILES[name]}-by-dim") for name in names]
    bars = [plots.bars(facet, "time_s", "S", word="bars") for facet in _facets(part)]
    drawn = [*filter(None, _by_length(square))] or bars
    return Block(part.title, [*by_dim, time, pivot(part, SPEEDUP, keys), *drawn], [*rest, plots.heat_map(part, keys)])


def _facets(part: View) -> list[View]:
    """A part for each plot against length: by head dimension, and by heads and batch where these tell cases apart."""
    names = part.telling(["D"] if part.varies("D") else [], "S", "impl", "causal")
    return part.cut("-".join(f"{n}{{{n}}}" for n in names), ", ".join(f"{n} {{{n}}}" for n in names), tail=True)


def _by_length(square: View) -> list[Plot | None]:
    """One plot for each metric and head dimension."""
    found = []
    for facet in _facets(square):
        peak = facet.machine.ceiling(facet.cases, facet.cases[0]["dtype"])
        ceiling = {"flops_per_s": (f"matmul {number(peak / 1e12)} TFLOP/s", peak / 1e12)} if peak else {}
        found += [plots.lines(facet, one, "S", xlabel="sequence length S", ceiling=ceiling.get(one)) for one in DRAWN]
    return found
