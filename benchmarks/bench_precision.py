"""Mixed precision: what rounding does to a long sum, and which dtype autocast gives each tensor. Nothing is timed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.models import build
from lmsys.bench import Benchmark, Candidate, Case, Entry, Field, Grid, Record, Settings, Table, bench, fields
from lmsys.model.precision import ADDEND, CONFIG, TIMES, accumulation, autocast_dtypes

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
STUDIES = Table(
    "study",
    [
        Entry("accumulation", "benchmarks.bench_precision:sums"),
        Entry("autocast", "benchmarks.bench_precision:tensors"),
    ],
)


def sums(dtype: torch.dtype, settings: Settings) -> Record:
    return {
        "addend": ADDEND,
        "times": TIMES,
        "sums": [{**asdict(one), "error": one.error} for one in accumulation(dtype)],
    }


def tensors(dtype: torch.dtype, settings: Settings) -> Record:
    tokens = torch.arange(CONFIG.context_length, device=settings.device)[None]
    found = autocast_dtypes(build(CONFIG, settings.device, settings.seed), tokens, dtype)
    return {"tensors": [{"name": name, "dtype": kept_in} for name, kept_in in found]}


@dataclass(frozen=True)
class Study(Case):
    """One study in one dtype of lower precision."""

    dtype: str

    @property
    def impl(self) -> str:
        return self.dtype

    @property
    def comparison(self) -> str:
        return f"precision-{self.section}"


class Precision(Benchmark):
    """Two studies that say what rounding does; nothing is timed."""

    name = "precision"
    fields: tuple[Field, ...] = (*fields.axes("dtype"), *fields.details("addend", "times", "sums", "tensors"))

    def cases(self, grid: Grid, settings: Settings) -> Iterator[Study]:
        for study in STUDIES.values():
            for dtype in DTYPES:
                yield Study(study.name, study, settings.device, dtype)

    def setup(self, cases: Sequence[Study], settings: Settings) -> Settings:
        return settings

    def open(self, candidate: Candidate, setup: Settings) -> None:
        candidate.notes |= candidate.entry.load()(DTYPES[candidate.case.dtype], setup)
        candidate.reason = "a study: nothing is timed"

    def turns(self, cases: Sequence[Study]) -> Iterable[Sequence[Study]]:
        return ()


test_precision = bench(Precision)
