"""Machines: published figures of accelerators, or this machine measured."""

import os
import time
from dataclasses import dataclass, replace

import torch

from idn.errors import UserError
from idn.flows.draws import Draws
from idn.flows.flow import Flow
from idn.memory import keep_freed_memory
from idn.streams import stream
from idn.train.config import TrainConfig

COPIES = 4
"""How often loopback copies what it carries: in and out of the system on both sides."""


@dataclass(frozen=True)
class Hardware:
    """One worker's device and what connects it with the others."""

    name: str
    flops: dict[str, float]
    """Peak FLOP/s of dense products, by precision."""
    reached: float
    """Share of that peak that convolutions of a hundred-odd channels reach."""
    traffic: float
    """Bytes per second between the device and its memory."""
    memory: float
    """Bytes of memory."""
    near: float
    """Bytes per second to a worker of the same node, one way."""
    far: float
    """Bytes per second and worker to another node, one way."""
    per_node: int
    """Workers in a node."""
    dollars: float
    """Price of a device and hour; a rough list price of on-demand machines."""
    start: float = 0.0
    """Seconds of a step that no batch size takes away: launching work, optimiser."""
    per_sample: float | None = None
    """Seconds per sample where they were measured: used instead of arithmetic and traffic."""


A100 = Hardware(
    name="a100",
    flops={"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
    reached=0.4,
    traffic=2.0e12,
    memory=80e9,
    near=300e9,
    far=25e9,
    per_node=8,
    dollars=3.5,
    start=0.02,
)
H100 = replace(
    A100,
    name="h100",
    flops={"fp32": 67e12, "bf16": 989e12, "fp16": 989e12},
    traffic=3.35e12,
    near=450e9,
    far=50e9,
    dollars=6.0,
)
PROFILES = {hardware.name: hardware for hardware in (A100, H100)}


def find(name: str, config: TrainConfig) -> Hardware:
    """A profile by name; `here` measures this machine for the run in question."""
    if name == "here":
        return calibrate(config)
    if name not in PROFILES:
        raise UserError(f"--hardware {name}: expected one of {', '.join(PROFILES)}, here")
    return PROFILES[name]


def calibrate(config: TrainConfig, sizes: tuple[int, int] | None = None, repeats: int = 6) -> Hardware:
    """This machine by one thread: training steps of two batch sizes give the cost of a sample and of a step itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    small, large = sizes or ((2, 8) if config.flow.logit_alpha is not None else (32, 256))
    try:
        flow = Flow(config.flow, converge=False).train()
        flow.set_precision(config.engine.precision)
        noise = stream(config.seed, "calibrate")
        x = torch.rand((large, *flow.shape), generator=noise)
        flow.initialize(x)
        # At the run's own pace: the faster weights move, the longer power iteration takes to follow.
        adam = torch.optim.Adam(flow.parameters(), lr=config.optimiser.lr)
        passes, updates = dict.fromkeys((small, large), 0.0), 0.0
        for step in range(-1, repeats):
            for size in passes:
                # The same lengths for both sizes: their difference is that of the samples alone.
                draws = Draws(stream(config.seed, "lengths", step), noise)
                forth_and_back, update = one_step(flow, adam, x[:size], draws)
                passes[size] += forth_and_back * (step >= 0)
                updates += update * (step >= 0)
    finally:
        torch.set_num_threads(threads)
    per_sample = (passes[large] - passes[small]) / repeats / (large - small)
    # Updates cost the same for any batch, and each step another number of power iterations: the mean of all.
    start = max(0.0, passes[small] / repeats - small * per_sample) + updates / (2 * repeats)
    return Hardware(
        name="here",
        flops={},
        reached=1.0,
        traffic=1.0,
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / (os.cpu_count() or 1),
        near=copy_speed(),
        far=copy_speed(),
        per_node=os.cpu_count() or 1,
        dollars=0.0,
        start=start,
        per_sample=per_sample,
    )


def one_step(flow: Flow, adam: torch.optim.Optimizer, x: torch.Tensor, draws: Draws) -> tuple[float, float]:
    """What a worker does in a step, without communication; seconds of the passes and of the update.

    The processor's seconds: what else runs on the machine does not count.
    """
    began = time.process_time()
    adam.zero_grad()
    (-flow(x, draws).log_prob.mean() / flow.dims).backward()
    passed = time.process_time()
    adam.step()
    flow.update_norms()
    return passed - began, time.process_time() - passed


def copy_speed(megabytes: int = 32) -> float:
    """Bytes per second between two workers of this machine, from how fast one thread copies."""
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        before = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - before)
    return source.nbytes / best / COPIES
