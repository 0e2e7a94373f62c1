"""A machine with other software is refused, and both versions are named."""

import os
import re
from pathlib import Path

import pytest
import torch

import idn
from idn.errors import UserError
from idn.train import trainer
from idn.train.placement import Plan
from tests.train.loops import tiny


def test_the_same_versions_pass() -> None:
    assert set(trainer.versions()) == {"idn", "torch", "ray"}
    trainer.check_versions(trainer.versions())


@pytest.mark.parametrize(("package", "own"), [("idn", idn.__version__), ("torch", torch.__version__)])
def test_a_worker_with_another_version_is_refused(package: str, own: str) -> None:
    with pytest.raises(UserError) as refused:
        trainer.check_versions(trainer.versions() | {package: "0.0.1"})
    assert str(refused.value) == f"worker on {os.uname().nodename} has {package} {own}, the driver 0.0.1"


@pytest.mark.slow
def test_a_real_worker_refuses_a_driver_with_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("moons", steps=2, workers="1", max_failures=0, runs=str(tmp_path), name="versions")
    with trainer.cluster("local"):
        other = trainer.versions() | {"torch": "1.0.0"}
        # The driver's claim; the worker is a process of its own and looks for itself.
        monkeypatch.setattr(trainer, "versions", lambda: other)
        with pytest.raises(UserError, match=f"has torch {re.escape(torch.__version__)}, the driver 1.0.0"):
            trainer.run(config, Plan(1, 1, 1, 0), lambda record: None, lambda note: None)
