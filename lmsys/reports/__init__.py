"""Tables, plots and a single-file page from result JSON: `python -m reports [RESULT.json ...] [-o DIR]`.

Needs pandas and matplotlib, not torch. A benchmark joins the page with a module that turns one machine's
records into chapters, and a row below, keyed by the record's "benchmark".
"""

from collections.abc import Callable

from lmsys.reports import anatomy, attention, collectives, loss, model, parallel, precision, tokenizer, training
from lmsys.reports.load import Machine
from lmsys.reports.page import Chapter

__all__ = ["BUILDERS"]

# (the machine with this benchmark's records only, the --baseline or None) -> chapters, in page order
BUILDERS: dict[str, Callable[[Machine, str | None], list[Chapter]]] = {
    "attention": attention.chapters,
    "model": model.chapters,
    "loss": loss.chapters,
    "anatomy": anatomy.chapters,
    "precision": precision.chapters,
    "collectives": collectives.chapters,
    "data_parallel": parallel.chapters,
    "tokenizer": tokenizer.chapters,
    "training": training.chapters,
}
