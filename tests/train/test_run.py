"""Whole runs by the `idn` command on a real Ray cluster: what they leave behind, and what survives a kill."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from idn.flows.files import load
from tests.train.conftest import COMMAND

Start = Callable[..., "subprocess.Popen[str]"]
TINY = ("--size", "tiny", "--flow.shape", "3", "8", "8", "--resize", "8", "--flow.blocks", "1", "1")
RUN = "cifar10-sample-tiny-idensenet-lc"
PATIENCE = 900.0


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def wait_for(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def worker_processes() -> list[int]:
    """The Ray Train workers of the tests' own cluster; other runs on this machine are none of our business."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


@pytest.fixture(scope="module")
def finished(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run of 12 steps with everything on, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    words = [*TINY, "--steps", "12", "--batch", "16", "--workers", "2", "--log-every", "2", "--validate-every", "6"]
    words += ["--picture-every", "12", "--checkpoint-every", "4", "--keep", "2", "--samples", "4", "--limit-test", "32"]
    process = subprocess.run(
        [COMMAND, "train", "cifar10-sample", *words],
        env=os.environ | {"RAY_ADDRESS": cluster, "IDN_RUNS": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, process.stderr
    return folder / RUN, process.stdout, process.stderr


def test_a_run_leaves_its_folder_in_order(finished: tuple[Path, str, str]) -> None:
    folder, _, _ = finished
    assert json.loads((folder / "config.json").read_text())["dataset"] == "cifar10-sample"
    assert [record["step"] for record in metrics(folder, "metrics")] == [2, 4, 6, 8, 10, 12]
    assert [record["step"] for record in metrics(folder, "validation")] == [6, 12]
    steps = [int(re.findall(r"step-0*(\d+)", path.name)[0]) for path in sorted(folder.glob("checkpoints/step-*"))]
    assert steps == [8, 12]
    assert load(folder / "best.safetensors").shape == (3, 8, 8)
    pictures = {path.name.rsplit("-", 1)[0] for path in folder.glob("samples/*.png")}
    assert pictures == {"samples", "reconstructions", "eta1", "eta2"}
    for path in folder.glob("samples/*.png"):
        assert min(Image.open(path).size) > 40


def test_the_summary_says_how_good_it_is_and_what_to_do_next(finished: tuple[Path, str, str]) -> None:
    folder, out, err = finished
    assert re.search(r"test +\d\.\d+ \+- \d\.\d+ bits/dim \(32 samples\)", out)
    assert str(folder) in out and "tensorboard --logdir" in out
    assert re.search(r"step 12/12: .* bits/dim.* samples/s", err)


def test_tensorboard_files_read_back(finished: tuple[Path, str, str]) -> None:
    folder, _, _ = finished
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "histograms": 0})
    board.Reload()
    scalars = board.Tags()["scalars"]
    wanted = {"bits per dim/train", "bits per dim/validation", "likelihood/log p(z)", "likelihood/log-det"}
    wanted |= {"training/gradient norm", "speed/samples per second", "speed/share of peak FLOPs"}
    wanted |= {"speed/memory per worker (GB)", "norms/largest sigma", "training/variance of the estimator"}
    assert wanted <= set(scalars)
    assert [event.step for event in board.Scalars("bits per dim/train")] == [2, 4, 6, 8, 10, 12]
    logged = {record["step"]: record["value"] for record in metrics(folder, "metrics")}
    assert board.Scalars("bits per dim/train")[-1].value == pytest.approx(logged[12], rel=1e-6)
    assert "norms/sigma" in board.Tags()["histograms"]
    assert {"samples", "reconstructions", "eta1", "eta2"} <= set(board.Tags()["images"])
    assert any(tag.startswith("sigma/scale1.block1") for tag in scalars)
    assert "_hparams_/session_end_info" in {name for run in folder.rglob("events*") for name in hparam_tags(run)}


def hparam_tags(path: Path) -> list[str]:
    board = EventAccumulator(str(path))
    board.Reload()
    return list(board.summary_metadata)


def test_the_same_command_again_has_nothing_left_to_do(finished: tuple[Path, str, str], cluster: str) -> None:
    folder, _, _ = finished
    before = (folder / "best.safetensors").read_bytes()
    assert metrics(folder, "finish")[0]["finished"]
    assert before == (folder / "best.safetensors").read_bytes()


def test_a_killed_worker_costs_only_the_steps_since_the_last_checkpoint(idn: Start, tmp_path: Path) -> None:
    words = [*TINY, "--steps", "40", "--batch", "16", "--workers", "2", "--log-every", "1", "--checkpoint-every", "5"]
    words += ["--validate-every", "0", "--picture-every", "0", "--deterministic", "--limit-test", "16"]
    folder = tmp_path / "runs" / RUN
    others = set(worker_processes())
    process = idn("train", "cifar10-sample", *words)
    wait_for(lambda: [r for r in metrics(folder, "saved") if r["step"] >= 10], process)
    victim = (set(worker_processes()) - others).pop()
    killed_at = metrics(folder, "metrics")[-1]["step"]
    os.kill(victim, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    starts = [record["step"] for record in metrics(folder, "start")]
    assert starts == [0, *starts[1:]] and len(starts) == 2
    assert killed_at - 5 <= starts[1] and starts[1] >= 10
    # Every step once, and the curve that an undisturbed run gives.
    assert [record["step"] for record in metrics(folder, "metrics")] == list(range(1, 41))
    quiet = idn("train", "cifar10-sample", *words, "--name", "undisturbed")
    code, _, err = finish(quiet)
    assert code == 0, err
    values = [[r["value"] for r in metrics(tmp_path / "runs" / name, "metrics")] for name in (RUN, "undisturbed")]
    assert values[0] == values[1]


def test_sigterm_saves_first_and_the_same_command_goes_on(idn: Start, tmp_path: Path) -> None:
    words = [*TINY, "--steps", "60", "--batch", "16", "--workers", "2", "--log-every", "1", "--limit-test", "16"]
    words += ["--checkpoint-every", "1000", "--validate-every", "0", "--picture-every", "0"]
    folder = tmp_path / "runs" / RUN
    process = idn("train", "cifar10-sample", *words)
    wait_for(lambda: len(metrics(folder, "metrics")) >= 5, process)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    stopped = int(re.findall(r"stopped at step (\d+)", out)[0])
    assert metrics(folder, "saved")[-1]["step"] == stopped
    code, out, err = finish(idn("train", "cifar10-sample", *words))
    assert code == 0, err
    assert f"resuming at step {stopped}" in err
    assert [record["step"] for record in metrics(folder, "metrics")] == list(range(1, 61))


def test_bad_input_ends_with_one_line_and_code_2(idn: Start, tmp_path: Path) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text('{"bf16": {"enabled": true}}')
    cases = {
        "--workers 2 --batch 15": "--batch 15 does not divide by 2",
        "--workers 64 --batch 64": "the cluster has 8 CPUs and 0 GPUs",
        "--gpus-per-worker 1": "0 GPUs",
        "--storage /proc/nowhere": "cannot be written",
        f"--deepspeed {odd}": "--precision bf16",
    }
    running = {words: idn("train", "moons", "--size", "tiny", *words.split()) for words in cases}
    for words, process in running.items():
        code, _, err = finish(process)
        assert code == 2, (words, err)
        assert err.startswith("idn: error: ") and cases[words] in err, (words, err)
        assert len(err.strip().splitlines()) == 1, err


def test_another_model_in_the_same_folder_is_refused(finished: tuple[Path, str, str], cluster: str) -> None:
    folder, _, _ = finished
    words = [*TINY, "--steps", "12", "--batch", "16", "--name", RUN, "--model", "idensenet"]
    process = subprocess.run(
        [COMMAND, "train", "cifar10-sample", *words],
        env=os.environ | {"RAY_ADDRESS": cluster, "IDN_RUNS": str(folder.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 2
    assert "was made with" in process.stderr and "choose another --name" in process.stderr
    assert ray.is_initialized()
