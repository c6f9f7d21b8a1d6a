"""Steps of layouts that serve one benchmark each, such as tables of model sizes, timelines and a fitted line.

A layout says how the report draws a benchmark; its steps are calls of functions by name (layout.py). `steps.applied`
calls the functions here as it calls those of steps.py, with a view (some cases of one benchmark, views.py) and the
arguments that the layout states. To add a step for one benchmark, write a function here below `@steps.step`, which
enters it into `steps.STEPS`.

WAYS are the axes that say how a model is run. In a table of model sizes at most one of them varies; the values of the
others are in the name of the table's file.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from lmsys.bench import fields, verdict
from lmsys.cost.communication import fit_latency_bandwidth
from lmsys.reports import cells, contest, items, load, plots, steps, tables, views, words

WAYS = ("precision", "compile", "checkpoint", "residual", "impl")  # fields that say how a model ran
PLAIN = {"checkpoint": "none", "residual": "wide"}  # values that file names leave out where nothing else was run
VERDICTS = {True: "fits", False: "too large"}  # words for a case's memory, in `predicted`
GIB = 2**30
PHASES = {"forward": "#2563eb", "backward": "#dc2626", "optimizer": "#16a34a"}  # colours in `memory_timeline`
HELD = "#9ca3af"  # the colour in `memory_timeline` of memory that was held before the call
COLOURS = {"computation": "#2563eb", "communication": "#dc2626"}  # colours in `overlap`


@steps.step
def least(view: views.View, name: str, of: str, by: str, among: str) -> views.View:
    """Adds the field `name`: the least value of the field `of` among cases with the same value of the field `by`.

    among  an expression (expressions.py): only cases for which it is true count for the least value
    """
    known = {key: min(part.column(of)) for (key,), part in view.only(f"{among} and {of}").groups([by]).items()}
    return view.adding(lambda case: {name: known.get(case[by])})


@steps.step
def greatest(view: views.View, name: str, of: str) -> views.View:
    """Adds the field `name`: the greatest value of the field `of` in any case; 0 if no case has one."""
    return view.adding({name: max(filter(None, view.column(of)), default=0)})


@steps.step
def pairs(view: views.View, name: str, other: str, how: str) -> views.View:
    """Puts several cases in place of each: one for its own row, and one for each entry of its field `name`.

    name        the field has a mapping {row: word}; cases without it are left out
    other, how  the fields of the new cases that get the row and the word; for the case's own row the word is "itself"
    """

    def entries(case: fields.Record) -> list[fields.Record]:
        return [{other: row, how: word} for row, word in ({case["impl"]: "itself"} | case[name]).items()]

    return view.only(name).expanded(entries)


@steps.step
def repeated(view: views.View, **facts: object) -> views.View:
    """Doubles the cases: first come copies in which `facts` replace fields, then the cases as they are."""
    return view.of(list(view.adding(facts).cases) + list(view.cases))


@steps.step
def products(view: views.View, names: Sequence[Sequence[str]]) -> views.View:
    """Makes captions end in products of fields that stay constant, such as "B·S = 16,384".

    names  pairs of fields; a pair counts if its first field varies and the product of the two is always the same
    """
    constant = []
    for pair in names:
        known = {a * b for a, b in view.groups(pair) if type(a) is type(b) is int}
        if len(known) == 1 and view.varies(pair[0]):
            constant.append(f"{'·'.join(pair)} = {known.pop():,}")
    return replace(view, remark=", ".join(constant))


@steps.step
def peak(view: views.View, dtype: str) -> views.View:
    """Adds `peak`, the best rate of a large matmul in these cases' runs, in TFLOP/s, and `peak_text`, which states it.

    dtype  the field that names the dtype of the matmul

    Both fields are None if no run measured that matmul.
    """
    runs = view.machine.runs_of(view.cases)
    rate = max(load.matmul_rates(run).get(view.first[dtype], 0.0) for run in runs) / 1e12 or None
    return view.adding({"peak": rate, "peak_text": rate and f"matmul {words.number(rate)} TFLOP/s"})


# Steps for models


@steps.step
def one_shape(view: views.View, name: str, shape: Sequence[str], ways: Sequence[str]) -> views.View:
    """Adds the field `name` to all cases: True if they have one shape and differ in a field of `ways`, else False.

    shape  the fields whose values are the shape
    """
    return view.adding({name: len(view.groups(shape)) == 1 and any(map(view.varies, ways))})


@steps.step
def each_way(view: views.View) -> list[views.View]:
    """Splits the view by all WAYS; headings and file names state the values of a part (`_with_names`)."""
    return [_with_names(view, part) for part in view.groups(WAYS).values()]


def _varying(view: views.View, axis: str) -> list[views.View]:
    """Splits the view by all WAYS but `axis`, the only one of these fields that may vary in a part."""
    return list(view.groups([name for name in WAYS if name != axis]).values())


def _with_names(whole: views.View, part: views.View) -> views.View:
    """The part, with its constant values of WAYS in its file names and its heading.

    The file names leave out a field if all cases of the whole have the value in PLAIN. The heading leaves out a field
    that does not vary in the whole.

    whole, part  the view before and after it was split by WAYS
    """
    stem, heading = list[str](), list[str]()
    for name in WAYS:
        if not part.varies(name):
            # The text is "{NAME}": `View.cut` fills in the value.
            stem += [f"{{{name}}}"] * (whole.values(name) != [PLAIN.get(name)])
            heading += [f"{{{name}}}"] * whole.varies(name)
    return list(part.cut("-".join(stem), ", ".join(heading), tail=True))[0]


def _grid(
    whole: views.View, part: views.View, metric: str, inside: str = "compile", word: str = ""
) -> items.Table | None:
    """A table of a metric: a line for each context length, a column for each model size.

    whole, part  the view before and after it was split by WAYS, as in `_with_names`
    inside       the field that may vary in the part: a cell has the metric for each of its values
    word         ends the file's name; by default the metric's word
    """
    return tables.pivot(
        _with_names(whole, part), metric, rows=["context", "batch?"], columns="size", inside=inside, word=word
    )


@steps.step
def by_size(
    view: views.View, metrics: Sequence[str], drawn: Sequence[str] = ()
) -> Iterator[items.Table | items.Plot | None]:
    """Yields tables of each metric by model size.

    drawn  the metrics of which it also yields plots against the context length, with a line for each size (and for each
           value of `compile`, if that varies) and a plot for each batch
    """
    for metric in view.chosen(metrics):
        for part in _varying(view, "compile"):
            yield _grid(view, part, metric)
            named = joined(_with_names(view, part), "line", ["size", "compile?"]).styled("line", row="size")
            facets = named.cut("B{batch}", "batch {batch}", tail=True) if part.varies("batch") else [named]
            yield from [plots.lines(facet, metric, "context", "line") for facet in facets if metric in drawn]


@steps.step
def joined(view: views.View, name: str, names: Sequence[str]) -> views.View:
    """Adds the field `name`: the words for several fields' values, joined by commas."""
    names = view.chosen(names)
    return view.with_fields([fields.Field(name, role="detail", of=lambda case: ", ".join(view.texts(names, case)))])


