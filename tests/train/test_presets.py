"""Two real steps of every preset of the paper, full sizes included: `just test-presets`."""

import math
from typing import Any

import pytest

from idn.flows.build import MODELS
from tests.train import loops

TOYS = ("circles", "checkerboard", "moons")
IMAGES = {"mnist": "mnist-sample", "cifar10": "cifar10-sample"}


def two_steps(settings: dict[str, Any]) -> dict[str, Any]:
    import tempfile

    found = {}
    for dataset in settings["datasets"]:
        for model in settings.get("models", MODELS):
            config = loops.two_steps_of(dataset, model, settings["size"])
            with tempfile.TemporaryDirectory() as folder:
                result = loops.run(config, folder)
            found[f"{dataset} {model}"] = result["losses"]
    return found


@pytest.mark.parametrize("size", ["tiny", "paper"])
def test_toy_presets_take_two_steps(in_workers: Any, size: str) -> None:
    check(in_workers(two_steps, 1, datasets=TOYS, size=size), 9)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "paper", "full"])
@pytest.mark.parametrize("dataset", IMAGES.values())
@pytest.mark.parametrize("model", MODELS)
def test_image_presets_take_two_steps(in_workers: Any, dataset: str, model: str, size: str) -> None:
    check(in_workers(two_steps, 1, datasets=(dataset,), models=(model,), size=size), 1)


@pytest.mark.slow
def test_toy_presets_of_100_blocks_take_two_steps(in_workers: Any) -> None:
    check(in_workers(two_steps, 1, datasets=TOYS, size="full"), 9)


def check(found: dict[str, dict[int, float]], count: int) -> None:
    assert len(found) == count
    for name, losses in found.items():
        assert sorted(losses) == [1, 2], name
        assert 0 < losses[1] < 10, (name, losses)
        # ActNorm starts from two images here, so that the next two look unlikely; not finite they must not be.
        assert math.isfinite(losses[2]), (name, losses)
