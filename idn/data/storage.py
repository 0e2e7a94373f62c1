"""Places where shards live: folders, web servers, object stores."""

import contextlib
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from idn import files
from idn.data import download
from idn.errors import UserError

SCHEMES = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "hdfs", "memory")
ARCHIVES = (".tar", ".tar.gz", ".tgz")
_WEB = ("http", "https")


def scheme(location: str, allow_pipe: bool = False) -> str:
    """The URL scheme, or "" for a local path; anything not known to be harmless is refused.

    >>> scheme("data/cifar10"), scheme("https://example.org/shards")
    ('', 'https')
    """
    if location.startswith("pipe:"):
        if allow_pipe:
            return "pipe"
        raise UserError(f"{location!r} would run a command: pass allow_pipe=True if you mean it")
    found = re.match(r"([A-Za-z][\w+.-]*):(//|:)", location)
    if found is None:
        return ""
    name = found[1].lower()
    if name == "file" and found[2] == "//":
        return ""
    if name not in SCHEMES or found[2] != "//":
        raise UserError(f"cannot read {location!r}: use a path or one of {', '.join(SCHEMES)}")
    return name


def local_path(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder else name


def read_bytes(location: str) -> bytes:
    """A small file's content; FileNotFoundError when it is not there."""
    kind = scheme(location)
    if not kind:
        return local_path(location).read_bytes()
    if kind in _WEB:
        return download.read(location)
    with _remote_errors(location), _open_remote(location, "rb") as file:
        return file.read()


def list_archives(folder: str) -> list[str]:
    """Names of the tar files in a folder, sorted."""
    kind = scheme(folder)
    if kind in _WEB:
        raise UserError(f"{folder} has no index.json and web folders cannot be listed: name the shards, {{0..9}}.tar")
    if not kind:
        names = [entry.name for entry in local_path(folder).iterdir()]
    else:
        with _remote_errors(folder):
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(folder)
            names = [entry.rsplit("/", 1)[-1] for entry in filesystem.ls(path, detail=False)]
    return sorted(name for name in names if name.endswith(ARCHIVES))


def fingerprint(location: str) -> str:
    """What changes when the file does: size and time, or the server's tag; FileNotFoundError if it is missing."""
    kind = scheme(location, allow_pipe=True)
    if not kind:
        status = local_path(location).stat()
        return f"{status.st_size}-{status.st_mtime_ns}"
    if kind in _WEB:
        return download.fingerprint(location)
    if kind == "pipe":
        return uuid.uuid4().hex
    with _remote_errors(location):
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(location)
        facts = filesystem.info(path)
        return "-".join(str(facts[name]) for name in ("size", "ETag", "etag", "mtime", "created") if name in facts)


def fetch(location: str, target: Path, allow_pipe: bool = False) -> None:
    """Copies a remote file, or a command's output, to `target`."""
    kind = scheme(location, allow_pipe)
    if kind in _WEB:
        download.download(location, target)
    elif kind == "pipe":
        with target.open("wb") as out:
            done = subprocess.run(location.removeprefix("pipe:"), shell=True, stdout=out, check=False)
        if done.returncode:
            raise UserError(f"{location!r} ended with code {done.returncode}")
    else:
        with _remote_errors(location), _open_remote(location, "rb") as file, target.open("wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)


def check_writable(location: str) -> None:
    if scheme(location) in _WEB:
        raise UserError(f"cannot write to {location}: a web server takes no uploads; give a folder or object store")


def write(location: str, content: bytes) -> None:
    """Writes a whole file so that readers see all of it or none."""
    if scheme(location):
        with _remote_errors(location), _open_remote(location, "wb") as file:
            file.write(content)
        return
    path = local_path(location)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(path, content)
        path.chmod(0o644)  # temporary files are private; shards are for every worker
    except OSError as error:
        problem = error.strerror or str(error)
        raise UserError(f"cannot write {path}: {problem}; free space or choose another place") from error


def _open_remote(location: str, mode: str) -> contextlib.AbstractContextManager[BinaryIO]:
    import fsspec

    opened: contextlib.AbstractContextManager[BinaryIO] = fsspec.open(location, mode)
    return opened


@contextlib.contextmanager
def _remote_errors(location: str) -> Iterator[None]:
    """fsspec's many kinds of failure as one line; a missing file stays FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except ImportError as error:
        raise UserError(f"{location} needs another package: {error}") from error
    except Exception as error:
        raise UserError(f"cannot reach {location}: {error}") from error
