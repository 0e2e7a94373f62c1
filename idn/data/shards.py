"""Writes WebDataset shards and their index."""

import gzip
import hashlib
from dataclasses import dataclass

import numpy as np

from idn.data import images, storage, tars
from idn.data.index import INDEX, Index, Shard, content_digest, sample_digests

SHARD_SAMPLES = 5000


@dataclass(frozen=True)
class Split:
    """Images (N x C x H x W uint8) with their labels; `numbers` are their places in the source, used as keys."""

    images: np.ndarray
    labels: np.ndarray
    numbers: np.ndarray

    def take(self, chosen: np.ndarray) -> "Split":
        return Split(self.images[chosen], self.labels[chosen], self.numbers[chosen])


def hold_out(train: Split, share: float = 0.1) -> tuple[Split, Split]:
    """(train, validation): the tenth whose SHA-256 is smallest, so the same images from any source."""
    digests = sample_digests(train.images, train.labels.tolist())
    by_digest = sorted(range(len(digests)), key=digests.__getitem__)
    held = np.zeros(len(digests), dtype=bool)
    held[by_digest[: round(len(digests) * share)]] = True
    return train.take(~held), train.take(held)


def write_dataset(
    out: str,
    dataset: str,
    splits: dict[str, Split],
    classes: int,
    shard_samples: int = SHARD_SAMPLES,
    packed: bool = False,
) -> Index:
    """Writes shards of all splits into a folder or URL, then their index; `packed` gzips the shards.

    Each file appears whole or not at all, and the index comes last. The bytes depend on the content alone,
    so a second run finds its shards and leaves them as they are.
    """
    storage.check_writable(out)
    shape = tuple(next(iter(splits.values())).images.shape[1:])
    shards: list[Shard] = []
    for name, split in splits.items():
        for number, start in enumerate(range(0, len(split.labels), shard_samples)):
            piece = split.take(np.arange(start, min(start + shard_samples, len(split.labels))))
            shard_name = f"{name}-{number:06d}.tar" + (".gz" if packed else "")
            content, blocks = shard_bytes(piece)
            if packed:
                content = gzip.compress(content, mtime=0)
            digest = hashlib.sha256(content).hexdigest()
            put(storage.join(out, shard_name), content)
            shards.append(Shard(shard_name, name, len(blocks), len(content), digest, np.array(blocks, np.uint32)))
    digests = {
        name: content_digest(sample_digests(split.images, split.labels.tolist())) for name, split in splits.items()
    }
    index = Index(dataset, shape, classes, digests, tuple(shards))
    put(storage.join(out, INDEX), index.to_json().encode())
    return index


def put(location: str, content: bytes) -> None:
    """Writes a file unless the same content is there already."""
    try:
        if storage.read_bytes(location) == content:
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    storage.write(location, content)


def shard_bytes(split: Split) -> tuple[bytes, list[int]]:
    """An archive and the number of blocks of each of its samples."""
    samples = [
        tars.sample_bytes(f"{number:06d}", {"png": images.encode_png(image), "cls": b"%d" % label})
        for image, label, number in zip(split.images, split.labels.tolist(), split.numbers.tolist(), strict=True)
    ]
    return b"".join(samples) + tars.END_MARK, [len(sample) // tars.BLOCK for sample in samples]
