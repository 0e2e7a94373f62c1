"""What `--dry-run` prints: the resolved config, what it costs, and DeepSpeed's config. Nothing is started."""

import dataclasses
import json
from typing import Any

from idn.train.config import TrainConfig, check_batch
from idn.train.engine import deepspeed_config
from idn.train.estimate import sample_cost, worker_memory
from idn.train.feed import Feed, is_toy
from idn.train.session import total_steps


def describe(config: TrainConfig) -> str:
    """The whole plan as text."""
    workers = (config.worker_range or (1, 1))[1]
    check_batch(config, workers)
    steps_per_epoch = None if is_toy(config) or config.length.steps else Feed(config, 0, workers).steps_per_epoch
    steps = total_steps(config, steps_per_epoch)
    cost = sample_cost(config.flow, config.engine.recompute, config.engine.precision)
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
        f"samples per worker and step: {samples} in {config.data.accumulation} piece{'s' * (config.data.accumulation > 1)}",
        f"FLOPs per worker and step: {cost.flops * samples:.3e} ({cost.flops:.3e} per sample)",
        f"FLOPs in all: {cost.flops * config.data.batch * steps:.3e}",
        f"memory per worker: {memory.total / 1e9:.2f} GB ("
        + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in vars(memory).items())
        + ")",
        "",
        "# deepspeed",
        json.dumps(deepspeed_config(config, workers), indent=2),
    ]
    return "\n".join(lines)


def settings(values: dict[str, Any], depth: int = 0) -> list[str]:
    """Nested settings, one per line."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{name}:", *settings(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {value}")
    return lines
