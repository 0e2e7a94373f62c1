"""The files in cluster/ against the software that reads them, and against what they start."""

import copy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

import idn
from idn.train.commands import parse

REPO = Path(__file__).parents[2]
CLUSTER = REPO / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
CLOUDS = ["aws.yaml", "gcp.yaml"]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


# --- Cloud ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLOUDS)
def test_ray_accepts_the_cloud_file_and_fills_in_no_command_of_its_own(name: str) -> None:
    config = prepare_config(documents(name)[0])
    validate_config(config)
    worker = config["available_node_types"]["worker"]
    assert worker["max_workers"] == config["max_workers"]
    # Ray's defaults would install a Ray of their choice and open the dashboard to the network.
    commands = [command for key, value in config.items() if key.endswith("_commands") for command in value]
    assert set(commands) == {"/idn/cluster/node.sh head", "/idn/cluster/node.sh worker"}
    for options in (worker["node_config"], config["available_node_types"]["head"]["node_config"]):
        assert "KeyName" not in options and "serviceAccounts" not in options


@pytest.mark.parametrize("name", CLOUDS)
def test_ray_would_refuse_a_misspelt_field(name: str) -> None:
    config = prepare_config(documents(name)[0])
    wrong = copy.deepcopy(config)
    wrong["available_node_types"]["worker"]["min_worker"] = 1
    with pytest.raises(ValidationError):
        validate_config(wrong)


def test_workers_are_spot_machines_and_the_head_is_not() -> None:
    aws, gcp = (documents(name)[0]["available_node_types"] for name in CLOUDS)
    assert aws["worker"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert gcp["worker"]["node_config"]["scheduling"][0]["provisioningModel"] == "SPOT"
    assert "InstanceMarketOptions" not in aws["head"]["node_config"]
    assert "scheduling" not in gcp["head"]["node_config"]


# --- Kubernetes -------------------------------------------------------------------------------------------------


def pods() -> dict[str, dict[str, Any]]:
    spec = documents("kuberay.yaml")[1]["spec"]["rayClusterSpec"]
    groups = {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def test_the_kubernetes_job_starts_a_run_that_its_workers_can_hold() -> None:
    spec = documents("kuberay.yaml")[1]["spec"]
    python, script, *options = shlex.split(spec["entrypoint"])
    assert python == "python" and (REPO / Path(script).relative_to("/idn")).is_file()
    config, dry_run = parse([Path(script).stem, *options])
    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert not dry_run and config.worker_range == (4, 4) and config.cluster.gpus_per_worker == 1.0
    assert group["replicas"] * gpus == 4
    # A lost worker is forgiven for ever, a lost head a number of times.
    assert config.cluster.max_failures == -1 and spec["backoffLimit"] > 0
    assert config.saving.name is None, "the same name again resumes"


def test_kubernetes_runs_the_versions_that_are_pinned_here() -> None:
    cluster = documents("kuberay.yaml")[1]["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    images = {pod["containers"][0]["image"] for pod in pods().values()}
    images |= {documents(name)[0]["docker"]["image"] for name in CLOUDS}
    assert images == {f"REGISTRY/idn:{idn.__version__}"}


def test_every_pod_has_shared_storage_probes_and_a_time_to_save() -> None:
    claim = documents("kuberay.yaml")[0]
    assert claim["kind"] == "PersistentVolumeClaim" and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods().values():
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert {environment["IDN_DATA"], environment["IDN_RUNS"]} == {"/shared/data", "/shared/runs"}
        assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
        assert float(environment["RAY_JOB_STOP_WAIT_TIME_S"]) < pod["terminationGracePeriodSeconds"]
        assert all(container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe"))


def test_the_probed_addresses_exist_in_ray_and_need_no_token() -> None:
    from ray.dashboard import http_server_head

    text = Path(http_server_head.__file__).read_text()
    for pod in pods().values():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert f'"{pod["containers"][0][probe]["httpGet"]["path"]}"' in text


# --- Image and scripts ------------------------------------------------------------------------------------------


def test_the_image_has_all_that_a_job_needs(tmp_path: Path) -> None:
    """The files that the Dockerfile copies, and nothing else, run a launch script."""
    for line in (CLUSTER / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for source in sources:
                path = tmp_path / target / (Path(source).name if target.endswith("/") else "")
                if (REPO / source).is_dir():
                    shutil.copytree(REPO / source, path, dirs_exist_ok=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(REPO / source, path)
    assert (tmp_path / "cluster" / "environment.sh").stat().st_mode & 0o111
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["version"] == idn.__version__ and (tmp_path / project["readme"]).is_file()
    code = "import idn, sys; sys.argv = ['cifar10', '--dry-run']; import runpy; runpy.run_path('launch/cifar10.py')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert "parameters: 8,761,3" in done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_and_say_what_is_wrong(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    text = script.read_text()
    assert "set -euo pipefail" in text and script.stat().st_mode & 0o111


def test_slurm_script_outside_a_job_says_how_to_submit_it() -> None:
    done = subprocess.run(
        [CLUSTER / "slurm.sh", "cifar10"], cwd=REPO, env={"PATH": "/usr/bin:/bin"}, capture_output=True
    )
    assert done.returncode == 2 and b"idn: error: not inside a Slurm job" in done.stderr


def test_no_file_carries_a_secret() -> None:
    for file in CLUSTER.iterdir():
        words = file.read_text().lower()
        assert not any(word in words for word in ("akia", "begin private key", "password", "secret_access_key"))
