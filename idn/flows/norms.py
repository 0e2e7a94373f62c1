"""The largest singular value of a linear operator, followed from step to step.

Plain power iteration crawls where singular values crowd, and an unconverged estimate lies below the truth, so that
the normalised weight breaks its bound. Here three vectors are followed, and each iteration maximises |A v| over the
span of all of them, of their gradients A^T A v - |A v|^2 v, and of the last directions (a locally optimal block
conjugate gradient method, LOBPCG). What may still be missing is known from the length of the gradient.

The first vector is v itself. The second is at hand when it overtakes. The third is an explorer: a convolution hardly
mixes spatial frequencies, so a pattern of another frequency can outgrow v without ever showing in v's gradient. The
explorer climbs on its own, orthogonally to the others; when it has settled below them, it starts anew at random.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


class TopSingular(NamedTuple):
    """|u| = |v| = 1 with A v = sigma u, the share of sigma that may be missing, and what to go on from next time."""

    u: Tensor
    v: Tensor
    sigma: Tensor
    missing: Tensor
    others: Tensor


FOLLOWED = 3
"""v, the second vector and the explorer."""
SETTLED = 0.02
"""An explorer whose gradient is below this share, and that cannot reach the second vector even so, starts anew."""
INDEPENDENT = 1e-3
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


def top_singular(
    apply: Operator, transpose: Operator, v: Tensor, others: Tensor, noise: Tensor, iterations: int
) -> TopSingular:
    """Improves v by at least one iteration.

    `others` are the second vector, the explorer and the direction in which the explorer moved last; `noise` is where
    an explorer starts anew.
    """
    tiny = torch.finfo(v.dtype).tiny
    start = rows(torch.cat([v, others]).flatten(1))
    shaped = apply(start.view(-1, *v.shape[1:]))
    vectors, images = start[:FOLLOWED], shaped.flatten(1)[:FOLLOWED]
    last, last_images = start[FOLLOWED:], shaped.flatten(1)[FOLLOWED:]

    def gradient(vectors: Tensor, images: Tensor) -> Tensor:
        pulled = transpose(images.view(-1, *shaped.shape[1:])).flatten(1)
        return pulled - images.square().sum(1, keepdim=True) * vectors

    for _ in range(max(iterations, 1)):
        climb = gradient(vectors, images)
        lengths = torch.linalg.vector_norm(climb, dim=1)
        climb = rows(climb)
        basis = torch.cat([vectors, climb, last])
        climb_images = apply(climb.view(-1, *v.shape[1:])).flatten(1)
        basis_images = torch.cat([images, climb_images, last_images])
        mix = best_combinations(basis, basis_images, count=FOLLOWED)
        moved = mix.clone()
        moved[:, :FOLLOWED] = 0
        vectors, images, last, last_images = mix @ basis, mix @ basis_images, moved @ basis, moved @ basis_images
        size = torch.linalg.vector_norm(last, dim=1, keepdim=True).clamp_min(tiny)
        last, last_images = last / size, last_images / size

    vectors = rows(vectors)
    images[:1] = apply(vectors[:1].view_as(v)).flatten(1)  # combined images carry roundoff
    found = images.square().sum(1)
    # An eigenvalue of A^T A lies within the gradient's length of |A v|^2.
    missing = torch.sqrt(1 + torch.linalg.vector_norm(gradient(vectors[:1], images[:1])) / found[0].clamp_min(tiny)) - 1
    explored = (lengths[2] < SETTLED * found[2]) & (found[2] + lengths[2] < found[1])
    flat = noise.flatten(1)
    explorer = torch.where(explored, rows(flat - (flat @ vectors.T) @ vectors), vectors[2:])
    direction = torch.where(explored, torch.zeros_like(explorer), last[2:])
    return TopSingular(
        u=rows(images[:1]).view(1, *shaped.shape[1:]),
        v=vectors[:1].view_as(v),
        sigma=found[0].sqrt(),
        missing=torch.where(found[0] > 0, missing, torch.zeros_like(missing)),
        others=torch.cat([vectors[1:2], explorer, direction]).view_as(others),
    )
