"""Texts to train on: the standard library of the running Python, TinyStories, or any text file. Imports no torch."""

import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from urllib.parse import urljoin

from lmsys.tokenizer.chunks import Chunk, cut_file, whole
from lmsys.tokenizer.pretokens import Pretokenizer
from lmsys.training.download import download

END_OF_TEXT = "<|endoftext|>"  # stands between documents; a special token of a tokenizer for them
HELD_OUT = 20  # one file of so many is for validation
TINYSTORIES_URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/"
TINYSTORIES_FILES = "TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Corpus:
    """Text to train on, and other text to evaluate on."""

    name: str
    train: tuple[Chunk, ...]
    valid: tuple[Chunk, ...]

    @property
    def files(self) -> tuple[Chunk, ...]:
        return self.train + self.valid


def default_folder() -> Path:
    """Where corpora are kept: `corpora` in $LMSYS_CACHE_DIR, by default ~/.cache/lmsys."""
    return Path(os.environ.get("LMSYS_CACHE_DIR", "~/.cache/lmsys")).expanduser() / "corpora"


def stdlib(folder: Path | None = None) -> Corpus:
    """The modules of the running Python's standard library, tests included, about 30 MB; made where it is not there.

    A document is a module that is UTF-8. Every 20th, in order of names, is for validation.
    """
    folder = folder or default_folder()
    paths = [folder / f"stdlib-{python_version()}-{part}.txt" for part in ("train", "valid")]
    if not all(path.is_file() for path in paths):
        documents = list(_stdlib_documents())
        if not documents:
            raise ValueError(f"the standard library in {sysconfig.get_path('stdlib')} has no modules in source")
        valid = documents[HELD_OUT - 1 :: HELD_OUT]
        train = [text for index, text in enumerate(documents) if index % HELD_OUT != HELD_OUT - 1]
        for path, texts in zip(paths, (train, valid), strict=True):
            _write(path, "".join(text + END_OF_TEXT for text in texts).encode())
    return Corpus("stdlib", (whole(paths[0]),), (whole(paths[1]),))


def tinystories(
    folder: Path | None = None,
    url: str = TINYSTORIES_URL,
    sha256: tuple[str | None, str | None] = (None, None),
    progress: Progress = lambda *_: None,
) -> Corpus:
    """TinyStories, as GPT-4 wrote it (Eldan & Li 2023, arXiv 2305.07759), 2.2 GB; downloaded where it is not there.

    `url` is the folder of its two files on a server, `sha256` their checksums where they are known beforehand; where
    the server names them, those are held too.
    """
    folder = folder or default_folder()
    base = url if url.endswith("/") else url + "/"
    for name, checksum in zip(TINYSTORIES_FILES, sha256, strict=True):
        if not (folder / name).is_file():
            download(urljoin(base, name), folder / name, sha256=checksum, progress=progress)
    train, valid = (whole(folder / name) for name in TINYSTORIES_FILES)
    return Corpus("tinystories", (train,), (valid,))


def text_file(path: Path, valid: Path | None = None) -> Corpus:
    """A file of UTF-8 and another one to evaluate on; without one, the last twentieth of the first.

    ValueError for a file that is absent or too short to be divided.
    """
    train = whole(Path(path))
    if valid is not None:
        return Corpus(train.path.stem, (train,), (whole(Path(valid)),))
    with train.path.open("rb") as file:
        after = train.size * (HELD_OUT - 1) // HELD_OUT
        border = cut_file(file.fileno(), Pretokenizer([END_OF_TEXT]), after, train.stop)
    if border == train.stop:
        raise ValueError(f"{path}: its last twentieth has no whitespace to divide it at; name a file for validation")
    return Corpus(train.path.stem, (Chunk(train.path, 0, border),), (Chunk(train.path, border, train.stop),))


def corpus_called(name: str, folder: Path | None = None, progress: Progress = lambda *_: None) -> Corpus:
    """`stdlib`, `tinystories` or the path of a text file."""
    if name == "stdlib":
        return stdlib(folder)
    if name == "tinystories":
        return tinystories(folder, progress=progress)
    if not Path(name).is_file():
        raise ValueError(f"corpus {name!r}: must be stdlib, tinystories or the path of a text file")
    return text_file(Path(name))


def _stdlib_documents() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few modules that test encodings are in others
        if END_OF_TEXT not in text:
            yield text


def _write(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
