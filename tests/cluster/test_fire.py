"""Checkpoints under fire: workers and drivers killed at random moments of one run, 30 times or $IDN_KILLS."""

import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.fs
import pytest
import torch

from idn.flows.files import load
from idn.train import checkpoint
from tests.cluster.ledgers import check_once
from tests.cluster.nodes import Nodes, real_nodes

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
LOCAL = pyarrow.fs.LocalFileSystem()
KILLS = int(os.environ.get("IDN_KILLS", "30"))
# A narrow flow: kills and starts are what is tested, not arithmetic.
WORDS = ("--workers", "2", "--flow.growth", "8", "--flow.fc-stem", "8", "--flow.fc-growth", "4")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with real_nodes(50, 2, tmp_path, dashboard=True) as made:
        yield made


def check_newest(folder: Path) -> int:
    """The newest whole checkpoint reads back complete; its step."""
    path = checkpoint.newest(LOCAL, str(folder))
    if path is None:
        return 0
    try:
        restored = checkpoint.Restored(LOCAL, path)
        moments = restored.moments()
    except Exception:
        # The run may have replaced it by a newer one meanwhile.
        if Path(path).exists() and checkpoint.is_whole(LOCAL, path, hashes=True):
            raise
        return check_newest(folder)
    assert all(torch.isfinite(moment).all() for parts in moments.values() for moment in parts.values())
    return restored.progress.step


def test_no_kill_costs_more_than_the_steps_since_a_checkpoint(nodes: Nodes) -> None:
    chance = random.Random(0)
    folder = nodes.runs / "fire" / "checkpoints"
    words = ("--name", "fire", *WORDS, "--steps", "100000")
    process = nodes.start(*words)
    nodes.wait(lambda: check_newest(folder) > 0, process)
    times: dict[str, list[float]] = {"worker": [], "driver": []}
    overlapping = 0
    for kill in range(KILLS):
        # Steps, saves and, every fourth time or so, the start after the last kill.
        time.sleep(chance.uniform(0, 3))
        before, began = check_newest(folder), time.monotonic()
        process, victim = strike(nodes, process, chance, words)
        assert check_newest(folder) >= before, f"kill {kill} cost a checkpoint"
        print(f"kill {kill + 1}: {victim}, newest checkpoint {before}", flush=True)
        if chance.random() < 0.25 and kill < KILLS - 1:
            overlapping += 1
            time.sleep(chance.uniform(0, 8))
            continue
        nodes.wait(lambda since=before: check_newest(folder) > since, process)
        times[victim].append(time.monotonic() - began)
    nodes.end_early(process)
    for victim, seconds in times.items():
        if seconds:
            print(
                f"{victim} killed, {len(seconds)} times awaited: "
                f"a newer checkpoint after {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s at most"
            )
    steps = check_newest(folder)
    epochs = check_once(nodes.runs / "fire-ledger", steps)
    print(
        f"{KILLS} kills, {overlapping} during a start; {steps} steps, {epochs} whole epochs: every sample once in each"
    )

    nodes.finish("--name", "calm", *WORDS, "--steps", str(steps), "--checkpoint-every", "100000")
    assert nodes.losses("fire") == nodes.losses("calm")
    flows = [checkpoint.newest(LOCAL, str(nodes.runs / name / "checkpoints")) for name in ("fire", "calm")]
    states = [load(Path(str(path)) / checkpoint.FLOW, ema=False).state_dict() for path in flows]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), f"{name} after {steps} steps"
    print(f"final weights: all {len(states[0])} tensors equal those of an undisturbed run, bit for bit")


def strike(
    nodes: Nodes, process: "subprocess.Popen[str]", chance: random.Random, words: tuple[str, ...]
) -> tuple["subprocess.Popen[str]", str]:
    """Kills one of the workers, which Ray replaces, or the driver, which is then started again; driver and victim."""
    victims = nodes.workers()
    if victims and chance.random() < 0.7:
        try:
            chance.choice(victims).kill()
            return process, "worker"
        except psutil.NoSuchProcess:
            pass  # It went by itself, as workers do while Ray replaces them.
    process.kill()
    process.wait()
    return nodes.start(*words), "driver"