@steps.step
def times_by_size(view: views.View) -> items.Items:
    """Tables of times and speedups for each part in which one of WAYS varies, then of the times of all other cases."""
    varied = [(axis, part) for axis in WAYS for part in _varying(view, axis) if part.varies(axis)]
    seen, figures = set[str](), list[items.Table | items.Plot | None]()
    for axis, part in varied:
        seen.update(part.column("id"))
        figures += [_grid(view, part, "time_s", axis), _speeds(view, part, axis)]
    others = _varying(view.only(lambda case: case["id"] not in seen), "compile")
    return figures + [_grid(view, part, "time_s") for part in others]


def _speeds(whole: views.View, part: views.View, axis: str) -> items.Table | None:
    """A table of speedups within a part, in which `axis` varies.

    Speedups are relative to the base. It is the first value of the axis in reading order, the order in which tables
    list values (`View.place`), such as eager. For the axis `impl` it is the baseline row, or a peer if there is none.
    """
    base = "" if axis == "impl" else next(iter(part.words[axis]))
    part = cells.compared(part, base, axis, otherwise="peer", medians=True)
    others = part.only(lambda case: case[axis] != part.base)
    return _grid(whole, others, cells.SPEEDUP, inside=axis, word=f"speedup-over-{part.base}")


@steps.step
def best(
    view: views.View, of: str, mode: str, by: str, keys: Sequence[str], metrics: Sequence[str], title: str
) -> items.Table | None:
    """A table with a line for each value of the field `by`: the case with the largest value of the field `of`.

    mode           the field that holds the mode, such as forward or step; only cases of the last mode, in reading
                   order, count
    keys, metrics  the fields of the columns, as in `tables.listing`
    """
    most = steps.one_of_each(steps.last_of(view.only(of), mode), [by], of)
    return tables.listing(
        most, view.chosen(keys), view.chosen(metrics), word="best", title=title, about=f"Of all that was timed, by {by}"
    )


