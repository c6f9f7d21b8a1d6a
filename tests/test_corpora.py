"""Corpora: the standard library's text, and downloads from a server here that cuts, lies and refuses."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmsys.training import corpora
from lmsys.training.corpora import END_OF_TEXT, Corpus, corpus_called, stdlib, text_file, tinystories
from lmsys.training.download import download

CONTENT = bytes(range(256)) * 20_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NO_PAUSES = (0.0,) * 3


@dataclass
class Server:
    """Serves CONTENT under any name but /gone.

    cuts       after how many bytes each of the next replies ends
    ranges     whether a part of the file can be asked for
    etag       what names the content; None: nothing
    linked     the checksum in the redirect that comes first, if any
    asked      the Range headers that came
    """

    cuts: list[int] = field(default_factory=list)
    ranges: bool = True
    etag: str | None = '"1"'
    linked: str | None = None
    status: list[int] = field(default_factory=list)
    asked: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if state.status:
                self.send_error(state.status.pop(0))
                return
            if self.path == "/gone":
                self.send_error(404)
                return
            if state.linked and not self.path.startswith("/cdn"):
                self.send_response(302)
                self.send_header("Location", "/cdn" + self.path)
                self.send_header("X-Linked-ETag", f'"{state.linked}"')
                self.end_headers()
                return
            asked = self.headers.get("Range")
            state.asked.append(asked)
            same = self.headers.get("If-Range") == state.etag
            start = int(asked[len("bytes=") : -1]) if asked and state.ranges and same else 0
            if start >= len(CONTENT):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if state.etag:
                self.send_header("ETag", state.etag)
            self.send_header("Content-Length", str(len(CONTENT) - start))
            self.end_headers()
            self.wfile.write(CONTENT[start : start + state.cuts.pop(0)] if state.cuts else CONTENT[start:])

        def log_message(self, *_: object) -> None:
            pass

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{found.server_port}/file"
    yield state
    found.shutdown()
    thread.join()
    found.server_close()


def fetched(server: Server, path: Path, **options: object) -> bytes:
    download(server.url, path, **{"pauses_s": NO_PAUSES, **options})  # type: ignore[arg-type]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return path.read_bytes()


def test_a_download_reports_its_progress(server: Server, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    assert fetched(server, tmp_path / "new" / "f", sha256=SHA256, progress=lambda *step: steps.append(step)) == CONTENT
    assert steps[-1] == ("downloading f", len(CONTENT), len(CONTENT)) and len(steps) > 1


def test_a_cut_connection_goes_on_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.cuts = [2_000_000, 1_000_000]
    assert fetched(server, tmp_path / "f", sha256=SHA256) == CONTENT
    assert server.asked == [None, "bytes=2000000-", "bytes=3000000-"]


def test_a_later_call_goes_on_too(server: Server, tmp_path: Path) -> None:
    server.cuts = [2_000_000]
    with pytest.raises(ConnectionError, match=r"in 1 tries; .*f.part keeps the 2,000,000 bytes"):
        download(server.url, tmp_path / "f", pauses_s=())
    assert not (tmp_path / "f").exists()
    assert fetched(server, tmp_path / "f", sha256=SHA256) == CONTENT
    assert server.asked[1:] == ["bytes=2000000-"]


@pytest.mark.parametrize("fault", ["no ranges", "another file", "no etag", "weak etag"])
def test_what_cannot_be_gone_on_with_is_begun_again(server: Server, tmp_path: Path, fault: str) -> None:
    server.ranges = fault != "no ranges"
    server.etag = {"no etag": None, "weak etag": 'W/"1"'}.get(fault, '"1"')
    server.cuts = [2_000_000]
    with pytest.raises(ConnectionError):
        download(server.url, tmp_path / "f", pauses_s=())
    if fault == "another file":
        server.etag = '"2"'
    assert fetched(server, tmp_path / "f", sha256=SHA256) == CONTENT


def test_a_part_that_is_longer_than_the_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(b"x" * (len(CONTENT) + 1))
    (tmp_path / "f.part.etag").write_text('"1"')
    assert fetched(server, tmp_path / "f", sha256=SHA256) == CONTENT


def test_a_wrong_checksum_is_an_error_and_nothing_stays(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"its SHA-256 is {SHA256}, and must be 0+; removed"):
        download(server.url, tmp_path / "f", sha256="0" * 64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("right", [True, False])
def test_the_servers_own_checksum_is_held(server: Server, tmp_path: Path, right: bool) -> None:
    server.linked = SHA256 if right else "1" * 64
    if right:
        assert fetched(server, tmp_path / "f") == CONTENT
        return
    with pytest.raises(ValueError, match="must be 1+; removed"):
        download(server.url, tmp_path / "f")


def test_busy_servers_are_asked_again_and_others_not(server: Server, tmp_path: Path) -> None:
    server.status = [503, 429]
    assert fetched(server, tmp_path / "f") == CONTENT
    with pytest.raises(ValueError, match="/gone: the server says 404"):
        download(server.url.replace("/file", "/gone"), tmp_path / "g")
    with pytest.raises(ConnectionError, match="in 1 tries"):
        download("http://127.0.0.1:1/nobody", tmp_path / "g", pauses_s=())


def test_tinystories_are_two_files_of_a_server(server: Server, tmp_path: Path) -> None:
    base = server.url.removesuffix("/file")
    for _ in range(2):
        found = tinystories(tmp_path, base, (SHA256, None))
        assert [part.path.name for part in found.files] == [*corpora.TINYSTORIES_FILES]
        assert [part.size for part in found.files] == [len(CONTENT)] * 2
    assert len(server.asked) == 2  # the second time they are there
    with pytest.raises(ValueError, match="removed"):
        tinystories(tmp_path / "other", base, ("0" * 64, None))


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
    found = stdlib(tmp_path / "new")
    train, valid = ("".join(part.read().decode() for part in parts) for parts in (found.train, found.valid))
    assert valid.count(END_OF_TEXT) == 2 and train.count(END_OF_TEXT) == 43
    documents = {text for text in (train + valid).split(END_OF_TEXT) if text}
    assert documents == {f"# module {index}, é\n" for index in range(45)}
    (root / "package0" / "m00.py").unlink()
    assert stdlib(tmp_path / "new") == found  # made once
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_the_standard_library_of_this_python_is_large(tmp_path: Path) -> None:
    found = stdlib(tmp_path)
    sizes = [sum(part.size for part in parts) for parts in (found.train, found.valid)]
    assert sizes[0] > 5_000_000 and 0.01 < sizes[1] / sizes[0] < 0.15


def test_a_text_file_is_divided_between_words(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("twenty words " * 100)
    found = text_file(path)
    assert found.name == "mine" and b"".join(part.read() for part in found.files) == path.read_bytes()
    assert 0.03 < found.valid[0].size / path.stat().st_size < 0.06
    assert found.valid[0].read().startswith(b" ")
    other = tmp_path / "other.txt"
    other.write_text("for validation")
    assert text_file(path, other).valid[0].read() == b"for validation"
    assert corpus_called(str(path)) == found
    path.write_text("x" * 1000)
    with pytest.raises(ValueError, match="name a file for validation"):
        text_file(path)


def test_an_unknown_corpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'shakespeare': must be stdlib, tinystories or the path of a text file"):
        corpus_called("shakespeare")
    with pytest.raises(ValueError, match="gone: there is no such file"):
        text_file(tmp_path / "gone")
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="nothing has no modules in source"):
        corpus_called("stdlib")
    assert isinstance(Corpus("x", (), ()).files, tuple)
