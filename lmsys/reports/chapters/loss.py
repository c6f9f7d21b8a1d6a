"""The head and loss: time and memory by vocabulary, ours beside all logits at once."""

from lmsys.bench.fields import Field, Record
from lmsys.reports import bits, plots
from lmsys.reports.cells import bases_of, compared
from lmsys.reports.tables import Block, Chapter, listing
from lmsys.reports.views import View

TITLE = "Time, speed and peak memory"


def chapters(view: View) -> list[Chapter]:
    view = view.checked(("tokens", "d_model", "vocab_size"), ("section", "precision"))
    view = view.labelled(impl="implementation", vocab_size="vocabulary")
    view = view.ordered("section", "precision", "tokens", "d_model", "vocab_size", "impl")
    heading = "{section}, {precision}, {tokens} tokens, d_model {d_model}"
    parts = view.cut("loss-{section}-{precision}-N{tokens}-M{d_model}", heading)
    last = Block("", [bits.table(view, "loss-same-bits")])
    return [Chapter("Head and loss", [*(_block(part) for part in parts), last])]


def _block(part: View) -> Block:
    """A table of all metrics, with speed and memory beside those of the rows that a user would have otherwise."""
    own, bases = part, bases_of(part)
    for base in bases:
        own = compared(own, base, name=f"speedup_over_{base}")
        label = f"peak, share of {own.text('impl', base)}"
        share = Field(f"peak_of_{base}", label=label, shown="%", of=_share)
        own = own.with_fields(share)
    first, *others = part.metrics()
    metrics = [first, *(f"speedup_over_{base}" for base in bases), *others, *(f"peak_of_{base}" for base in bases)]
    bars = [plots.bars(part, [metric], "vocab_size") for metric in ("time_s", "peak_bytes")]
    return Block(part.title, [listing(own, ("vocab_size", "impl"), metrics, "", TITLE), *bars])


def _share(case: Record) -> float:
    return case["peak_bytes"] / case["beside"]["peak_bytes"]
