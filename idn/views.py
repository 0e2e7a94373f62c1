"""What pictures show of a flow, as plain arrays."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from idn.curves import Norm
from idn.errors import UserError
from idn.flows.flow import Flow
from idn.flows.inverse import NotInvertedError

GRID = 160
EXTENT = 4.0


def pixels(images: Tensor) -> np.ndarray:
    """Floats in [0, 1] as N x H x W x C bytes."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


@torch.no_grad()
def density_grid(flow: Flow, grid: int = GRID, extent: float = EXTENT) -> np.ndarray:
    """p(x) of a 2-D flow at grid x grid points of [-extent, extent]^2, first index x1."""
    axis = torch.linspace(-extent, extent, grid)
    points = torch.cartesian_prod(axis, axis).to(flow.device)
    density = torch.cat([flow.log_prob(part).exp() for part in points.split(5000)])
    return density.view(grid, grid).cpu().numpy().astype(np.float32)


def draw_samples(flow: Flow, n: int, generator: torch.Generator, temperature: float = 1.0, batch: int = 64) -> Tensor:
    """n samples in batches, with a progress bar where there are several."""
    size = batch if len(flow.shape) == 3 else 4000
    sizes = [min(size, n - first) for first in range(0, n, size)]
    bar = tqdm(sizes, unit="batch", leave=False, disable=len(sizes) == 1)
    with inverse_explained():
        return torch.cat([flow.sample(size, generator, temperature).cpu() for size in bar])


def decoded(flow: Flow, z: Tensor) -> Tensor:
    """F^-1(z)."""
    with inverse_explained():
        return flow.decode(z)


@contextmanager
def inverse_explained() -> Iterator[None]:
    """An inverse that does not converge is the file's fault: one line says so."""
    try:
        yield
    except NotInvertedError as error:
        raise UserError(str(error)) from error


def walk(start: Tensor, end: Tensor, steps: int) -> Tensor:
    """Ways between rows of two matrices, N x steps x d, along which Gaussian vectors keep their typical length.

    >>> walk(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), 3).norm(dim=2).round(decimals=3).tolist()
    [[1.0, 1.0, 1.0]]
    """
    angle = torch.linspace(0, torch.pi / 2, steps, dtype=start.dtype, device=start.device)
    ways = start[:, None] * angle.cos()[:, None] + end[:, None] * angle.sin()[:, None]
    ways[:, -1] = end  # cos(pi/2) is not quite 0
    return ways


@torch.no_grad()
def layer_norms(flow: Flow) -> list[Norm]:
    """Every layer's spectral norm; soft normalisation leaves those below the bound as they are."""
    found = []
    for name, layer in flow.spectral_layers():
        learned = float(layer.sigma)
        found.append(Norm(name, learned, min(learned, layer.coeff), layer.coeff))
    return found
