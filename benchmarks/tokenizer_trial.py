"""Tokenizers put to the test on one text: checked, sampled in turns, checked again, and their memory measured.

A row that encodes must give the ids that the definition gives, on the whole text before it is timed, on another one
after; ours that trains must learn the merges of the definition on a small text.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import trial
from benchmarks.sections import TokenizerSection
from benchmarks.session import Result, Settings
from benchmarks.tokenizer_rows import LABELS, PACKAGES, encoder, ids_of, trainer, why_not
from benchmarks.trial import ending, fail_the_good, sample
from lmsys.bench.record import Record, summarize, trim
from lmsys.measure.compare import Step, attempt
from lmsys.measure.memory import peak_resident_bytes
from lmsys.tokenizer import Tokenizer, naive, train
from lmsys.tokenizer.chunks import Chunk, cut_file
from lmsys.tokenizer.pretokens import Pretokenizer
from lmsys.tokenizer.training import count_pretokens
from lmsys.training.corpora import END_OF_TEXT, stdlib

DEFAULT_ROUNDS = 10  # what the settings say when the user says nothing
SMALL_BYTES, SMALL_TOKENS = 30_000, 200  # what the definition can train on in a second
OURS = ("lmsys", "lmsys_serial")


@dataclass(frozen=True)
class Cell:
    """One test: a task on a text, and who does it."""

    section: TokenizerSection
    task: str
    row: str

    @property
    def group(self) -> str:
        text = "all" if self.section.text_bytes is None else f"{self.section.text_bytes // 1000}kB"
        return f"{self.section.name}-{self.task}-{text}-V{self.section.vocab_size}"

    @property
    def id(self) -> str:
        return f"{self.group}-{self.row}"


def cells_of(section: TokenizerSection) -> Iterator[Cell]:
    for task, row in product(section.tasks, section.rows):
        yield Cell(section, task, row)


@dataclass
class Contender(trial.Contender):
    """A row, and what has been found out about it."""

    make: Callable[[Path], Callable[[], Any]]  # of a text: the function that is timed


@dataclass
class Found(trial.Found):
    """peak_bytes: resident, of a process that does the task once and of those that it starts, added up."""

    peak_bytes: int | None = None


@dataclass
class Texts:
    """The text that is timed, another one, a small one, and the tokenizer that encodes them."""

    timed: Path
    other: Path
    small: Path
    folder: Path
    tokenizer: Tokenizer

    @classmethod
    def prepare(cls, section: TokenizerSection, folder: Path) -> "Texts":
        corpus = stdlib()
        whole = None if section.text_bytes is None else section.text_bytes
        timed = _beginning(corpus.train + (corpus.valid if whole is None else ()), whole, folder / "timed.txt")
        other = _beginning(corpus.valid, min(200_000, whole or 200_000), folder / "other.txt")
        small = _beginning(corpus.valid, SMALL_BYTES, folder / "small.txt")
        tokenizer = train([timed], section.vocab_size, [END_OF_TEXT], section.processes)
        tokenizer.save(folder)
        return cls(timed, other, small, folder, tokenizer)


def _beginning(parts: tuple[Chunk, ...], num_bytes: int | None, path: Path) -> Path:
    """The text of the parts, or about so many bytes of it, in a file."""
    with path.open("wb") as out:
        for part in parts:
            with part.path.open("rb") as file:
                after = part.stop if num_bytes is None else num_bytes
                stop = cut_file(file.fileno(), Pretokenizer([END_OF_TEXT]), after, part.stop)
                out.write(file.read(stop))
    return path


def tokenizer_trial(cells: list[Cell], settings: Settings) -> Iterator[Result]:
    """A result for each cell of a group. What fails outside a row's own calls fails every cell that was still good."""
    found = {cell.id: Found() for cell in cells}
    contenders: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory() as folder:
        texts, failure = attempt(lambda: Texts.prepare(cells[0].section, Path(folder)))
        contenders |= {cell.id: contender_of(cell, texts) for cell in cells}
        if not failure:
            _, failure = attempt(lambda: _measure(cells, contenders, texts, settings, found))
        text_bytes = texts.timed.stat().st_size if texts else None
    fail_the_good(contenders.values(), failure)
    for cell in cells:
        yield _result(cell, contenders[cell.id], found[cell.id], text_bytes, settings)


def contender_of(cell: Cell, texts: Texts | None) -> Contender:
    """What the cell's row is; `unsupported`, with the reason, where it cannot do the task."""
    processes, vocab_size = cell.section.processes, cell.section.vocab_size
    if cell.task == "train":
        contender = Contender(lambda text: trainer(cell.row, processes, vocab_size, text))
    else:
        contender = Contender(lambda text: encoder(cell.row, processes, texts.tokenizer, text))  # type: ignore[union-attr]
    if reason := why_not(cell.task, cell.row):
        contender.failed("unsupported", reason)
    return contender


