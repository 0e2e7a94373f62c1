"""Everything a worker needs before its first step: flow, data, DeepSpeed, averages, and where the last run stopped."""

import os
import uuid
from dataclasses import dataclass

import pyarrow.fs
import torch

from idn.errors import UserError
from idn.flows.cost import Cost, flow_cost
from idn.flows.flow import Flow
from idn.flows.fuse import fuse
from idn.memory import keep_freed_memory, spare_collector
from idn.train import checkpoint
from idn.train.checkpoint import Progress, Restored, Snapshotter
from idn.train.config import TrainConfig
from idn.train.ema import AveragedWeights
from idn.train.engine import Engine
from idn.train.estimate import kernel_bytes
from idn.train.feed import Feed
from idn.train.group import Group
from idn.train.ledger import Ledger
from idn.train.scaling import LossScale
from idn.train.watch import FiniteWatch


@dataclass
class Session:
    """One worker's live state."""

    config: TrainConfig
    group: Group
    feed: Feed
    engine: Engine
    ema: AveragedWeights
    watch: FiniteWatch
    scale: LossScale
    snapshots: Snapshotter
    progress: Progress
    steps: int
    attempt: str
    cost: Cost
    ledger: Ledger

    @property
    def flow(self) -> Flow:
        return self.engine.flow


def open_session(config: TrainConfig, group: Group, filesystem: pyarrow.fs.FileSystem, folder: str) -> Session:
    """A new run, or the newest whole checkpoint of one taken up again."""
    if group.device.type == "cpu":
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
        keep_freed_memory()
    fuse(config.engine.compile)
    path = group.from_first(checkpoint.newest(filesystem, folder) if group.rank == 0 else None)
    restored = Restored(filesystem, path) if path else None
    if restored and restored.flow.config != config.flow:
        raise UserError(f"checkpoint {path} is of another flow; choose another --name or the options it was made with")
    feed = Feed(config, group.rank, group.workers)
    flow = prepare_flow(config, group, restored)
    cost = flow_cost(flow, kernel_bytes(config.engine, group.device.type))
    ema = AveragedWeights(flow, config.optimiser.ema)
    snapshots = Snapshotter(flow, config.to_dict(), group.rank, group.workers)
    engine = Engine(flow, config, group.workers)
    watch = FiniteWatch(flow)
    scale = LossScale.start(config.engine.precision)
    progress = Progress()
    if restored:
        progress = restored.progress
        feed.load_state_dict(progress.feed)
        if ema.decay and restored.ema:
            ema.load(restored.ema)
        engine.restore(restored.moments(), progress.updates)
        if scale.on and progress.loss_scale > 1:
            scale.value, scale.good_steps = progress.loss_scale, progress.good_steps
    flow.gradient_scale = scale.value
    steps = total_steps(config, feed.steps_per_epoch)
    attempt = group.from_first(uuid.uuid4().hex[:6]) or ""
    ledger = Ledger(attempt, group.rank)
    spare_collector()
    return Session(config, group, feed, engine, ema, watch, scale, snapshots, progress, steps, attempt, cost, ledger)


def prepare_flow(config: TrainConfig, group: Group, restored: Restored | None) -> Flow:
    """The flow before DeepSpeed wraps it; a new one's ActNorms start from the whole first global batch."""
    flow = restored.flow if restored else Flow(config.flow)
    flow.to(group.device).train()
    if not restored:
        first = Feed(config, group.rank, group.workers)
        pieces = first.pieces(first.next_share(), 0)
        flow.initialize(torch.cat([piece.x for piece in pieces if piece.weight]).to(group.device), group.sum)
    saved = {name: tensor.clone() for name, tensor in flow.state_dict().items()}
    flow.set_precision(config.engine.precision)
    if restored:
        # A change of precision moves the singular vectors; a resumed run goes on from the very ones it saved.
        flow.load_state_dict(saved)
    flow.recompute = config.engine.recompute
    return flow


def total_steps(config: TrainConfig, steps_per_epoch: int | None) -> int:
    """Optimiser steps of the whole run."""
    if config.length.steps is not None:
        return config.length.steps
    if steps_per_epoch is None:
        raise UserError(f"--epochs means nothing for {config.dataset}, which has no end; give --steps")
    return config.length.epochs * steps_per_epoch
