"""From a dataset's name, a folder or a URL to its index."""

import os
from pathlib import Path

from idn.data import storage
from idn.data.cache import Cache
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
    """(folder, index) of a dataset."""
    folder = resolve(source)
    index = load_index(folder)
    if index is None:
        hint = f"run `idn data prepare {source}`" if source in NAMES else f"expected {INDEX} beside the shards"
        raise UserError(f"no prepared data at {folder}: {hint}")
    return folder, index
