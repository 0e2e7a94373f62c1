"""cluster/slurm.sh under a real Slurm with two nodes: trains on both, is preempted, queued again, and goes on."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import slurm
from tests.cluster.slurm import Slurm, running_slurm

REPO = Path(__file__).parents[2]
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(slurm.missing()), reason=slurm.HOW)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def submit(cluster: Slurm, runs: Path, *words: str) -> str:
    """sbatch from the project's folder; the job's number."""
    options = ["--parsable", f"--chdir={REPO}", f"--output={runs}/log", "--cpus-per-task=1", "--time=20"]
    environment = {"IDN_RUNS": str(runs), "OMP_NUM_THREADS": "1", "SLURM_SUBMIT_DIR": str(REPO)}
    return cluster.call("sbatch", *options, str(REPO / "cluster" / "slurm.sh"), *words, **environment)


def test_a_preempted_job_is_queued_again_and_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    os.chdir(REPO)
    steps = 300
    words = f"toy moons --size tiny --workers 2 --steps {steps} --batch 64 --checkpoint-every 20 --validate-every 0"
    job = submit(cluster, tmp_path, *words.split(), "--picture-every", "0", "--limit-test", "100", "--log-every", "1")
    run = tmp_path / "moons-tiny-idensenet-lc"
    log = tmp_path / "log"
    saved = cluster.wait(lambda: any(r["step"] >= 40 for r in records(run, "saved")), 240)
    assert saved, log.read_text()
    token = tmp_path / f".slurm-{job}.token"
    assert token.stat().st_mode & 0o077 == 0 and token.read_text() not in log.read_text()
    # Two workers of one CPU each need both nodes.
    assert cluster.field(job, "NumNodes") == "2" and records(run, "start")[0]["workers"] == 2

    urgent = cluster.call("sbatch", "--parsable", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=true")
    assert cluster.wait(lambda: cluster.field(urgent, "JobState") == "COMPLETED", 120), cluster.call("squeue")
    assert int(cluster.field(job, "Restarts")) == 1
    over = ("COMPLETED", "FAILED", "CANCELLED")
    assert cluster.wait(lambda: cluster.field(job, "JobState") in over, 300), log.read_text()
    assert cluster.field(job, "JobState") == "COMPLETED", log.read_text()
    assert f"finished: step {steps}" in log.read_text()
    resumed = int(re.findall(r"resuming at step (\d+)", log.read_text())[0])
    assert resumed >= 40
    assert [record["step"] for record in records(run, "metrics")] == list(range(1, steps + 1))
    assert not token.exists()


def test_an_unknown_name_is_refused_in_the_jobs_log(cluster: Slurm, tmp_path: Path) -> None:
    os.chdir(REPO)
    job = submit(cluster, tmp_path, "imagenet")
    assert cluster.wait(lambda: cluster.field(job, "JobState") == "FAILED", 60)
    assert "idn: error: job imagenet: expected one of cifar10 mnist toy" in (tmp_path / "log").read_text()
    assert cluster.field(job, "ExitCode") == "2:0"
