"""The measured numbers (figures) of attention in README.md and docs/results.md.

`python -m dev.figures` calls `figures` and writes what it yields into the pages. Each function reads committed runs
(`runs.py`) and yields tables and sentences of the pages. For a new figure, yield one more `Table` or `Sentence`
(`pages.py`), which finds its place on the page by the head of the table or by the words of the sentence.
"""

from collections.abc import Iterator
from typing import Any

from dev.figures.pages import Sentence, Table
from dev.figures.runs import H100, H200, Record, bounds, grouped, mean, published, records, run, speedups
from lmsys.attention import ATTENTION

README, RESULTS = "README.md", "docs/results.md"
RUN = "attention-bf16", H200  # name and machine of the run that sampled all rows of these tables together
BEST = "flash_attn_4", "sdpa_cudnn"  # in each shape the fastest peer (row of other people's code) is one of these
WAYS = {"forward": "fwd", "backward": "bwd"}  # {word in the pages: value of the field `direction` in records}
PATTERNS = {  # {first cell of a line of the table: (name of the run, section of its records, head dimensions)}
    "documents": ("documents-and-windows", "documents", (64, 128)),
    "windows, D 64": ("documents-and-windows", "window", (64,)),
    "windows, D 128": ("windows-128", "window", (128,)),
    "grouped heads, D 128": ("grouped", "grouped", (128,)),
}


def figures() -> Iterator[Table | Sentence]:
    """All figures of these pages."""
    yield from _rates()
    yield from _means()
    yield from _patterns()
    yield _decoding()
    yield from _fixed_order()


def shapes_of(direction: str, name: str, machine: str) -> dict[Any, dict[str, Record]]:
    """{(causal, head_dim, keys): {row: record}} for the shapes with 16,384 tokens, in the order of the page's tables.

    direction      "fwd" or "bwd"
    name, machine  the run, as in `runs.run`
    """
    cases = records(name, machine, section="tokens16k", direction=direction)
    shapes = grouped(cases, "causal", "head_dim", "keys")
    return dict(sorted(shapes.items(), key=lambda shape: (not shape[0][0], *shape[0][1:])))


def _rates() -> Iterator[Table | Sentence]:
    """Tables of TFLOP/s, and the sentences that name the versions, the commit and the date of the run.

    These sentences have no figures to fill in: if the run is replaced, `Sentence.filled` raises ValueError, and the
    pages need an edit by hand.
    """
    head = "mask", "D", "S"
    for direction, tables in (("fwd", ((README, 0), (RESULTS, 0))), ("bwd", ((RESULTS, 1),))):
        lines = []
        for (causal, head_dim, keys), rows in shapes_of(direction, *RUN).items():
            rates = [f"{rows[name]['flops_per_s'] / 1e12:.3g}" for name in ATTENTION if name in rows]
            lines.append(["causal" if causal else "not causal", str(head_dim), f"{keys:,}", *rates])
        names = [name for name in ATTENTION if name in rows]
        for page, place in tables:
            yield Table(page, (*head, *names), lines, place)
    machine = run(*RUN)["machine"]
    about = "torch {torch}, triton {triton}, driver {driver}, commit {commit:.10}, {date:.10}".format_map(machine)
    for page in (README, RESULTS):
        yield Sentence(page, about)


def _means() -> Iterator[Table | Sentence]:
    """Geometric means over shapes of our rows' speed, relative to the peers'."""
    forward, backward = (list(shapes_of(direction, *RUN).values()) for direction in ("fwd", "bwd"))
    leads, backward_leads = (speedups(shapes, "flash_gluon", "flash_attn_4") for shapes in (forward, backward))
    yield Sentence(
        README,
        "in {} of 12 shapes, {} to {} times as fast; its backward is level with it, {} to {} times as fast",
        [str(sum(ratio > 1 for ratio in leads)), *bounds(leads), *bounds(backward_leads)],
    )
    yield Sentence(
        RESULTS,
        "`flash_gluon` is {} times as fast in the forward and {} times in the backward",
        [mean(leads), mean(backward_leads)],
    )
    better = speedups(forward, "flash_gluon", *BEST)
    words = "`flash_gluon` is {} times as fast, and at least {} times in each shape"
    yield Sentence(RESULTS, words, [mean(better), bounds(better)[0]])
    # The speed relative to the fastest row of each shape. All shapes have the same rows, so shapes[0] names them all.
    reached = [mean(speedups(shapes, "flash_triton", *shapes[0])) for shapes in (forward, backward)]
    yield Sentence(
        RESULTS, "`flash_triton` reaches {} of the fastest row in the forward, and {} in the backward", reached
    )
    (both,) = grouped(records(*RUN, direction="fwdbwd", queries=16384), "comparison").values()
    milliseconds = [f"{1e3 * both[name]['time_s']:.2f}" for name in ("flash_gluon", "flash_attn_4")]
    yield Sentence(RESULTS, "that takes `flash_gluon` {} ms and `flash_attn_4` {} ms", milliseconds)
    yield from _table_of_means()


