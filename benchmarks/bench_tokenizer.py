"""Tokenizers: training and encoding, ours beside the packages of `lmsys.tokenizer.engines` that are installed.

A row is a tokenizer; `tokenizer/rows.py` has its calls, and says how to add one. Every call gets a text that no call
saw before: the lines of a corpus in another order. The runner calls the methods of `Tokenizers`: they override hooks of
`lmsys.bench.Benchmark`, which says when each is called and what it returns.

*The definition* is `lmsys.tokenizer.naive`: training and encoding as the algorithm is defined, slow and without tricks.
"""

import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from benchmarks.layouts import TOKENIZER as LAYOUT
from benchmarks.tokenizer import rows
from lmsys import draws, registry
from lmsys.bench import (
    Axis,
    Benchmark,
    Candidate,
    Case,
    Failed,
    Field,
    Grid,
    Kept,
    Record,
    Settings,
    Step,
    bench,
    benchmark,
    fields,
    one_of,
    positive,
)
from lmsys.measure import memory
from lmsys.tokenizer import Tokenizer, chunks, naive, pretokens, train, training
from lmsys.training.corpora import END_OF_TEXT, stdlib

FIRST_MERGES = 30  # the most merges, from the first on, that are compared with the definition in a timed call


class Texts:
    """A text in a file; each `write` replaces it by the lines of the first text in another order.

    The special token between two documents is part of a line, and moves with it.

    path       the file
    small      another file, of about SMALL_BYTES, which the definition can train on in a second
    tokenizer  trained on the first text; rows and the definition encode with it
    partly     True: each text leaves out some lines of the first one, as texts to train on do
    drawn      the text that was written last, with the right results for it
    """

    def __init__(self, path: Path, small: Path, tokenizer: Tokenizer, partly: bool):
        self.path, self.small, self.tokenizer = path, small, tokenizer
        self._lines = path.read_bytes().split(b"\n")
        # One line of 16 is left out of texts to train on, so that the counts of pre-tokens differ from text to text.
        self._num_lines = len(self._lines) - (len(self._lines) // 16 if partly else 0)
        self.end_of_text = tokenizer.encode(END_OF_TEXT)[0]

    def write(self, draw: int) -> None:
        """Writes the text of a draw into the file, and sets `drawn`."""
        # A random number for each line, by which the lines are sorted. Philox makes four for each counter.
        words = draws.philox(draw, 0, -(-len(self._lines) // 4))[: len(self._lines)]
        text = b"\n".join(map(self._lines.__getitem__, words.argsort(stable=True)[: self._num_lines].tolist()))
        self.path.write_bytes(text)
        self.drawn = Drawn(draw, text, self)


class Drawn:
    """The text that was written last, and the right results for it, each computed once.

    documents  the bytes of each document
    """

    def __init__(self, draw: int, text: bytes, texts: Texts):
        self.draw, self.num_bytes, self._texts = draw, len(text), texts
        self.documents = text.split(END_OF_TEXT.encode())
        self._ids: dict[int, list[int]] = {}

    def chosen(self, key: int) -> list[int]:
        """The numbers of some documents, which the key chooses: as many as it takes to hold 100 kB in all."""
        order = random.Random(key).sample(range(len(self.documents)), len(self.documents))
        sizes = accumulate(len(self.documents[number]) for number in order)
        return order[: 1 + sum(size < 100_000 for size in sizes)]

    def difference(self, count: int, ids: Mapping[int, Sequence[int]]) -> str | None:
        """Says what is wrong with the number of documents, or with the ids of some; None if all is right.

        count  the number of documents that a row has encoded
        ids    {number of a document: the ids that the row gave it}
        """
        if count != len(self.documents):
            return f"ids of {count:,} documents, by definition {len(self.documents):,}"
        for number, document in ids.items():
            if number not in self._ids:
                self._ids[number] = naive.encode(self.documents[number].decode(), self._texts.tokenizer)
            if words := first_difference("id", document, self._ids[number]):
                return f"document {number:,}: {words}"
        return None

    def difference_of_merges(self, merges: Sequence[naive.Pair], num_merges: int, key: int | None) -> str | None:
        """Says what is wrong with the first merges, with the number of merges, or with one that the key chooses.

        None if all is right.

        merges      the merges of a row
        num_merges  the number of merges that were asked for
        key         None: no merge is chosen, and only the first ones and the number are judged
        """
        first = self.first_merges[:num_merges]
        if words := first_difference("merge", merges[: len(first)], first):
            return words
        places = [len(merges)] if len(merges) < num_merges else []
        places += [random.Random(key).randrange(len(merges))] if merges and key is not None else []
        for place in places:
            right = naive.next_merge(self.counts, merges[:place])
            merge = merges[place] if place < len(merges) else None
            if merge != right:
                return f"merge {place:,} is {merge}, by definition {right}"
        return None

    @cached_property
    def counts(self) -> dict[bytes, int]:
        """How often each pre-token is in the text."""
        return training.count_pretokens([self._texts.path], [END_OF_TEXT])

    @cached_property
    def first_merges(self) -> list[naive.Pair]:
        """The first merges by the definition, FIRST_MERGES or fewer."""
        # The definition reads all distinct pre-tokens for each merge: about half a second for 500 kB in all.
        return naive.learn_merges(self.counts, max(1, min(FIRST_MERGES, 500_000 // sum(map(len, self.counts)))))


def first_difference(what: str, results: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """Says where the two differ first; None if they are equal. what: the name of an element, such as "id"."""
    if list(results) == list(expected):
        return None
    for place, (element, other) in enumerate(zip(results, expected, strict=False)):
        if element != other:
            return f"{what} {place:,} is {element}, by definition {other}"
    return f"{len(results):,} {what}s, by definition {len(expected):,}"


ROWS, ENGINES = "benchmarks.tokenizer.rows:", "lmsys.tokenizer.engines:"
# Makes the entry of another package, which is timed where it is installed.
peer = partial(registry.Entry, peer=True, extra="peers", supports=f"{ROWS}supports")


@dataclass(frozen=True)
class TokenizerTraits(registry.Traits):
    """Facts about a tokenizer's row.

    processes  the number of processes that the row works in, whatever the sweep says; 0: as many as the sweep says
    """

    processes: int = 0


TOKENIZERS = registry.Table(
    "tokenizer",
    [
        registry.Entry("lmsys", f"{ROWS}Ours", "this library"),
        registry.Entry("lmsys_serial", f"{ROWS}Ours", "this library, one process", traits=TokenizerTraits(processes=1)),
        peer("gigatoken", f"{ENGINES}Gigatoken", "gigatoken"),
        peer("fastokens", f"{ENGINES}Fastokens", "fastokens"),
        peer("tiktoken", f"{ENGINES}Tiktoken", "tiktoken"),
        peer("huggingface", f"{ENGINES}HuggingFace", "Hugging Face tokenizers"),
    ],
    traits=TokenizerTraits,
)

SMALL_BYTES, SMALL_TOKENS = 30_000, 200  # a text, and a number of merges, that the definition learns in a second
SMALLEST = 257  # the vocabulary without merges: 256 bytes and END_OF_TEXT
# By task: the name of an element of its result.
WHAT = {"train": "merge", "encode": "id"}


@dataclass(frozen=True)
class TokenizerCase(Case):
    """A task that a row does on a text.

    task        "train" or "encode"
    text_bytes  about how many bytes of the text are used; None: all of it
    vocab_size  vocabulary of the tokenizer that is trained, or that encodes
    processes   for our rows the number of processes, for the others that of threads
    min_rounds  samples of each row at least
    """

    task: str
    text_bytes: int | None
    vocab_size: int
    processes: int
    min_rounds: int

    @property
    def axes(self) -> Record:
        return {"task": self.task, "vocab_size": self.vocab_size, "processes": self.processes}

    @property
    def comparison(self) -> str:
        text = "all" if self.text_bytes is None else f"{self.text_bytes // 1000}kB"
        return f"{self.section}-{self.task}-{text}-V{self.vocab_size}"


def _beginning(parts: tuple[chunks.Chunk, ...], num_bytes: int | None, path: Path) -> Path:
    """Writes about the first `num_bytes` bytes (None: all) of each part into the file `path`. Returns `path`."""
    cut = partial(chunks.chunks, pretokenizer=pretokens.Pretokenizer([END_OF_TEXT]))
    path.write_bytes(b"".join(next(cut([part], size=num_bytes or part.size)).read() for part in parts))
    return path


class Tokenizers(Benchmark):
    """Training and encoding by each row; every call has a text that no call saw before.

    A row that encodes must give the ids of the definition: for a whole text before it is timed, and in timed calls for
    some documents. Our rows must learn the merges of the definition: all merges of a small text before timing, and in
    timed calls the first merges and one of the others. Merges of other packages are not judged, since these break ties
    in other ways.
    """

    name = "tokenizer"
    layout = LAYOUT
    tables = {"tokenizer": TOKENIZERS}
    clock = "host"
    trials = 1
    text_bytes: int | None = None  # bytes of the present group's text, once `setup` has made it
    axes = (
        Axis("tokenizer", one_of(*TOKENIZERS), tuple(TOKENIZERS)),
        Axis("task", one_of("train", "encode"), ("train", "encode")),
        Axis("text_bytes", positive, None, single=True),  # how much of the text; None: all, about 30 MB
        Axis("vocab_size", positive, 10_000, single=True),
        Axis("processes", positive, 2, single=True),  # of ours, and threads of the others
        Axis("rounds", positive, 3, single=True),  # samples of each row at least: a training takes seconds
    )
    fields = fields.columns(
        "task vocab_size",
        Field("text_bytes", "B", "text", "axis", shown="MB"),
        Field("processes", label="processes", role="axis", about="Processes of ours, and threads of the others"),
        fields.TIME.called(shown="s"),
        Field("bytes_per_s", "B/s", "Rate", about="Bytes of text over median time", shown="MB/s"),
        fields.PEAK.called(
            about="Peak memory, resident, of a process that does the task once and of those that it starts, added up",
            shown="MB",
        ),
        fields.COMPILE.called(role="detail"),  # to open a row is to import it
        fields.ERROR.called(role="detail"),  # 0: results are exact
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[TokenizerCase]:
        for task, name in grid.product("task", "tokenizer"):
            entry = TOKENIZERS[name]
            yield TokenizerCase(
                grid.name,
                entry,
                "cpu",
                task,
                grid["text_bytes"],
                grid["vocab_size"],
                TokenizerTraits.of(entry).processes or grid["processes"],
                grid["rounds"],
            )

    @contextmanager
    def context(self, cases: Sequence[TokenizerCase]) -> Iterator[None]:
        """A folder for the texts. All records of a group say how long the text is, also of rows that cannot run."""
        self.text_bytes = None
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            yield

    def setup(self, cases: Sequence[TokenizerCase], settings: Settings) -> Texts:
        (case, *_), corpus = cases, stdlib()
        parts = corpus.files if case.text_bytes is None else corpus.train
        timed = _beginning(parts, case.text_bytes, self.folder / "timed.txt")
        small = _beginning(corpus.valid, SMALL_BYTES, self.folder / "small.txt")
        tokenizer = train([timed], case.vocab_size, [END_OF_TEXT], case.processes)
        tokenizer.save(self.folder)
        texts = Texts(timed, small, tokenizer, partly=case.task == "train")
        texts.write(settings.seed)
        self.text_bytes = texts.drawn.num_bytes
        return texts

    def check_all(self, candidates: Sequence[Candidate], setup: Texts, runner: Any) -> None:
        judged = [candidate for candidate in candidates if candidate.case.task == "encode" or not candidate.entry.peer]
        expected = by_definition(judged[0].case.task, setup) if judged else []
        for candidate in judged:
            result, what = candidate.attempt(answer_of, candidate.case, setup), WHAT[candidate.case.task]
            if candidate.outcome == "ok" and (difference := first_difference(what, result, expected)):
                candidate.failed("wrong", difference)

    def redraw(self, setup: Texts, draw: int) -> None:
        if setup.drawn.draw != draw:
            setup.write(draw)

    def step(self, case: TokenizerCase, candidate: Candidate, setup: Texts) -> Step:
        """A call on a new text. Before the timed part a row may read into memory what it needs of the text."""
        asked = setup.tokenizer if case.task == "encode" else case.vocab_size
        call_of = partial(rows.call_of, case.entry.load(), case.task, setup.path, asked, case.processes)

        def keep(result: Any, key: int | None) -> Any:
            if key is None or (case.task == "train" and case.entry.peer):
                return None
            if case.task == "train":
                return list(result.merges)
            ids = rows.ids_by_document(result, setup.end_of_text)
            return len(ids), {
                number: list(map(int, ids[number])) for number in setup.drawn.chosen(key) if number < len(ids)
            }

        return Step(lambda call: call(), call_of, redraw=setup.write, keep=keep)

    def judge(self, case: TokenizerCase, candidate: Candidate, setup: Texts, kept: Kept) -> Mapping[str, float]:
        if kept.result is None:
            return {}
        if case.task == "encode":
            difference = setup.drawn.difference(*kept.result)
        else:
            # A merge that the key chooses takes longest to judge: that is done once for each row.
            key = kept.key if candidate.state is None else None
            candidate.state = "a later merge was judged"
            difference = setup.drawn.difference_of_merges(kept.result, case.vocab_size - SMALLEST, key)
        if difference:
            raise Failed("wrong", difference)
        return {WHAT[case.task] + "s": 0.0}  # results are exact: no error

    def sample(self, turn: Sequence[TokenizerCase], trial: Any) -> None:
        """Takes as many rounds as the grid says, unless the user says otherwise."""
        trial.interleave(turn, turn[0].min_rounds if trial.settings.min_rounds == benchmark.DEFAULT_ROUNDS else None)

    def inspect(self, case: TokenizerCase, candidate: Candidate, setup: Texts) -> Record:
        what = case.task, case.entry.target, case.processes, setup.path, setup.path.parent, case.vocab_size
        return {"peak_bytes": memory.peak_resident_bytes([sys.executable, "-m", rows.__name__, *map(str, what)])}

    def metrics(self, case: TokenizerCase, record: Record, machine: Record) -> Record:
        text_bytes, time_s = record.get("text_bytes", self.text_bytes), record.get("time_s")
        return {"text_bytes": text_bytes} | ({"bytes_per_s": text_bytes / time_s} if text_bytes and time_s else {})


def by_definition(task: str, texts: Texts) -> list[Any]:
    """The right answer, by the definition: for "encode" the ids of the text, for "train" merges of the small text."""
    return (
        naive.encode(texts.path.read_bytes().decode(), texts.tokenizer)
        if task == "encode"
        else naive.learn_merges(training.count_pretokens([texts.small], [END_OF_TEXT]), SMALL_TOKENS)
    )


def answer_of(case: TokenizerCase, texts: Texts) -> list[Any]:
    """The answer of a row in the form of `by_definition`: ids of documents are joined by ends of text."""
    row, encodes, end = case.entry.load(), case.task == "encode", texts.end_of_text
    text, asked = (texts.path, texts.tokenizer) if encodes else (texts.small, SMALLEST + SMALL_TOKENS)
    result = rows.call_of(row, case.task, text, asked, case.processes)()
    documents = rows.ids_by_document(result, end) if encodes else ()
    return list(map(int, chain.from_iterable((*ids, end) for ids in documents)))[:-1] if encodes else result.merges


test_tokenizer = bench(Tokenizers)
