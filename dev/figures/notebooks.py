"""The measured numbers (figures) of the pages docs/flash_gluon.md and docs/flash_triton.md, and one of docs/install.md.

`python -m dev.figures` calls `figures` and writes what it yields into the pages. Each function reads committed runs
(`runs.py`) and yields tables and sentences (`pages.py`); for a new figure, yield one more. A plan is one setting of
`flash_gluon`'s kernels; its name lists the fields in which it differs from the default, such as "l2_mib5+wide". The
*row's plan* is the plan that the row `flash_gluon` takes by itself for a shape.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dev.figures.attention import shapes_of
from dev.figures.pages import Sentence, Table
from dev.figures.runs import H100, H200, Record, bounds, grouped, mean, path_of, ratio, records, speedups
from dev.plan_cases import name_of, plan_called
from lmsys.attention.flash_gluon.plans import BackwardPlan

GLUON, TRITON = "docs/flash_gluon.md", "docs/flash_triton.md"  # pages
ORDER = "wide+late_dv+by_query+fma_exp+peeled"  # the fields that all plans of `_short_plans` have, except one plan
SHORT_PLANS = {  # {first cell of a line in the table of `_short_plans`: name of the plan, or of a peer's row}
    "5 MiB of heads": f"l2_mib5+{ORDER}",
    "22 MiB of heads": f"l2_mib22+{ORDER}",
    "5 MiB of heads, the plain order of a step": "l2_mib5",
    "SDPA cuDNN": "sdpa_cudnn",
}
FORMS = {  # {first cell of a line in the table of `_forms`: the form of flash_triton's forward loop, as its run has it}
    "row sums kept by eight columns, added once after the last tile": "sums",
    "the output is scaled only where a maximum has moved by more than 8": "lazy",
    "the next tile's scores ahead of this tile's softmax": "ahead",
    "the products with values a tile behind": "behind",
}
EMULATED_FORMS = (  # forms of the forward kernel in the run of `_emulation`; each is a line of its second table
    "mask under a branch",
    "mask always, sums by columns",
    "mask added",
    "mask added, sums by columns",
    "two loops, loads without a mask, sums by columns",
)
ENERGY_CELLS = "64-causal", "64-full", "128-causal", "128-full"  # head dimension and mask of each run of energy
ALL_THREE = {"wide": True, "late_dv": True, "by_query": True}
# {direction: {first cell of a line of the table: a function from the row's plan to the plan of this line}}
IDEAS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "bwd": {
        "none of the fields": lambda plan: BackwardPlan(plan.prefetch, plan.l2_mib),
        "none, `prefetch` the other way": lambda plan: BackwardPlan(not plan.prefetch, plan.l2_mib),
        "`wide`": lambda plan: BackwardPlan(plan.prefetch, plan.l2_mib, wide=True),
        "`late_dv`": lambda plan: BackwardPlan(plan.prefetch, plan.l2_mib, late_dv=True),
        "`by_query`": lambda plan: BackwardPlan(plan.prefetch, plan.l2_mib, by_query=True),
        "all three": lambda plan: BackwardPlan(plan.prefetch, plan.l2_mib, **ALL_THREE),
        "all three, `fma_exp`": lambda plan: BackwardPlan(plan.prefetch, plan.l2_mib, **ALL_THREE, fma_exp=True),
    },
    "fwd": {
        "`ping_pong` the other way": lambda plan: replace(plan, ping_pong=not plan.ping_pong),
        "`named` the other way, no `ping_pong`": lambda plan: replace(plan, named=not plan.named, ping_pong=False),
        "`dynamic` the other way": lambda plan: replace(plan, dynamic=not plan.dynamic),
        "one head after another": lambda plan: replace(plan, l2_mib=0),
        "two consumers, `named`, no `ping_pong`": lambda plan: replace(plan, consumers=2, named=True, ping_pong=False),
    },
}


def figures() -> Iterator[Table | Sentence]:
    """All figures of these pages."""
    yield _short_plans()
    yield from _energy_of_plans()
    yield from _energy_of_rows()
    yield from _forms()
    yield from _emulation()


def _short_plans() -> Table:
    """The table of plans of the backward for few keys.

    A cell is the speed relative to the row's plan at the time of the runs, which has the fields of ORDER and l2_mib 11.
    """
    lengths: dict[int, dict[str, Record]] = {}
    for name in ("short-backwards", "short-backwards-2"):
        for case in records(name, H200, "flash_gluon"):
            lengths.setdefault(case["length"], {})[case["plan"] or case["impl"]] = case
    lines = []
    for label, plan in SHORT_PLANS.items():
        speeds = [ratio(lengths[keys][plan], lengths[keys][f"l2_mib11+{ORDER}"]) for keys in sorted(lengths)]
        lines.append([label, *(f"{speed:.2f}" for speed in speeds)])
    return Table(GLUON, ("plan", "256 keys"), lines)


def energy_cells(direction: str) -> list[dict[str, Record]]:
    """For each of ENERGY_CELLS, the records: {name of a plan, or of a peer's row: record}.

    The record of the row's plan is there twice: under its name, and under "plan".
    """
    cells = []
    for name in ENERGY_CELLS:
        cases: dict[str, Record] = {}
        for case in records(f"energy-{name}", H200, "flash_gluon", direction=direction):
            cases[case["plan"] or case["impl"]] = case
            if case["planned"]:
                cases["plan"] = case
        cells.append(cases)
    return cells


def changed(cases: dict[str, Record], direction: str, idea: str) -> Record:
    """The record of the plan that the idea, a key of IDEAS[direction], makes of the row's plan.

    cases  one item of what `energy_cells` returns
    """
    return cases[name_of(IDEAS[direction][idea](plan_called(cases["plan"]["plan"])))]


def _energy_of_plans() -> Iterator[Table | Sentence]:
    """Tables and sentences on IDEAS: the speed and energy of each, relative to the row's plan."""
    cells = {direction: energy_cells(direction) for direction in IDEAS}
    for direction, head in (("bwd", "backward"), ("fwd", "forward")):
        joules = [f"{cases['plan']['energy_j']:.2f}" for cases in cells[direction]]
        lines = [["the plan, joules of a call", *joules]]
        for idea in (*IDEAS[direction], "SDPA cuDNN"):
            texts = []
            for cases in cells[direction]:
                case = changed(cases, direction, idea) if idea in IDEAS[direction] else cases["sdpa_cudnn"]
                share = case["energy_j"] / cases["plan"]["energy_j"]
                is_plan = case is cases["plan"]
                texts.append("is the plan" if is_plan else f"{ratio(case, cases['plan']):.2f}, {share:.2f}")
            lines.append([idea, *texts])
        yield Table(GLUON, (head, "64 causal"), lines)
    # Pairs (record, record of the row's plan in the same cell) for all records of both directions.
    pairs = [(case, cases["plan"]) for several in cells.values() for cases in several for case in cases.values()]
    power = bounds((case["energy_power_w"] for case, _ in pairs), "{:.0f}".format)
    yield Sentence(GLUON, "Every row draws {} to {} W", power)
    least = min(case["energy_j"] / plan["energy_j"] for case, plan in pairs)
    yield Sentence(GLUON, "in the forward at 128 causal, takes {} of it", [f"{least:.3f}"])
    yield Sentence(GLUON, "are the best by energy too, within {} %", [f"{100 * (1 - least):.1f}"])
    none = [(cases["plan"], changed(cases, "bwd", "none of the fields")) for cases in cells["bwd"]]
    faster = bounds((100 * (ratio(plan, case) - 1) for plan, case in none), "{:.0f}".format)
    saved = bounds((100 * (1 - plan["energy_j"] / case["energy_j"]) for plan, case in none), "{:.0f}".format)
    yield Sentence(GLUON, "gain {} to {} % in time, and save {} to {} % of the energy", [*faster, *saved])


def _energy_of_rows() -> Iterator[Sentence]:
    """The energy of a call of `flash_triton` and of `flash_attn_4`, relative to `flash_gluon`."""
    rows = grouped(records("attention", H200, "energy"), "impl", row="direction")
    theirs = "takes {} times the energy of one of `flash_gluon` in the forward, and {} times in the backward"
    peers = "takes {} times as much as `flash_gluon` in the forward, and {} times in the backward"
    for page, words, row in ((TRITON, theirs, "flash_triton"), (GLUON, peers, "flash_attn_4")):
        shares = [rows[row][way]["energy_j"] / rows["flash_gluon"][way]["energy_j"] for way in ("fwd", "bwd")]
        yield Sentence(page, words, [f"{share:.2f}" for share in shares])


def _forms() -> Iterator[Table | Sentence]:
    """Speeds of other forms of `flash_triton`'s forward loop, relative to today's form with the same tiles.

    Also the speed of the row itself, relative to the fastest row.
    """
    runs = _lines_of("forward-forms.jsonl", "flash_triton")
    lines = []
    for label, form in FORMS.items():
        cells = []
        for head_dim in (64, 128):
            ratios = []
            for shape in (run for run in runs if run["D"] == head_dim):
                # A name is a form and its tile, such as "base(128, 64, 4, 2)".
                rates = {tuple(name.split("(", 1)): rate for name, rate in shape["tflops"].items()}
                tiles = [tile for name, tile in rates if name == form]
                ratios.append(max(rates[form, tile] for tile in tiles) / max(rates["base", tile] for tile in tiles))
            cells.append(mean(ratios))
        lines.append([label, *cells])
    yield Table(TRITON, ("form", "D 64", "D 128"), lines)
    for words, head_dims in (
        (
            "its forward has {} of the speed of the fastest row, in geometric mean over the 12 shapes of"
            " [the table](results.md#attention), and its backward {}.",
            (64, 128),
        ),
        ("At head dimension 64 these are {} and {}", (64,)),
        ("at 128 they are {} and {}", (128,)),
    ):
        means = []
        for direction in ("fwd", "bwd"):
            by_shape = shapes_of(direction, "attention", H100)
            shapes = [rows for (_, head_dim, _), rows in by_shape.items() if head_dim in head_dims]
            means.append(mean(speedups(shapes, "flash_triton", *shapes[0])))
        yield Sentence(TRITON, words, means)


def _lines_of(name: str, folder: str) -> list[dict[str, Any]]:
    """The objects of a committed JSON-lines file of the H100."""
    return [json.loads(line) for line in path_of(name, H100, folder).read_text().splitlines()]


def fastest(shape: dict[str, Any], form: str) -> float:
    """The least time of a form over its tile sizes, in ms, without those compiled with a limit of registers.

    A name in the run has the form, its tile, and two launch settings, such as "dq, mask added, 64 × 64, 4, 2"; a limit
    follows as ", 168 registers".
    """
    return min(ms for name, ms in shape["ms"].items() if re.fullmatch(rf"{form}, \d+ × \d+, \d, \d", name))


def _emulation() -> Iterator[Table | Sentence]:
    """The speed of our kernels relative to SDPA's flash attention, all compiled for sm_80 (A100) and run on an H100.

    An emulation of this kind says how fast rows are relative to one another, and not how long they take on an A100.
    """
    shapes = _lines_of("tiles-sm80.jsonl", "emulated")
    shapes.sort(key=lambda shape: (not shape["causal"], shape["D"], shape["S"]))
    lines, speeds = [], []
    for shape in shapes:
        flash, cuda = ([shape["ms"][f"{row} {way}"] for way in ("fwd", "bwd")] for row in ("sdpa_flash", "flash_cuda"))
        forward = fastest(shape, "fwd, mask added, sums by columns")
        backward = fastest(shape, "dq, mask added") + fastest(shape, "dkdv, mask added")
        speeds.append([of / time for of, time in zip(flash * 2, (forward, backward, *cuda), strict=True)])
        mask = "causal" if shape["causal"] else "not causal"
        lines.append([mask, str(shape["D"]), f"{shape['S']:,}", *(f"{speed:.2f}" for speed in speeds[-1])])
    means = [mean(column) for column in zip(*speeds, strict=True)]
    yield Table(TRITON, ("emulated", "D"), [*lines, ["geometric mean", "", "", *means]])
    forms = []
    for form in EMULATED_FORMS:
        cells = []
        for head_dim in (64, 128):
            several = [shape for shape in shapes if shape["D"] == head_dim]
            cells.append(mean(shape["ms"]["sdpa_flash fwd"] / fastest(shape, f"fwd, {form}") for shape in several))
        forms.append([form, *cells])
    yield Table(TRITON, ("emulated form", "D 64"), forms)
    least = min(speed for line in speeds for speed in line[:2])
    yield Sentence(
        "docs/install.md",
        "have {} of the speed of SDPA's flash attention in the forward and {} in the backward, in geometric mean over"
        " 12 shapes, and {} at least",
        [*means[:2], f"{least:.2f}"],
    )