def _table_of_means() -> Iterator[Table | Sentence]:
    """The table of means by mask, from the published report, and the means of a run on an H100."""
    _, *summary = published(f"{H200}-tokens16k-summary")
    lines = []
    for name, *cells in summary:
        # The report appends the number of shapes that a mean is over: each mask has 6.
        forward, backward, forward_full, backward_full = (cell.removesuffix(" (6)") for cell in cells)
        lines.append([name, forward, forward_full, backward, backward_full])
    yield Table(RESULTS, ("row", "forward, causal"), lines)
    on_h100 = [shapes_of(direction, "attention", H100).values() for direction in ("fwd", "bwd")]
    better = speedups(on_h100[0], "flash_gluon", *BEST)
    yield Sentence(
        RESULTS,
        "is {} times as fast as the better of the two in the forward, at least {} times in each shape, and {} times"
        " as fast as FlashAttention-4 in the backward",
        [mean(better), bounds(better)[0], mean(speedups(on_h100[1], "flash_gluon", "flash_attn_4"))],
    )
    yield Sentence(README, "the forward is at least {} times as fast in each shape", [bounds(better)[0]])


def _patterns() -> Iterator[Table]:
    """Two tables of speed relative to peers: documents and windows, and grouped heads."""
    for cases, peer in ((list(PATTERNS)[:3], "flex"), (list(PATTERNS)[3:], "sdpa_cudnn")):
        lines = []
        for case in cases:
            name, section, head_dims = PATTERNS[case]
            for row in ("flash_gluon", "flash_triton"):
                ratios = []
                for direction in WAYS.values():
                    in_section = [
                        record
                        for record in records(name, section=section, direction=direction)
                        if record["head_dim"] in head_dims
                    ]
                    shapes = grouped(in_section, "comparison").values()
                    ratios += [mean(speedups(shapes, row, other)) for other in (peer, "flash_attn_4")]
                lines.append([case, row, *ratios])
        yield Table(RESULTS, ("cases", "row", f"forward, over {peer}"), lines)


def _decoding() -> Table:
    """The table of decoding, with a line for each batch size and a column for each number of keys.

    A cell has the speed of `flash_triton` relative to the fastest other row, and in brackets its memory bandwidth
    relative to that of a copy.
    """
    shapes = grouped(records("decode", outcome="ok"), "batch", "keys")
    batches, lengths = (sorted({shape[at] for shape in shapes}) for at in (0, 1))
    lines = []
    for batch in batches:
        cells = []
        for length in lengths:
            rows = shapes.get((batch, length), {})
            ours = rows.pop("flash_triton", None)  # `rows` then has the other rows alone
            (lead,) = speedups([rows | {"ours": ours}], "ours", *rows) if ours else [0.0]
            cells.append(f"{lead:.2f} ({ours['copy_ceiling_fraction']:.2f})" if ours else "")
        lines.append([str(batch), *cells])
    return Table(RESULTS, ("batch", *(f"{length:,} keys" for length in lengths)), lines)


def _fixed_order() -> Iterator[Sentence]:
    """The speed of `flash_gluon`'s deterministic backward, which adds in a fixed order.

    It is relative to the default backward, and to the deterministic backward of FlashAttention-4.
    """
    texts = {
        H200: "has {} of the speed of the default one on one H200, and {} times that of FlashAttention-4's",
        H100: "on one H100 it has {} and {}.",
    }
    for machine, words in texts.items():
        cases = records("fixed-order", machine, "flash_gluon")
        fixed = grouped((case for case in cases if case["deterministic"]), "head_dim", "causal", "keys")
        plain = grouped((case for case in cases if not case["deterministic"]), "head_dim", "causal", "keys")
        default = [
            plain[shape]["flash_gluon"]["time_s"] / rows["flash_gluon"]["time_s"] for shape, rows in fixed.items()
        ]
        yield Sentence(RESULTS, words, [mean(default), mean(speedups(fixed.values(), "flash_gluon", "flash_attn_4"))])
