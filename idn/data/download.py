"""HTTP downloads that survive dropped connections and go on where an earlier attempt stopped."""

import http.client
import io
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from idn.errors import UserError

ATTEMPTS = 5
TIMEOUT = 30.0
_CHUNK = 1 << 18
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
Progress = Callable[[int, int | None], None]
"""Told (bytes here so far, bytes in all if known)."""


class NetworkError(UserError):
    """A server that cannot be reached or does not answer as it should."""


class _Interrupted(Exception):
    """An attempt that failed in a way that another attempt may mend."""


def read(url: str) -> bytes:
    """A small file's content; FileNotFoundError if the server says that there is none."""
    body = io.BytesIO()
    _transfer(url, body, None)
    return body.getvalue()


def download(url: str, target: Path, progress: Progress | None = None) -> None:
    """Fetches `url` into `target`; bytes that are already there are kept and continued."""
    try:
        with target.open("ab") as file:
            _transfer(url, file, progress)
    except FileNotFoundError:
        raise
    except OSError as error:  # network failures do not come this far, so it is the disk
        raise UserError(f"cannot write {target}: {error.strerror or error}; free space or choose another place") from error


def _transfer(url: str, sink: BinaryIO, progress: Progress | None) -> None:
    """Attempts until all bytes are in `sink`; an attempt that brought some renews the patience."""
    failures = 0
    etag = ""
    while True:
        start = sink.seek(0, io.SEEK_END)
        try:
            answer = _open(url, start, etag)
            if answer is None:
                return
            with answer:
                etag = answer.headers.get("ETag", "")
                if answer.status != 206:
                    start = sink.truncate(0)
                _copy(answer, sink, start, progress)
            return
        except _Interrupted as reason:
            failures = 1 if sink.seek(0, io.SEEK_END) > start else failures + 1
            if failures >= ATTEMPTS:
                raise NetworkError(f"cannot read {url}: {reason} ({ATTEMPTS} attempts)") from None
            time.sleep(0.2 * 2**failures)


def _open(url: str, start: int, etag: str) -> http.client.HTTPResponse | None:
    """The server's answer from byte `start` on, or None when nothing is left to fetch."""
    request = urllib.request.Request(url, headers={"User-Agent": "idn"})
    if start:
        request.add_header("Range", f"bytes={start}-")
        if etag:  # a file that changed in between is sent anew instead of being patched together
            request.add_header("If-Range", etag)
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        return answer
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{start}":
            return None
        problem = f"the server answers {error.code} {error.reason}"
        if error.code in (404, 410):
            raise FileNotFoundError(f"{url}: {problem}") from None
        if error.code in _TRY_AGAIN:
            raise _Interrupted(problem) from None
        raise NetworkError(f"cannot read {url}: {problem}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(getattr(error, "reason", "") or error)) from None


def _copy(answer: http.client.HTTPResponse, sink: BinaryIO, start: int, progress: Progress | None) -> None:
    length = answer.headers.get("Content-Length")
    total = start + int(length) if length is not None else None
    here = start
    while True:
        try:
            chunk = answer.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _Interrupted(str(error) or "the connection was dropped") from None
        if not chunk:
            break
        sink.write(chunk)
        here += len(chunk)
        if progress:
            progress(here, total)
    if total is not None and here < total:
        raise _Interrupted(f"the connection ended after {here} of {total} bytes")
