"""Norms of matrices that are small on one side: found by powers of the Gram matrix, and proven, at every step.

Let G = A A^T, or A^T A where that is smaller. Its fourth power brings out the top vector w in a few products, from
wherever w was before, and an eigenvalue of G lies within |G w - l w| of l = w^T G w. That none is larger is shown by a
Cholesky factorisation, which exists only for positive matrices: (l + |G w - l w|) I - G must have one. Where it has
none, or w is vague, all eigenvalues are computed.

As in `norms.py`, the first dimension of every tensor counts matrices of equal shape, which are treated together.
"""

import torch
from torch import Tensor

from idn.flows.following import grams, kernel_for
from idn.flows.norms import TopSingular, units

SMALL = 96
"""Rows of G at most. For larger ones following vectors is cheaper,"""
SMALL_AND_FLAT = 192
FLAT = 8
"""unless the other side is so many times as long: vectors are followed in several passes over it, G takes one."""
SQUARINGS = 2
PRODUCTS = 6
"""With G^4 from the last vector: as many as 24 plain power iterations."""
VAGUE = 4e-3
"""Share of l that |G w - l w| may have; half of it is what the norm may miss."""
ROUNDOFF = 2e-4
"""Share of l by which the proof may be wrong in fp32, generously."""


def is_small(weight: Tensor) -> bool:
    """Whether one matrix has a small side."""
    short, long = sorted((weight.shape[0], weight[0].numel()))
    return short <= (SMALL_AND_FLAT if long >= FLAT * short else SMALL)


def top_of_small(weight: Tensor, v: Tensor) -> TopSingular:
    """The largest singular values of L x outputs x inputs, from vectors L x 1 x inputs near their own."""
    wide = weight.shape[1] <= weight.shape[2]
    rows, kernel = weight if wide else weight.mT, kernel_for(weight, "grams")
    gram = rows @ rows.mT if kernel is None else grams(kernel, weight)
    vector, square, left = _climbed(gram, v @ weight.mT if wide else v)
    bound = (square + left) * (1 + ROUNDOFF)
    unproven = torch.linalg.cholesky_ex(torch.diag_embed(bound.expand(-1, gram.shape[1])) - gram).info != 0
    weak = unproven | ~(left <= VAGUE * square)[:, 0]
    if weak.any():
        values, vectors = torch.linalg.eigh(gram[weak])
        vector[weak], bound[weak] = vectors[..., -1:].mT, values[:, -1:].clamp_min(0) * (1 + ROUNDOFF)
    v = units(vector @ weight) if wide else vector
    image = v @ weight.mT
    sigma = torch.linalg.vector_norm(image, dim=(1, 2))
    missing = bound[:, 0].sqrt() / sigma.clamp_min(torch.finfo(sigma.dtype).tiny) - 1
    return TopSingular(units(image), v, sigma, torch.where(sigma > 0, missing.clamp_min(0), torch.zeros_like(missing)))


def _climbed(gram: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w of length 1, l = w^T G w, and |G w - l w|."""
    power = gram
    for _ in range(SQUARINGS):
        trace = power.diagonal(dim1=1, dim2=2).sum(1).clamp_min(torch.finfo(gram.dtype).tiny)
        power = power / trace[:, None, None]
        power = power @ power
    vector = start
    for product in range(PRODUCTS):
        vector = units(vector @ power) if product % 2 else vector @ power
    image = vector @ gram
    square = (vector * image).sum(2)
    return vector, square, torch.linalg.vector_norm(image - square[:, None] * vector, dim=2)
