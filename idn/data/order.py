"""Which sample stands at which place of an epoch: a pure function of (seed, epoch)."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from idn.streams import stream_seed

WINDOW = 1 << 16


class Order:
    """A permutation of all samples that needs memory for one window only.

    Shards are permuted, neighbours are gathered into windows of at least `window` samples, and each window is
    permuted as a whole: a dataset of up to one window is shuffled globally, of a larger one only a few shards
    are in use at a time. Windows come from the data and `window` alone, never from ranks or processes.
    """

    def __init__(self, counts: Sequence[int], seed: int, shuffle: bool = True, window: int = WINDOW) -> None:
        self.counts = np.array(counts, dtype=np.int64)
        self.samples = int(self.counts.sum())
        self.seed, self.shuffle, self.window = seed, shuffle, window
        self._epoch = lru_cache(maxsize=2)(self._plan_epoch)
        self._window = lru_cache(maxsize=2)(self._permute_window)

    def __reduce__(self) -> tuple[type["Order"], tuple[list[int], int, bool, int]]:
        return Order, (self.counts.tolist(), self.seed, self.shuffle, self.window)

    def locate(self, epoch: int, first: int, count: int) -> list[tuple[int, int]]:
        """(shard, number within it) of the samples at places first, first + 1, ..."""
        found: list[tuple[int, int]] = []
        starts, _ = self._epoch(epoch)
        while count > 0:
            number = int(np.searchsorted(starts, first, side="right")) - 1
            shards, numbers = self._window(epoch, number)
            inside = first - int(starts[number])
            take = slice(inside, inside + count)
            found += zip(shards[take].tolist(), numbers[take].tolist(), strict=True)
            taken = len(shards[take])
            first, count = first + taken, count - taken
        return found

    def windows(self, epoch: int) -> list[np.ndarray]:
        """The shards of each window, in the order in which the epoch comes to them."""
        return self._epoch(epoch)[1]

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        order = np.arange(len(self.counts))
        if self.shuffle:
            order = np.random.default_rng(stream_seed(self.seed, "shards", epoch)).permutation(order)
        ends = np.cumsum(self.counts[order])
        groups, start = [], 0
        while start < len(order):
            before = ends[start - 1] if start else 0
            # Unshuffled reading needs no window: one shard after the other.
            wanted = before + (self.window if self.shuffle else 1)
            stop = min(int(np.searchsorted(ends, wanted)) + 1, len(order))
            groups.append(order[start:stop])
            start = stop
        sizes = [int(self.counts[group].sum()) for group in groups]
        return np.concatenate([[0], np.cumsum(sizes)[:-1]]), groups

    def _permute_window(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        group = self._epoch(epoch)[1][number]
        counts = self.counts[group]
        shards = np.repeat(group, counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        if self.shuffle:
            generator = np.random.default_rng(stream_seed(self.seed, "samples", epoch, number))
            mixed = generator.permutation(len(shards))
            shards, numbers = shards[mixed], numbers[mixed]
        return shards, numbers