@steps.step
def beside_fastest(view: views.View, ways: Sequence[str]) -> list[views.View]:
    """Our cases, with their speedup over a peer (somebody else's model) in the fastest way in which that was run.

    ways  the fields that say how a model is run; our cases and the peer's fastest case may differ in them

    Adds four fields for texts about the peer: `theirs` (its row), `their_label`, `their_about` (what the speedup is),
    and `peers` (the row's name with a capital). [] if there is no peer.
    """
    if not (peers := view.only("peer").column("impl")):
        return []
    theirs = peers[0]
    same = [name for name in view.axes() if name not in (*ways, "impl", "label", "peer")]
    groups = view.having("impl", [theirs]).groups(same).values()
    fastest = [min(part.cases, key=lambda case: case["time_s"] or math.inf)["id"] for part in groups]
    view = view.only(lambda case: case["impl"] != theirs or case["id"] in fastest)
    compared = cells.compared(view, theirs, same=same, medians=True)
    return [
        compared.only("not peer").adding(
            {
                "theirs": theirs,
                "their_label": view.text("impl", theirs),
                "their_about": compared.fields[cells.SPEEDUP].about,
                "peers": theirs.capitalize(),
            }
        )
    ]


@steps.step
def predicted(
    view: views.View, metric: str, expected: str, asks: Sequence[str], title: str, about: str
) -> items.Table | None:
    """A table of a memory metric as measured, and as predicted in the field `expected`; both in bytes.

    asks  sections of a sweep that ask which cases fit into the memory of the machine. In these sections, and under a
          memory limit, the table also says which cases were predicted to fit, and which cases did fit
    """
    limit = view.first["memory_limit_bytes"]
    room = limit or min(run.get("memory_bytes") or 0 for run in view.machine.runs_of(view.cases))
    part = view.only(expected).ordered("size", "batch").labelled(**{metric: "measured", expected: "predicted"})
    part = part.with_fields(
        [  # a Field begins with its name, unit and label
            fields.Field("share", "", "measured / predicted", shown="%", of=lambda case: case[metric] / case[expected]),
            fields.Field("on_paper", label="on paper", of=lambda case: VERDICTS[case[expected] <= room]),
            fields.Field("tried", of=lambda case: VERDICTS[case["outcome"] != "oom" and case[metric] > 0]),
        ]
    )
    columns = [metric, expected, "share"]
    if limit or (view.first["section"] in asks and room):
        columns += ["on_paper", "tried"]
        tried = part.only("tried")
        right = f"{len(tried.only('on_paper == tried').cases)} of {len(tried.cases)}"
        about += f". Room for {words.number(room / 2**30)} GiB: {right} cases ended as predicted"
    return tables.listing(part, ("size", "batch"), columns, word="predicted", title=title, about=about)


@steps.step
def memory_timeline(view: views.View, about: str) -> items.Plot | None:
    """A plot of the memory in use during a call, with a colour for each phase; None if it was not recorded.

    The first case's field `timeline` has for each phase its name and points (seconds, bytes above what was held).
    """
    case, phases = view.first, view.first["timeline"] or ()
    points = [point for phase in phases for point in phase["points"]]
    if len(points) < 2:
        return None
    held = (case["held_bytes"] or 0) / GIB
    most, end = held + max(map(itemgetter(1), points)) / GIB, 1e3 * points[-1][0]
    axes = plots.canvas(2.6)
    axes.fill_between([0, end], held, color=HELD, alpha=0.55, linewidth=0, label="held before")
    last = (0.0, held)
    for phase in phases:
        xs, ys = zip(last, *((1e3 * at, held + size / GIB) for at, size in phase["points"]), strict=True)
        color, last = PHASES.get(phase["name"], plots.INK), (xs[-1], ys[-1])
        axes.plot(xs, ys, drawstyle="steps-post", linewidth=1.0, color=color)
        axes.fill_between(xs, held, ys, step="post", alpha=0.3, linewidth=0, color=color, label=phase["name"])
    axes.axhline(most, **plots.CEILING)
    axes.text(0, most, f" peak {words.number(most)} GiB", va="bottom", fontsize=9)
    axes.set(xlim=(0, end), ylim=(0, 1.14 * most), xlabel="ms", ylabel="GiB")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(plots.plain)
    return plots.drawn(
        view,
        axes,
        head=f"Memory in the course of one {view.text('mode', case['mode'])}, GiB",
        word="timeline",
        caption=view.caption(about),
    )


@steps.step
def overlap(view: views.View, about: str) -> list[items.Plot]:
    """A plot of when a training step computes and when it communicates.

    Each case has two lanes, computation above and communication below. Only cases of the first batch size are drawn;
    [] if no case's timeline has communication.

    A case's field `timeline` has spans (kind, start, end), in seconds; the kind is a key of COLOURS.
    """
    traced = view.only(lambda case: "communication" in map(itemgetter(0), case["timeline"] or ()))
    for part in traced.cut("", "batch {batch}"):
        axes = plots.canvas(0.45 * len(part.cases) + 0.6)
        for lane, case in enumerate(part.cases):
            for (what, color), top in zip(COLOURS.items(), (lane - 0.36, lane - 0.02), strict=True):
                spans = [(1e3 * start, 1e3 * (end - start)) for kind, start, end in case["timeline"] if kind == what]
                axes.broken_barh(spans, (top, 0.34), color=color, linewidth=0, label=what if lane == 0 else None)
        axes.set_yticks(range(len(part.cases)), part.column("impl"), fontsize=8)
        axes.set(ylim=(len(part.cases) - 0.5, -0.5), xlabel="ms")
        return [plots.drawn(part, axes, "A step's timeline", "timeline", part.caption(about))]
    return []


