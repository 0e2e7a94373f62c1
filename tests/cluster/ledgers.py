"""What a run's ledger proves: every sample of an epoch once, whatever happened in between."""

import collections
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.cluster.nodes import BATCH, SAMPLES

EPOCH = -(-SAMPLES // BATCH)
"""Steps of an epoch."""


def read(folder: Path) -> dict[int, list[str]]:
    """Samples that are in the weights, by step: where a step was made again, those of the last time."""
    attempts: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            # A killed worker leaves its last line half written.
            with contextlib.suppress(ValueError):
                attempts[file.name.split("-")[0]].append(json.loads(line))
    kept: dict[int, list[str]] = {}
    for lines in sorted(attempts.values(), key=lambda lines: min(line["time"] for line in lines)):
        first = min(line["step"] for line in lines)
        # Workers went on from a checkpoint: what was made of later steps before is lost.
        kept = {step: samples for step, samples in kept.items() if step < first}
        for line in lines:
            kept[line["step"]] = kept.get(line["step"], []) + line["samples"]
    return kept


def check_once(folder: Path, steps: int) -> int:
    """Every step has its whole batch, every whole epoch every sample once; how many epochs were whole."""
    kept = read(folder)
    assert sorted(kept) == list(range(1, steps + 1)), "a step is missing"
    epochs = [Counter[str]() for _ in range(-(-steps // EPOCH))]
    for step, samples in kept.items():
        place = (step - 1) % EPOCH
        assert len(samples) == (BATCH if place < EPOCH - 1 else SAMPLES - BATCH * (EPOCH - 1)), f"step {step}"
        epochs[(step - 1) // EPOCH].update(samples)
    for number, epoch in enumerate(epochs):
        twice = [sample for sample, times in epoch.items() if times > 1]
        assert not twice, f"epoch {number}: {len(twice)} samples trained on twice"
    whole = epochs if steps % EPOCH == 0 else epochs[:-1]
    assert all(len(epoch) == SAMPLES for epoch in whole), "a sample was never trained on"
    assert all(epoch.keys() <= epochs[0].keys() for epoch in epochs), "a sample that is not in the data"
    return len(whole)
