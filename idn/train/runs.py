"""A run's folder: where it is, what it was made with, and whether a command may go on with it."""

import json
import os
from pathlib import Path
from typing import Any

from idn.errors import UserError
from idn.files import write_json
from idn.train.config import TrainConfig
from idn.train.monitor import flatten

CONFIG = "config.json"
IDENTITY = (
    "dataset",
    "model",
    "size",
    "seed",
    "flow",
    "data.batch",
    "data.split",
    "data.resize",
    "data.flip",
    "optimiser.ema",
)
"""What must not change when a run is resumed: the checkpoint or its meaning depends on it."""


def runs_folder(config: TrainConfig) -> Path:
    """--runs, $IDN_RUNS, or ./runs. A job's working folder is a copy that Ray deletes, so runs go home from there."""
    chosen = config.saving.runs or os.environ.get("IDN_RUNS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    here = Path.cwd()
    return Path.home() / "idn" / "runs" if "working_dir_files" in here.parts else here / "runs"


def run_folder(config: TrainConfig) -> Path:
    """The run's own folder."""
    return runs_folder(config) / config.name


def checkpoint_storage(config: TrainConfig) -> str:
    """The folder or address above `checkpoints/`."""
    storage = config.saving.storage
    if storage is None:
        return str(run_folder(config))
    base = storage.rstrip("/") if "://" in storage else str(Path(storage).expanduser().absolute())
    return f"{base}/{config.name}"


def claim(config: TrainConfig) -> None:
    """Makes the run's folder, or recognises it as this run's."""
    folder = run_folder(config)
    if (folder / CONFIG).exists():
        check_same(read_config(folder / CONFIG), config.to_dict(), folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--runs {runs_folder(config)}: cannot be written ({error.strerror})") from error


def record(config: TrainConfig) -> None:
    """Writes down what the run is made with, once nothing can refuse it any more."""
    write_json(run_folder(config) / CONFIG, config.to_dict())


def read_config(path: Path) -> dict[str, Any]:
    """A saved config as plain values."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a run's config ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a run's config")
    return values


def check_same(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Refuse to mix two different runs in one folder."""
    # Through JSON, which knows no tuples.
    before, now = (flatten(json.loads(json.dumps(values))) for values in (old, new))
    for name in sorted(set(before) | set(now)):
        part_of_identity = name in IDENTITY or name.startswith("flow.")
        if part_of_identity and before.get(name) != now.get(name):
            raise UserError(
                f"{folder} was made with {name} {before.get(name)!r}, this command says {now.get(name)!r}: "
                "choose another --name, or the old value to resume"
            )
