"""The one typed configuration of a run; `tyro` turns its fields and their docstrings into the command line."""

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from idn.errors import UserError
from idn.flows.config import FlowConfig

Precision = Literal["fp32", "bf16", "fp16"]
FLAT = tyro.conf.arg(name="")
"""Sections group the help text; their options carry no prefix."""


@dataclass(frozen=True)
class Optimiser:
    """Adam and everything around the update."""

    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's decay rates."""
    weight_decay: float = 0.0
    """L2 penalty inside Adam."""
    warmup: int = 1000
    """Steps of linear warm-up."""
    decay: Literal["none", "cosine"] = "none"
    """How the learning rate falls to zero by the last step."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    ema: float = 0.999
    """Decay of the averaged weights used for evaluation; 0 turns averaging off."""
    freeze_lc: int = 0
    """Steps before the learnable concatenation starts to learn."""


@dataclass(frozen=True)
class Length:
    """How long to train."""

    epochs: int = 200
    """Passes over the training set (images)."""
    steps: int | None = None
    """Optimiser steps; wins over --epochs."""


@dataclass(frozen=True)
class Data:
    """What a step reads."""

    batch: int = 64
    """Global batch: samples per optimiser step over all workers."""
    accumulation: int = 1
    """Pieces that a worker's share of the batch is cut into, to save memory."""
    split: str = "train"
    """What to train on; train+validation for all training images."""
    loaders: int = 0
    """Reading processes per worker; 0 reads in the worker itself."""
    flip: bool = False
    """Mirror training images at random."""
    resize: int | None = None
    """Resize images to this side length."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """What to do with a sample that cannot be read."""
    limit_validation: int | None = None
    """Validate on at most this many samples."""
    limit_test: int | None = None
    """Test on at most this many samples."""


@dataclass(frozen=True)
class Cluster:
    """Where it runs."""

    workers: str = "auto"
    """Number of workers, a range such as 1:3 for elastic training, or auto: as many as fit and divide the batch."""
    cpus_per_worker: float | None = None
    """CPUs reserved for each worker (default: an equal share of a CPU cluster, 1 beside a GPU)."""
    gpus_per_worker: float | None = None
    """GPUs per worker (default: 1 where the cluster has GPUs, else 0)."""
    wait: float = 0.0
    """Seconds to wait for missing workers or GPUs before giving up."""
    max_failures: int = 3
    """Lost workers to recover from before giving up; -1 for any number."""
    address: str | None = None
    """Ray cluster to join (default: RAY_ADDRESS, else a private one on this machine)."""


@dataclass(frozen=True)
class Engine:
    """How DeepSpeed runs the step."""

    precision: Precision = "fp32"
    """Arithmetic of the convolutions; parameters, norms and every sum stay fp32."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 shards the optimiser, 2 also gradients, 3 also parameters."""
    deepspeed: str | None = None
    """JSON file whose settings win over the generated DeepSpeed config."""
    compile: bool = False
    """Compile elementwise kernels: some seconds at the start, then faster steps; without a compiler nothing changes."""
    recompute: bool = False
    """Recompute each block's activations in the backward pass to save memory."""
    deterministic: bool = False
    """Key noise and probes by a sample's place in the batch: any number of workers gives the same curve."""


@dataclass(frozen=True)
class Saving:
    """What is kept, and where."""

    name: str | None = None
    """Name of the run (default: DATASET-SIZE-MODEL). The same name again resumes."""
    runs: str | None = None
    """Folder of all runs (default: $IDN_RUNS, else ./runs)."""
    storage: str | None = None
    """Where checkpoints go instead of the run's folder: a shared path, s3://... or gs://..."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints to keep; the best weights are kept besides."""


@dataclass(frozen=True)
class Watching:
    """What a person sees."""

    log_every: int = 10
    """Steps between lines of metrics."""
    validate_every: int = 1000
    """Steps between validations with the averaged weights; 0 for none."""
    picture_every: int = 5000
    """Steps between pictures: samples, reconstructions, densities, heat maps; 0 for none."""
    samples: int = 36
    """Images in a sample grid."""


