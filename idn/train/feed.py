"""What a rank trains on: its share of every global batch, dequantised, with the randomness of each pass."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idn.data import Stream, dequantise, open_stream
from idn.data.toy import ToyStream
from idn.flows.build import TOY
from idn.flows.draws import Draws
from idn.streams import stream
from idn.train.config import TrainConfig


class Piece(NamedTuple):
    """One forward and backward pass of a rank."""

    x: Tensor
    draws: Draws
    weight: float
    """How much the piece's mean counts, 1 for full pieces of full batches."""


class Share(NamedTuple):
    """A rank's part of one global batch."""

    data: Tensor
    """uint8 images, or points of the plane."""
    positions: list[int]
    """Each sample's place in the epoch or, for toy data, in the global batch."""
    weight: float


class Feed:
    """Endless batches of one rank; `state_dict` holds in it no number of ranks."""

    def __init__(self, config: TrainConfig, rank: int, workers: int) -> None:
        self.config, self.rank = config, rank
        batch = config.data.batch // workers
        self._toy = ToyStream(config.dataset, batch, rank, workers, config.seed) if is_toy(config) else None
        self._images = None if self._toy else open_images(config, config.data.split, batch, rank, workers, shuffle=True)
        self._shares = self._iterate(rank, batch)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimiser steps of one pass over the training set; toy data has no end."""
        return None if self._images is None else self._images.batches

    def next_share(self) -> Share:
        """The next batch."""
        return next(self._shares)

    def state_dict(self) -> dict[str, Any]:
        source = self._toy or self._images
        assert source is not None
        return source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        source = self._toy or self._images
        assert source is not None
        source.load_state_dict(state)

    def pieces(self, share: Share, step: int) -> list[Piece]:
        """The share cut for accumulation. Roulette lengths are the same for all pieces and ranks of a step."""
        count = self.config.data.accumulation
        noise = self._generators("noise", share.positions, step)
        probes = self._generators("probes", share.positions, step)
        x = share.data if self._toy else dequantise(share.data, noise)
        pieces = []
        for index in torch.arange(len(x)).tensor_split(count):
            part = index if len(index) else torch.zeros(1, dtype=torch.int64)
            own = [probes[i] for i in part.tolist()] if isinstance(probes, list) else probes
            draws = Draws(stream(self.config.seed, "lengths", step), own)
            pieces.append(Piece(x[part], draws, share.weight * count * len(index) / len(x)))
        return pieces

    def _generators(self, use: str, positions: list[int], step: int) -> torch.Generator | list[torch.Generator]:
        seed = self.config.seed
        if not self.config.engine.deterministic:
            return stream(seed, use, self.rank, step)
        return [stream(seed, use, "place", position, step) for position in positions]

    def _iterate(self, rank: int, batch: int) -> Iterator[Share]:
        if self._toy:
            for points in self._toy:
                yield Share(points, list(range(rank * batch, (rank + 1) * batch)), 1.0)
        while self._images is not None:
            for images in self._images:
                yield Share(images.images, images.positions.tolist(), images.weight)


def is_toy(config: TrainConfig) -> bool:
    """Whether the data is a distribution over the plane, in nats, rather than images, in bits per dimension."""
    return config.dataset in TOY


def open_images(config: TrainConfig, split: str, batch: int, rank: int, workers: int, shuffle: bool) -> Stream:
    """One rank's images of a split."""
    data = config.data
    return open_stream(
        config.dataset,
        split,
        batch=batch,
        rank=rank,
        world=workers,
        workers=data.loaders if shuffle else 0,
        seed=config.seed,
        shuffle=shuffle,
        flip=data.flip and shuffle,
        resize=data.resize,
        on_bad_sample=data.on_bad_sample,
    )
