"""Reads the samples of one batch: direct reads from shards, decoding, flip and resize.

This is what loader processes run; it is picklable and imports nothing of the training system.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from idn.data import images, pixels, storage
from idn.data.cache import Cache
from idn.data.index import Index, Shard
from idn.data.order import Order
from idn.data.sample import decode_image, decode_label
from idn.data.tars import BadShard, read_sample
from idn.errors import UserError


class Request(NamedTuple):
    """`length` samples of an epoch from place `first` on."""

    epoch: int
    first: int
    length: int


class Answer(NamedTuple):
    """Decoded samples; what was skipped, or the error that stopped the batch, in words."""

    images: np.ndarray
    """N x C x H x W uint8."""
    labels: list[int]
    positions: list[int]
    skipped: list[str]
    error: str | None


class BadSample(ValueError):
    """One sample that cannot be used, with shard and key in the message."""


@dataclass
class Reader:
    folder: str
    index: Index
    shards: Sequence[Shard]
    order: Order
    cache: Cache
    flip: bool = False
    resize: int | None = None
    skip_bad: bool = False
    _open: OrderedDict[int, tuple[int, list[int]]] = field(default_factory=OrderedDict, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __del__(self) -> None:
        for handle, _ in self._open.values():
            os.close(handle)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.index.shape
        return (channels, self.resize or height, self.resize or width)

    def read(self, request: Request) -> Answer:
        """Errors come back as text: an exception that crosses processes would lose its one-line message."""
        try:
            return self._read(request)
        except (UserError, BadSample, BadShard) as error:
            return Answer(np.zeros(0, np.uint8), [], [], [], str(error))

    def _read(self, request: Request) -> Answer:
        channels, height, width = self.index.shape
        batch = np.empty((request.length, height, width, channels), np.uint8)
        labels: list[int] = []
        positions: list[int] = []
        skipped: list[str] = []
        for place, (shard, number) in enumerate(self.order.locate(*request), start=request.first):
            try:
                batch[len(labels)], label = self.sample(shard, number)
            except BadSample as error:
                if not self.skip_bad:
                    raise
                skipped.append(str(error))
                continue
            labels.append(label)
            positions.append(place)
        batch = batch[: len(labels)]
        if self.flip:
            mirrored = pixels.flips(self.order.seed, request.epoch, positions)
            batch[mirrored] = batch[mirrored, :, ::-1]
        planes = np.ascontiguousarray(batch.transpose(0, 3, 1, 2))
        if self.resize:
            planes = pixels.resize(planes, self.resize)
        return Answer(planes, labels, positions, skipped, None)

    def sample(self, shard: int, number: int) -> tuple[np.ndarray, int]:
        """One decoded image (H x W x C) and its label."""
        handle, offsets = self._shard(shard)
        start, end = offsets[number], offsets[number + 1]
        region = os.pread(handle, end - start, start)
        name = self.shards[shard].name
        try:
            key, files = read_sample(region)
        except BadShard as error:
            raise BadSample(f"{name}, sample {number}: {error}; run `idn data verify`") from None
        if not key:
            raise BadSample(f"{name}, sample {number}: nothing at byte {start}; the index disagrees with the shard")
        try:
            return decode_image(files, self.index.shape), decode_label(files, self.index.classes)
        except images.BadImage as error:
            raise BadSample(f"{name}, sample {key!r}: {error}") from None

    def _shard(self, number: int) -> tuple[int, list[int]]:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.shards[number]
        location = storage.join(self.folder, shard.name)
        try:
            handle = self.cache.open(location, shard.sha256, shard.version)
        except FileNotFoundError:
            raise UserError(f"shard {location} is missing: prepare the data again") from None
        except BadShard as error:
            raise UserError(f"shard {location}: {error}") from None
        offsets = shard.offsets().tolist()
        size = os.fstat(handle).st_size
        if size < offsets[-1]:
            os.close(handle)
            raise UserError(f"shard {location} is truncated: {size} bytes, its index says {offsets[-1]} and more")
        # Two windows at most are in use at once; older descriptors would only pin evicted files.
        while len(self._open) >= self._most_open():
            os.close(self._open.popitem(last=False)[1][0])
        self._open[number] = (handle, offsets)
        return self._open[number]

    def _most_open(self) -> int:
        return 2 * max(len(window) for window in self.order.windows(0))