@dataclass(frozen=True)
class TrainConfig:
    """A complete run. Presets build it, the command line changes fields."""

    dataset: Annotated[str, tyro.conf.Fixed]
    """Toy distribution, prepared dataset, folder or URL of shards."""
    model: Annotated[str, tyro.conf.Fixed]
    """residual, idensenet or idensenet-lc."""
    size: Annotated[str, tyro.conf.Fixed]
    """tiny, paper or full."""
    flow: FlowConfig
    """The flow's architecture."""
    seed: int = 0
    """Seed of every random stream, the first weights' included."""
    optimiser: Annotated[Optimiser, FLAT] = Optimiser()
    length: Annotated[Length, FLAT] = Length()
    data: Annotated[Data, FLAT] = Data()
    cluster: Annotated[Cluster, FLAT] = Cluster()
    engine: Annotated[Engine, FLAT] = Engine()
    saving: Annotated[Saving, FLAT] = Saving()
    watching: Annotated[Watching, FLAT] = Watching()

    def __post_init__(self) -> None:
        if self.flow.seed != self.seed:
            object.__setattr__(self, "flow", dataclasses.replace(self.flow, seed=self.seed))

    @property
    def name(self) -> str:
        """The run's name; without one of its own, what it trains."""
        stem = self.dataset.rstrip("/").rsplit("/", 1)[-1] if "/" in self.dataset else self.dataset
        return self.saving.name or f"{stem}-{self.size}-{self.model}"

    @property
    def worker_range(self) -> tuple[int, int] | None:
        """Fewest and most workers; None when the cluster decides."""
        return parse_workers(self.cluster.workers)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Inverse of `to_dict`, also after a trip through JSON."""
        return typing.cast(TrainConfig, _rebuild(cls, values))


def parse_workers(text: str) -> tuple[int, int] | None:
    """
    >>> parse_workers("2"), parse_workers("1:3"), parse_workers("auto")
    ((2, 2), (1, 3), None)
    """
    if text == "auto":
        return None
    fewest, _, most = text.partition(":")
    try:
        low, high = int(fewest), int(most or fewest)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high:
        raise UserError(f"--workers {text}: expected a number, a range such as 1:3, or auto")
    return low, high


def validate(config: TrainConfig) -> TrainConfig:
    """The config itself, or an error for values that cannot work, before anything starts."""
    data, optimiser, watching = config.data, config.optimiser, config.watching
    at_least = [
        ("--batch", data.batch, 1),
        ("--accumulation", data.accumulation, 1),
        ("--loaders", data.loaders, 0),
        ("--epochs", config.length.epochs, 0),
        ("--steps", config.length.steps or 0, 0),
        ("--warmup", optimiser.warmup, 0),
        ("--freeze-lc", optimiser.freeze_lc, 0),
        ("--clip", optimiser.clip, 0),
        ("--weight-decay", optimiser.weight_decay, 0),
        ("--wait", config.cluster.wait, 0),
        ("--max-failures", config.cluster.max_failures, -1),
        ("--checkpoint-every", config.saving.checkpoint_every, 1),
        ("--keep", config.saving.keep, 1),
        ("--log-every", watching.log_every, 1),
        ("--validate-every", watching.validate_every, 0),
        ("--picture-every", watching.picture_every, 0),
        ("--samples", watching.samples, 1),
    ]
    for option, value, least in at_least:
        if value < least:
            raise UserError(f"{option} {value}: expected at least {least}")
    if not optimiser.lr > 0:
        raise UserError(f"--lr {optimiser.lr}: expected a number above 0")
    if not 0 <= optimiser.ema < 1:
        raise UserError(f"--ema {optimiser.ema}: expected a decay from 0 (off) up to, not including, 1")
    if not all(0 <= beta < 1 for beta in optimiser.betas):
        raise UserError(f"--betas {optimiser.betas}: expected two decays from 0 up to, not including, 1")
    if "/" in config.name or config.name in ("", ".", ".."):
        raise UserError(f"--name {config.name}: expected a name without '/', it becomes a folder")
    workers = config.worker_range
    if workers:
        for count in range(workers[0], workers[1] + 1):
            check_batch(config, count)
    return config


def check_batch(config: TrainConfig, workers: int) -> None:
    """The global batch must split evenly, or ranks would weigh samples differently."""
    pieces = workers * config.data.accumulation
    if config.data.batch % pieces:
        parts = f"{workers} workers x {config.data.accumulation} accumulation"
        raise UserError(
            f"--batch {config.data.batch} does not divide by {pieces} ({parts}): choose a multiple of {pieces}"
        )


def _rebuild(kind: Any, value: Any) -> Any:
    """Give JSON's lists and dictionaries their declared types back."""
    if kind is FlowConfig:
        return FlowConfig.from_dict(value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise UserError(f"config: unknown field {sorted(unknown)[0]!r}: written by another version?")
        return typing.cast(Any, kind)(**{name: _rebuild(hints[name], part) for name, part in value.items()})
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(kind) if part is not type(None)]
        return None if value is None else _rebuild(inner[0], value)
    if origin is tuple:
        return tuple(value)
    return value
