"""The largest singular value of a linear operator, followed from step to step.

Plain power iteration crawls where singular values crowd, and an unconverged estimate lies below the truth, so that
the normalised weight breaks its bound. Here each iteration costs the same two products, but maximises |A v| over
the span of v, the gradient and the last direction (the locally optimal conjugate gradient method, LOBPCG), and what
may still be missing is known from the residual r = A^T A v - |A v|^2 v.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


class TopSingular(NamedTuple):
    """The pair u, v with |u| = |v| = 1 and A v = sigma u, and a bound on what sigma misses, relative to it."""

    u: Tensor
    v: Tensor
    sigma: Tensor
    missing: Tensor


LEAST = 1e-3
"""A unit vector that keeps less than this of itself beside the others adds roundoff rather than a direction."""


def unit(x: Tensor) -> Tensor:
    """x / |x|, and zero for zero."""
    return x / torch.linalg.vector_norm(x).clamp_min(torch.finfo(x.dtype).tiny)


def inverse_size(x: Tensor) -> Tensor:
    """1 / |x|, or zero where little of a unit vector is left."""
    size = torch.linalg.vector_norm(x)
    return torch.where(size > LEAST, 1 / size.clamp_min(LEAST), torch.zeros_like(size))


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def top_singular(apply: Operator, transpose: Operator, v: Tensor, noise: Tensor, iterations: int) -> TopSingular:
    """Improves the right singular vector v by a number of iterations.

    `noise` is any fixed random vector: mixed into the first direction, it finds a larger singular value that
    has come up in a place where v has no component at all.
    """
    v = unit(v)
    av = apply(v)
    last: tuple[Tensor, Tensor] | None = None
    for iteration in range(iterations):
        direction = unit(transpose(av) - dot(av, av) * v)
        if iteration == 0:
            direction = unit(direction + 0.1 * noise)
        # A new direction costs one product; the old ones' images are known.
        direction = direction - dot(direction, v) * v
        direction = direction * inverse_size(direction)
        basis, images = [v, direction], [av, apply(direction)]
        if last is not None:
            rest, image = last
            for axis, axis_image in zip(basis, images, strict=True):
                overlap = dot(rest, axis)
                rest, image = rest - overlap * axis, image - overlap * axis_image
            factor = inverse_size(rest)
            basis.append(rest * factor)
            images.append(image * factor)
        stacked = torch.stack([image.flatten() for image in images])
        weights = torch.linalg.eigh(stacked @ stacked.T).eigenvectors[:, -1]
        step = sum(w * axis for w, axis in zip(weights[1:], basis[1:], strict=True))
        step_image = sum(w * image for w, image in zip(weights[1:], images[1:], strict=True))
        size = torch.linalg.vector_norm(step).clamp_min(torch.finfo(v.dtype).tiny)
        last = (step / size, step_image / size)
        v, av = weights[0] * v + step, weights[0] * av + step_image
        size = torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny)
        v, av = v / size, av / size
    av = apply(v)
    sigma = torch.linalg.vector_norm(av)
    residual = torch.linalg.vector_norm(transpose(av) - sigma**2 * v)
    missing = torch.sqrt(1 + residual / (sigma**2).clamp_min(torch.finfo(v.dtype).tiny)) - 1
    return TopSingular(unit(av), v, sigma, torch.where(sigma > 0, missing, torch.zeros_like(missing)))
