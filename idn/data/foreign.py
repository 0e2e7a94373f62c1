"""WebDataset shards that somebody else made: indexed on first sight, the index kept in the cache."""

import hashlib
import os
import re

import braceexpand
import numpy as np

from idn.data import storage
from idn.data.cache import Cache
from idn.data.images import BadImage
from idn.data.index import Index, Shard
from idn.data.sample import decode_image
from idn.data.tars import BLOCK, BadShard, read_sample, scan
from idn.errors import UserError

_SPLITS = {"train": "train", "val": "validation", "test": "test"}


def index_foreign(source: str, cache: Cache) -> tuple[str, Index] | None:
    """(folder, index) of a folder of tars, one tar, or a pattern such as shards-{000..099}.tar; None if none."""
    folder, names = _list_shards(source)
    if not names:
        return None
    try:
        versions = [storage.fingerprint(storage.join(folder, name)) for name in names]
    except FileNotFoundError as error:
        raise UserError(f"shard not found: {error}") from None
    facts = repr((folder, names, versions))
    kept = cache.folder / "indexes" / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.json"
    if folder and kept.exists():
        return folder, Index.from_json(kept.read_bytes(), str(kept))
    index = _build(source, folder, names, versions, cache)
    if folder:  # what a command prints may change: such an index lives as long as its stream
        storage.write(str(kept), index.to_json().encode())
    return folder, index


def _list_shards(source: str) -> tuple[str, list[str]]:
    """(folder, names within it); the folder is "" where commands stand for shards."""
    if source.startswith("pipe:"):
        return "", list(braceexpand.braceexpand(source))
    if not source.endswith(storage.ARCHIVES):
        try:
            return source, storage.list_archives(source)
        except (FileNotFoundError, NotADirectoryError):
            return source, []
    folder = source.partition("{")[0].rpartition("/")[0]
    return folder, [location.removeprefix(folder + "/") for location in braceexpand.braceexpand(source)]


def _build(source: str, folder: str, names: list[str], versions: list[str], cache: Cache) -> Index:
    shape: tuple[int, int, int] | None = None
    shards = []
    for name, version in zip(names, versions, strict=True):
        location = storage.join(folder, name)
        handle = -1
        try:
            handle = cache.open(location, version=version)
            size = os.fstat(handle).st_size
            spans = scan(lambda offset, length: os.pread(handle, length, offset), size)  # noqa: B023
            if not spans:
                raise BadShard("it holds no sample")
            if shape is None:
                region = os.pread(handle, spans[0].end - spans[0].start, spans[0].start)
                shape = _shape(region)
        except BadShard as error:
            raise UserError(f"shard {location}: {error}") from None
        finally:
            if handle >= 0:
                os.close(handle)
        blocks = np.array([(span.end - span.start) // BLOCK for span in spans], np.uint32)
        shards.append(
            Shard(name, _split(name), len(spans), size, "", blocks, first_byte=spans[0].start, version=version)
        )
    assert shape is not None
    # The last part of the name: a run that resumes may find the same shards under another folder.
    return Index(source.rstrip("/").rpartition("/")[2], shape, None, {}, tuple(shards))


def _shape(region: bytes) -> tuple[int, int, int]:
    key, files = read_sample(region)
    try:
        height, width, channels = decode_image(files, None).shape
    except BadImage as error:
        raise BadShard(f"sample {key!r}: {error}") from None
    return channels, height, width


def _split(name: str) -> str:
    """train, validation or test if the file's name says so, else train."""
    found = re.match(r"(train|val|test)", name.rpartition("/")[2])
    return _SPLITS[found[1]] if found else "train"
