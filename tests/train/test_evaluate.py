"""Evaluation on real Ray workers."""

import json
from pathlib import Path

import pytest

import idn
from idn.cli import main
from idn.data.locate import resolve
from tests.trained import moons_run


def test_ray_workers_give_the_number_of_one_process(cluster: str, tmp_path: Path) -> None:
    figures, run = [], moons_run(tmp_path)
    for words in ([], ["--workers", "2", "--address", cluster]):
        target = tmp_path / "figures.json"
        assert main(["eval", str(run), "--limit", "5000", "--json", str(target), *words]) == 0
        figures.append(json.loads(target.read_text()))
    alone, together = figures
    assert together["samples"] == alone["samples"] == 5000
    assert together["value"] == pytest.approx(alone["value"], rel=1e-6)
    assert together["standard_error"] == pytest.approx(alone["standard_error"], rel=1e-5)


def test_a_worker_s_complaint_is_one_line(cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in Path(resolve("cifar10-sample")).iterdir():
        content = path.read_bytes()
        half = len(content) // 2
        (shards / path.name).write_bytes(content[:half] + bytes(half) if path.name.startswith("test") else content)
    flow = tmp_path / "flow.safetensors"
    idn.build("cifar10", "idensenet", "tiny", shape=(3, 8, 8), blocks=(1, 1)).save(flow)
    assert main(["eval", str(flow), "--data", str(shards), "--workers", "2"]) == 2
    err = capsys.readouterr().err
    assert "idn: error: " in err and "Traceback" not in err
