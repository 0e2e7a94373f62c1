"""The converged norm of a layer whose singular vectors are not known."""

import torch
from torch import Tensor

from idn.flows.layers import SpectralLayer
from idn.flows.norms import Operator, unit

STEPS = 40
"""Dimensions of a Krylov space."""
ROUNDS = 25
SETTLED = 1e-6
"""Spaces are built until one adds less than this share to the norm."""


def settle(layer: SpectralLayer, generator: torch.Generator) -> None:
    """Sets u, v and sigma to the largest singular triple of the weight, with no margin for what may be missing.

    Unlike the iteration that follows a weight through training, this one starts from a random vector, which has a
    part of every singular vector, and so cannot rest on one that is not the largest.
    """
    weight = layer.weight.detach()
    largest = weight.abs().amax().clamp_min(torch.finfo(weight.dtype).tiny)
    apply, transpose = layer.operator(weight / largest)
    noise = torch.randn(layer.v.shape, generator=generator).to(layer.v)
    v, before = unit(layer.v) + unit(noise), 0.0
    for _ in range(ROUNDS):
        v = krylov_top(apply, transpose, v, STEPS)
        norm = torch.linalg.vector_norm(apply(v)).item()
        if norm - before <= SETTLED * norm:
            break
        before = norm
    with torch.no_grad():
        layer.v.copy_(v)
        layer.u.copy_(unit(apply(v)))
        layer.sigma.copy_(torch.linalg.vector_norm(apply(v)) * largest)
        layer.slack.zero_()


@torch.no_grad()
def krylov_top(apply: Operator, transpose: Operator, start: Tensor, steps: int) -> Tensor:
    """The unit vector v with the largest |A v| in the span of start, (A^T A) start, (A^T A)^2 start, ..."""
    axis = unit(start).flatten()
    basis, images = axis.new_zeros(0, len(axis)), []
    for _ in range(min(steps, len(axis))):
        basis = torch.cat([basis, axis[None]])
        images.append(apply(axis.view_as(start)))
        axis = transpose(images[-1]).flatten()
        size = torch.linalg.vector_norm(axis)
        for _ in range(2):  # once leaves roundoff behind
            axis = axis - basis.T @ (basis @ axis)
        if torch.linalg.vector_norm(axis) <= 1e-5 * size:
            break  # the space holds all that it can
        axis = unit(axis)
    flat = torch.stack([image.flatten() for image in images]).double()
    best = torch.linalg.eigh(flat @ flat.T).eigenvectors[:, -1]
    return unit((best.to(basis) @ basis).view_as(start))
