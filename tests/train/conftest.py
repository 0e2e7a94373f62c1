"""One private Ray cluster for all training tests of a session, with more logical CPUs than the machine has."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

REPO = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("idn"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The cluster's address; this process is a driver of it too."""
    os.environ["PYTHONPATH"] = str(REPO)
    from idn.train import trainer  # sets what Ray Train reads

    assert trainer.CHECKPOINTS
    context = ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def in_workers(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a function in a real Ray Train worker group; rank 0's result."""

    def call(function: Callable[[dict[str, Any]], Any], workers: int, **settings: Any) -> Any:
        trainer: Any = ray.train.torch.TorchTrainer(
            function,
            train_loop_config=settings,
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(name="tests", storage_path=str(tmp_path_factory.mktemp("ray"))),
        )
        return trainer.fit().return_value

    return call


@pytest.fixture
def idn(cluster: str, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the `idn` command on the shared cluster, its runs in a folder of the test's own."""

    def start(*words: str) -> subprocess.Popen[str]:
        environment = os.environ | {"RAY_ADDRESS": cluster, "IDN_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [COMMAND, *words],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start
