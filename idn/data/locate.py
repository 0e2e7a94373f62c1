"""From a dataset's name, a folder or a URL to its index."""

import os
from pathlib import Path

from idn.data import storage
from idn.data.cache import Cache
from idn.data.foreign import index_foreign
from idn.data.index import INDEX, Index
from idn.errors import UserError

NAMES = ("cifar10", "mnist", "fashion-mnist")
SAMPLES = ("cifar10-sample", "mnist-sample")


def data_root() -> Path:
    """Where prepared datasets live: $IDN_DATA, or ./data."""
    return Path(os.environ.get("IDN_DATA") or "data")


def resolve(source: str) -> str:
    """The absolute folder or URL of a dataset's shards, the same on every worker of a machine."""
    if source in SAMPLES:
        return str(Path(__file__).parent / "samples" / source)
    if source in NAMES:
        return str((data_root() / source).resolve())
    if storage.scheme(source, allow_pipe=True):
        return source
    return str(storage.local_path(source).resolve())


def load_index(folder: str) -> Index | None:
    """The folder's index, or None if it has none."""
    try:
        return Index.from_json(storage.read_bytes(storage.join(folder, INDEX)), storage.join(folder, INDEX))
    except (FileNotFoundError, NotADirectoryError):
        return None


def open_index(source: str, cache: Cache) -> tuple[str, Index]:
    """(folder, index) of a dataset by name, a folder or URL with an index, or somebody else's shards."""
    location = resolve(source)
    storage.scheme(location, cache.allow_pipe)
    index = None if location.endswith(storage.ARCHIVES) or location.startswith("pipe:") else load_index(location)
    if index is not None:
        return location, index
    if source in NAMES:
        raise UserError(f"{source} is not prepared at {location}: run `idn data prepare {source}`")
    found = index_foreign(location, cache)
    if found is None:
        raise UserError(f"no shards at {location}: expected {INDEX}, or .tar files, or a dataset's name")
    return found
