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


def unit(x: Tensor) -> Tensor:
    """x / |x|, and zero for zero."""
    return x / torch.linalg.vector_norm(x).clamp_min(torch.finfo(x.dtype).tiny)


def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def top_singular(
    apply: Operator, transpose: Operator, v: Tensor, noise: Tensor, iterations: int
) -> TopSingular:
    """Improves the right singular vector v by a number of iterations.

    `noise` is any fixed random vector: mixed into the first direction, it finds a larger singular value that
    has come up in a place where v has no component at all.
    """
    v = unit(v)
    av = apply(v)
    last: tuple[Tensor, Tensor] | None = None
    for iteration in range(iterations):
        direction = transpose(av) - dot(av, av) * v
        if iteration == 0:
            direction = unit(direction) + 0.1 * noise
        # A new direction costs one product; the old ones' images are known.
        direction = unit(direction - dot(direction, v) * v)
        direction = unit(direction - dot(direction, v) * v)
        basis, images = [v, direction], [av, apply(direction)]
        if last is not None:
            rest, image = last
            for axis, axis_image in zip(basis, images, strict=True):
                overlap = dot(rest, axis)
                rest, image = rest - overlap * axis, image - overlap * axis_image
            size = torch.linalg.vector_norm(rest).clamp_min(torch.finfo(rest.dtype).tiny)
            basis.append(rest / size)
            images.append(image / size)
        stacked = torch.stack([image.flatten() for image in images])
        weights = torch.linalg.eigh(stacked @ stacked.T).eigenvectors[:, -1]
        step = sum(w * axis for w, axis in zip(weights[1:], basis[1:], strict=True))
        step_image = sum(w * image for w, image in zip(weights[1:], images[1:], strict=True))
        last = (step, step_image)
        v, av = weights[0] * v + step, weights[0] * av + step_image
        size = torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny)
        v, av = v / size, av / size
    av = apply(v)
    sigma = torch.linalg.vector_norm(av)
    residual = torch.linalg.vector_norm(transpose(av) - sigma**2 * v)
    missing = torch.sqrt(1 + residual / (sigma**2).clamp_min(torch.finfo(v.dtype).tiny)) - 1
    return TopSingular(unit(av), v, sigma, torch.where(sigma > 0, missing, torch.zeros_like(missing)))
