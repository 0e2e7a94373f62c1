"""What tests run inside real Ray Train workers: many short runs per worker group, since starting one is slow."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch
from torch import Tensor

from idn.train import checkpoint
from idn.train.config import TrainConfig
from idn.train.group import Group, bit_sum
from idn.train.presets import preset
from idn.train.session import Session, open_session
from idn.train.watch import FiniteWatch
from idn.train.worker import NotFinite, train

LOCAL = pyarrow.fs.LocalFileSystem()


class LocalPort:
    """Keeps records, writes checkpoints at once, and asks to stop after a number of steps."""

    def __init__(self, folder: str, stop_at: int | None = None) -> None:
        self.folder, self.stop_at = folder, stop_at
        self.records: list[dict[str, Any]] = []
        self.steps = 0

    def send(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def stop_wanted(self) -> int:
        self.steps += 1
        return int(self.steps == self.stop_at)

    def save(self, snapshot: checkpoint.Snapshot, name: str, metrics: dict[str, Any]) -> None:
        checkpoint.write(snapshot, LOCAL, self.folder, name)

    def flush(self) -> None:
        pass


def tiny(dataset: str = "cifar10-sample", **options: Any) -> TrainConfig:
    """A small run; options are fields of the config's sections, wherever they are."""
    base = preset(dataset, options.pop("model", "idensenet-lc"), "tiny")
    if dataset == "cifar10-sample":
        # Real images, but small enough for dozens of runs.
        small = dataclasses.replace(base.flow, shape=(3, 8, 8), blocks=(1, 1), growth=8, fc_stem=8, fc_growth=4)
        base = dataclasses.replace(base, flow=small, data=dataclasses.replace(base.data, resize=8))
    quiet = {"log_every": 1, "validate_every": 0, "picture_every": 0, "checkpoint_every": 10**6, "batch": 8}
    quiet |= {"limit_test": 8, "limit_validation": 8, "warmup": 2, "workers": "auto"}
    changed = {}
    for section in ("optimiser", "length", "data", "cluster", "engine", "saving", "watching"):
        part = getattr(base, section)
        names = {f.name for f in dataclasses.fields(part)}
        changed[section] = dataclasses.replace(part, **{k: v for k, v in (quiet | options).items() if k in names})
    rest = {name: value for name, value in options.items() if name in ("seed", "flow")}
    return dataclasses.replace(base, **changed, **rest)


def two_steps_of(dataset: str, model: str, size: str) -> TrainConfig:
    """A preset as it is, but for its batch and length."""
    base = preset(dataset, model, size)
    few = {
        "batch": 2 if base.flow.logit_alpha is not None else 50,
        "loaders": 0,
        "limit_test": 2,
        "limit_validation": 2,
    }
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, **few),
        length=dataclasses.replace(base.length, steps=2),
        watching=dataclasses.replace(base.watching, log_every=1, validate_every=0, picture_every=0),
    )


def group() -> Group:
    context = ray.train.get_context()
    return Group(context.get_world_rank(), context.get_world_size(), torch.device("cpu"))


def run(config: TrainConfig, folder: str, stop_at: int | None = None) -> dict[str, Any]:
    """One run from its newest checkpoint to its end or to `stop_at` steps; what it showed and left behind."""
    session = open_session(config, group(), LOCAL, folder)
    port = LocalPort(folder, stop_at)
    try:
        outcome = train(session, port)
    except NotFinite as error:
        return {"error": str(error), **left_behind(session)}
    finally:
        session.watch.close()
    metrics = [record for record in port.records if record["kind"] == "metrics"]
    return {
        "outcome": outcome,
        "losses": {record["step"]: record["value"] for record in metrics},
        "norms": {record["step"]: record["gradient_norm"] for record in metrics},
        "skipped": sum(record["skipped"] for record in metrics),
        "scale": session.scale.value,
        **left_behind(session),
    }


def left_behind(session: Session) -> dict[str, Any]:
    """Exact fingerprints of weights, buffers, averages and moments."""
    with session.engine.gathered():
        state = {name: int(bit_sum(tensor)) for name, tensor in session.flow.state_dict().items()}
    state |= {f"ema/{name}": int(bit_sum(tensor)) for name, tensor in session.ema.shadow.items()}
    for name, _, moments in session.engine.fragments():
        state |= {f"{key}/{name}": int(bit_sum(view)) for key, view in moments.items()}
    return {"state": state}


def run_broken(folder: Path, rank: int, at_step: int) -> dict[str, Any]:
    """A run in which one rank's gradient of one weight turns into NaN at a step."""
    session = open_session(tiny("cifar10-sample", steps=5), group(), LOCAL, str(folder / "broken"))
    before: dict[str, Any] = {}

    def spoil(gradient: Tensor) -> Tensor:
        if session.progress.step != at_step:
            return gradient
        before.update(left_behind(session)["state"])
        return gradient * float("nan") if session.group.rank == rank else gradient

    # Before the watch's own hooks, as a real fault would be.
    session.watch.close()
    weight = session.flow.blocks[0].branch.get_parameter("parts.0.layer.weight")
    weight.register_hook(spoil)
    session.watch = FiniteWatch(session.flow)
    try:
        train(session, LocalPort(str(folder / "broken")))
    except NotFinite as error:
        return {"error": str(error), "state before": before, **left_behind(session)}
    return {"error": "none"}


def copy(source: Path, target: Path) -> Path:
    """Rank 0 copies a run's folder for all."""
    if group().rank == 0:
        shutil.copytree(source, target)
    group().gather([0.0])
    return target


def only(part: Callable[[Path], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A loop that makes a single run."""
    return lambda settings: {part.__name__: part(Path(settings["folder"]))}


def interrupted(config: TrainConfig, folder: Path, stop_at: int) -> dict[str, Any]:
    """The same run stopped after `stop_at` steps and taken up again by new objects."""
    run(config, str(folder), stop_at)
    return run(config, str(folder))
