"""A local cache of remote shards that never holds more than its limit, shared by all processes of a machine."""

import contextlib
import fcntl
import gzip
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from idn.data import storage
from idn.data.tars import BadShard
from idn.errors import UserError

DEFAULT_BYTES = 10 * 10**9


def default_folder() -> Path:
    return Path(os.environ.get("IDN_CACHE") or Path.home() / ".cache" / "idn")


@dataclass(frozen=True)
class Cache:
    folder: Path
    limit: int = DEFAULT_BYTES
    allow_pipe: bool = False

    def open(self, location: str, sha256: str = "", version: str = "") -> int:
        """A descriptor of the shard's plain tar bytes; remote shards are fetched first.

        A gzipped shard is unpacked into a file without a name, which ends with its descriptor.
        """
        if not storage.scheme(location, self.allow_pipe):
            handle = os.open(storage.local_path(location), os.O_RDONLY)
        else:
            handle = self._open_cached(location, sha256, version)
        return _unpacked(handle) if os.pread(handle, 2, 0) == b"\x1f\x8b" else handle

    def _open_cached(self, location: str, sha256: str, version: str) -> int:
        name = hashlib.sha256(f"{location} {sha256} {version}".encode()).hexdigest()[:24] + ".shard"
        path = self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock(name):  # one process fetches, the others wait for it
                if not path.exists():
                    self._fetch(location, sha256, path)
                os.utime(path)
                handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UserError(f"cannot use the cache {self.folder}: {error}; set IDN_CACHE to another place") from error
        self._evict(keep=path)
        return handle

    def _fetch(self, location: str, sha256: str, path: Path) -> None:
        temporary = path.with_suffix(".part")
        temporary.unlink(missing_ok=True)
        try:
            storage.fetch(location, temporary, self.allow_pipe)
            size = temporary.stat().st_size
            if size > self.limit:
                raise UserError(f"{location} has {size} bytes, more than the cache's limit of {self.limit}")
            if sha256 and (found := file_sha256(temporary)) != sha256:
                raise UserError(f"{location} has SHA-256 {found}, its index says {sha256}: prepare the data again")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _evict(self, keep: Path) -> None:
        """Removes the least recently used shards; open descriptors stay readable."""
        with self._lock("evict"):
            entries = []
            for path in self.folder.glob("*.shard"):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    entries.append((status.st_mtime_ns, status.st_size, path))
            total = sum(size for _, size, _ in entries)
            for _, size, path in sorted(entries):
                if total <= self.limit:
                    break
                if path != keep:
                    path.unlink(missing_ok=True)
                    total -= size

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with (self.folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpacked(handle: int) -> int:
    with tempfile.TemporaryFile() as plain, os.fdopen(handle, "rb") as packed:
        try:
            with gzip.open(packed) as source:
                shutil.copyfileobj(source, plain, 1 << 20)
        except (OSError, EOFError) as error:
            raise BadShard(f"damaged gzip archive ({error})") from error
        plain.flush()
        return os.dup(plain.fileno())
