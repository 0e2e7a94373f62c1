"""Machines: published figures of accelerators, or this machine measured."""

import os
import statistics
import time
from dataclasses import dataclass, replace

import torch

from idn.errors import UserError
from idn.plan.pace import paces
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
    contention: float = 1.0
    """How many times as long a worker's step takes beside others of its node."""
    device: str = "cuda"
    """As torch calls it."""


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


def find(name: str, config: TrainConfig, workers: int = 1) -> Hardware:
    """A profile by name; `here` measures this machine for the run in question."""
    if name == "here":
        return calibrate(config, workers)
    if name not in PROFILES:
        raise UserError(f"--hardware {name}: expected one of {', '.join(PROFILES)}, here")
    return PROFILES[name]


def calibrate(
    config: TrainConfig, workers: int = 1, sizes: tuple[int, int] | None = None, repeats: int = 8
) -> Hardware:
    """This machine, by steps of one thread, alone and with as many workers at once as there will be."""
    together = min(workers, os.cpu_count() or 1)
    sizes = sizes or ((4, 16) if config.flow.logit_alpha is not None else (32, 256))
    (alone,) = paces(config, 1, sizes, repeats)
    # A step of the larger batch stands for all: contention is for memory, which every part of a step uses.
    crowd = paces(config, together, sizes, repeats) if together > 1 else [alone]
    seconds = [pace.start + sizes[1] * pace.per_sample for pace in (alone, *crowd)]
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
        start=alone.start,
        per_sample=alone.per_sample,
        contention=max(1.0, statistics.mean(seconds[1:]) / seconds[0]),
        device="cpu",
    )


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