@steps.step
def with_held(view: views.View) -> views.View:
    """Puts a phase "held", for the memory held before the call, in front of each case's field `phases`.

    Cases without a profile get the phases of their mode, with None as their peaks.
    """

    def held_and_phases(case: fields.Record) -> fields.Record:
        expected = PHASES if case["mode"] == "step" else ("forward",)
        phases = case["phases"] or [{"name": name, "peak_bytes": None} for name in expected]
        return {"phases": [{"name": "held", "peak_bytes": 0 if case["phases"] else None}] + phases}

    return view.adding(held_and_phases)


@steps.step
def latency_and_bandwidth(view: views.View, names: Sequence[str]) -> views.View:
    """One case for each combination of values of these fields, with `latency_s` and `bytes_per_s` fitted to its times.

    The fit is a line through the times of all sizes (`bytes`) of the combination. Cases during which the machine was
    disturbed count only if it was disturbed in all. There is no case if fewer than two sizes count, or if times do not
    grow with the size.
    """
    cases = []
    for part in view.groups(names).values():
        timed = part.of(verdict.undisturbed(part.only("time_s").cases))
        try:
            latency_s, bytes_per_s = fit_latency_bandwidth(timed.column("bytes"), timed.column("time_s"))
        except ValueError:
            continue
        cases.append(timed.first | {"latency_s": latency_s, "bytes_per_s": bytes_per_s})
    return view.of(cases)


@steps.step
def row_labels(view: views.View, plain: str) -> views.View:
    """Adds the field `called`: a strategy, the size of its buckets, and its checkpointing where that is not `plain`."""

    def called(case: fields.Record) -> fields.Record:
        extra = case["impl"].removeprefix(case["strategy"])
        if case["checkpoint"] != plain:
            extra = re.sub(r"-C\w+", f"-{case['checkpoint']}", extra)  # row names shorten levels: "-Ca12m22"
        extra = extra.strip("-").replace("-", ", ").replace("MiB", " MiB")
        extra = re.sub("^auto", f"auto ({case['bucket_mb'] or 0:.0f} MiB)", extra)
        return {"called": ", ".join(filter(None, [case["strategy"], extra]))}

    return view.adding(called)


@steps.step
def rivals(
    view: views.View, settings: Sequence[str], names: tuple[str, str], word: str, title: str
) -> items.Table | None:
    """A table of how much faster each strategy is than its rivals, which its trait `rivals` names.

    There is a line for each combination of values of the fields `settings`, and a column for each pair that was timed.
    A line's name has a beginning and an end. Below these lines there is one for each end: it has the geometric means
    over the lines with this end.

    names        templates of the beginning and of the end of a line's name, with names of fields in braces
    word, title  the end of the file's name, and the title, with names of fields in braces
    """
    data = list[fields.Record]()
    pairs: dict[str, tuple[str, str]] = {}
    for ours, row in view.table("strategy").items():
        pairs |= {f"{ours} / {theirs}": (ours, theirs) for theirs in row.get("rivals") or ()}
    for part in view.only("time_s").groups(settings).values():
        ratios = {head: contest.ratio_of_best(part.cases, *pair) for head, pair in pairs.items()}
        if any(ratios.values()):
            start, end = (words.filled(text, part.first) for text in names)
            data.append({"training": start + end, "end": end} | ratios)
    if not (heads := list(filter(view.of(data).has_any, pairs))):  # of the pairs that were timed
        return None
    rows = []
    for line in data:
        rows.append([line["training"]] + [words.number(line[head]) if line[head] else "" for head in heads])
    for (end,), part in view.of(data).groups(["end"]).items():
        rows.append([f"geometric mean, {end}"] + [cells.mean_text(part.column(head)) for head in heads])
    return items.Table(
        name=view.file(words.filled(word, view.first)),
        title=words.filled(title, view.first),
        caption="Median of step-time ratios, steps alternating; of the best bucket size of each. Above 1: ours is "
        "faster." + tables.ASIDE * view.has("disturbed"),
        source=view.machine.about(view.cases),
        columns=["training"] + heads,
        rows=rows,
        data=tables.lines_of(data, ["training"] + heads),
    )
