"""Toy distributions: their scales, their entropies against Monte Carlo, and the endless stream."""

import math

import pytest
import torch

from idn.data import toy
from idn.errors import UserError
from idn.streams import stream


def points(name: str, n: int = 100_000) -> torch.Tensor:
    return toy.sample(name, n, stream(1, name)).double()


def test_circles_have_the_scales_of_the_table() -> None:
    radius = points("circles").norm(dim=1)
    outer = radius[radius > 2.25]
    assert len(outer) == pytest.approx(50_000, rel=0.02)
    # Noise across the circle widens the mean radius: sqrt(r^2 + s^2) to first order.
    assert float(outer.mean()) == pytest.approx(3 + 0.24**2 / 6, abs=0.01)
    assert float(outer.std()) == pytest.approx(0.24, abs=0.01)
    assert float(radius[radius < 2.25].mean()) == pytest.approx(1.5 + 0.24**2 / 3, abs=0.01)


def test_moons_lie_on_their_half_circles() -> None:
    xy = (points("moons") - torch.tensor([-1.0, -0.2])) / 2
    upper = (xy.norm(dim=1) - 1).abs()
    lower = ((xy - torch.tensor([1.0, 0.5])).norm(dim=1) - 1).abs()
    assert float(torch.minimum(upper, lower).max()) < 0.6
    assert float(torch.minimum(upper, lower).pow(2).mean().sqrt()) == pytest.approx(0.1, abs=0.02)


def test_checkerboard_is_uniform_on_its_squares() -> None:
    squares = (points("checkerboard") / 2).floor().long() + 2
    counts = torch.bincount(squares[:, 0] * 4 + squares[:, 1], minlength=16).reshape(4, 4)
    filled = counts[counts > 0]
    assert len(filled) == 8
    assert float((filled.double() / 12_500 - 1).abs().max()) < 0.05
    assert all(bool(counts[i, j]) == ((i + j) % 2 == 0) for i in range(4) for j in range(4))


def nearest_neighbour_entropy(x: torch.Tensor) -> float:
    """Kozachenko and Leonenko's estimate, which knows nothing of how the points were made."""
    n = len(x)
    distances = torch.cat([torch.cdist(part, x).topk(2, largest=False).values[:, 1] for part in x.split(500)])
    return float(2 * distances.log().mean()) + math.log(math.pi * (n - 1)) + 0.5772156649


@pytest.mark.parametrize("name", toy.NAMES)
def test_entropy_agrees_with_an_estimate_from_points(name: str) -> None:
    estimate = nearest_neighbour_entropy(points(name, 5000))
    assert estimate == pytest.approx(toy.entropy(name), abs=0.08)


def test_entropies_of_the_paper() -> None:
    """Circles also from the closed form of a noisy ring's density, integrated over the radius."""
    s, r = 0.24, torch.linspace(0, 6, 60_001, dtype=torch.float64)
    density = sum(
        torch.exp(-((r - ring) ** 2) / (2 * s * s)) * torch.special.i0e(r * ring / s**2) / (4 * math.pi * s * s)
        for ring in (3.0, 1.5)
    )
    ring_entropy = float(torch.trapezoid(-torch.xlogy(density, density) * 2 * math.pi * r, r))
    assert toy.entropy("circles") == pytest.approx(ring_entropy, abs=1e-6)
    assert toy.entropy("checkerboard") == math.log(32)
    assert toy.entropy("moons") == pytest.approx(2.3939, abs=1e-4)


def test_the_stream_is_endless_seeded_and_the_same_for_any_number_of_ranks() -> None:
    alone = toy.ToyStream("moons", batch=12, seed=5)
    shared = [toy.ToyStream("moons", batch=4, rank=rank, world=3, seed=5) for rank in range(3)]
    for _, whole, *parts in zip(range(5), alone, *shared, strict=False):
        assert torch.equal(whole, torch.cat(parts))
    resumed = toy.ToyStream("moons", batch=12, seed=5)
    resumed.load_state_dict(alone.state_dict())
    assert torch.equal(next(iter(resumed)), next(iter(alone)))
    with pytest.raises(UserError, match="seed 5"):
        toy.ToyStream("moons", batch=12, seed=6).load_state_dict(alone.state_dict())


def test_unknown_names_are_told() -> None:
    with pytest.raises(UserError, match=r"'sun'.*circles, checkerboard, moons"):
        toy.sample("sun", 3, stream(0))
