"""Checkpoints: what is saved, how it is proven whole, and how any number of workers takes it up again.

    step-000001200-1a2b3c/
      flow.safetensors                       weights, buffers, averages and config: also a file for `idn.load`
      optimizer-00000-of-00002.safetensors   one rank's fragments of Adam's moments, by parameter and offset
      state.json                             step, data position, loss scale, run config
      rank-00000-of-00002.json               sizes and hashes of what the rank wrote; written last

The best weights so far stand beside the folder of checkpoints, as best.safetensors.

A checkpoint counts only when every rank's list is there and fits. Random streams need no saving: each is a function of
(seed, rank, step).
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.fs
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from idn.errors import UserError
from idn.files import write_json
from idn.flows.files import load
from idn.flows.flow import Flow
from idn.train.ema import AveragedWeights
from idn.train.engine import MOMENTS, Engine

FLOW = "flow.safetensors"
STATE = "state.json"
BEST = "best.safetensors"
NAME = re.compile(r"step-(\d{9})-\w+")


@dataclass
class Progress:
    """Where a run stands, apart from tensors."""

    step: int = 0
    updates: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    best: float | None = None
    last_validation: float | None = None
    feed: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The newest lines of metrics.jsonl: a driver may die between taking and writing them."""


@dataclass
class Snapshot:
    """A checkpoint in memory, which training no longer touches."""

    progress: Progress
    config: dict[str, Any]
    rank: int
    workers: int
    fragments: dict[str, Tensor]
    flow: Flow | None
    ema: dict[str, Tensor]
    is_best: bool


def checkpoint_name(step: int, attempt: str) -> str:
    """The attempt keeps files of an interrupted save apart from those of the next one."""
    return f"step-{step:09d}-{attempt}"


class Snapshotter:
    """Copies the live state into memory that is made once, so that a copy costs no more than its bytes."""

    def __init__(self, flow: Flow, config: dict[str, Any], rank: int, workers: int) -> None:
        self.config, self.rank, self.workers = config, rank, workers
        self.shadow = Flow(flow.config, converge=False) if rank == 0 else None

    def take(self, engine: Engine, ema: AveragedWeights, progress: Progress, is_best: bool) -> Snapshot:
        """A copy of everything that this rank writes. All ranks take part: ZeRO 3 gathers the parameters."""
        with engine.gathered():
            if self.shadow is not None:
                self.shadow.load_state_dict(engine.flow.state_dict())
        averages = {name: tensor.to("cpu", copy=True) for name, tensor in ema.shadow.items()} if self.shadow else {}
        fragments = {}
        # Without ZeRO all ranks hold the same moments, and one writes them.
        if engine.stage > 0 or self.rank == 0:
            for name, start, moments in engine.fragments():
                for key, view in moments.items():
                    fragments[f"{key}@{start}@{name}"] = view.to("cpu", copy=True)
        return Snapshot(progress, self.config, self.rank, self.workers, fragments, self.shadow, averages, is_best)


def write(snapshot: Snapshot, filesystem: pyarrow.fs.FileSystem, folder: str, name: str) -> str:
    """Writes one rank's part under `folder`; returns the checkpoint's path. Its list of files comes last."""
    target = f"{folder}/{name}"
    rank = f"{snapshot.rank:05d}-of-{snapshot.workers:05d}"
    with _staging(filesystem, target) as local:
        files = [f"optimizer-{rank}.safetensors"]
        _save_tensors(snapshot.fragments, local / files[0])
        if snapshot.flow is not None:
            files += [FLOW, STATE]
            snapshot.flow.save(local / FLOW, snapshot.ema or None)
            write_json(local / STATE, {"progress": vars(snapshot.progress), "config": snapshot.config})
        listing = {file: {"bytes": (local / file).stat().st_size, "sha256": _sha256(local / file)} for file in files}
        for file in files:
            _publish(local / file, filesystem, f"{target}/{file}")
        write_json(local / f"rank-{rank}.json", {"step": snapshot.progress.step, "files": listing})
        _publish(local / f"rank-{rank}.json", filesystem, f"{target}/rank-{rank}.json")
        if snapshot.is_best and snapshot.flow is not None:
            snapshot.flow.save(local / BEST, snapshot.ema or None)
            _publish(local / BEST, filesystem, f"{folder.rsplit('/', 1)[0]}/{BEST}")
    return target


def newest(filesystem: pyarrow.fs.FileSystem, folder: str) -> str | None:
    """Path of the newest checkpoint that is whole, byte for byte."""
    for path in reversed(list_checkpoints(filesystem, folder)):
        if is_whole(filesystem, path, hashes=True):
            return path
    return None


def list_checkpoints(filesystem: pyarrow.fs.FileSystem, folder: str) -> list[str]:
    """Paths of all checkpoint folders, whole or not, oldest first."""
    selector = pyarrow.fs.FileSelector(folder, allow_not_found=True)
    found = [info for info in filesystem.get_file_info(selector) if NAME.fullmatch(info.base_name)]
    return [info.path for info in sorted(found, key=lambda info: info.base_name)]


