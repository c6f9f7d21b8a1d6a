"""`lmsys.training.corpora`: the standard library's text, text files, and downloads from a server that misbehaves.

The fixture `server` is an HTTP server on this machine; its fields say how it cuts, stalls, redirects or refuses.
"""

import copy
import errno
import hashlib
import http.server
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lmsys.tokenizer import chunks
from lmsys.tokenizer.pretokens import Pretokenizer
from lmsys.training import corpora
from lmsys.training.__main__ import main
from lmsys.training.config import DataConfig
from lmsys.training.corpora import END_OF_TEXT, PAUSES_S, corpus_of, download, stdlib, text_file, tinystories

CONTENT = bytes(range(256)) * 20_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NO_PAUSES = (0.0,) * 3  # seconds before each of three further tries


@dataclass
class Server:
    """Serves CONTENT under any name.

    cuts          for each of the next replies: number of bytes after which the connection ends
    silences      for each of the next replies: number of bytes after which nothing follows on an open connection
    tells_length  True if replies have a Content-Length
    leads_to      the URL to which /file redirects, if any
    status        the HTTP status of each of the next replies, which are errors
    asked         how many times CONTENT was requested
    """

    cuts: list[int] = field(default_factory=list)
    silences: list[int] = field(default_factory=list)
    tells_length: bool = True
    leads_to: str | None = None
    status: list[int] = field(default_factory=list)
    asked: int = 0
    url: str = ""

    def reply(self, **settings: Any) -> None:
        """Sets these fields to copies, since replies are taken from their lists."""
        for name, value in settings.items():
            setattr(self, name, copy.copy(value))


