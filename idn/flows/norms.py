"""The largest singular values of linear operators, followed from step to step.

Plain power iteration crawls where singular values crowd, and an unconverged estimate lies below the truth, so that
the normalised weight breaks its bound. Here three vectors are followed, and each iteration maximises |A v| over the
span of all of them, of their gradients A^T A v - |A v|^2 v, and of the last directions (a locally optimal block
conjugate gradient method, LOBPCG). What may still be missing is known from the length of the gradient.

The first vector is v itself. The second is at hand when it overtakes. The third is an explorer, for what outgrows v
without ever showing in v's gradient. It climbs on its own, orthogonally to the others; when it has settled below them,
it starts anew at random. A convolution's products are dear, and it hardly mixes spatial frequencies: there v is
followed alone, with the strongest wave (`waves.py`) at its side, which is sought at every step.

Operators of equal shape are followed together: the first dimension of every tensor counts operators, the second the
vectors of each, the third their entries.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from idn.flows.following import gradients, kernel_for, longest

Operator = Callable[[Tensor], Tensor]


class Wave(NamedTuple):
    """Patterns that an operator is expected to lengthen, and what it makes of them."""

    images: Tensor
    responses: Tensor


class TopSingular(NamedTuple):
    """Per operator: |u| = |v| = 1 with A v = sigma u, and the share that sigma may miss."""

    u: Tensor
    v: Tensor
    sigma: Tensor
    missing: Tensor


FOLLOWED = 3
"""v, the second vector and the explorer."""
EXPLORER = 2
SETTLED = 0.02
"""An explorer whose gradient is below this share, and that cannot reach the second vector even so, starts anew."""
INDEPENDENT = 1e-3
"""Directions with less than this left beside the others (squared) are roundoff."""


def units(x: Tensor) -> Tensor:
    """Each last-dimension vector divided by its length; zero stays zero."""
    return x / lengths(x).clamp_min(torch.finfo(x.dtype).tiny)


def lengths(x: Tensor) -> Tensor:
    """Of each last-dimension vector."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def unit(x: Tensor) -> Tensor:
    """x / |x|, and zero for zero."""
    return units(x.reshape(-1)).view_as(x)


def best_combinations(basis: Tensor, images: Tensor, count: int) -> Tensor:
    """Coefficients of the `count` orthonormal combinations of `basis` whose images are longest, longest first.

    The first of the basis takes part as it is: what is dropped is dropped from the others.
    """
    gram = basis @ basis.mT
    shorten = gram.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
    gram = gram * shorten.unsqueeze(-1) * shorten.unsqueeze(-2)
    along = gram[..., 1:, :1]
    size, directions = torch.linalg.eigh(gram[..., 1:, 1:] - along @ along.mT)
    scale = torch.where(size > INDEPENDENT, size.clamp_min(INDEPENDENT).rsqrt(), torch.zeros_like(size))
    others = (directions * scale.unsqueeze(-2)).mT
    first = torch.zeros_like(gram[..., :1, :])
    first[..., 0] = 1
    whiten = torch.cat([first, torch.cat([-others @ along, others], -1)], -2) * shorten.unsqueeze(-2)
    whitened = whiten @ images
    top = torch.linalg.eigh(whitened @ whitened.mT).eigenvectors[..., -count:].flip(-1)
    return top.mT @ whiten


