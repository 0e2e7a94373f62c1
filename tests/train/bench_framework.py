"""What Ray and DeepSpeed cost: python -m tests.train.bench_framework [--dataset ... --size ... --batch ... --steps ...]

In one Ray Train worker, steps of a bare loop (flow, Adam, clipping, averages, norms: nothing else) alternate with steps
of the real one (DeepSpeed, finiteness watch, agreement of ranks, records to the driver) on the same data, so that
whatever else the machine does falls on both. Prints the median of the ratios.
"""

import dataclasses
import json
import statistics
import tempfile
import time
from typing import Any

import torch
import tyro

from idn.plan.pace import BareLoop
from idn.train.config import TrainConfig
from idn.train.feed import Feed
from idn.train.presets import preset


def compare(settings: dict[str, Any]) -> dict[str, list[float]]:
    """Runs in the worker; seconds of every step of both loops."""
    from idn.train.group import Group
    from idn.train.meter import Meter
    from idn.train.session import open_session
    from idn.train.trainer import RayPort
    from idn.train.worker import train_step

    config = TrainConfig.from_dict(settings["config"])
    port = RayPort(settings["relay"], 0)
    group = Group(0, 1, torch.device("cpu"))
    session = open_session(config, group, port.storage.storage_filesystem, settings["folder"])
    meter, bare, feed = Meter(session), BareLoop(config), Feed(config, 0, 1)
    seconds: dict[str, list[float]] = {"bare": [], "framework": []}
    for step in range(settings["steps"]):
        started = time.perf_counter()
        bare.passes(feed, step)
        bare.update()
        middle = time.perf_counter()
        result = train_step(session, port.stop_wanted)
        session.progress.step += 1
        meter.after(result, port.send)
        seconds["bare"].append(middle - started)
        seconds["framework"].append(time.perf_counter() - middle)
    return seconds


def main(dataset: str = "cifar10-sample", size: str = "tiny", batch: int = 32, steps: int = 40) -> None:
    """Compare a step under Ray and DeepSpeed with a bare loop.

    Args:
        dataset: What to train on.
        size: tiny, paper or full.
        batch: Samples per step.
        steps: Steps of each loop; the first five are not counted.
    """
    import ray

    from idn.train import trainer

    base = preset(dataset, size=size)
    config = dataclasses.replace(base, data=dataclasses.replace(base.data, batch=batch, loaders=0))
    with trainer.cluster(config.cluster.address), tempfile.TemporaryDirectory() as folder:
        relay = ray.remote(num_cpus=0)(trainer.Relay).remote()
        run: Any = ray.train.torch.TorchTrainer(
            compare,
            train_loop_config={"config": config.to_dict(), "relay": relay, "steps": steps, "folder": folder},
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(name="bench", storage_path=folder),
        )
        seconds = run.fit().return_value
    medians = {name: statistics.median(values[5:]) for name, values in seconds.items()}
    pairs = [a / b for a, b in zip(seconds["framework"][5:], seconds["bare"][5:], strict=True)]
    print(json.dumps({"seconds": medians, "ratio": statistics.median(pairs), "steps": len(pairs)}))


if __name__ == "__main__":
    tyro.cli(main)
