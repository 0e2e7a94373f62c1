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

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from idn.data.cache import DEFAULT_BYTES, Cache, default_folder
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
        self._loader = loader(reader, _Sampler(self), workers) if workers else None

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
            yield Cut(Request(epoch, first, count), count * self.world / size, position + size)
            position += size

    def __iter__(self) -> Iterator[Batch]:
        answers = iter(self._loader) if self._loader is not None else map(self._reader.read, _Sampler(self))
        for cut, answer in zip(self.cuts(), answers, strict=False):
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
        if self._reader.order.shuffle and not len(answer.images):
            raise UserError(f"every sample of a batch is bad, the last one: {answer.skipped[-1]}")
        positions = answer.positions if weight else torch.full_like(answer.positions, -1)
        return Batch(answer.images, answer.labels, positions, weight)


class _Sampler(Sampler[Request]):
    """What to read next, as torch's DataLoader asks for it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Request]:
        for cut in self.stream.cuts():
            epoch, first, length = cut.request
            stand_in = length == 0 and self.stream._reader.order.shuffle
            yield Request(epoch, min(first, self.stream.samples - 1), 1) if stand_in else cut.request


class _Requests(Dataset[Answer]):
    """The reader as torch's DataLoader wants it; tensors cross processes through shared memory."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, request: Request) -> Answer:
        return self.reader.read(request)


def loader(reader: Reader, sampler: Sampler[Request], workers: int) -> "DataLoader[Answer]":
    """Loader processes that outlive epochs.

    They come from a fork server: forking a training process, full of the threads of torch and Ray, can
    deadlock, while spawning pays torch's import once per process. Each works with one thread.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return DataLoader(
        _Requests(reader),
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_is,
        persistent_workers=True,
        prefetch_factor=4,
        multiprocessing_context=context,
        generator=torch.Generator(),  # its base seed would otherwise be drawn from torch's global state
    )


def _as_is(answer: Any) -> Any:
    return answer


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
    reader = Reader(folder, index, shards, order, kept, flip, resize, on_bad_sample == "skip")
    return Stream(reader, batch, rank, world, workers)
