"""Mixed precision: what rounding does to a long sum, and which dtype autocast gives each tensor. Nothing is timed."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

import pytest
import torch

from benchmarks.conftest import SESSION, cell_params
from benchmarks.session import Result, Settings
from lmsys.bench.record import Record
from lmsys.measure.compare import attempt
from lmsys.model import TransformerLM
from lmsys.model.precision import ADDEND, CONFIG, TIMES, accumulation, autocast_dtypes

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
STUDY = "a study: nothing is timed"


@dataclass(frozen=True)
class Study:
    """What is looked at, in which dtype of lower precision."""

    topic: str
    dtype: str
    group = "precision"

    @property
    def id(self) -> str:
        return f"precision-{self.topic}-{self.dtype}"


STUDIES = [Study(topic, dtype) for topic, dtype in product(("accumulation", "autocast"), DTYPES)]


def precision_trial(studies: list[Study], settings: Settings) -> Iterator[Result]:
    for study in studies:
        found, failure = attempt(lambda study=study: _look_at(study, settings))
        outcome, reason = failure or ("ok", STUDY)
        record: Record = {
            "id": study.id,
            "benchmark": "precision",
            "section": study.topic,
            "impl": study.dtype,
            "dtype": study.dtype,
            "device": settings.device,
            "outcome": outcome,
            "reason": reason,
            "memory_limit_bytes": settings.memory_limit_bytes,
        }
        yield Result(record | (found or {}), None)


def _look_at(study: Study, settings: Settings) -> Record:
    dtype = DTYPES[study.dtype]
    if study.topic == "accumulation":
        sums = [{**asdict(one), "error": one.error} for one in accumulation(dtype)]
        return {"addend": ADDEND, "times": TIMES, "sums": sums}
    torch.manual_seed(settings.seed)
    tokens = torch.arange(CONFIG.context_length, device=settings.device)[None]
    found = autocast_dtypes(TransformerLM(CONFIG, device=settings.device), tokens, dtype)
    return {"tensors": [{"name": name, "dtype": kept_in} for name, kept_in in found]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    session = metafunc.config.stash[SESSION]
    metafunc.parametrize("cell", cell_params(session.add(STUDIES, precision_trial)))


def test_precision(cell: str, measured: Callable[[str], None]) -> None:
    measured(cell)