def top_singular(
    apply: Operator, transpose: Operator, v: Tensor, others: Tensor, noise: Tensor, iterations: int
) -> tuple[TopSingular, Tensor]:
    """Improves every v by at least one iteration; also gives the others to go on with.

    `others` are the second vector, the explorer and the direction in which the explorer moved last; `noise` is where
    an explorer starts anew.
    """
    start = units(torch.cat([v, others], 1))
    (vectors, last), (images, last_images) = (x.split(FOLLOWED, 1) for x in (start, apply(start)))
    for _ in range(max(iterations, 1)):
        climb = gradient(transpose, vectors, images)
        left = lengths(climb)[:, EXPLORER, 0]
        basis = torch.cat([vectors, climb, last], 1)
        basis_images = torch.cat([images, apply(climb), last_images], 1)
        mix = best_combinations(basis, basis_images, FOLLOWED)
        vectors, images = mix @ basis, mix @ basis_images
        last, last_images = moves(mix, basis, basis_images)

    vectors = units(vectors)
    second, third = images[:, 1:].square().sum(2).unbind(1)
    explored = (left < SETTLED * third) & (third + left < second)
    explored = explored[:, None, None]
    explorer = torch.where(explored, units(noise - (noise @ vectors.mT) @ vectors), vectors[:, EXPLORER:])
    direction = torch.where(explored, torch.zeros_like(explorer), last[:, EXPLORER:])
    first = vectors[:, :1]
    # Applied once more: combined images carry roundoff.
    image = apply(first)
    climb = gradient(transpose, first, image)
    return found(first, image, *squared(image, climb)), torch.cat([vectors[:, 1:2], explorer, direction], 1)


def top_beside_wave(
    apply: Operator, transpose: Operator, v: Tensor, climb: Tensor, wave: Wave, iterations: int
) -> tuple[TopSingular, Tensor]:
    """The same with as few products as can be: v goes where its gradient pointed when it was last followed, or to the
    wave. Also gives the gradient to go on with."""
    pair = torch.cat([v, climb], 1)
    applied = apply(pair)
    kernel = kernel_for(v, "longest") if iterations == 1 else None
    if kernel is not None:
        first, image, square = longest(kernel, pair, wave.images, applied, wave.responses, INDEPENDENT)
        climb, left = gradients(kernel, transpose(image), first, square)
        return found(first, image, square, left), climb
    basis, images = torch.cat([pair, wave.images], 1), torch.cat([applied, wave.responses], 1)
    # On a long way two vectors are followed: alone, v can linger where a smaller singular value is.
    count, combinations = (1, 1) if iterations == 1 else (2, basis.shape[1])
    mix = best_combinations(basis, images, combinations)
    (vectors, last), (images, last_images) = ((mix @ x).tensor_split([count], 1) for x in (basis, images))
    for _ in range(iterations - 1):
        steps = gradient(transpose, vectors, images)
        basis = torch.cat([vectors, steps, last], 1)
        basis_images = torch.cat([images, apply(steps), last_images], 1)
        mix = best_combinations(basis, basis_images, count)
        vectors, images = mix @ basis, mix @ basis_images
        last, last_images = moves(mix, basis, basis_images)
    size = lengths(vectors[:, :1]).clamp_min(torch.finfo(v.dtype).tiny)
    first = vectors[:, :1] / size
    # Applied once more: combined images carry roundoff.
    image = images / size if iterations == 1 else apply(first)
    climb = gradient(transpose, first, image)
    return found(first, image, *squared(image, climb)), climb


def gradient(transpose: Operator, vectors: Tensor, images: Tensor) -> Tensor:
    """A^T A v - |A v|^2 v for vectors of length 1."""
    return transpose(images) - images.square().sum(2, keepdim=True) * vectors


def moves(mix: Tensor, basis: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """The directions in which vectors moved away from what they were, the first of the basis; and their images."""
    added = mix.clone()
    added[..., : mix.shape[1]] = 0
    direction = added @ basis
    size = lengths(direction).clamp_min(torch.finfo(mix.dtype).tiny)
    return direction / size, added @ images / size


def squared(image: Tensor, climb: Tensor) -> tuple[Tensor, Tensor]:
    """|A v|^2 and the length of the gradient."""
    return image.square().sum((1, 2)), lengths(climb)[:, 0, 0]


def found(v: Tensor, image: Tensor, square: Tensor, left: Tensor) -> TopSingular:
    """An eigenvalue of A^T A lies within the gradient's length of |A v|^2."""
    tiny = torch.finfo(v.dtype).tiny
    sigma = square.sqrt()
    missing = torch.sqrt(1 + left / square.clamp_min(tiny)) - 1
    u = image / sigma.clamp_min(tiny)[:, None, None]
    return TopSingular(u, v, sigma, torch.where(square > 0, missing, torch.zeros_like(missing)))
