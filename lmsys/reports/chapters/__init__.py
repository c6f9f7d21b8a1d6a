"""The chapters of the page: a function from all cases of a benchmark to chapters, by the benchmark, in page order."""

from collections.abc import Callable, Sequence

from lmsys.reports.chapters import anatomy, attention, model, small, training
from lmsys.reports.tables import Chapter
from lmsys.reports.views import View

__all__ = ["CHAPTERS", "ENERGY", "OTHERS"]

CHAPTERS: dict[str, Callable[[View], Sequence[Chapter]]] = {
    "attention": attention.chapters,
    "model": model.chapters,
    "loss": small.loss,
    "anatomy": anatomy.chapters,
    "precision": small.precision,
    "collectives": small.collectives,
    "data_parallel": training.data_parallel,
    "steps": small.steps,
    "tokenizer": small.tokenizer,
    "training": training.training,
}
ENERGY = small.energy  # of any benchmark whose energy was measured
OTHERS = small.any_other  # of a benchmark that is none of these: a user's own
