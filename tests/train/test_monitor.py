"""Records become files: metrics that a resumed run mends, pictures, plain progress lines."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from idn import plots
from idn.train.monitor import Monitor, flatten
from idn.train.presets import preset
from idn.train.progress import ProgressBar


def record(step: int, value: float = 3.0) -> dict[str, Any]:
    numbers = ("log_pz", "logdet", "gradient_norm", "loss_scale", "rate", "share_of_peak", "memory_gb", "sigma_max")
    sigmas = {"block1.layer1": 0.5, "block1.layer2": 0.9}
    return {"kind": "metrics", "step": step, "value": value, "sigmas": sigmas} | dict.fromkeys(numbers, 1.0)


def start(step: int) -> dict[str, Any]:
    return {"kind": "start", "step": step, "steps": 10, "workers": 2, "places": [[0, 0], [0, 1]]}


def test_steps_done_again_replace_the_lost_ones(tmp_path: Path) -> None:
    monitor = Monitor(preset("moons", size="tiny"), tmp_path)
    for item in (start(0), record(1), record(2), record(3), start(1), record(2, 7.0)):
        monitor.write(item)
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    values = {line["step"]: line["value"] for line in lines if line["kind"] == "metrics"}
    assert values == {1: 3.0, 2: 7.0}


def test_lines_that_a_lost_driver_did_not_write_come_back_with_the_checkpoint(tmp_path: Path) -> None:
    monitor = Monitor(preset("moons", size="tiny"), tmp_path)
    for item in (start(0), record(1), record(4)):
        monitor.write(item)
    monitor.write(start(4) | {"lines": [record(1, 9.0), record(2), record(3)]})
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["value"]) for line in lines if line["kind"] == "metrics"] == [
        (1, 3.0),
        (2, 3.0),
        (3, 3.0),
        (4, 3.0),
    ]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert not any("lines" in line for line in lines)


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    monitor = Monitor(preset("moons", size="tiny"), tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + '\n{"kind": "metr')
    monitor.write(start(1))
    monitor.close()
    assert [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        "metrics",
        "start",
    ]


def test_pictures_of_a_toy_run_reach_disk_and_board(tmp_path: Path) -> None:
    monitor = Monitor(preset("moons", size="tiny"), tmp_path)
    rng = np.random.default_rng(0)
    etas = [{"scale": "toy", "block": b, "layer": a, "eta1": 0.6, "eta2": 0.8} for b in (1, 2, 3) for a in (1, 2)]
    monitor.write(start(0))
    monitor.write(
        {
            "kind": "pictures",
            "step": 5,
            "etas": etas,
            "density": rng.random((40, 40), dtype=np.float32),
            "points": rng.normal(size=(100, 2)),
            "samples_2d": rng.normal(size=(100, 2)),
        }
    )
    monitor.close()
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {
        "density-000000005.png",
        "eta1-000000005.png",
        "eta2-000000005.png",
    }
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["images"]) == {"density", "eta1", "eta2"}


def test_a_sheet_shows_every_image_in_its_place() -> None:
    images = np.stack([np.full((2, 2, 3), shade, np.uint8) for shade in (10, 20, 30)])
    sheet = np.asarray(plots.grid(images, columns=2, scale=1))
    assert sheet.shape == (5, 5, 3)
    assert (sheet[0, 0, 0], sheet[0, 3, 0], sheet[3, 0, 0], sheet[3, 3, 0]) == (10, 20, 30, 255)


def test_plain_lines_when_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = ProgressBar("nats")
    bar.update(start(3))
    bar.update({"kind": "metrics", "step": 10, "value": 2.5, "rate": 1234.5})
    bar.close()
    text = shown.getvalue()
    assert "2 workers, resuming at step 3 of 10" in text
    assert "step 10/10: 2.500 nats, 1,234.5 samples/s" in text


def test_nested_settings_flatten() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}
