"""Tokenizers: how fast each trains and encodes, and in how much memory."""

from lmsys.reports import plots
from lmsys.reports.cells import bases_of, compared
from lmsys.reports.tables import Block, Chapter, listing
from lmsys.reports.views import View

TASKS = {"train": "training", "encode": "encoding"}  # in page order


def chapters(view: View) -> list[Chapter]:
    view = view.checked(("vocab_size", "processes"), ("section", "task")).read_as(task=TASKS)
    view = view.labelled(impl="implementation")
    view = view.ordered("section", "vocab_size", "text_bytes", "task", "impl")
    parts = view.cut(
        "tokenizer-{section}-V{vocab_size}-{text_bytes}B", "{section}, vocabulary {vocab_size}, {text_bytes}"
    )
    return [Chapter("Tokenizers", [_block(part) for part in parts])]


def _block(part: View) -> Block:
    """A table of all metrics, with speeds beside those of the packages."""
    own, styles = part, part.styles["impl"]
    bases = bases_of(part, otherwise=[row for row in styles if styles[row].dashed])
    for base in bases:
        own = compared(own, base, name=f"speedup_over_{base}", same=("task",))
    first, *others = part.metrics()
    metrics = [first, *(f"speedup_over_{base}" for base in bases), *others]
    table = listing(own, ("task", "impl", "processes"), metrics, "", "Time, rate, speed and memory")
    return Block(part.title, [table, plots.bars(part, ["bytes_per_s"], "task", word="rate")])
