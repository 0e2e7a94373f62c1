"""Images per second of three pipelines over the same shards: ours, stock WebDataset, tensors in memory."""

import io
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from idn.data import storage
from idn.data.cache import Cache, default_folder
from idn.data.locate import open_index
from idn.data.stream import open_stream
from idn.errors import UserError

ROUNDS = 4
WARM_UP = 2.0
"""Seconds for processes to start and queues to fill."""


class Pipeline:
    """Endless batches from some loader, with its speed and the memory that it takes."""

    def __init__(self, name: str, make: Callable[[], Iterator[int]]) -> None:
        self.name, self.images, self.spent = name, 0, 0.0
        before = _memory()
        self.batch_sizes = make()
        self.measure(WARM_UP)
        self.images, self.spent = 0, 0.0
        self.memory = _memory() - before

    def measure(self, seconds: float) -> None:
        start = time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            self.images += next(self.batch_sizes)
        self.spent += spent

    @property
    def speed(self) -> float:
        return self.images / self.spent


def run(place: str, workers: int, batch: int, seconds: float) -> None:
    """Measures in turns, so that whatever else the machine does falls on all alike."""
    folder, index = open_index(place, Cache(default_folder()))
    shards = index.select("train")
    if storage.scheme(folder):
        raise UserError(f"{folder} is remote: measure on a local copy, or the network is what you measure")
    urls = [storage.join(folder, shard.name) for shard in shards]
    samples = sum(shard.samples for shard in shards)
    print(f"{place}: {samples} images, {len(shards)} shards, {workers} loader processes, batch {batch}")
    pipelines = [
        Pipeline("idn stream", lambda: map(len, _ours(place, workers, batch))),
        Pipeline("stock WebDataset", lambda: map(len, _stock(urls, workers, batch))),
        Pipeline("DataLoader in memory", lambda: map(len, _in_memory(place, workers, batch))),
    ]
    for _ in range(ROUNDS):
        for pipeline in pipelines:
            pipeline.measure(seconds / ROUNDS)
    for pipeline in pipelines:
        print(f"  {pipeline.name:<21} {pipeline.speed:>9,.0f} images/s {pipeline.memory / 1e6:>6,.0f} MB")
    print(f"  the stream is {pipelines[0].speed / pipelines[1].speed:.1f}x stock WebDataset")


def _memory() -> int:
    """Memory of this process and its children, shared pages counted once."""
    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in (me, *me.children(recursive=True)))


def _forever(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def _ours(place: str, workers: int, batch: int) -> Iterator[Tensor]:
    for ours in _forever(open_stream(place, batch=batch, workers=workers)):
        yield ours.images


def _stock(urls: list[str], workers: int, batch: int) -> Iterator[Tensor]:
    """A plain pipeline as WebDataset's documentation builds it."""
    import webdataset

    dataset = webdataset.WebDataset(urls, shardshuffle=100).shuffle(1000).map(_decode_stock).batched(batch)
    for images, _ in _forever(webdataset.WebLoader(dataset, batch_size=None, num_workers=workers)):
        yield images


def _decode_stock(sample: dict[str, Any]) -> tuple[Tensor, int]:
    from PIL import Image

    pixels = np.atleast_3d(np.asarray(Image.open(io.BytesIO(sample["png"]))))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), int(sample["cls"])


def _in_memory(place: str, workers: int, batch: int) -> Iterator[Tensor]:
    whole = list(open_stream(place, batch=1000, shuffle=False))
    dataset = TensorDataset(torch.cat([b.images for b in whole]), torch.cat([b.labels for b in whole]))
    del whole
    loader = DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    for images, _ in _forever(loader):
        yield images
