"""What `--dry-run` prints: the resolved config, what it costs, and DeepSpeed's config. Nothing is started."""

import dataclasses
import json
import math
from typing import Any

import torch

from idn.errors import UserError
from idn.flows.cost import flow_cost
from idn.flows.flow import Flow
from idn.train.config import TrainConfig, check_batch
from idn.train.engine import deepspeed_config
from idn.train.estimate import kernel_bytes, worker_memory
from idn.train.feed import is_toy, open_images
from idn.train.session import total_steps

SAMPLES = {"cifar10": 45_000, "mnist": 54_000, "fashion-mnist": 54_000}
"""Training images after a tenth has been held out for validation."""


def describe(config: TrainConfig) -> str:
    """The whole plan as text."""
    workers = (config.worker_range or (1, 1))[1]
    check_batch(config, workers)
    steps_per_epoch = None if is_toy(config) else epoch_steps(config)
    steps = total_steps(config, steps_per_epoch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cost = flow_cost(Flow(config.flow, converge=False), kernel_bytes(config.engine, device))
    flops = cost.training_flops(config.engine.recompute)
    memory = worker_memory(config, workers, cost)
    samples = config.data.batch // workers
    lines = [
        f"# {config.name}",
        *settings(dataclasses.asdict(config)),
        "",
        "# cost",
        f"parameters: {cost.parameters:,}",
        f"steps: {steps:,}" + (f" ({steps_per_epoch:,} per epoch)" if steps_per_epoch else ""),
        f"workers: {workers}" + (" (auto: counted for one)" if config.worker_range is None else ""),
        f"samples per worker and step: {samples}, in pieces of {samples // config.data.accumulation}",
        f"FLOPs per worker and step: {flops * samples:.3e} ({flops:.3e} per sample)",
        f"FLOPs in all: {flops * config.data.batch * steps:.3e}",
        f"memory per worker: {memory.total / 1e9:.2f} GB ("
        + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in vars(memory).items())
        + ")",
        "",
        "# deepspeed",
        json.dumps(deepspeed_config(config, workers, cost.parameters), indent=2),
    ]
    return "\n".join(lines)


def epoch_steps(config: TrainConfig) -> int:
    """Steps of one epoch, from the data itself or, before it has been prepared, from its known size."""
    try:
        samples = open_images(config, config.data.split, 1, 0, 1, shuffle=False).samples
    except UserError:
        if config.dataset not in SAMPLES or config.data.split != "train":
            raise
        samples = SAMPLES[config.dataset]
    return math.ceil(samples / config.data.batch)


def settings(values: dict[str, Any], depth: int = 0) -> list[str]:
    """Nested settings, one per line."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{name}:", *settings(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {value}")
    return lines