def _measure(
    cells: list[Cell], contenders: dict[str, Contender], texts: Texts, settings: Settings, found: dict[str, Found]
) -> None:
    section = cells[0].section
    able = [cell for cell in cells if contenders[cell.id].outcome == "ok"]
    _gate(able, contenders, texts, texts.timed)
    able = [cell for cell in able if contenders[cell.id].outcome == "ok"] if settings.timed else []
    rounds = settings.min_rounds if settings.min_rounds != DEFAULT_ROUNDS else section.rounds
    on_cpu = replace(settings, device="cpu", min_rounds=rounds)
    steps = {
        cell.id: Step(lambda call: call(), lambda one=contenders[cell.id]: one.make(texts.timed)) for cell in able
    }  # fmt: skip
    sample(steps, on_cpu, found, on_cpu.clock, trials=1)
    for cell in able:
        found[cell.id].peak_bytes, _ = attempt(lambda cell=cell: peak_resident_bytes(_command(cell, texts)))
    _gate(able, contenders, texts, texts.other)
    for cell in able:
        if contenders[cell.id].outcome != "ok":
            contenders[cell.id].reason = f"right before it was timed, not after: {contenders[cell.id].reason}"


def _command(cell: Cell, texts: Texts) -> list[str]:
    options = cell.section.processes, texts.timed, texts.folder, cell.section.vocab_size
    return [sys.executable, "-m", "benchmarks.tokenizer_rows", cell.task, cell.row, *map(str, options)]


def _gate(cells: list[Cell], contenders: dict[str, Contender], texts: Texts, text: Path) -> None:
    """Fails each contender that cannot run or is wrong."""
    if not cells:
        return
    if cells[0].task == "encode":
        expected = np.array(naive.encode(text.read_text(encoding="utf-8"), texts.tokenizer), np.int64)
        end_of_text = texts.tokenizer.encode(END_OF_TEXT)[0]
    for cell in cells:
        one = contenders[cell.id]
        if cell.task == "train":
            reason, failure = attempt(lambda cell=cell: _wrong_merges(cell, texts.small))
        else:
            ids, failure = attempt(lambda one=one: ids_of(one.make(text)(), end_of_text))
            reason = None if failure else _wrong_ids(ids, expected)
        if failure or reason:
            one.failed(*(failure or ("wrong", reason)))


def _wrong_ids(ids: np.ndarray, expected: np.ndarray) -> str | None:
    shared = min(len(ids), len(expected))
    differing = np.flatnonzero(ids[:shared] != expected[:shared])
    if len(differing):
        place = int(differing[0])
        return f"id {place:,} is {ids[place]}, by definition {expected[place]}"
    return None if len(ids) == len(expected) else f"{len(ids):,} ids, by definition {len(expected):,}"


def _wrong_merges(cell: Cell, text: Path) -> str | None:
    """Of ours: others break ties in other ways."""
    if cell.row not in OURS:
        return None
    processes = 1 if cell.row == "lmsys_serial" else cell.section.processes
    counts = count_pretokens([text], [END_OF_TEXT])
    expected = naive.learn_merges(counts, SMALL_TOKENS)
    merges = train([text], 257 + SMALL_TOKENS, [END_OF_TEXT], processes).merges
    wrong = [place for place, (one, other) in enumerate(zip(merges, expected, strict=False)) if one != other]
    if wrong or len(merges) != len(expected):
        place = wrong[0] if wrong else min(len(merges), len(expected))
        return f"merge {place} is {merges[place : place + 1]}, by definition {expected[place : place + 1]}"
    return None


def _result(cell: Cell, contender: Contender, found: Found, text_bytes: int | None, settings: Settings) -> Result:
    outcome, reason, samples = ending(contender, found)
    processes = 1 if cell.row == "lmsys_serial" else cell.section.processes
    record: Record = {
        "id": cell.id,
        "benchmark": "tokenizer",
        "section": cell.section.name,
        "impl": cell.row,
        "label": LABELS[cell.row],
        "peer": cell.row in PACKAGES,
        "task": cell.task,
        "vocab_size": cell.section.vocab_size,
        "text_bytes": text_bytes,
        "processes": processes,
        "device": "cpu",
        "outcome": outcome,
        "reason": reason,
        "comparison": f"{cell.group} {settings.run}",
        "clock": "perf_counter",
        "memory_limit_bytes": settings.memory_limit_bytes,
    }
    if samples:
        record |= summarize(samples) | {"samples_s": trim(samples), "peak_bytes": found.peak_bytes}
        record["bytes_per_s"] = text_bytes / record["time_s"] if text_bytes else None
    return Result(record, samples)
