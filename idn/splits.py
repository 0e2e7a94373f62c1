"""What a flow is evaluated on: every sample of a split once, with dequantisation noise of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from idn.data import Stream, dequantise, open_stream, toy
from idn.errors import UserError
from idn.streams import stream

TOY_POINTS = 10_000
TOY_BATCH = 1000


class Scored(NamedTuple):
    """A batch to evaluate and each sample's place in the split, which keys its probes."""

    x: Tensor
    places: list[int]


@dataclass(frozen=True)
class Split:
    """A part of a dataset: a function of its fields alone, whoever reads it."""

    dataset: str
    """Toy distribution, prepared dataset, folder or URL of shards."""
    name: str = "test"
    """train, validation or test; a toy distribution gives new points to each."""
    seed: int = 0
    limit: int | None = None
    """Only the first so many samples; the number of points of a toy distribution."""
    resize: int | None = None
    batch: int = 64
    on_bad_sample: Literal["stop", "skip"] = "stop"

    @property
    def is_toy(self) -> bool:
        return self.dataset in toy.NAMES

    @property
    def samples(self) -> int:
        """How many samples all ranks see together."""
        if self.is_toy:
            return self.limit or TOY_POINTS
        count = self.open().samples
        return count if self.limit is None else min(count, self.limit)

    @property
    def shape(self) -> tuple[int, ...]:
        return (2,) if self.is_toy else tuple(self.open().shape)

    def open(self, rank: int = 0, workers: int = 1) -> Stream:
        """The images as one of `workers` ranks reads them."""
        return open_stream(
            self.dataset,
            self.name,
            batch=self.batch,
            rank=rank,
            world=workers,
            seed=self.seed,
            shuffle=False,
            resize=self.resize,
            on_bad_sample=self.on_bad_sample,
        )

    def batches(self, rank: int = 0, workers: int = 1) -> Iterator[Scored]:
        """One rank's samples, dequantised."""
        if self.is_toy:
            points = toy.sample(self.dataset, self.samples, stream(self.seed, self.name, self.dataset))
            for places in torch.arange(rank, self.samples, workers).split(TOY_BATCH):
                yield Scored(points[places], places.tolist())
            return
        for images in self.open(rank, workers):
            positions = images.positions.tolist()
            if self.limit is not None and positions and min(positions) >= self.limit:
                return
            keep = [i for i, place in enumerate(positions) if self.limit is None or place < self.limit]
            places = [positions[i] for i in keep]
            noise = [stream(self.seed, "noise", self.name, place) for place in places]
            yield Scored(dequantise(images.images[keep], noise), places)

    def first(self, count: int) -> Tensor:
        """The first samples, for pictures."""
        found: list[Tensor] = []
        for batch in self.batches():
            found.append(batch.x)
            if sum(map(len, found)) >= count:
                break
        return torch.cat(found)[:count]


def matching(split: Split, shape: tuple[int, ...]) -> Split:
    """The split resized to what a flow of this shape takes, or an error that names both shapes."""
    given = split.shape
    if given != shape and len(given) == len(shape) == 3 and given[0] == shape[0] and shape[1] == shape[2]:
        return Split(**(vars(split) | {"resize": shape[1]}))
    if given != shape:
        sizes = ["x".join(map(str, size)) for size in (given, shape)]
        raise UserError(f"{split.dataset} has size {sizes[0]}, the flow takes {sizes[1]}: choose other --data")
    return split
