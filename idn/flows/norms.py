"""The largest singular values of linear operators, followed from step to step.

Plain power iteration crawls where singular values crowd, and an unconverged estimate lies below the truth, so that
the normalised weight breaks its bound. Here three vectors are followed, and each iteration maximises |A v| over the
span of all of them, of their gradients A^T A v - |A v|^2 v, and of the last directions (a locally optimal block
conjugate gradient method, LOBPCG). What may still be missing is known from the length of the gradient.

The first vector is v itself. The second is at hand when it overtakes. The third is an explorer, for what outgrows v
without ever showing in v's gradient. It climbs on its own, orthogonally to the others; when it has settled below them,
it starts anew at random. A convolution hardly mixes spatial frequencies, so there the explorer is another one at every
step, the strongest wave (`waves.py`), and v needs no other company.

Operators of equal shape are followed together: the first dimension of every tensor counts operators, the second the
vectors of each.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


class TopSingular(NamedTuple):
    """Per operator: |u| = |v| = 1 with A v = sigma u, the share that sigma may miss, and what to go on from.

    `started` are the lengths |A x| of the vectors of length 1 that it started from.
    """

    u: Tensor
    v: Tensor
    sigma: Tensor
    missing: Tensor
    others: Tensor
    started: Tensor


FOLLOWED = 3
"""v, the second vector and the explorer."""
EXPLORER = 2
SETTLED = 0.02
"""An explorer whose gradient is below this share, and that cannot reach the second vector even so, starts anew."""
INDEPENDENT = 1e-3
"""Directions with less than this left beside the others (squared) are roundoff."""


def units(x: Tensor) -> Tensor:
    """Each last-dimension vector divided by its length; zero stays zero."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def unit(x: Tensor) -> Tensor:
    """x / |x|, and zero for zero."""
    return units(x.reshape(-1)).view_as(x)


def best_combinations(basis: Tensor, images: Tensor, count: int) -> Tensor:
    """Coefficients of the `count` orthonormal combinations of `basis` whose images are longest, longest first."""
    size, directions = torch.linalg.eigh(basis @ basis.mT)
    scale = torch.where(size > INDEPENDENT, size.clamp_min(INDEPENDENT).rsqrt(), torch.zeros_like(size))
    whiten = (directions * scale.unsqueeze(-2)).mT
    whitened = whiten @ images
    top = torch.linalg.eigh(whitened @ whitened.mT).eigenvectors[..., -count:].flip(-1)
    return top.mT @ whiten


def top_singular(
    apply: Operator, transpose: Operator, v: Tensor, others: Tensor, noise: Tensor, iterations: int
) -> TopSingular:
    """Improves every v by at least one iteration.

    `others` are the second vector, the explorer and, if known, the direction in which the explorer moved last; `noise`
    is where an explorer starts anew. With an explorer that is found elsewhere, it is the only other, and none are kept.
    """
    tiny, shape, count = torch.finfo(v.dtype).tiny, v.shape[2:], min(FOLLOWED, 1 + others.shape[1])
    start = units(torch.cat([v, others], 1).flatten(2))
    shaped = apply(start.unflatten(2, shape))
    vectors, images = start[:, :count], shaped.flatten(2)[:, :count]
    last, last_images = start[:, count:], shaped.flatten(2)[:, count:]

    def gradient(vectors: Tensor, images: Tensor) -> Tensor:
        pulled = transpose(images.unflatten(2, shaped.shape[2:])).flatten(2)
        return pulled - images.square().sum(2, keepdim=True) * vectors

    for left in reversed(range(max(iterations, 1))):
        climb = gradient(vectors, images)
        lengths = torch.linalg.vector_norm(climb, dim=2)
        climb = units(climb)
        basis = torch.cat([vectors, climb, last], 1)
        basis_images = torch.cat([images, apply(climb.unflatten(2, shape)).flatten(2), last_images], 1)
        if not left and count < FOLLOWED:
            vectors = best_combinations(basis, basis_images, count=1) @ basis
            break
        mix = best_combinations(basis, basis_images, count=count)
        moved = mix.clone()
        moved[..., :count] = 0
        vectors, images, last, last_images = mix @ basis, mix @ basis_images, moved @ basis, moved @ basis_images
        size = torch.linalg.vector_norm(last, dim=2, keepdim=True).clamp_min(tiny)
        last, last_images = last / size, last_images / size

    vectors = units(vectors)
    first = vectors[:, :1]
    image = apply(first.unflatten(2, shape)).flatten(2)  # combined images carry roundoff
    square = image.square().sum((1, 2))
    # An eigenvalue of A^T A lies within the gradient's length of |A v|^2.
    climb_left = torch.linalg.vector_norm(gradient(first, image), dim=(1, 2))
    missing = torch.sqrt(1 + climb_left / square.clamp_min(tiny)) - 1
    if count == FOLLOWED:
        second, third = images[:, 1:].square().sum(2).unbind(1)
        explored = (lengths[:, EXPLORER] < SETTLED * third) & (third + lengths[:, EXPLORER] < second)
        explored, flat = explored[:, None, None], noise.flatten(2)
        explorer = torch.where(explored, units(flat - (flat @ vectors.mT) @ vectors), vectors[:, EXPLORER:])
        direction = torch.where(explored, torch.zeros_like(explorer), last[:, EXPLORER:])
        others = torch.cat([vectors[:, 1:2], explorer, direction], 1).unflatten(2, shape)
    return TopSingular(
        u=units(image).unflatten(2, shaped.shape[2:]),
        v=first.unflatten(2, shape),
        sigma=square.sqrt(),
        missing=torch.where(square > 0, missing, torch.zeros_like(missing)),
        others=others,
        started=torch.linalg.vector_norm(shaped.flatten(2), dim=2),
    )
