"""Texts to train on: the standard library of the running Python, TinyStories, or any text file. Imports no torch."""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from platform import python_version
from tempfile import TemporaryFile

from lmsys.files import cache_folder, replacing, sha256_of
from lmsys.tokenizer.chunks import Chunk, cut_file, whole
from lmsys.tokenizer.pretokens import Pretokenizer
from lmsys.training.config import DataConfig, file_of
from lmsys.training.download import download

END_OF_TEXT = "<|endoftext|>"  # stands between documents; a special token of a tokenizer for them
HELD_OUT = 20  # one file of so many is for validation

Progress = Callable[[str, int, int], None]  # (work, how much of it is done, of how much)


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
    return cache_folder() / "corpora"


def make_folder(folder: Path, setting: str) -> None:
    """Makes the folder that a setting names, where it is missing. ValueError where files cannot be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        told = f"files cannot be written in {folder}: {error.strerror}; name another folder"
        raise ValueError(f"{setting}: {told}") from error


def stdlib(folder: Path | None = None) -> Corpus:
    """The modules of the running Python's standard library, tests included, about 30 MB; made where it is not there.

    A document is a module that is UTF-8. Every 20th, in order of names, is for validation.
    """
    folder = Path(folder or default_folder())
    paths = [folder / f"stdlib-{python_version()}-{part}.txt" for part in ("train", "valid")]
    if not all(path.is_file() for path in paths):
        make_folder(folder, "data.folder")
        documents = list(_stdlib_documents())
        if not documents:
            raise ValueError(f"the standard library in {sysconfig.get_path('stdlib')} has no modules in source")
        valid = documents[HELD_OUT - 1 :: HELD_OUT]
        train = [text for index, text in enumerate(documents) if index % HELD_OUT != HELD_OUT - 1]
        for path, texts in zip(paths, (train, valid), strict=True):
            with replacing(path) as file:
                file.write("".join(text + END_OF_TEXT for text in texts).encode())
    return Corpus("stdlib", (whole(paths[0]),), (whole(paths[1]),))


def tinystories(
    folder: Path | None = None, settings: DataConfig | None = None, progress: Progress = lambda *_: None
) -> Corpus:
    """TinyStories, as GPT-4 wrote it (Eldan & Li 2023, arXiv 2305.07759), 2.2 GB; downloaded where it is not there.

    The settings name the URLs of its two files, and their checksums where they are known beforehand. A checksum holds
    for a file that is there already, too; beside a file stands what it was when it came.
    """
    folder, settings = Path(folder or default_folder()), settings or DataConfig()
    wanted = ((settings.url, settings.sha256), (settings.valid_url, settings.valid_sha256))
    train, valid = (whole(_download_once(url, folder, sha256, progress)) for url, sha256 in wanted)
    return Corpus("tinystories", (train,), (valid,))


def text_file(path: Path, valid: Path | None = None) -> Corpus:
    """A file of UTF-8 and another one to evaluate on; without one, the last twentieth of the first.

    ValueError for a file that is absent, empty or too short to be divided.
    """
    train = whole(Path(path))
    if not train.size:
        raise ValueError(f"there is no text in {path}")
    if valid is not None:
        return Corpus(train.path.stem, (train,), (whole(Path(valid)),))
    with train.path.open("rb") as file:
        after = train.size * (HELD_OUT - 1) // HELD_OUT
        border = cut_file(file.fileno(), Pretokenizer([END_OF_TEXT]), after, train.stop)
    if border == train.stop:
        raise ValueError(f"{path}: its last twentieth has no whitespace to divide it at; name a file for validation")
    return Corpus(train.path.stem, (Chunk(train.path, 0, border),), (Chunk(train.path, border, train.stop),))


def corpus_of(settings: DataConfig, progress: Progress = lambda *_: None) -> Corpus:
    """The corpus that settings name: `stdlib`, `tinystories` or the path of a text file, and a text to evaluate on."""
    name, folder = settings.corpus, Path(settings.folder) if settings.folder else None
    valid = Path(settings.valid) if settings.valid else None
    if name not in ("stdlib", "tinystories"):
        if not Path(name).is_file():
            raise ValueError(f"corpus {name!r}: must be stdlib, tinystories or the path of a text file")
        return text_file(Path(name), valid)
    found = stdlib(folder) if name == "stdlib" else tinystories(folder, settings, progress)
    return found if valid is None else replace(found, valid=(whole(valid),))


def _download_once(url: str, folder: Path, sha256: str | None, progress: Progress) -> Path:
    """ValueError for a file that is there and has another checksum than it is to have."""
    path = folder / file_of(url)
    note = path.with_name(path.name + ".sha256")
    if not path.is_file():
        make_folder(folder, "data.folder")
        found = download(url, path, sha256=sha256, progress=progress)
        note.write_text(found)
    elif sha256 is not None:
        if not note.is_file() or note.stat().st_mtime < path.stat().st_mtime:  # the file came in another way
            note.write_text(sha256_of(path))
        if (found := note.read_text()) != sha256.lower():
            raise ValueError(f"{path}: its SHA-256 is {found}, and must be {sha256}; remove it to download it again")
    return path


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
