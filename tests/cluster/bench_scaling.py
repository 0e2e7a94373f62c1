"""Throughput of 2 workers against 1, a thread each: python -m tests.cluster.bench_scaling [--size paper --batch 16 ...]

Real Ray Train workers on a private cluster; every worker has the same share, so that 2 workers have twice the global
batch. Runs alternate and each step counts with its fastest run: steps of one number draw the same roulette lengths
in all runs, and other work on the machine only ever adds time. On a busy machine wall times say little; beside them
stands the processor's time, which leaves out waiting for a core.
"""

import dataclasses
import itertools
import json
import os
import statistics
import tempfile
import time
from typing import Any

import ray.train
import ray.train.torch
import torch
import tyro

from idn.flows.cost import BYTES, flow_cost
from idn.flows.flow import Flow
from idn.plan.hardware import calibrate
from idn.plan.model import step_time
from idn.train import trainer
from idn.train.config import TrainConfig
from idn.train.presets import preset
from idn.train.session import open_session
from idn.train.worker import train
from tests.cluster.collectives import timed_collectives, transfer_seconds
from tests.train.loops import LOCAL, LocalPort, group

WARM = 2
"""Steps of a run that do not count."""


class ClockedPort(LocalPort):
    """Notes the processor's time at every line of metrics."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.clock: list[float] = []

    def send(self, record: dict[str, Any]) -> None:
        super().send(record)
        if record["kind"] in ("start", "metrics"):
            self.clock.append(time.process_time())


def quiet(dataset: str, size: str, batch: int, steps: int) -> TrainConfig:
    """A preset that only trains."""
    base = preset(dataset, size=size)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, batch=batch, loaders=0, limit_test=2, limit_validation=2),
        # Without warm-up: weights move as they do in most of a run, and norms take as long to follow.
        optimiser=dataclasses.replace(base.optimiser, warmup=0),
        length=dataclasses.replace(base.length, steps=steps),
        watching=dataclasses.replace(base.watching, log_every=1, validate_every=0, picture_every=0),
        saving=dataclasses.replace(base.saving, checkpoint_every=10**9),
    )


def loop(settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """In a worker: a short run of every ZeRO stage."""
    torch.set_num_threads(1)
    found = {}
    for stage in settings["stages"]:
        config = TrainConfig.from_dict(settings["config"])
        config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, zero=stage))
        with tempfile.TemporaryDirectory() as folder:
            session = open_session(config, group(), LOCAL, folder)
            port = ClockedPort(folder)
            with timed_collectives() as traffic:
                train(session, port)
            session.watch.close()
        rates = [record["rate"] for record in port.records if record["kind"] == "metrics"]
        steps = [config.data.batch / rate for rate in rates]
        processor = [after - before for before, after in itertools.pairwise(port.clock)]
        found[stage] = {"steps": steps, "processor": processor, "share": traffic.seconds / sum(steps), **vars(traffic)}
        if session.group.workers > 1:
            found[stage]["transfer"] = transfer_seconds(BYTES * session.cost.parameters)
    return found


def measure(config: TrainConfig, workers: int, stages: list[int], folder: str) -> dict[int, dict[str, Any]]:
    """Rank 0's figures."""
    made: Any = trainer.Trainer(
        loop,
        train_loop_config={"config": config.to_dict(), "stages": stages},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="bench", storage_path=folder),
    )
    result: dict[int, dict[str, Any]] = made.fit().return_value
    return result


def fastest(runs: list[list[float]]) -> float:
    """Mean over steps of each step's fastest run."""
    return statistics.mean(min(times) for times in zip(*(run[WARM:] for run in runs), strict=True))


def main(
    dataset: str = "cifar10-sample",
    size: str = "tiny",
    batch: int = 16,
    steps: int = 12,
    rounds: int = 2,
    stages: tuple[int, ...] = (0, 2),
) -> None:
    """Measure how 2 workers scale.

    Args:
        dataset: What to train on.
        size: tiny, paper or full.
        batch: Samples per worker and step.
        steps: Steps of a run.
        rounds: Pairs of runs.
        stages: ZeRO stages.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # Ray would run workers at the lowest priority, and other work would be measured instead of them.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    runs: dict[int, list[dict[int, dict[str, Any]]]] = {1: [], 2: []}
    configs = {workers: quiet(dataset, size, batch * workers, steps) for workers in runs}
    cost = flow_cost(Flow(configs[1].flow, converge=False))
    profiles = []
    with trainer.cluster("local"), tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            profiles.append(calibrate(configs[1], workers=2))
            for workers, config in configs.items():
                runs[workers].append(measure(config, workers, list(stages), f"{folder}/{turn}-{workers}"))
    # The fastest, as for the steps.
    here = min(profiles, key=lambda profile: step_time(configs[1], cost, profile, 1).total)
    print(
        f"{configs[1].name}: {cost.parameters:,} parameters, {batch} samples per worker, load {os.getloadavg()[0]:.1f}"
    )
    for stage in stages:
        one, two = (fastest([run[stage]["steps"] for run in runs[workers]]) for workers in (1, 2))
        busy = {workers: fastest([run[stage]["processor"] for run in runs[workers]]) for workers in (1, 2)}
        last = min((run[stage] for run in runs[2]), key=lambda run: sum(run["steps"]))
        told = {
            "zero": stage,
            "step_1_worker": one,
            "step_2_workers": two,
            "speedup": 2 * one / two,
            "processor_1_worker": busy[1],
            "processor_2_workers": busy[2],
            "speedup_by_processor": 2 * busy[1] / busy[2],
            "in_collectives": last["share"],
            "transfer": last["transfer"] / two,
            "sent_in_backward": last["bytes_in_backward"] / max(last["bytes"], 1),
        }
        for workers, measured in ((1, one), (2, two)):
            staged = dataclasses.replace(configs[workers], engine=dataclasses.replace(configs[workers].engine, zero=0))
            planned = step_time(staged, cost, here, workers).total
            told[f"plan_{workers}_over_measured"] = planned / measured
            told[f"plan_{workers}_over_processor"] = planned / busy[workers]
        print(json.dumps({name: round(value, 4) for name, value in told.items()}, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