@pytest.fixture
def server() -> Iterator[Server]:
    state, over = Server(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if state.status:
                self.send_error(state.status.pop(0))
                return
            if state.leads_to and self.path == "/file":
                self.send_response(302)
                self.send_header("Location", state.leads_to)
                self.end_headers()
                return
            state.asked += 1
            self.send_response(200)
            if state.tells_length:
                self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            if state.silences:
                self.wfile.write(CONTENT[: state.silences.pop(0)])
                over.wait()
            else:
                self.wfile.write(CONTENT[: state.cuts.pop(0)] if state.cuts else CONTENT)

        def log_message(self, *_: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{httpd.server_port}/file"
    yield state
    over.set()
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def fetched(server: Server, path: Path, **options: object) -> bytes:
    download(server.url, str(path), **{"pauses_s": NO_PAUSES, **options})  # type: ignore[arg-type]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return path.read_bytes()


def test_a_download_reports_its_progress(server: Server, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    assert fetched(server, tmp_path / "new" / "f", sha256=SHA256, progress=lambda *step: steps.append(step)) == CONTENT
    assert steps[-1] == ("downloading f", len(CONTENT), len(CONTENT)) and len(steps) > 1


@pytest.mark.parametrize(
    ("replies", "asked"),
    [
        ({"cuts": [2_000_000, 0]}, 3),
        ({"status": [503, 429, 408]}, 1),
        ({"tells_length": False}, 1),
        ({"leads_to": "/elsewhere"}, 1),
    ],
    ids=["cut connections", "a busy server", "unknown length", "a redirect"],
)
def test_a_download_brings_the_whole_file(server: Server, tmp_path: Path, replies: dict[str, Any], asked: int) -> None:
    server.reply(**replies)
    assert fetched(server, tmp_path / "f", sha256=SHA256) == CONTENT and server.asked == asked


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("replies", "options", "error", "message"),
    [
        (
            {"cuts": [2_000_000] * 2},
            {"pauses_s": (0.0,)},
            ConnectionError,
            "/file: the connection ended after 2,000,000 of 5,120,000 .*in 2 tries",
        ),
        ({"silences": [0, 2_000_000]}, {"pauses_s": (0.0,)}, ConnectionError, "/file: .*timed out.*, in 2 tries"),
        ({"cuts": [2_000_000], "tells_length": False}, {"sha256": SHA256}, ValueError, f"must be {SHA256}; removed"),
        ({}, {"sha256": "0" * 64}, ValueError, f"its SHA-256 is {SHA256}, and must be 0+; removed"),
        ({}, {"progress": full}, OSError, r"^\[Errno 28\] No space left on device$"),  # no fault of the connection
        ({"status": [404]}, {}, ValueError, "/file: the server says 404"),
        ({"leads_to": Path(__file__).as_uri()}, {}, ValueError, "the server says 302 .*not allowed"),
    ],
    ids=[
        "half a file",
        "silence",
        "half a file of unknown length",
        "a wrong checksum",
        "a full disk",
        "no such file",
        "a redirect to a file of this machine",
    ],
)
def test_a_download_that_fails_leaves_the_earlier_file(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replies: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    """Half a file never stands for the whole, and is not left beside it, either."""
    monkeypatch.setattr(corpora, "SILENCE_S", 0.1)
    (tmp_path / "f").write_bytes(b"an earlier one")
    server.reply(**replies)
    with pytest.raises(error, match=message):
        download(server.url, tmp_path / "f", **{"pauses_s": NO_PAUSES, **options})
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("f", b"an earlier one")]
    assert not (server.cuts or server.silences or server.status), "it was asked less often than that"


def test_a_refused_connection_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="/nobody: .*, in 1 tries"):
        download("http://127.0.0.1:1/nobody", tmp_path / "f", pauses_s=())


@pytest.mark.parametrize("corpus", ["stdlib", "tinystories"])
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_for_corpora_that_cannot_be_is_named(
    tmp_path: Path, corpus: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert start(tmp_path, f"data.corpus={corpus}", f"data.folder={tmp_path / place}") == 2
    message = capsys.readouterr().err
    assert f"data.folder: files cannot be written in {tmp_path / place}: " in message and message.count("\n") == 1


def stories(server: Server, **settings: object) -> DataConfig:
    """The settings of TinyStories with URLs of this server."""
    urls = {"url": f"{server.url}-train.txt?raw=1", "valid_url": f"{server.url}-valid.txt"}
    return DataConfig(**{"corpus": "tinystories", **urls, **settings})  # type: ignore[arg-type]


def test_tinystories_are_two_files_of_a_server(server: Server, tmp_path: Path) -> None:
    for folder in (tmp_path, str(tmp_path)):
        downloaded = tinystories(folder, stories(server, sha256=SHA256))
        assert [part.path.name for part in downloaded.files] == ["file-train.txt", "file-valid.txt"]
        assert [part.size for part in downloaded.files] == [len(CONTENT)] * 2
    assert server.asked == 2  # the second call finds both files
    for setting in ("sha256", "valid_sha256"):
        with pytest.raises(ValueError, match="must be 0+; removed"):
            tinystories(tmp_path / setting, stories(server, **{setting: "0" * 64}))
    assert tinystories(tmp_path, stories(server, url=f"{server.url}-2")).train[0].path.name == "file-2"


def test_a_checksum_holds_for_a_file_that_is_there(server: Server, tmp_path: Path) -> None:
    tinystories(tmp_path, stories(server))  # the first download writes down the checksum of what came
    assert (tmp_path / "file-train.txt.sha256").read_text() == SHA256
    tinystories(tmp_path, stories(server, sha256=SHA256.upper(), valid_sha256=SHA256))
    with pytest.raises(ValueError, match=f"file-valid.txt: its SHA-256 is {SHA256}, and must be 1+; remove it"):
        tinystories(tmp_path, stories(server, valid_sha256="1" * 64))
    mine = tmp_path / "file-train.txt"
    mine.write_bytes(b"another text")
    os.utime(mine, (note := (tmp_path / "file-train.txt.sha256").stat().st_mtime + 10, note))
    with pytest.raises(ValueError, match=f"its SHA-256 is {hashlib.sha256(b'another text').hexdigest()}"):
        tinystories(tmp_path, stories(server, sha256=SHA256))
    assert mine.read_bytes() == b"another text" and server.asked == 2


def test_what_a_killed_download_has_left_is_removed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file-train.txt.0123abcd.tmp").write_bytes(CONTENT[:1000])
    (tmp_path / "file-train.txt.mine.tmp").write_bytes(b"mine")
    tinystories(tmp_path, stories(server))
    names = {f"file-{part}.txt{end}" for part in ("train", "valid") for end in ("", ".sha256")}
    assert {file.name for file in tmp_path.iterdir()} == names | {"file-train.txt.mine.tmp"}


def start(tmp_path: Path, *settings: str) -> int:
    """Runs `lmsys train tokenizer` with these settings, and a folder for corpora below `tmp_path`: the exit code."""
    given = [f"output={tmp_path / 'run'}", f"data.folder={tmp_path / 'corpora'}", "model.vocab_size=300", *settings]
    return main(["tokenizer", *(part for setting in given for part in ("--set", setting))])


def test_a_run_downloads_what_its_settings_say(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmsys.training.corpora.time.sleep", lambda _: None)
    where = ["data.corpus=tinystories", f"data.url={server.url}-train", f"data.valid_url={server.url}-valid"]
    server.status = [503] * (len(PAUSES_S) + 1)
    assert start(tmp_path, *where) == 1
    assert f"-train: 503 Service Unavailable, in {len(PAUSES_S) + 1} tries" in capsys.readouterr().err
    assert start(tmp_path, *where, f"data.sha256={'0' * 64}") == 2
    assert f"its SHA-256 is {SHA256}, and must be 0" in capsys.readouterr().err
    server.cuts = [2_000_000]
    assert start(tmp_path, *where, f"data.sha256={SHA256}") == 2  # CONTENT is no text
    message = capsys.readouterr()
    assert "downloading file-train: 5.1 of 5.1 MB" in message.out
    assert "file-train is not UTF-8 text: invalid start byte at byte 128" in message.err
    assert server.asked == 4  # a file with a wrong checksum, half a file, the training text, the validation text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "text': must be stdlib, tinystories or the path of a text file"),
        (b"", "there is no text in"),
        (b"one" * 100, "has no whitespace to divide it at: name a longer text, or data.valid"),
        ("caf\u00e9 au lait ".encode("latin-1") * 100, "is not UTF-8 text: invalid continuation byte at byte 3"),
    ],
    ids=["missing", "empty", "one word", "not UTF-8"],
)
def test_a_run_says_what_is_wrong_with_its_text(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert start(tmp_path, f"data.corpus={tmp_path / 'text'}") == 2
    assert message in capsys.readouterr().err


def test_the_standard_library_is_divided_into_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "lib"
    for index in range(45):
        (root / f"package{index % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"package{index % 3}" / f"m{index:02}.py").write_text(f"# module {index}, é\n")
    (root / "latin.py").write_bytes("# é".encode("latin-1"))
    (root / "marks.py").write_text(f"END = {END_OF_TEXT!r}")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("# not ours")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(root))
    library = stdlib(tmp_path / "new")
    train, valid = ("".join(part.read().decode() for part in parts) for parts in (library.train, library.valid))
    assert valid.count(END_OF_TEXT) == 2 and train.count(END_OF_TEXT) == 43
    documents = {text for text in (train + valid).split(END_OF_TEXT) if text}
    assert documents == {f"# module {index}, é\n" for index in range(45)}
    (root / "package0" / "m00.py").unlink()
    assert stdlib(tmp_path / "new") == stdlib(str(tmp_path / "new")) == library  # the files are made only once
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_the_standard_library_of_this_python_is_large(tmp_path: Path) -> None:
    library = stdlib(tmp_path)
    (other := tmp_path / "other.txt").write_text("for validation")
    chosen = corpus_of(DataConfig(folder=str(tmp_path), valid=str(other)))
    assert chosen.train == library.train and chosen.valid[0].read() == b"for validation"
    with pytest.raises(ValueError, match="gone.txt: there is no such file"):
        corpus_of(DataConfig(folder=str(tmp_path), valid=str(tmp_path / "gone.txt")))
    sizes = [sum(part.size for part in parts) for parts in (library.train, library.valid)]
    assert sizes[0] > 5_000_000 and 0.01 < sizes[1] / sizes[0] < 0.15


def test_no_chunk_of_the_text_to_train_on_goes_into_the_held_out_text(tmp_path: Path) -> None:
    """The next place to cut after one inside of the special token is in the held-out text: that was trained on, too."""
    path = tmp_path / "text.txt"
    path.write_text("a" * 1400 + END_OF_TEXT + "held out, and longer than the special token is")
    (train,) = text_file(path).train
    assert train.read().decode().endswith(END_OF_TEXT)
    pretokenizer = Pretokenizer([END_OF_TEXT])
    for size in range(1, train.size):
        assert list(chunks.chunks([train], pretokenizer, size))[-1].stop == train.stop


def test_a_text_file_is_divided_between_words(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("twenty words " * 100)
    divided = text_file(path)
    assert b"".join(part.read() for part in divided.files) == path.read_bytes()
    assert 0.03 < divided.valid[0].size / path.stat().st_size < 0.06
    assert divided.valid[0].read().startswith(b" ")
    other = tmp_path / "other.txt"
    other.write_text("for validation")
    assert text_file(path, other).valid[0].read() == b"for validation"
    assert corpus_of(DataConfig(corpus=str(path))) == divided
    assert corpus_of(DataConfig(corpus=str(path), valid=str(other))) == text_file(path, other)


def test_a_standard_library_without_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="nothing has no modules in source"):
        corpus_of(DataConfig())
