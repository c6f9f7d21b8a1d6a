"""Texts to train on: the standard library of the running Python, TinyStories, or any text file. Imports no torch.

The pipeline calls `corpus_of(config.data)` and gets a `Corpus`: a text to train on and another to evaluate on. To add a
corpus, write a function like `stdlib`, and call it in `corpus_of`. Add its name to the message there, to the docstring
of `DataConfig` (config.py) and to docs/training.md.
"""

import hashlib
import http.client
import ssl
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from platform import python_version
from tempfile import TemporaryFile

from lmsys import files, values
from lmsys.tokenizer import chunks, pretokens
from lmsys.training.config import DataConfig, file_of

END_OF_TEXT = "<|endoftext|>"  # the special token between documents
HELD_OUT = 20  # for validation: every 20th document of the standard library, or the last twentieth of a text file

Progress = Callable[[str, int, int], None]  # (what is being done, bytes done, bytes in all or 0: unknown)


@dataclass(frozen=True)
class Corpus:
    """Text to train on, and other text to evaluate on: parts of files, in order."""

    train: tuple[chunks.Chunk, ...]
    valid: tuple[chunks.Chunk, ...]

    @property
    def files(self) -> tuple[chunks.Chunk, ...]:
        return self.train + self.valid


def make_folder(folder: Path, setting: str) -> None:
    """Makes a folder where it is missing. ValueError, with the setting that named it, where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # an attempt to write
    except OSError as error:
        raise ValueError(
            f"{setting}: files cannot be written in {folder}: {error.strerror}; name another folder"
        ) from error


def stdlib(folder: Path | None = None) -> Corpus:
    """The modules of the running Python's standard library, tests included: about 30 MB. A first call writes the files.

    A document is a module in UTF-8 without the special token; installed packages are left out. Every 20th document, in
    order of paths, is for validation.

    folder  where the files are; None: `corpora` in $LMSYS_CACHE_DIR
    """
    folder = Path(folder or files.cache_folder() / "corpora")
    paths = [folder / f"stdlib-{python_version()}-{part}.txt" for part in ("train", "valid")]
    if not all(path.is_file() for path in paths):
        make_folder(folder, "data.folder")
        documents = list(_stdlib_documents())
        values.hold((documents, f"the standard library in {sysconfig.get_path('stdlib')} has no modules in source"))
        valid = documents[HELD_OUT - 1 :: HELD_OUT]
        train = [text for index, text in enumerate(documents) if index % HELD_OUT != HELD_OUT - 1]
        for path, texts in zip(paths, (train, valid), strict=True):
            with files.replacing(path) as file:
                file.write("".join(text + END_OF_TEXT for text in texts).encode())
    return Corpus((chunks.whole(paths[0]),), (chunks.whole(paths[1]),))


def tinystories(
    folder: Path | None = None, settings: DataConfig | None = None, progress: Progress = lambda *_: None
) -> Corpus:
    """TinyStories, as GPT-4 wrote it (Eldan & Li 2023, arXiv 2305.07759), 2.2 GB; missing files are downloaded.

    The settings name the URLs of its two files, and may give their SHA-256. A file that was downloaded earlier must
    have that SHA-256, too. The SHA-256 of a file is kept beside it, in NAME.sha256, so that it need not be read again.
    """
    folder, settings = Path(folder or files.cache_folder() / "corpora"), settings or DataConfig()
    train = _download_once(settings.url, folder, settings.sha256, progress)
    valid = _download_once(settings.valid_url, folder, settings.valid_sha256, progress)
    return Corpus((chunks.whole(train),), (chunks.whole(valid),))


def text_file(path: Path, valid: Path | None = None) -> Corpus:
    """A UTF-8 file to train on and another to evaluate on; without the latter, the last twentieth of the first.

    ValueError for a file that is absent, empty or too short to be divided.
    """
    train = chunks.whole(values.path("path", path))
    values.hold((train.size, f"there is no text in {path}"))
    if valid is not None:
        return Corpus((train,), (chunks.whole(values.path("valid", valid)),))
    first = next(chunks.chunks([train], pretokens.Pretokenizer([END_OF_TEXT]), train.size * (HELD_OUT - 1) // HELD_OUT))
    values.hold(
        (
            first.stop < train.stop,
            f"{path}: its last twentieth has no whitespace to divide it at: name a longer text, or data.valid",
        )
    )
    return Corpus((first,), (replace(train, start=first.stop),))


def corpus_of(settings: DataConfig, progress: Progress = lambda *_: None) -> Corpus:
    """The corpus that settings name: `stdlib`, `tinystories` or the path of a text file, and a text to evaluate on."""
    name, folder = (
        values.instance("settings", settings, DataConfig).corpus,
        Path(settings.folder) if settings.folder else None,
    )
    valid = Path(settings.valid) if settings.valid else None
    if name not in ("stdlib", "tinystories"):
        values.hold((Path(name).is_file(), f"corpus {name!r}: must be stdlib, tinystories or the path of a text file"))
        return text_file(Path(name), valid)
    corpus = stdlib(folder) if name == "stdlib" else tinystories(folder, settings, progress)
    return corpus if valid is None else replace(corpus, valid=(chunks.whole(valid),))


def _download_once(url: str, folder: Path, sha256: str | None, progress: Progress) -> Path:
    """The path of the file of `url` in `folder`, downloaded where it is missing.

    ValueError if its SHA-256 is not `sha256`; None: it may have any.
    """
    path = folder / file_of(url)
    note = path.with_name(path.name + ".sha256")
    if not path.is_file():
        make_folder(folder, "data.folder")
        with ExitStack() as ending:
            # Only this process writes the file until this block ends; `claim` removes what a killed download has left.
            ending.callback(files.claim(path))
            note.write_text(download(url, path, sha256=sha256, progress=progress))
    elif sha256 is not None:
        if not note.is_file() or note.stat().st_mtime < path.stat().st_mtime:  # the file was put there by other means
            note.write_text(files.sha256_of(path))
        digest = note.read_text()
        values.hold(
            (
                digest == sha256.lower(),
                f"{path}: its SHA-256 is {digest}, and must be {sha256}; remove it to download it again",
            )
        )
    return path


def _stdlib_documents() -> Iterator[str]:
    """The text of each module, in order of their paths."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            with suppress(UnicodeDecodeError):  # a few modules, which test encodings, are not UTF-8
                text = path.read_text(encoding="utf-8")
                if END_OF_TEXT not in text:
                    yield text


