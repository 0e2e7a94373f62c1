"""The stream: every sample of an epoch exactly once over all ranks, resumable at any batch.

An epoch is one order of all samples, a function of (seed, epoch). Global batch after global batch is cut from
it, rank r taking the r-th piece of each, so a position in that order says all there is to say about progress,
whatever the number of ranks and loader processes. The last global batch is what is left: it is spread over the
ranks as evenly as can be, and `Batch.weight` says how much a rank's mean counts.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from idn.data import storage
from idn.data.cache import DEFAULT_BYTES, Cache, default_folder
from idn.data.index import Shard
from idn.data.loaders import Loaders
from idn.data.locate import open_index
from idn.data.order import WINDOW, Order
from idn.data.reader import Answer, Reader, Request
from idn.errors import UserError

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    images: Tensor
    """N x C x H x W uint8."""
    labels: Tensor
    """N int64; -1 where a sample has no label."""
    positions: Tensor
    """N int64: each sample's place in the epoch, equal for any number of ranks; -1 for a stand-in."""
    weight: float
    """This rank's share of the global batch times the number of ranks: 1 for full batches.

    The mean over ranks of `weight * loss.mean()` is the mean over the global batch. In training a rank for
    which nothing is left gets one stand-in image of weight 0, so that nobody waits for it; in evaluation
    (shuffle=False) it gets an empty batch.
    """


class Cut(NamedTuple):
    """One batch of one rank, planned: what to read, its weight, and where the epoch stands after it."""

    request: Request
    weight: float
    end: int


class Stream:
    """One rank's batches; iterating gives the rest of the current epoch, iterating again the next one."""

    def __init__(self, reader: Reader, batch: int, rank: int, world: int, workers: int) -> None:
        self.batch, self.rank, self.world = batch, rank, world
        self.samples, self.shape, self.classes = reader.order.samples, reader.shape, reader.index.classes
        self.epoch, self.position = 0, 0
        self.skipped = 0
        """Bad samples that this rank left out so far."""
        self._reader = reader
        self._loaders = Loaders(reader, workers) if workers else None

    @property
    def batches(self) -> int:
        """Batches of a whole epoch, equal on all ranks."""
        return math.ceil(self.samples / (self.batch * self.world))

    @property
    def batches_left(self) -> int:
        """Batches that the current epoch still has."""
        return math.ceil((self.samples - self.position) / (self.batch * self.world))

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; the epoch that is under way goes on where it is."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The place of the next sample, in terms into which no number of ranks or processes enters."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the very sample that the saved stream would have given next."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise UserError(
                    f"the saved data position has {name} {state.get(name)!r}, this stream has {value!r}: "
                    "resume with the same data and seed"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        order = self._reader.order
        return {
            "dataset": self._reader.index.dataset,
            "samples": self.samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "window": order.window,
        }

    def cuts(self) -> Iterator[Cut]:
        """This rank's batches from the current position to the end of the epoch."""
        epoch, position = self.epoch, self.position
        while position < self.samples:
            size = min(self.batch * self.world, self.samples - position)
            share, longer = divmod(size, self.world)
            count = share + (self.rank < longer)
            first = position + self.rank * share + min(self.rank, longer)
            # A rank for which nothing is left still needs an image to train on: the epoch's last one stands in.
            stand_in = count == 0 and self._reader.order.shuffle
            request = Request(epoch, self.samples - 1, 1) if stand_in else Request(epoch, first, count)
            yield Cut(request, count * self.world / size, position + size)
            position += size

    def __iter__(self) -> Iterator[Batch]:
        requests = (cut.request for cut in self.cuts())
        answers = self._loaders.read(requests) if self._loaders else map(self._reader.read, requests)
        for cut, answer in zip(self.cuts(), answers, strict=True):
            batch = self._batch(answer, cut.weight)
            self.position = cut.end
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _batch(self, answer: Answer, weight: float) -> Batch:
        if answer.error:
            raise UserError(answer.error)
        for reason in answer.skipped:
            log.warning("skipped %s", reason)
        self.skipped += len(answer.skipped)
        if self._reader.order.shuffle and not answer.labels:
            raise UserError(f"every sample of a batch is bad, the last one: {answer.skipped[-1]}")
        places = answer.positions if weight else [-1] * len(answer.positions)
        labels, positions = (torch.tensor(values, dtype=torch.int64) for values in (answer.labels, places))
        return Batch(torch.from_numpy(answer.images), labels, positions, weight)

    def close(self) -> None:
        """Ends the loader processes; they also end with the stream itself."""
        if self._loaders:
            self._loaders.close()


def _check_cache(shards: list[Shard], order: Order, limit: int) -> None:
    """A cache that cannot hold a window would fetch its shards again and again."""
    sizes = np.array([shard.bytes for shard in shards])
    need = max(int(sizes[window].sum()) for epoch in range(2) for window in order.windows(epoch))
    if need > limit:
        raise UserError(
            f"the cache may hold {limit} bytes, but {order.window} samples shuffled together take up to {need}: "
            "raise cache_bytes or lower window"
        )


def open_stream(
    source: str,
    split: str = "train",
    *,
    batch: int = 64,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    flip: bool = False,
    resize: int | None = None,
    on_bad_sample: Literal["stop", "skip"] = "stop",
    window: int = WINDOW,
    cache: str | Path | None = None,
    cache_bytes: int = DEFAULT_BYTES,
    allow_pipe: bool = False,
) -> Stream:
    """Opens a dataset by name, folder or URL for one of `world` ranks.

    `batch` is the number of images per rank, `workers` the number of loader processes (0: decode in place).
    `split` may join several, as in "train+validation". Remote shards pass through the folder `cache`, which
    holds at most `cache_bytes`; `window` is how many samples are shuffled together, 65,536 by default.

    >>> stream = open_stream("mnist-sample", batch=100, resize=32)
    >>> stream.samples, stream.shape, stream.batches
    (384, (1, 32, 32), 4)
    >>> [len(batch.images) for batch in stream]
    [100, 100, 100, 84]
    """
    if batch < 1 or world < 1 or not 0 <= rank < world or workers < 0 or window < 1:
        raise UserError(
            f"batch {batch}, rank {rank} of {world}, {workers} loader processes, window {window}: "
            "need batch, world and window >= 1, 0 <= rank < world, workers >= 0"
        )
    if on_bad_sample not in ("stop", "skip"):
        raise UserError(f"on_bad_sample is {on_bad_sample!r}, expected stop or skip")
    kept = Cache(Path(cache) if cache else default_folder(), cache_bytes, allow_pipe)
    folder, index = open_index(source, kept)
    shards = index.select(split)
    order = Order([shard.samples for shard in shards], seed, shuffle, window)
    if storage.scheme(folder or source, allow_pipe):
        _check_cache(shards, order, cache_bytes)
    reader = Reader(folder, index, shards, order, kept, flip, resize, on_bad_sample == "skip")
    return Stream(reader, batch, rank, world, workers)
