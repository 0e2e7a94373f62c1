"""Checkpoints under fire: workers and drivers killed at random moments of one run, 30 times or $IDN_KILLS."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.fs
import pytest
import torch
from ray.cluster_utils import Cluster

from idn.flows.files import load
from idn.train import checkpoint
from tests.cluster.test_nodes import PATIENCE, end, join, records, start, wait

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
LOCAL = pyarrow.fs.LocalFileSystem()
KILLS = int(os.environ.get("IDN_KILLS", "30"))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    os.environ["OMP_NUM_THREADS"] = "1"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.50"})
    try:
        for number in (51, 52):
            join(made, f"127.0.0.{number}")
        yield made
    finally:
        end(made)


def workers(cluster: Cluster) -> list[psutil.Process]:
    """Training processes of this cluster, and of no other on the machine."""
    raylets = [info.process.pid for node in cluster.list_all_nodes() for info in node.all_processes["raylet"]]
    children = [child for pid in raylets for child in psutil.Process(pid).children(recursive=True)]
    return [child for child in children if "RayTrainWorker" in " ".join(command_line(child))]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def check_newest(folder: Path) -> int:
    """The newest whole checkpoint reads back complete; its step."""
    try:
        path = checkpoint.newest(LOCAL, str(folder))
        if path is None:
            return 0
        restored = checkpoint.Restored(LOCAL, path)
    except FileNotFoundError:
        # The run replaced it by a newer one meanwhile.
        return check_newest(folder)
    assert all(torch.isfinite(moment).all() for parts in restored.moments().values() for moment in parts.values())
    return restored.progress.step


def test_no_kill_costs_more_than_the_steps_since_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--workers", "2", "--steps", "100000")
    chance = random.Random(0)
    folder = tmp_path / "fire" / "checkpoints"
    process = start(cluster, tmp_path, "--name", "fire", *words)
    times: list[float] = []
    for kill in range(KILLS):

        def progressed(since: int = check_newest(folder)) -> bool:
            return any(record["step"] > since for record in records(tmp_path, "fire", "metrics"))

        wait(progressed, process, tmp_path)
        # Steps, saves and starts of Ray all get their share.
        time.sleep(chance.uniform(0, 3))
        before, began = check_newest(folder), time.monotonic()
        process = strike(cluster, process, chance, tmp_path, words)
        assert check_newest(folder) >= before, f"kill {kill} cost a checkpoint"
        wait(lambda since=before: check_newest(folder) > since, process, tmp_path)
        times.append(time.monotonic() - began)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    print(f"\n{KILLS} kills: a newer checkpoint after {sorted(times)[len(times) // 2]:.1f} s (median)")

    steps = check_newest(folder)
    calm = start(cluster, tmp_path, "--name", "calm", "--workers", "2", "--steps", str(steps))
    assert calm.wait(PATIENCE * 4) == 0, (tmp_path / "log").read_text()
    flows = [checkpoint.newest(LOCAL, str(tmp_path / name / "checkpoints")) for name in ("fire", "calm")]
    states = [load(Path(str(path)) / checkpoint.FLOW, ema=False).state_dict() for path in flows]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), f"{name} after {steps} steps"


def strike(
    cluster: Cluster, process: "subprocess.Popen[str]", chance: random.Random, runs: Path, words: tuple[str, ...]
) -> "subprocess.Popen[str]":
    """Kills the driver, which is then started again, or one of the workers, which Ray replaces; the driver."""
    victims = workers(cluster)
    if chance.random() < 0.3 or not victims:
        process.kill()
        process.wait()
        return start(cluster, runs, "--name", "fire", *words)
    chance.choice(victims).kill()
    return process
