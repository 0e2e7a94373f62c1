"""Three real Ray nodes: one dies without a word, comes back, a worker dies, the driver dies; nothing is lost twice."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ledgers import check_once
from tests.cluster.nodes import Nodes, real_nodes

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with real_nodes(40, 3, tmp_path, dashboard=True) as made:
        yield made


def test_a_run_outlives_its_nodes_and_its_driver(nodes: Nodes) -> None:
    def trains_on(workers: int, since: int) -> bool:
        """A step was made after the newest of more than `since` starts, which had so many workers."""
        starts = nodes.records("fire", "start")
        begun = starts[-1] if len(starts) > since else {"workers": 0, "step": 0}
        return begun["workers"] == workers and nodes.last("fire", "metrics")["step"] > begun["step"]

    def starts() -> int:
        return len(nodes.records("fire", "start"))

    def saved_twice_more() -> bool:
        return nodes.last("fire", "saved")["step"] >= nodes.last("fire", "start")["step"] + 10

    words = ("--name", "fire", "--workers", "1:3", "--zero", "2", "--steps", "100000")
    process = nodes.start(*words)
    nodes.wait(lambda: trains_on(3, 0) and saved_twice_more(), process)

    reached, before = nodes.last("fire", "metrics")["step"], starts()
    nodes.lose()
    seconds = nodes.wait(lambda: trains_on(2, before), process)
    lost = reached - nodes.last("fire", "start")["step"]
    print(f"\nnode killed at step {reached}: {seconds:.1f} s to the next step on 2 workers, {lost} steps lost")
    assert lost <= 10

    before = starts()
    nodes.members.append(nodes.join())
    seconds = nodes.wait(lambda: trains_on(3, before), process)
    print(f"node back: {seconds:.1f} s to the next step on 3 workers")
    nodes.wait(saved_twice_more, process)

    reached, before = nodes.last("fire", "metrics")["step"], starts()
    random.Random(0).choice(nodes.workers()).kill()
    seconds = nodes.wait(lambda: trains_on(3, before), process)
    print(f"worker killed at step {reached}: {seconds:.1f} s to the next step on 3 workers")
    nodes.wait(saved_twice_more, process)

    process.kill()
    process.wait()
    reached, before = nodes.last("fire", "metrics")["step"], starts()
    process = nodes.start(*words)
    seconds = nodes.wait(lambda: trains_on(3, before), process)
    print(f"driver killed at step {reached}, started again at once: {seconds:.1f} s to the next step on 3 workers")
    nodes.wait(saved_twice_more, process)

    nodes.end_early(process)
    losses = nodes.losses("fire")
    assert sorted(losses) == list(range(1, len(losses) + 1)), "every step once"
    epochs = check_once(nodes.runs / "fire-ledger", len(losses))
    print(f"{len(losses)} steps, {epochs} whole epochs: every sample once in each")
    assert epochs >= 1

    # Noise and probes are keyed by a sample's place: the same samples in the same steps give the same losses.
    nodes.finish("--name", "calm", "--workers", "2", "--steps", str(len(losses)), "--checkpoint-every", "1000")
    assert losses == pytest.approx(nodes.losses("calm"), rel=1e-3)
