"""What a run costs one worker: memory as the ZeRO stage splits it, and the machine's peak to compare its speed with."""

import math
import time
from dataclasses import dataclass

import torch

from idn.flows.cost import BYTES, Cost
from idn.train.config import Engine, TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def kernel_bytes(engine: Engine, device: str) -> int:
    """What `flow_cost` asks for: the kernel for dense branches of images knows fp32 and bf16, on CPUs."""
    known = engine.compile and device == "cpu" and engine.precision != "fp16"
    return DTYPES[engine.precision].itemsize if known else 0


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes on one worker, without the libraries' own needs."""

    parameters: int
    gradients: int
    optimiser: int
    averages: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.averages + self.activations


def worker_memory(config: TrainConfig, workers: int, cost: Cost) -> WorkerMemory:
    """fp32 states as the ZeRO stage splits them, and one piece's activations."""
    whole = BYTES * cost.parameters
    part = math.ceil(whole / workers)
    stage = config.engine.zero
    piece = cost.training_memory(config.data.batch // workers // config.data.accumulation, config.engine.recompute)
    # From stage 1 on, DeepSpeed keeps an fp32 master of its part beside the parameters.
    master = 0 if stage == 0 else part
    return WorkerMemory(
        parameters=(part if stage == 3 else whole) + master,
        gradients=part if stage >= 2 else whole,
        optimiser=2 * (whole if stage == 0 else part),
        averages=whole if config.optimiser.ema else 0,
        activations=piece.kept + piece.working,
    )


def measured_peak(precision: str, device: torch.device, seconds: float = 0.1) -> float:
    """FLOP/s of large matrix products on this worker, the best of a few."""
    size = 4096 if device.type == "cuda" else 768
    a = torch.ones(size, size, dtype=DTYPES[precision], device=device)
    best, started = math.inf, time.perf_counter()
    a @ a
    while time.perf_counter() - started < seconds or best == math.inf:
        before = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - before)
    return 2 * size**3 / best
