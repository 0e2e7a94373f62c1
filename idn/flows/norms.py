"""The largest singular value of a linear operator, followed from step to step.

Plain power iteration crawls where singular values crowd, and an unconverged estimate lies below the truth, so that
the normalised weight breaks its bound. Here each iteration maximises |A v| over the span of v, of its gradient, and of
a second vector with its gradient and last direction (a locally optimal block conjugate gradient method, LOBPCG).
What may still be missing is known from the residual r = A^T A v - |A v|^2 v.

The second vector is an explorer. A convolution hardly mixes spatial frequencies, so a pattern of another frequency
can outgrow v without ever showing in v's gradient. The explorer climbs on its own, orthogonally to v; it becomes v
when it is larger, and starts anew from a random vector when it has settled below.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


class Tracked(NamedTuple):
    """Right singular vector v, the explorer, and the direction in which the explorer moved last."""

    v: Tensor
    explorer: Tensor
    direction: Tensor


class TopSingular(NamedTuple):
    """|u| = |v| = 1 with A v = sigma u, and the share of sigma that may be missing."""

    u: Tensor
    sigma: Tensor
    missing: Tensor
    tracked: Tracked


SETTLED = 0.02
"""An explorer whose residual is below this share, and that cannot reach v even so, starts anew."""
INDEPENDENT = 1e-5
"""Directions with less than this left beside the others (squared) are roundoff."""


def rows(x: Tensor) -> Tensor:
    """Each row divided by its length; zero stays zero."""
    return x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def unit(x: Tensor) -> Tensor:
    """x / |x|, and zero for zero."""
    return rows(x.reshape(1, -1)).view_as(x)


def best_combinations(basis: Tensor, images: Tensor, count: int) -> Tensor:
    """Coefficients of the `count` orthonormal combinations of `basis` whose images are longest, longest first."""
    size, directions = torch.linalg.eigh(basis @ basis.T)
    scale = torch.where(size > INDEPENDENT, size.clamp_min(INDEPENDENT).rsqrt(), torch.zeros_like(size))
    whiten = (directions * scale).T
    whitened = whiten @ images
    top = torch.linalg.eigh(whitened @ whitened.T).eigenvectors[:, -count:].flip(1)
    return top.T @ whiten


def top_singular(apply: Operator, transpose: Operator, start: Tracked, noise: Tensor, iterations: int) -> TopSingular:
    """Improves v and the explorer by a number of iterations; `noise` is where an explorer starts anew."""
    shape = start.v.shape
    image_shape = apply(start.v[:0]).shape[1:]

    def image(flat: Tensor) -> Tensor:
        return apply(flat.view(-1, *shape[1:])).flatten(1)

    def gradient(vectors: Tensor, images: Tensor) -> Tensor:
        pulled = transpose(images.view(-1, *image_shape)).flatten(1)
        return pulled - images.square().sum(1, keepdim=True) * vectors

    known = rows(torch.cat(start).flatten(1))
    known_images = image(known)
    v, av = known[:2], known_images[:2]
    last, last_image = known[2:], known_images[2:]
    for _ in range(iterations):
        climb = rows(gradient(v, av))
        basis = torch.cat([v, climb, last])
        images = torch.cat([av, image(climb), last_image])  # the old directions' images are known
        mix = best_combinations(basis, images, count=2)
        moved = mix.clone()
        moved[:, :2] = 0
        v, av, last, last_image = mix @ basis, mix @ images, moved @ basis, moved @ images
        length = torch.linalg.vector_norm(last, dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        last, last_image = last / length, last_image / length
    v = rows(v)
    av = image(v)
    square = av.square().sum(1)
    residual = torch.linalg.vector_norm(gradient(v, av), dim=1)
    missing = residual / square.clamp_min(torch.finfo(v.dtype).tiny)
    explored = (missing[1] < SETTLED) & (square[1] + residual[1] < square[0])
    fresh = rows(noise.flatten(1) - (noise.flatten(1) @ v.T) @ v)
    explorer = torch.where(explored, fresh, v[1:])
    direction = torch.where(explored, torch.zeros_like(fresh), last[-1:])
    return TopSingular(
        u=rows(av[:1]).view(1, *image_shape),
        sigma=square[0].sqrt(),
        missing=torch.where(square[0] > 0, torch.sqrt(1 + missing[0]) - 1, torch.zeros_like(square[0])),
        tracked=Tracked(v[:1].view(shape), explorer.view(shape), direction.view(shape)),
    )
