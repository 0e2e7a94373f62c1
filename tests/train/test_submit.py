"""`ray job submit` to a real local head: token required, loopback only, runs where the cluster says."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

REPO = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def head(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cluster by cluster/local.sh on free ports, with a token of its own, beside another Ray on this machine."""
    folder = tmp_path_factory.mktemp("head")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PATH": f"{REPO / '.venv' / 'bin'}:{os.environ['PATH']}",
        "IDN_CLUSTER_STATE": str(folder / "state"),
        "IDN_CLUSTER_PORT": str(free_port()),
        "IDN_DASHBOARD_PORT": str(free_port()),
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "IDN_RUNS": str(folder / "runs"),
        "IDN_DATA": str(folder / "data"),
    }
    up = call(environment, "up", "--num-cpus=4")
    try:
        assert up.returncode == 0, up.stderr
        yield environment, folder
    finally:
        down = call(environment, "down")
    assert down.returncode == 0, down.stderr
    assert not answers(environment["IDN_DASHBOARD_PORT"])


def call(environment: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    script = str(REPO / "cluster" / "local.sh")
    return subprocess.run([script, *words], env=environment, capture_output=True, text=True, timeout=400)


def answers(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


def test_a_job_trains_and_its_run_outlives_the_jobs_folder(head: Any) -> None:
    environment, folder = head
    submitted = call(environment, "submit", "toy", "moons", "--size", "tiny", "--steps", "6", "--workers", "2")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "finished: step 6" in submitted.stdout
    run = folder / "runs" / "moons-tiny-idensenet-lc"
    assert json.loads((run / "config.json").read_text())["length"]["steps"] == 6
    assert list(run.glob("checkpoints/step-*/flow.safetensors"))


def test_the_cluster_listens_on_loopback_only(head: Any) -> None:
    _, folder = head
    ray = psutil.Process(int((folder / "state" / "pid").read_text()))
    found = listeners(ray)
    assert len(found) > 5
    assert {address for address in found if not address.endswith(("127.0.0.1", "::1"))} == set()


def test_a_run_listens_on_loopback_only(tmp_path: Path) -> None:
    """While workers train, the store where they meet among them."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    words = ["train", "moons", "--size", "tiny", "--workers", "2", "--steps", "100000", "--runs", str(tmp_path)]
    command = str(Path(sys.executable).with_name("idn"))
    log = (tmp_path / "log").open("w")
    with subprocess.Popen([command, *words], env=environment, stdout=log, stderr=log) as run:
        try:
            metrics = tmp_path / "moons-tiny-idensenet-lc" / "metrics.jsonl"
            deadline = time.monotonic() + 300
            while not (metrics.exists() and '"metrics"' in metrics.read_text()):
                assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.5)
            found = listeners(psutil.Process(run.pid))
        finally:
            run.terminate()
    assert len(found) > 5
    assert {address for address in found if not address.endswith(("127.0.0.1", "::1"))} == set()


def listeners(process: psutil.Process) -> list[str]:
    """Addresses on which a process and its children take connections."""
    found = []
    for part in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [one.laddr.ip for one in part.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return found


def test_a_private_cluster_listens_on_loopback_only() -> None:
    code = """
import psutil
from idn.train import trainer
from tests.train.test_submit import listeners
with trainer.cluster("local"):
    print(*listeners(psutil.Process()))
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, text=True)
    found = done.stdout.split()
    assert len(found) > 3, done.stderr
    assert {address for address in found if not address.endswith(("127.0.0.1", "::1"))} == set()


def test_a_job_without_the_token_is_refused(head: Any, tmp_path: Path) -> None:
    environment, _ = head
    (tmp_path / "launch").mkdir()
    shutil.copy(REPO / "launch" / "toy.py", tmp_path / "launch")
    words = ["job", "submit", "--address", f"http://127.0.0.1:{environment['IDN_DASHBOARD_PORT']}"]
    words += ["--working-dir", str(tmp_path), "--", "python", "launch/toy.py", "moons", "--dry-run"]
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    ray = str(REPO / ".venv" / "bin" / "ray")
    stranger = environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)}
    refused = subprocess.run([ray, *words], env=stranger, capture_output=True, text=True, timeout=200)
    assert refused.returncode != 0
    assert "uthenticat" in refused.stdout + refused.stderr or "nvalid" in refused.stdout + refused.stderr


def test_a_port_in_use_and_a_second_cluster_are_refused(head: Any, tmp_path: Path) -> None:
    environment, _ = head
    again = call(environment, "up")
    assert again.returncode == 2 and "a cluster is up already" in again.stderr
    other = call(environment | {"IDN_CLUSTER_STATE": str(tmp_path)}, "up")
    assert other.returncode == 2 and "in use" in other.stderr
    unknown = call(environment, "submit", "imagenet")
    assert unknown.returncode == 2 and "expected one of cifar10 mnist toy" in unknown.stderr
