"""From a word of the command line, a run's folder or a flow's file, to the flow and what is known about it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from idn.errors import UserError
from idn.flows.files import EMA_PREFIX, load
from idn.flows.flow import Flow
from idn.memory import keep_freed_memory

RUN_FILES = ("config.json", "metrics.jsonl")
MODEL_TITLES = {"residual": "Residual Flow", "idensenet": "i-DenseNet", "idensenet-lc": "i-DenseNet+LC"}


@dataclass(frozen=True)
class Model:
    """A flow ready for use, and the run that it comes from, if it comes from one."""

    flow: Flow
    path: Path
    """The flow's file."""
    weights: str
    """raw or averaged."""
    run: Path | None
    """The run's folder."""
    config: dict[str, Any]
    """The run's settings; empty for a file that stands alone."""

    @property
    def name(self) -> str:
        return self.run.name if self.run else self.path.stem

    @property
    def title(self) -> str:
        """What a picture of it is called."""
        if not self.config:
            return self.name
        model = self.config["model"]
        return f"{self.config['dataset']}, {MODEL_TITLES.get(model, model)}, size {self.config['size']}"

    def dataset(self, chosen: str | None) -> str:
        """What was asked for, or what the run was trained on."""
        if chosen is None and "dataset" not in self.config:
            raise UserError(f"{self.path} does not say what it was trained on; add --data, for example --data cifar10")
        return chosen or str(self.config["dataset"])

    def seed(self, chosen: int | None) -> int:
        """What was asked for, or the run's own."""
        return int(self.config.get("seed", 0)) if chosen is None else chosen

    def beside(self, name: str) -> Path:
        """Where something made from this flow goes: the run's folder, or the current one."""
        return (self.run or Path()) / name


def find_model(path: Path) -> Path:
    """The flow file that `path` is, or that a run's or a checkpoint's folder holds: the best, else the newest."""
    if not path.is_dir():
        return path
    for found in (path / "flow.safetensors", path / "best.safetensors"):
        if found.is_file():
            return found
    checkpoints = sorted(path.rglob("step-*/flow.safetensors"), key=lambda file: file.parent.name)
    if not checkpoints:
        raise UserError(f"no flow in folder {path}; expected best.safetensors or step-*/flow.safetensors")
    return checkpoints[-1]


def find_run(path: Path) -> Path | None:
    """The run's folder that `path` is or lies in."""
    if (path / "config.json").is_file():
        return path
    parents = path.absolute().parents[:3]
    return next((folder for folder in parents if all((folder / file).is_file() for file in RUN_FILES)), None)


def read_settings(run: Path) -> dict[str, Any]:
    """A run's config.json as plain values."""
    path = run / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict) or not {"dataset", "model", "size"} <= set(values):
        raise UserError(f"{path} is not a run's config: it names no dataset, model and size")
    return values


def has_average(path: Path) -> bool:
    with safetensors.safe_open(path, "pt") as file:
        return any(name.startswith(EMA_PREFIX) for name in file.keys())  # noqa: SIM118


def open_model(path: Path, raw: bool = False) -> Model:
    """The flow of a run or file, on the GPU if there is one, with averaged weights unless `raw`."""
    if not path.exists():
        raise UserError(f"no file or folder {path}; expected a run's folder or a flow's file")
    file = find_model(path)
    keep_freed_memory()
    flow = load(file, ema=not raw).to("cuda" if torch.cuda.is_available() else "cpu")
    run = find_run(path)
    weights = "averaged" if not raw and has_average(file) else "raw"
    return Model(flow, file, weights, run, read_settings(run) if run else {})
