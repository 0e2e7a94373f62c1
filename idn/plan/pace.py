"""How fast this machine trains: a bare training loop on real data, alone and beside others like it."""

import dataclasses
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

import torch

from idn.data.locate import SAMPLES
from idn.flows.flow import Flow
from idn.flows.fuse import fuse
from idn.memory import keep_freed_memory
from idn.train.config import TrainConfig
from idn.train.ema import AveragedWeights
from idn.train.feed import Feed

WARM = 2
"""Steps that do not count."""


class BareLoop:
    """What a worker does in a step, without any framework: passes, clipping, Adam, norms, averages."""

    def __init__(self, config: TrainConfig, converge: bool = True) -> None:
        self.config = config
        self.flow = Flow(config.flow, converge=converge).train()
        first = Feed(config, 0, 1)
        self.flow.initialize(first.pieces(first.next_share(), 0)[0].x)
        self.flow.set_precision(config.engine.precision)
        self.flow.recompute = config.engine.recompute
        optimiser = config.optimiser
        self.adam = torch.optim.Adam(
            self.flow.parameters(), optimiser.lr, optimiser.betas, weight_decay=optimiser.weight_decay
        )
        self.ema = AveragedWeights(self.flow, optimiser.ema)

    def passes(self, feed: Feed, step: int) -> None:
        """Forward and backward of the feed's next batch."""
        piece = feed.pieces(feed.next_share(), step)[0]
        loss = -self.flow(piece.x, piece.draws).log_prob.mean() / self.flow.dims
        self.adam.zero_grad()
        loss.backward()

    def update(self) -> None:
        """All that follows, whatever the batch."""
        if self.config.optimiser.clip:
            torch.nn.utils.clip_grad_norm_(self.flow.parameters(), self.config.optimiser.clip)
        self.adam.step()
        self.flow.update_norms()
        self.ema.update(self.flow)


class Pace(NamedTuple):
    """The processor's seconds, which leave out what else runs on the machine."""

    start: float
    """Of a step, whatever its batch."""
    per_sample: float


def pace(config: TrainConfig, sizes: tuple[int, int], repeats: int) -> Pace:
    """On one thread; two batch sizes give the cost of a sample and of a step itself."""
    torch.set_num_threads(1)
    keep_freed_memory()
    fuse(config.engine.compile)
    feeds = {size: Feed(of_batch(config, size), 0, 1) for size in sizes}
    loop = BareLoop(of_batch(config, sizes[1]), converge=False)
    passes: dict[int, list[float]] = {size: [] for size in sizes}
    updates: list[float] = []
    for step in range(WARM + repeats):
        # The same roulette lengths for both sizes: their difference is that of the samples alone.
        for size, feed in feeds.items():
            times = [time.process_time()]
            loop.passes(feed, step)
            times.append(time.process_time())
            loop.update()
            passes[size].append(times[1] - times[0])
            updates.append(time.process_time() - times[1])
    small, large = (statistics.mean(passes[size][WARM:]) for size in sizes)
    per_sample = (large - small) / (sizes[1] - sizes[0])
    return Pace(max(0.0, small - sizes[0] * per_sample) + statistics.mean(updates[2 * WARM :]), per_sample)


def of_batch(config: TrainConfig, batch: int) -> TrainConfig:
    """The run with another batch, on the bundled images of its kind: nothing has to be fetched to plan."""
    sample = f"{config.dataset}-sample"
    data = dataclasses.replace(config.data, batch=batch, accumulation=1, loaders=0)
    return dataclasses.replace(config, data=data, dataset=sample if sample in SAMPLES else config.dataset)


def paces(config: TrainConfig, count: int, sizes: tuple[int, int], repeats: int) -> list[Pace]:
    """Those of so many processes at once, which share caches and memory."""
    context = multiprocessing.get_context("spawn")
    barrier, pipes = context.Barrier(count), [context.Pipe(duplex=False) for _ in range(count)]
    arguments = (config.to_dict(), sizes, repeats, barrier)
    processes = [context.Process(target=_tell, args=(*arguments, theirs), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    found = [Pace(*ours.recv()) for ours, _ in pipes]
    for process in processes:
        process.join()
    return found


def _tell(settings: dict[str, object], sizes: tuple[int, int], repeats: int, start: Barrier, to: Connection) -> None:
    start.wait()
    to.send(tuple(pace(TrainConfig.from_dict(settings), sizes, repeats)))
