"""Two-dimensional toy distributions, their entropies, and an endless seeded stream of points.

Most are a centre on a curve plus Gaussian noise, so one sampler and one numeric entropy serve them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from idn.errors import UserError
from idn.streams import stream

Centre = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Toy(Protocol):
    """A distribution over the plane that can be sampled and whose entropy is known."""

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """n points as an (n, 2) float64 tensor."""

    def entropy(self) -> float:
        """Differential entropy in nats: no model's expected negative log-likelihood goes lower."""


@dataclass(frozen=True)
class Curve:
    """`centre(component, t) + noise * N(0, I)`: a fair choice of component, t uniform in [0, 1)."""

    components: int
    centre: Centre
    noise: float

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        component = torch.randint(self.components, (n,), generator=generator).double()
        t = torch.rand(n, generator=generator, dtype=torch.float64)
        noise = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        return torch.stack(self.centre(component, t), 1) + self.noise * noise

    def entropy(self, nodes: int = 1000, grid: int = 800) -> float:
        """The integral of -p log p: midpoints along the curve, a grid that reaches 7 sigma beyond it."""
        t = ((torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes).repeat(self.components)
        component = torch.arange(self.components, dtype=torch.float64).repeat_interleave(nodes)
        reach = 7 * self.noise
        gaussians, area = [], 1.0
        for centre in self.centre(component, t):
            low, high = float(centre.min()) - reach, float(centre.max()) + reach
            axis = torch.linspace(low, high, grid, dtype=torch.float64)
            distance = (axis[:, None] - centre) / self.noise
            gaussians.append(torch.exp(-(distance**2) / 2) / (self.noise * math.sqrt(2 * math.pi)))
            area *= (high - low) / (grid - 1)
        # A round Gaussian factorises over the two axes, so the sum over the curve is a matrix product.
        density = gaussians[0] @ gaussians[1].T / len(t)
        return float(-torch.xlogy(density, density).sum()) * area


class Checkerboard:
    """Uniform on 8 of 16 squares of side 2, an area of 32."""

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        u = torch.rand(n, 2, generator=generator, dtype=torch.float64)
        down = torch.randint(2, (n,), generator=generator)
        x1 = 4 * u[:, 0] - 2
        x2 = u[:, 1] - 2 * down + x1.floor() % 2
        return 2 * torch.stack([x1, x2], 1)

    def entropy(self) -> float:
        return math.log(32)


class Pinwheel:
    """Five Gaussian arms, each point then turned by an angle that grows with its radius.

    That turn keeps areas, so the entropy is that of the straight arms.
    """

    arms, radial, tangential = 5, 0.5, 0.16

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        arm = torch.randint(self.arms, (n,), generator=generator)
        spread = torch.tensor([self.radial, self.tangential], dtype=torch.float64)
        x, y = (torch.randn(n, 2, generator=generator, dtype=torch.float64) * spread).unbind(1)
        radius, angle = torch.hypot(x + 2, y), torch.atan2(y, x + 2)
        angle = angle + 2 * math.pi / self.arms * arm + torch.exp(radius / 2) / 2
        return torch.stack(_polar(radius, angle), 1)

    def entropy(self, grid: int = 1200) -> float:
        axis = torch.linspace(-6, 6, grid, dtype=torch.float64)
        x, y = torch.meshgrid(axis, axis, indexing="ij")
        density = torch.zeros_like(x)
        for arm in range(self.arms):
            cos, sin = math.cos(2 * math.pi / self.arms * arm), math.sin(2 * math.pi / self.arms * arm)
            along, across = cos * x + sin * y - 2, cos * y - sin * x
            density += torch.exp(-((along / self.radial) ** 2 + (across / self.tangential) ** 2) / 2)
        density /= self.arms * 2 * math.pi * self.radial * self.tangential
        return float(-torch.xlogy(density, density).sum() * (axis[1] - axis[0]) ** 2)


def _polar(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    return radius * angle.cos(), radius * angle.sin()


def _circles(component: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return _polar(3 - 1.5 * component, 2 * math.pi * t)


def _rings(component: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return _polar(0.75 * (component + 1), 2 * math.pi * t)


def _moons(component: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _polar(torch.ones_like(t), math.pi * t)
    lower = component == 1
    return 2 * torch.where(lower, 1 - x, x) - 1, 2 * torch.where(lower, 0.5 - y, y) - 0.2


def _gaussians(component: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return _polar(torch.full_like(t, 2 * math.sqrt(2)), math.pi / 4 * component)


def _spirals(component: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    angle = 3 * math.pi * t.sqrt()
    return _polar(angle / 3, angle + math.pi * component)


def _swiss_roll(component: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    angle = 1.5 * math.pi * (1 + 2 * t)
    return _polar(angle / 4, angle)


TOYS: dict[str, Toy] = {
    "circles": Curve(2, _circles, 0.24),
    "checkerboard": Checkerboard(),
    "moons": Curve(2, _moons, 0.2),
    "8gaussians": Curve(8, _gaussians, 0.35),
    "pinwheel": Pinwheel(),
    "2spirals": Curve(2, _spirals, 0.1),
    "swissroll": Curve(1, _swiss_roll, 0.2),
    "rings": Curve(4, _rings, 0.08),
}
NAMES = tuple(TOYS)


def _toy(name: str) -> Toy:
    if name not in TOYS:
        raise UserError(f"unknown toy distribution {name!r}: choose one of {', '.join(NAMES)}")
    return TOYS[name]


def sample(name: str, n: int, generator: torch.Generator) -> Tensor:
    """n points of the named distribution, (n, 2) float32.

    >>> sample("moons", 5, stream(0, "example")).shape
    torch.Size([5, 2])
    """
    return _toy(name).sample(n, generator).float()


@lru_cache
def entropy(name: str) -> float:
    """Differential entropy in nats, exact for the checkerboard, else integrated to five digits.

    >>> [round(entropy(name), 3) for name in ("circles", "checkerboard", "moons")]
    [3.268, 3.466, 2.394]
    """
    return _toy(name).entropy()


class ToyStream:
    """Endless batches of new points; step k of a global batch is the same for any number of ranks.

    >>> points = ToyStream("circles", batch=4, seed=7)
    >>> next(iter(points)).shape, points.state_dict()
    (torch.Size([4, 2]), {'toy': 'circles', 'seed': 7, 'step': 1})
    """

    def __init__(self, name: str, batch: int, rank: int = 0, world: int = 1, seed: int = 0) -> None:
        if batch < 1 or not 0 <= rank < world:
            raise UserError(f"batch {batch}, rank {rank} of {world}: need batch >= 1 and 0 <= rank < world")
        _toy(name)
        self.name, self.batch, self.rank, self.world, self.seed = name, batch, rank, world, seed
        self.step = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            generator = stream(self.seed, "toy", self.name, self.step)
            points = sample(self.name, self.batch * self.world, generator)
            self.step += 1
            yield points[self.rank * self.batch : (self.rank + 1) * self.batch]

    def state_dict(self) -> dict[str, int | str]:
        return {"toy": self.name, "seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        if (state["toy"], state["seed"]) != (self.name, self.seed):
            raise UserError(
                f"the saved position is of {state['toy']} with seed {state['seed']}, "
                f"this stream is {self.name} with seed {self.seed}"
            )
        self.step = int(state["step"])
