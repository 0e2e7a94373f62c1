"""The benchmark measures real work on both sides, and says what it found."""

import json

import pytest

from idn.bench import bench, judge
from idn.bench.rows import ROWS, Row
from idn.bench.work import Job, Worker
from idn.errors import UserError
from idn.flows.build import make_config
from idn.flows.flow import Flow

TINY = {"blocks": (1,), "growth": 4, "fc_blocks": 0, "shape": (1, 4, 4)}


@pytest.mark.parametrize("work", ["train", "evaluate", "sample", "norms", "products"])
def test_every_work_runs(work):
    worker = Worker(Job(True, work, "cifar10", "idensenet-lc", batch=2, threads=1, overrides=TINY))
    try:
        measured = worker.repeat(0)
    finally:
        worker.close()
    assert measured.seconds > 0 and measured.peak > 0 and worker.flops > 0
    assert worker.process.exitcode == 0


def test_the_plain_side_may_keep_freed_memory(monkeypatch, capsys):
    jobs = []

    class Noted(Worker):
        def __init__(self, job):
            jobs.append(job)
            super().__init__(job)

    row = Row(
        "small",
        "a small flow",
        *(Job(ours, "sample", "cifar10", "residual", overrides=TINY) for ours in (True, False)),
        1.0,
    )
    monkeypatch.setattr("idn.bench.ROWS", (row,))
    monkeypatch.setattr("idn.bench.Worker", Noted)
    bench(threads=1, rounds=1, batch=2, keep_memory=True)
    assert "a small flow" in capsys.readouterr().out
    assert [(job.ours, job.keep_memory) for job in jobs] == [(True, True), (False, True)]


def test_ratios_are_read_the_right_way():
    job = Job(True, "train", "cifar10", "idensenet-lc")
    faster = judge(Row("a", "", job, job, 2.0), [1.0, 3.0], [0, 0], None)
    assert (faster.ratio, faster.reached) == (3.0, True)
    slower = judge(Row("a", "", job, job, 1.15, measure="slowdown"), [1.2, 1.0], [0, 0], None)
    assert (slower.ratio, slower.reached) == (1.2, False)
    limit = judge(Row("a", "", job, job, 3e9, measure="limit"), [1.0], [int(4e9)], None)
    assert not limit.reached


def test_one_row_end_to_end(tmp_path, monkeypatch, capsys):
    ours = Job(True, "train", "cifar10", "residual", batch=2, overrides=TINY | {"width": 4})
    plain = Job(False, "train", "cifar10", "residual", batch=2, overrides=TINY | {"width": 4})
    monkeypatch.setattr("idn.bench.ROWS", (Row("small", "a small flow", ours, plain, 1.0),))
    bench(json_file=tmp_path / "speed.json", threads=1, rounds=1)
    assert "a small flow" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert row["ours"] > 0 and row["other"] > 0 and row["ratio"] == pytest.approx(row["other"] / row["ours"])
    assert row["roofline"] > 0


def test_a_trained_flow_is_sampled_from(tmp_path, capsys):
    (tmp_path / "trained").mkdir()
    Flow(make_config("cifar10", "idensenet-lc", "paper", **TINY)).save(tmp_path / "trained/flow.safetensors")
    bench(rows=("sample",), threads=1, rounds=1, flow=tmp_path / "trained/flow.safetensors")
    assert "sample, trained " in capsys.readouterr().out
    with pytest.raises(UserError, match="no file"):
        bench(rows=("sample",), flow=tmp_path / "nothing")


def test_names_are_checked():
    assert len({row.name for row in ROWS}) == len(ROWS)
    with pytest.raises(UserError, match="unknown row 'nothing'"):
        bench(rows=("nothing",))
