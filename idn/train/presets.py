"""Every cell of the paper's tables as a named function that returns a complete config."""

from collections.abc import Callable
from dataclasses import replace

from idn.errors import UserError
from idn.flows.build import IMAGES, MODELS, SIZES, TOY, make_config
from idn.train.config import Data, Engine, Length, Optimiser, Saving, TrainConfig, Watching

Preset = Callable[[str, str], TrainConfig]

PAPER_DATASETS = ("circles", "checkerboard", "moons", "mnist", "cifar10")


def toy_10(dataset: str, model: str) -> TrainConfig:
    """10 blocks, 50,000 steps of 500 new points."""
    return TrainConfig(
        dataset=dataset,
        model=model,
        size="paper",
        flow=make_config(dataset, model, "paper"),
        optimiser=Optimiser(betas=(0.9, 0.999), weight_decay=1e-5, warmup=0, clip=0.0, ema=0.0),
        length=Length(steps=50_000),
        data=Data(batch=500, limit_validation=10_000, limit_test=100_000),
        saving=Saving(checkpoint_every=2000),
        engine=Engine(compile=True),
        watching=Watching(log_every=50, validate_every=2000, picture_every=10_000),
    )


def toy_100(dataset: str, model: str) -> TrainConfig:
    """100 blocks of the same branch."""
    return replace(toy_10(dataset, model), size="full", flow=make_config(dataset, model, "full"))


def toy_tiny(dataset: str, model: str) -> TrainConfig:
    """4 narrow blocks and 600 steps: under two minutes on 2 cores."""
    return replace(
        toy_10(dataset, model),
        size="tiny",
        flow=make_config(dataset, model, "tiny"),
        length=Length(steps=600),
        data=Data(batch=256, limit_validation=2000, limit_test=10_000),
        saving=Saving(checkpoint_every=200),
        engine=Engine(),
        watching=Watching(log_every=10, validate_every=200, picture_every=300),
    )


def cifar10_4(dataset: str, model: str) -> TrainConfig:
    """4-4-4 blocks, 200 epochs of batch 64, mirrored at random."""
    return TrainConfig(
        dataset=dataset,
        model=model,
        size="paper",
        flow=make_config(dataset, model, "paper"),
        data=Data(batch=64, flip=True, loaders=1),
        engine=Engine(compile=True),
    )


def cifar10_16(dataset: str, model: str) -> TrainConfig:
    """16-16-16 blocks, CLipSwish for i-DenseNets."""
    return replace(cifar10_4(dataset, model), size="full", flow=make_config(dataset, model, "full"))


def cifar10_tiny(dataset: str, model: str) -> TrainConfig:
    """A few narrow blocks and 120 steps: under two minutes on 2 cores."""
    return replace(
        cifar10_4(dataset, model),
        size="tiny",
        flow=make_config(dataset, model, "tiny"),
        optimiser=Optimiser(warmup=20, ema=0.95),
        length=Length(steps=120),
        data=Data(batch=32, flip=True, limit_validation=64, limit_test=256),
        saving=Saving(checkpoint_every=40),
        engine=Engine(),
        watching=Watching(log_every=5, validate_every=60, picture_every=60, samples=16),
    )


def mnist_4(dataset: str, model: str) -> TrainConfig:
    """4-4-4 blocks on digits resized to 32x32, 200 epochs of batch 64."""
    return replace(cifar10_4(dataset, model), data=Data(batch=64, resize=32, loaders=1))


def mnist_16(dataset: str, model: str) -> TrainConfig:
    """16-16-16 blocks."""
    return replace(mnist_4(dataset, model), size="full", flow=make_config(dataset, model, "full"))


def mnist_tiny(dataset: str, model: str) -> TrainConfig:
    """A few narrow blocks and 120 steps: under two minutes on 2 cores."""
    tiny = cifar10_tiny(dataset, model)
    return replace(tiny, data=replace(tiny.data, flip=False, resize=32))


PRESETS: dict[tuple[str, str], Preset] = {
    ("toy", "tiny"): toy_tiny,
    ("toy", "paper"): toy_10,
    ("toy", "full"): toy_100,
    ("mnist", "tiny"): mnist_tiny,
    ("mnist", "paper"): mnist_4,
    ("mnist", "full"): mnist_16,
    ("cifar10", "tiny"): cifar10_tiny,
    ("cifar10", "paper"): cifar10_4,
    ("cifar10", "full"): cifar10_16,
}


def family(dataset: str) -> str:
    """The settings that a dataset shares: toy, mnist or cifar10. Unknown names and addresses are colour images."""
    if dataset in TOY:
        return "toy"
    return "mnist" if "mnist" in dataset.rsplit("/", 1)[-1] else "cifar10"


def preset(dataset: str, model: str = "idensenet-lc", size: str = "paper") -> TrainConfig:
    """The complete config of a run by name.

    >>> preset("cifar10", "idensenet", "full").flow.blocks
    (16, 16, 16)
    """
    if model not in MODELS:
        raise UserError(f"--model {model}: expected one of {', '.join(MODELS)}")
    if size not in SIZES:
        raise UserError(f"--size {size}: expected one of {', '.join(SIZES)}")
    make = PRESETS[family(dataset), size]
    if dataset in TOY + IMAGES:
        return make(dataset, model)
    if "/" not in dataset:
        raise UserError(
            f"dataset {dataset}: expected one of {', '.join(TOY + IMAGES)}, or the folder or URL of prepared shards"
        )
    return replace(make(family(dataset), model), dataset=dataset)
