"""HTTP downloads that survive dropped connections and go on where an earlier attempt stopped."""

import http.client
import io
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from idn.errors import UserError

ATTEMPTS = 5
TIMEOUT = 30.0
_CHUNK = 1 << 18
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
Progress = Callable[[int, int | None], None]
"""Told (bytes here so far, bytes in all if known)."""
T = TypeVar("T")


class NetworkError(UserError):
    """A server that cannot be reached or does not answer as it should."""


class _Interrupted(Exception):
    """An attempt that failed in a way that another attempt may mend."""


def read(url: str) -> bytes:
    """A small file's content; FileNotFoundError if the server says that there is none."""
    body = io.BytesIO()
    _Transfer(url, body).run()
    return body.getvalue()


def fingerprint(url: str) -> str:
    """The server's tag, date and size of a file."""

    def ask() -> str:
        with _open(urllib.request.Request(url, method="HEAD")) as answer:
            return "-".join(answer.headers.get(name, "") for name in ("ETag", "Last-Modified", "Content-Length"))

    return _patiently(url, ask, lambda: 0)


def download(url: str, target: Path, progress: Progress | None = None) -> None:
    """Fetches `url` into `target`; bytes that are already there are kept and continued."""
    try:
        with target.open("ab") as file:
            _Transfer(url, file, progress).run()
    except FileNotFoundError:
        raise
    except OSError as error:  # network failures do not come this far, so it is the disk
        problem = error.strerror or str(error)
        raise UserError(f"cannot write {target}: {problem}; free space or choose another place") from error


class _Transfer:
    """One URL on its way into a file."""

    def __init__(self, url: str, sink: BinaryIO, progress: Progress | None = None) -> None:
        self.url, self.sink, self.progress = url, sink, progress
        self.etag = ""

    def run(self) -> None:
        _patiently(self.url, self._attempt, self._size)

    def _size(self) -> int:
        return self.sink.seek(0, io.SEEK_END)

    def _attempt(self) -> None:
        start = self._size()
        request = urllib.request.Request(self.url)
        if start:
            request.add_header("Range", f"bytes={start}-")
            if self.etag:  # a file that changed in between comes anew instead of being patched together
                request.add_header("If-Range", self.etag)
        try:
            answer = _open(request)
        except _NothingLeft as error:
            if error.size == start:
                return
            self.sink.truncate(0)
            raise _Interrupted("the file on the server has changed") from None
        with answer:
            self.etag = answer.headers.get("ETag", "")
            if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                start = self.sink.truncate(0)
            self._copy(answer, start)

    def _copy(self, answer: http.client.HTTPResponse, here: int) -> None:
        length = answer.headers.get("Content-Length")
        total = here + int(length) if length is not None else None
        while True:
            try:
                chunk = answer.read1(_CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _Interrupted(str(error) or "the connection was dropped") from None
            if not chunk:
                break
            self.sink.write(chunk)
            here += len(chunk)
            if self.progress:
                self.progress(here, total)
        if total is not None and here < total:
            raise _Interrupted(f"the connection ended after {here} of {total} bytes")


class _NothingLeft(Exception):
    """The range begins at or beyond the file's end, which is at `size`."""

    def __init__(self, size: int | None) -> None:
        self.size = size


def _patiently(url: str, attempt: Callable[[], T], size: Callable[[], int]) -> T:
    """Attempts again after failures; whatever brings the transfer further renews the patience."""
    failures, furthest = 0, size()
    while True:
        try:
            return attempt()
        except _Interrupted as reason:
            failures = 1 if size() > furthest else failures + 1
            furthest = max(furthest, size())
            if failures >= ATTEMPTS:
                raise NetworkError(f"cannot read {url}: {reason} ({ATTEMPTS} attempts)") from None
            time.sleep(0.1 * 2**failures)


def _open(request: urllib.request.Request) -> http.client.HTTPResponse:
    url = request.full_url
    request.add_header("User-Agent", "idn")
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        return answer
    except urllib.error.HTTPError as error:
        problem = f"the server answers {error.code} {error.reason}"
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            size = error.headers.get("Content-Range", "").rpartition("/")[2]
            raise _NothingLeft(int(size) if size.isdigit() else None) from None
        if error.code in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.GONE):
            raise FileNotFoundError(f"{url}: {problem}") from None
        if error.code in _TRY_AGAIN:
            raise _Interrupted(problem) from None
        raise NetworkError(f"cannot read {url}: {problem}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(getattr(error, "reason", "") or error)) from None
