"""Small datasets whose images say who they are, and a real web server that can misbehave."""

import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idn.data import open_stream
from idn.data.index import Index
from idn.data.shards import Split, write_dataset


def numbered(count: int, shape: tuple[int, int, int] = (1, 4, 4), first: int = 0) -> Split:
    """Images whose first two bytes are their number; labels are the number's last digit."""
    numbers = np.arange(first, first + count)
    images = np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = numbers // 256, numbers % 256
    return Split(images, (numbers % 10).astype(np.uint8), numbers)


def write_numbered(folder: Path | str, counts: list[int], **options: Any) -> Index:
    """A train split whose shards have the given (equal, but for the last) numbers of samples."""
    splits = {"train": numbered(sum(counts), **options)}
    return write_dataset(str(folder), "numbered", splits, classes=10, shard_samples=counts[0])


def numbers_of(images: torch.Tensor) -> list[int]:
    """Which images of `numbered` these are."""
    return (images[:, 0, 0, 0].long() * 256 + images[:, 0, 0, 1].long()).tolist()


def epoch_of(place: Path | str, **options: Any) -> list[int]:
    return [number for batch in open_stream(str(place), **options) for number in numbers_of(batch.images)]


@dataclass
class WebServer:
    """Serves a folder on loopback with range requests; faults are counted down as they happen."""

    folder: Path
    drop_after: int | None = None
    """Close the connection after this many bytes of a body ..."""
    drops: int = 0
    """... this many times."""
    failures: int = 0
    """Answer 503 this many times."""
    ranges: bool = True
    delay: float = 0.0
    """Seconds to wait before each 64 KiB of a body."""
    requests: Counter[str] = field(default_factory=Counter)
    ranged: int = 0

    def __enter__(self) -> "WebServer":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def _handler(web: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            web.requests[self.path] += 1
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = web.folder / self.path.lstrip("/")
            if web.failures:
                web.failures -= 1
                self.send_error(503)
                return
            if not path.is_file():
                self.send_error(404)
                return
            content, start = path.read_bytes(), 0
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if wanted and web.ranges:
                start = int(wanted[1])
                web.ranged += 1
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
            self.end_headers()
            if body:
                self.send(content[start:])

        def send(self, content: bytes) -> None:
            dropping = web.drop_after is not None and web.drops > 0
            if dropping:
                web.drops -= 1
                content = content[: web.drop_after]
            for start in range(0, len(content), 1 << 16):
                time.sleep(web.delay)
                self.wfile.write(content[start : start + (1 << 16)])
            if dropping:
                self.close_connection = True

    return Handler