def is_whole(filesystem: pyarrow.fs.FileSystem, path: str, hashes: bool = False) -> bool:
    """Whether every rank's list is there and every file has its size (and hash)."""
    infos = {info.base_name: info for info in filesystem.get_file_info(pyarrow.fs.FileSelector(path))}
    lists = [name for name in infos if name.startswith("rank-")]
    if not lists or len(lists) != int(lists[0].removesuffix(".json").rsplit("-", 1)[1]):
        return False
    for name in lists:
        with filesystem.open_input_stream(f"{path}/{name}") as file:
            try:
                listing = json.loads(file.read())["files"]
            except (ValueError, KeyError):
                return False
        for member, facts in listing.items():
            if member not in infos or infos[member].size != facts["bytes"]:
                return False
            if hashes and _remote_sha256(filesystem, f"{path}/{member}") != facts["sha256"]:
                return False
    return True


class Restored:
    """A checkpoint read back, in terms into which the number of workers that wrote it does not enter."""

    def __init__(self, filesystem: pyarrow.fs.FileSystem, path: str) -> None:
        self.path = path
        with _local_copy(filesystem, path) as local:
            state = json.loads((local / STATE).read_text())
            self.progress = Progress(**state["progress"])
            self.config: dict[str, Any] = state["config"]
            self.flow = load(local / FLOW, ema=False)
            self.ema = _read_ema(local / FLOW)
            self._shards = [_read_tensors(file) for file in sorted(local.glob("optimizer-*.safetensors"))]
        # Noted now: ZeRO 3 leaves parameters empty.
        self._sizes = {name: p.numel() for name, p in self.flow.named_parameters() if p.requires_grad}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Adam's moments of every parameter, whole and flat."""
        sizes = self._sizes
        whole = {name: {key: torch.empty(size) for key in MOMENTS} for name, size in sizes.items()}
        seen = dict.fromkeys(sizes, 0)
        for shard in self._shards:
            for label, piece in shard.items():
                key, start, name = label.split("@", 2)
                whole[name][key][int(start) : int(start) + piece.numel()] = piece
                seen[name] += piece.numel()
        for name, size in sizes.items():
            if seen[name] != size * len(MOMENTS):
                raise UserError(f"checkpoint {self.path}: the optimiser state of {name} is incomplete")
        return whole


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.part")
    save_file(tensors, temporary)
    temporary.replace(path)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _read_ema(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.startswith("ema/")]  # noqa: SIM118
        return {name.removeprefix("ema/"): file.get_tensor(name) for name in names}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remote_sha256(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open_input_stream(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _staging(filesystem: pyarrow.fs.FileSystem, target: str) -> Iterator[Path]:
    """Where files are written first: the place itself on a local disk, a temporary folder for remote storage."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        Path(target).mkdir(parents=True, exist_ok=True)
        yield Path(target)
    else:
        with tempfile.TemporaryDirectory(prefix="idn-checkpoint-") as folder:
            yield Path(folder)


def _publish(local: Path, filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Put a finished file in its place; a reader never sees a part of it."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        if local != Path(path):
            local.replace(path)
        return
    filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
    # Object stores show a file when it is complete.
    with local.open("rb") as source, filesystem.open_output_stream(path) as sink:
        while block := source.read(1 << 22):
            sink.write(block)


@contextmanager
def _local_copy(filesystem: pyarrow.fs.FileSystem, path: str) -> Iterator[Path]:
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="idn-checkpoint-") as folder:
        pyarrow.fs.copy_files(
            path, folder, source_filesystem=filesystem, destination_filesystem=pyarrow.fs.LocalFileSystem()
        )
        yield Path(folder)


def tidy(filesystem: pyarrow.fs.FileSystem, folder: str) -> None:
    """Before and after a run: drop what a crash cut short, and checkpoints that Ray's index has lost sight of."""
    known = _indexed(filesystem, folder)
    found = list_checkpoints(filesystem, folder)
    whole = [path for path in found if is_whole(filesystem, path)]
    for path in found:
        if path not in whole or (path.rsplit("/", 1)[1] not in known and path != whole[-1]):
            filesystem.delete_dir(path)


def _indexed(filesystem: pyarrow.fs.FileSystem, folder: str) -> list[str]:
    """Names in Ray's index, which is written in place: one that is cut short or wrong is deleted."""
    index = f"{folder}/checkpoint_manager_snapshot.json"
    if filesystem.get_file_info(index).type == pyarrow.fs.FileType.NotFound:
        return []
    with filesystem.open_input_stream(index) as file:
        content = file.read()
    try:
        names = [entry["checkpoint_dir_name"] for entry in json.loads(content)["checkpoint_results"]]
        if all(is_whole(filesystem, f"{folder}/{name}") for name in names):
            return names
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        pass
    filesystem.delete_file(index)
    return []
