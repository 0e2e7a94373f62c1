"""The step's time from the model's own arithmetic and a machine's figures.

    step = start + arithmetic + traffic + norms + communication

- arithmetic: FLOPs of a worker's samples (exact in expectation, see idn.flows.cost) at the reached share of the peak;
- traffic: every product reads and writes its activations once, and elementwise work is bound by memory;
- norms: power iteration costs what a few samples would, on every worker, however small its share of the batch;
- communication: a ring moves 2 (W-1)/W of all gradients in and out of every worker; nothing of it is hidden.
"""

import dataclasses
from dataclasses import dataclass

from idn.flows.cost import BYTES, Cost, products
from idn.plan.hardware import Hardware
from idn.train.config import TrainConfig
from idn.train.estimate import WorkerMemory, worker_memory

NORM_PASSES = 8
"""Forward passes of one sample that norms cost: 5 products, and the search for waves, which takes half as long."""
USABLE = 0.9
"""Share of a device's memory that a run may fill; the rest is the libraries' own."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest worker."""

    start: float
    arithmetic: float
    traffic: float
    norms: float
    communication: float

    @property
    def total(self) -> float:
        return self.start + self.arithmetic + self.traffic + self.norms + self.communication


def communicated(cost: Cost, workers: int, zero: int) -> float:
    """Bytes that a worker sends per step.

    Reduce-scatter and all-gather, (W-1)/W of the parameters each; ZeRO 3 gathers them in the forward pass, in the
    backward pass and for the norms instead of once.
    """
    passes = 4 if zero == 3 else 2
    return passes * (workers - 1) / workers * BYTES * cost.parameters


def moved(cost: Cost, recompute: bool) -> float:
    """Bytes to and from memory per sample of a training step."""
    numbers = sum(
        block.kept * products(cost.train_logdet, block.dims, training=True, recompute=recompute)
        for block in cost.blocks
    )
    return 2 * BYTES * numbers


def step_time(config: TrainConfig, cost: Cost, hardware: Hardware, workers: int) -> StepTime:
    """One step of the global batch on a number of workers."""
    samples = config.data.batch / workers
    link = hardware.near if workers <= hardware.per_node else min(hardware.near, hardware.far)
    communication = communicated(cost, workers, config.engine.zero) / link
    if hardware.per_sample is not None:
        slower = hardware.contention if workers > 1 else 1.0
        return StepTime(slower * hardware.start, slower * samples * hardware.per_sample, 0.0, 0.0, communication)
    peak = hardware.reached * hardware.flops[config.engine.precision]
    recompute = config.engine.recompute
    return StepTime(
        start=hardware.start,
        arithmetic=samples * cost.training_flops(recompute) / peak,
        traffic=samples * moved(cost, recompute) / hardware.traffic,
        # Norms are fp32 whatever the precision.
        norms=NORM_PASSES * cost.forward_flops / (hardware.reached * hardware.flops["fp32"]),
        communication=communication,
    )


def memory(config: TrainConfig, cost: Cost, workers: int, zero: int) -> WorkerMemory:
    """A worker's memory under a ZeRO stage."""
    stage = dataclasses.replace(config.engine, zero=zero)  # type: ignore[arg-type]
    return worker_memory(dataclasses.replace(config, engine=stage), workers, cost)


def largest_batch(config: TrainConfig, cost: Cost, hardware: Hardware, workers: int, zero: int) -> int:
    """The largest global batch whose share fits a worker; 0 when not even the parameters do."""

    def fits(samples: int) -> bool:
        data = dataclasses.replace(config.data, batch=samples * workers, accumulation=1)
        needed = memory(dataclasses.replace(config, data=data), cost, workers, zero)
        return needed.total <= USABLE * hardware.memory

    most = 1
    while fits(most) and most < 1 << 24:
        most *= 2
    fewest = most // 2
    while most - fewest > 1:
        middle = (fewest + most) // 2
        fewest, most = (middle, most) if fits(middle) else (fewest, middle)
    return fewest * workers
