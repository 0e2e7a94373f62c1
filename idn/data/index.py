"""`index.json`: what a folder of shards holds and where each sample begins."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from idn.data.tars import BLOCK
from idn.errors import UserError

INDEX = "index.json"
WRITER = "idn-shards-1"


@dataclass(frozen=True)
class Shard:
    """One archive. `blocks[i]` is the number of 512-byte blocks of sample i, so that offsets are its sums."""

    name: str
    split: str
    samples: int
    bytes: int
    sha256: str
    blocks: np.ndarray = field(repr=False, compare=False)
    first_byte: int = 0
    version: str = ""
    """For shards without a SHA-256: what tells the file from another one under its name."""

    def offsets(self) -> np.ndarray:
        """Where each sample begins, and where the last one ends."""
        steps = np.concatenate([[0], np.cumsum(self.blocks, dtype=np.int64)])
        return self.first_byte + BLOCK * steps


@dataclass(frozen=True)
class Index:
    """A dataset: its image shape (C, H, W) and its shards, in order."""

    dataset: str
    shape: tuple[int, int, int]
    classes: int | None
    """None when nobody said: then any label, or none, is accepted."""
    digests: dict[str, str]
    """Per split: SHA-256 over the sorted SHA-256 of its samples (label byte, then C x H x W pixels)."""
    shards: tuple[Shard, ...]
    bits: int = 8
    writer: str = WRITER

    def splits(self) -> list[str]:
        return list(dict.fromkeys(shard.split for shard in self.shards))

    def select(self, split: str) -> list[Shard]:
        """The shards of a split, or of several joined by `+` as in `train+validation`."""
        names = split.split("+")
        for name in names:
            if name not in self.splits():
                have = ", ".join(self.splits())
                raise UserError(f"{self.dataset} has no split {name!r}: it has {have}")
        return [shard for name in dict.fromkeys(names) for shard in self.shards if shard.split == name]

    def to_json(self) -> str:
        plain = asdict(self)
        for shard in plain["shards"]:
            shard["blocks"] = shard["blocks"].tolist()
        # One shard per line keeps the file readable in spite of its long lists of blocks.
        shards = ",\n  ".join(json.dumps(shard) for shard in plain.pop("shards"))
        return json.dumps(plain, indent=1)[:-2] + f',\n "shards": [\n  {shards}\n ]\n}}\n'

    @staticmethod
    def from_json(text: str | bytes, where: str) -> "Index":
        try:
            plain: dict[str, Any] = json.loads(text)
            if plain["writer"] != WRITER:
                raise UserError(f"{where} was written by {plain['writer']!r}, this version reads {WRITER!r}")
            shards = tuple(_shard(entry) for entry in plain.pop("shards"))
            shape = tuple(int(n) for n in plain.pop("shape"))
            if len(shape) != 3 or not shards:
                raise ValueError("needs a shape of 3 numbers and at least one shard")
            return Index(**plain, shape=shape, shards=shards)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where} is not a readable index ({error!r}): prepare the data again") from error


def _shard(entry: dict[str, Any]) -> Shard:
    blocks = np.array(entry.pop("blocks"), dtype=np.uint32)
    shard = Shard(**entry, blocks=blocks)
    if shard.name.startswith("/") or ":" in shard.name or ".." in shard.name.split("/"):
        raise ValueError(f"shard name {shard.name!r} leaves the folder")
    if shard.samples != len(blocks):
        raise ValueError(f"{shard.name}: {shard.samples} samples but {len(blocks)} entries in blocks")
    return shard


def sample_digests(images: np.ndarray, labels: Iterable[int]) -> list[bytes]:
    """SHA-256 of each sample: its label as one byte, then its C x H x W pixels."""
    return [
        hashlib.sha256(bytes([label]) + image.tobytes())
        .digest()
        for image, label in zip(images, labels, strict=True)
    ]  # fmt: skip


def content_digest(digests: Iterable[bytes]) -> str:
    """One digest for a set of samples in any order."""
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()
