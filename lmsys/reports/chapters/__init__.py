"""The chapters of the page: a function from all cases of a benchmark to chapters, by the benchmark, in page order."""

from collections.abc import Callable, Sequence

from lmsys.reports.chapters import (
    anatomy,
    attention,
    collectives,
    data_parallel,
    generic,
    loss,
    model,
    precision,
    steps,
    tokenizer,
    training,
)
from lmsys.reports.tables import Chapter
from lmsys.reports.views import View

__all__ = ["CHAPTERS", "OTHERS"]

CHAPTERS: dict[str, Callable[[View], Sequence[Chapter]]] = {
    "attention": attention.chapters,
    "model": model.chapters,
    "loss": loss.chapters,
    "anatomy": anatomy.chapters,
    "precision": precision.chapters,
    "collectives": collectives.chapters,
    "data_parallel": data_parallel.chapters,
    "steps": steps.chapters,
    "tokenizer": tokenizer.chapters,
    "training": training.chapters,
}
OTHERS = generic.chapters  # of a benchmark that is none of these: a user's own
