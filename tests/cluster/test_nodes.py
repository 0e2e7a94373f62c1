"""Three real Ray nodes with a loopback address each: one dies without a word, comes back, the driver dies too."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
COMMAND = str(Path(sys.executable).with_name("idn"))
# 24 samples divide among one, two or three workers.
WORDS = "train cifar10-sample --size tiny --flow.shape 3 8 8 --resize 8 --flow.blocks 1 1 --batch 24 --log-every 1 "
WORDS += "--checkpoint-every 5 --validate-every 0 --picture-every 0 --limit-test 24 --deterministic --max-failures -1"
PATIENCE = 240.0
STARTED: list["subprocess.Popen[str]"] = []
"""Drivers, ended with the cluster when a test fails before them."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Cluster, list[Any]]]:
    """A head that trains nothing, and three nodes with room for one worker each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.40"})
    try:
        yield cluster, [join(cluster, f"127.0.0.{number}") for number in (41, 42, 43)]
    finally:
        end(cluster)


def end(cluster: Cluster) -> None:
    for process in STARTED:
        process.kill()
        process.wait()
    cluster.shutdown()


def join(cluster: Cluster, address: str) -> Any:
    return cluster.add_node(num_cpus=1, node_ip_address=address)


def start(cluster: Cluster, runs: Path, *words: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "IDN_RUNS": str(runs)}
    with (runs / "log").open("a") as log:
        command = [COMMAND, *WORDS.split(), *words]
        STARTED.append(subprocess.Popen(command, env=environment, text=True, stdout=log, stderr=log))
    return STARTED[-1]


def records(runs: Path, name: str, kind: str) -> list[dict[str, Any]]:
    path = runs / name / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        # The last line may be half written.
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if record["kind"] == kind]


def wait(condition: Callable[[], bool], process: "subprocess.Popen[str]", runs: Path) -> float:
    """Seconds until the condition held."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE:
        if condition():
            return time.monotonic() - began
        assert process.poll() is None, (runs / "log").read_text()
        time.sleep(0.1)
    raise AssertionError(f"waited in vain:\n{(runs / 'log').read_text()}")


def test_a_run_outlives_its_nodes_and_its_driver(nodes: Any, tmp_path: Path) -> None:
    cluster, members = nodes

    def last(kind: str) -> dict[str, Any]:
        return (records(tmp_path, "fire", kind) or [{"step": 0, "workers": 0}])[-1]

    def trains_on(workers: int) -> bool:
        """A step was made after the newest start, which had so many workers."""
        begun = last("start")
        return begun["workers"] == workers and last("metrics")["step"] > begun["step"]

    words = ("--name", "fire", "--workers", "1:3", "--steps", "100000")
    process = start(cluster, tmp_path, *words)
    wait(lambda: trains_on(3) and last("saved")["step"] >= 10, process, tmp_path)

    reached = last("metrics")["step"]
    cluster.remove_node(members.pop(), allow_graceful=False)
    seconds = wait(lambda: trains_on(2), process, tmp_path)
    lost = reached - last("start")["step"]
    print(f"\nnode killed at step {reached}: {seconds:.1f} s to the next step on 2 workers, {lost} steps lost")
    assert lost <= 10

    members.append(join(cluster, "127.0.0.43"))
    seconds = wait(lambda: trains_on(3), process, tmp_path)
    print(f"node back: {seconds:.1f} s to the next step on 3 workers")

    wait(lambda: last("saved")["step"] >= last("start")["step"] + 10, process, tmp_path)
    process.kill()
    process.wait()
    reached = last("metrics")["step"]
    process = start(cluster, tmp_path, *words)
    seconds = wait(lambda: last("start")["step"] > 0 and last("metrics")["step"] > reached, process, tmp_path)
    print(f"driver killed at step {reached}: {seconds:.1f} s to get beyond it again")

    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    losses = {record["step"]: record["value"] for record in records(tmp_path, "fire", "metrics")}
    assert sorted(losses) == list(range(1, len(losses) + 1)), "every step once"

    # Noise and probes are keyed by a sample's place: the same samples in the same steps give the same losses.
    undisturbed = start(cluster, tmp_path, "--name", "calm", "--workers", "2", "--steps", str(len(losses)))
    assert undisturbed.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    calm = {record["step"]: record["value"] for record in records(tmp_path, "calm", "metrics")}
    assert losses == pytest.approx(calm, rel=1e-3)
