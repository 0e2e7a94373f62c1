"""What a run costs before it starts: parameters, FLOPs and memory per worker."""

import dataclasses
import math
import time
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from idn.flows.config import FlowConfig
from idn.flows.draws import Draws
from idn.flows.flow import Flow
from idn.flows.logdet import LogdetRule
from idn.train.config import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cost:
    """One sample's forward and backward pass, counted on a real one with the roulette's mean number of terms."""

    parameters: int
    flops: float
    activation_bytes: int


@lru_cache
def sample_cost(config: FlowConfig, recompute: bool = False, precision: str = "fp32") -> Cost:
    """Runs one sample through a flow of this shape and counts products and what is kept for the backward pass."""
    rule = config.train_logdet
    if rule.rule == "roulette":
        mean = rule.parameter if rule.lengths == "poisson" else 1 / rule.parameter
        rule = LogdetRule("series", terms=rule.exact_terms + round(mean), probes=rule.probes)
    flow = Flow(dataclasses.replace(config, train_logdet=rule), converge=False).train()
    flow.set_precision(precision)
    flow.recompute = recompute
    own = {p.data_ptr() for p in flow.parameters()} | {b.data_ptr() for b in flow.buffers()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # Two samples less one: weights that a pass derives for itself are counted in both, and cancel.
    totals = []
    for samples in (1, 2):
        kept.clear()
        x = torch.full((samples, *config.shape), 0.5)
        with FlopCounterMode(display=False) as counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            likelihood = flow(x, Draws.seeded(0, "cost"))
            size = sum(kept.values())
            likelihood.log_prob.sum().backward()
        totals.append((counter.get_total_flops(), size))
    (flops_1, bytes_1), (flops_2, bytes_2) = totals
    return Cost(flow.parameter_count(), float(flops_2 - flops_1), bytes_2 - bytes_1)


def flops_per_sample(config: FlowConfig) -> float:
    """FLOPs of one training sample."""
    return sample_cost(config).flops


@dataclass(frozen=True)
class Memory:
    """Bytes on one worker."""

    parameters: int
    gradients: int
    optimiser: int
    averages: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimiser + self.averages + self.activations


def worker_memory(config: TrainConfig, workers: int, cost: Cost) -> Memory:
    """fp32 states as the ZeRO stage splits them, and one piece's activations."""
    whole, part = 4 * cost.parameters, math.ceil(4 * cost.parameters / workers)
    stage = config.engine.zero
    piece = config.data.batch // workers // config.data.accumulation
    # From stage 1 on, DeepSpeed keeps an fp32 master of its part beside the parameters.
    master = 0 if stage == 0 else part
    return Memory(
        parameters=(part if stage == 3 else whole) + master,
        gradients=part if stage >= 2 else whole,
        optimiser=2 * (whole if stage == 0 else part),
        averages=whole if config.optimiser.ema else 0,
        activations=piece * cost.activation_bytes,
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
