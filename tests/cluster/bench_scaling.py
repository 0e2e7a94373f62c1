"""Throughput of 2 workers against 1, a thread each: python -m tests.cluster.bench_scaling [--size paper --batch 16 ...]

Real runs on a private Ray cluster; every worker has the same share, so that 2 workers have twice the global batch.
Beside each measured step stands the one that `idn plan --hardware here` predicts. Runs alternate, since other work on
the machine changes the figures; on a busy machine they say little.
"""

import dataclasses
import json
import os
import statistics
import tempfile
from typing import Any

import tyro

from idn.flows.cost import flow_cost
from idn.flows.flow import Flow
from idn.plan.hardware import calibrate
from idn.plan.model import step_time
from idn.train import trainer
from idn.train.config import TrainConfig
from idn.train.placement import Plan
from idn.train.presets import preset


def quiet(dataset: str, size: str, batch: int, steps: int, folder: str) -> TrainConfig:
    """A preset that only trains."""
    base = preset(dataset, size=size)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, batch=batch, loaders=0, limit_test=2, limit_validation=2),
        length=dataclasses.replace(base.length, steps=steps),
        watching=dataclasses.replace(base.watching, log_every=1, validate_every=0, picture_every=0),
        saving=dataclasses.replace(base.saving, runs=folder, checkpoint_every=10**9),
    )


def measure(config: TrainConfig, workers: int) -> float:
    """Median seconds of a step; the first ones warm up."""
    rates: list[float] = []

    def note(record: dict[str, Any]) -> None:
        if record["kind"] == "metrics":
            rates.append(record["rate"])

    trainer.run(config, Plan(workers, workers, 1, 0), note, print)
    return config.data.batch / statistics.median(rates[3:])


def main(
    dataset: str = "cifar10-sample", size: str = "tiny", batch: int = 16, steps: int = 30, rounds: int = 2
) -> None:
    """Measure how 2 workers scale.

    Args:
        dataset: What to train on.
        size: tiny, paper or full.
        batch: Samples per worker and step.
        steps: Steps of a run.
        rounds: Pairs of runs.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    seconds: dict[int, list[float]] = {1: [], 2: []}
    predicted: dict[int, list[float]] = {1: [], 2: []}
    cost = flow_cost(Flow(preset(dataset, size=size).flow, converge=False))
    with trainer.cluster("local"), tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            here = calibrate(preset(dataset, size=size))
            for workers in (1, 2):
                config = quiet(dataset, size, batch * workers, steps, f"{folder}/{turn}-{workers}")
                seconds[workers].append(measure(config, workers))
                predicted[workers].append(step_time(config, cost, here, workers).total)
    speedups = [2 * one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    figures = {"seconds": seconds, "predicted": predicted, "speedup": statistics.median(speedups)}
    print(json.dumps(figures | {"load": os.getloadavg()[0]}, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