PIECE_BYTES = 1 << 20  # bytes of a download that are read at once
SILENCE_S = 30.0  # a try fails when the server sends nothing for this time
PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # before each further try
# Errors of the connection, after which a download is tried again.
CUT = (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError)


def download(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    progress: Progress = lambda *_: None,
    pauses_s: tuple[float, ...] = PAUSES_S,
) -> str:
    """Downloads `url` to `path`, where the file appears only when it is whole, and returns its SHA-256.

    After a cut or refused connection, and where the server is silent or busy, the whole file is asked for again, after
    each of `pauses_s`. ConnectionError when the last try fails too; ValueError for a SHA-256 other than `sha256`, and
    for a URL that the server refuses.
    """
    for pause_s in (0.0, *pauses_s):  # before the first try there is no pause
        time.sleep(pause_s)
        try:
            return _fetch(url, Path(path), sha256, progress)
        except urllib.error.HTTPError as error:
            failure = f"{error.code} {error.reason}"
            values.hold((error.code >= 500 or error.code in (408, 429), f"{url}: the server says {failure}"))
        except CUT as error:
            failure = str(error) or type(error).__name__
    raise ConnectionError(f"{url}: {failure}, in {len(pauses_s) + 1} tries")


def _fetch(url: str, path: Path, sha256: str | None, progress: Progress) -> str:
    """Tries the download once: see `download`. ConnectionResetError if the reply is cut short."""
    content = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=SILENCE_S) as reply, files.replacing(path) as file:
        length = int(reply.headers.get("Content-Length", 0))
        while piece := reply.read(PIECE_BYTES):
            content.update(piece)
            file.write(piece)
            progress(f"downloading {path.name}", file.tell(), length)
        if file.tell() < length:
            raise ConnectionResetError(f"the connection ended after {file.tell():,} of {length:,} bytes")
        digest = content.hexdigest()
        values.hold(
            (
                sha256 is None or digest == sha256.lower(),
                f"{url}: its SHA-256 is {digest}, and must be {sha256}; removed",
            )
        )
    return digest
