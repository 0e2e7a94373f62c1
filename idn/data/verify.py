"""Checks a folder of shards against its index, down to the last pixel."""

import hashlib
import os
from collections.abc import Iterator

import numpy as np

from idn.data import storage
from idn.data.cache import Cache
from idn.data.images import BadImage
from idn.data.index import Index, Shard, content_digest, sample_digests
from idn.data.sample import decode_image, decode_label
from idn.data.tars import BadShard, Span, read_sample, scan
from idn.errors import UserError


def problems(folder: str, index: Index, cache: Cache) -> Iterator[str]:
    """All that is wrong, in words that name shard and sample; nothing if all is well."""
    digests: dict[str, list[bytes]] = {split: [] for split in index.splits()}
    sound = dict.fromkeys(digests, True)
    for shard in index.shards:
        found = list(_check_shard(folder, shard, index, cache, digests[shard.split]))
        sound[shard.split] &= not found
        yield from found
    for split, expected in index.digests.items():
        if sound.get(split) and (digest := content_digest(digests[split])) != expected:
            yield f"split {split} has content digest {digest}, the index says {expected}"


def _check_shard(folder: str, shard: Shard, index: Index, cache: Cache, digests: list[bytes]) -> Iterator[str]:
    location = storage.join(folder, shard.name)
    if not storage.scheme(location):
        path = storage.local_path(location)
        if not path.exists():
            yield f"{shard.name} is missing"
            return
        size = path.stat().st_size
        if size != shard.bytes:
            yield f"{shard.name} has {size} bytes, the index says {shard.bytes}"
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        if shard.sha256 and content != shard.sha256:
            yield f"{shard.name} has SHA-256 {content}, the index says {shard.sha256}"
    try:
        handle = cache.open(location, shard.sha256, shard.version)
    except FileNotFoundError:
        yield f"{shard.name} is missing"
        return
    except (UserError, BadShard) as error:
        yield f"{shard.name}: {error}"
        return
    try:
        spans = scan(lambda offset, length: os.pread(handle, length, offset), os.fstat(handle).st_size)
        if [span.start for span in spans] != shard.offsets().tolist()[:-1]:
            yield f"{shard.name} has {len(spans)} samples at other places than the index's {shard.samples}"
        for span in spans:
            yield from _check_sample(handle, span, shard, index, digests)
    except BadShard as error:
        yield f"{shard.name}: {error}"
    finally:
        os.close(handle)


def _check_sample(handle: int, span: Span, shard: Shard, index: Index, digests: list[bytes]) -> Iterator[str]:
    try:
        _, files = read_sample(os.pread(handle, span.end - span.start, span.start))
        image = decode_image(files, index.shape)
        label = decode_label(files, index.classes)
    except (BadShard, BadImage) as error:
        yield f"{shard.name}, sample {span.key!r}: {error}"
        return
    if index.classes is not None:
        digests += sample_digests(np.ascontiguousarray(image.transpose(2, 0, 1))[None], [label])
