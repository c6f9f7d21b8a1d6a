"""A file over HTTP: in parts, going on where an earlier try ended, checked before it takes its name."""

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from lmsys.files import sha256_of

_PIECE = 1 << 20  # bytes that are read at once
TIMEOUT_S = 30.0
PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # before each further try


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects and keeps the checksum that the first server names, as that of a large file at Hugging Face."""

    def __init__(self) -> None:
        self.headers: list[http.client.HTTPMessage] = []

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        self.headers.append(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    pauses_s: tuple[float, ...] = PAUSES_S,
) -> str:
    """Fetch `url` into `path`, and say its SHA-256. What has come stands in `path`.part until it is whole, and a later
    call goes on from it.

    A cut or refused connection is tried again after each of `pauses_s`. The length must be the server's; the SHA-256
    must be `sha256`, and the one that the server names, if it does (X-Linked-ETag).
    ConnectionError when the last try fails too; ValueError for a wrong checksum (what has come is removed) and for a
    URL that the server does not have.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    named: set[str] = {sha256.lower()} if sha256 else set()
    for pause_s in (*pauses_s, None):
        try:
            named |= _fetch(url, part, lambda done, total: progress(f"downloading {path.name}", done, total))
            break
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise ValueError(f"{url}: the server says {error.code} {error.reason}") from None
            failure = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            failure = str(error) or type(error).__name__
        if pause_s is None:
            kept = f"; {part} keeps the {part.stat().st_size:,} bytes that came" if part.is_file() else ""
            raise ConnectionError(f"{url}: {failure}, in {len(pauses_s) + 1} tries{kept}")
        time.sleep(pause_s)
    found = sha256_of(part)
    if named and named != {found}:
        part.unlink()
        raise ValueError(f"{url}: its SHA-256 is {found}, and must be {' and '.join(sorted(named))}; removed")
    part.replace(path)
    return found


def _first_byte(reply: http.client.HTTPResponse) -> int:
    """Where the part begins that has come, -1 where that is not told."""
    told = re.match(r"bytes (\d+)-", reply.headers.get("Content-Range", ""))
    return int(told[1]) if told else -1


def _fetch(url: str, part: Path, progress: Callable[[int, int], None]) -> set[str]:
    """Append what is missing to `part`; the checksums that the server names. OSError when the connection is cut."""
    validator = part.with_name(part.name + ".etag")  # the ETag of the whole file
    have = part.stat().st_size if part.is_file() and validator.is_file() else 0
    headers = {"Range": f"bytes={have}-", "If-Range": validator.read_text()} if have else {}
    redirects = _Redirects()
    request = urllib.request.Request(url, headers=headers | {"Accept-Encoding": "identity"})
    try:
        reply = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is missing, or the part is of something else: begin again to know
            part.unlink()
            return _fetch(url, part, progress)
        raise
    with reply:
        resumed = reply.status == 206
        if resumed and _first_byte(reply) != have:  # it would be put in the wrong place: begin again
            if not have:
                raise ValueError(f"{url}: the server sent a part of the file that nobody asked for")
            validator.unlink()
            return _fetch(url, part, progress)
        done = have if resumed else 0
        length = reply.headers.get("Content-Length")
        total = done + int(length) if length is not None else 0
        etag = reply.headers.get("ETag", "")
        if not resumed:
            validator.unlink(missing_ok=True)
            if etag and not etag.startswith("W/"):  # a weak one does not promise the same bytes
                validator.write_text(etag)
        with part.open("ab" if resumed else "wb") as file:
            while piece := reply.read(_PIECE):
                file.write(piece)
                done += len(piece)
                progress(done, total)
        if done < total:
            raise ConnectionResetError(f"the connection ended after {done:,} of {total:,} bytes")
    validator.unlink(missing_ok=True)
    tags = [message.get("X-Linked-ETag", "").strip('"') for message in (*redirects.headers, reply.headers)]
    return {tag for tag in tags if re.fullmatch("[0-9a-f]{64}", tag)}
