"""Proofs that no singular value of a matrix or a zero-padded convolution A exceeds s.

||A|| <= s exactly if s^2 I - A A* has no negative eigenvalue, and a Cholesky factorisation that reaches its end proves
that, up to rounding errors which have a known bound. A convolution's A A* is a band matrix of blocks, one block row per
row of the image, so the factorisation costs little. Three operators, each at least as large in norm as the one before:

    exact   A itself, the image's columns unrolled into the blocks
    rows    the columns closed to a ring, which Fourier modes turn into one small band matrix per frequency
    symbol  the rows closed to a ring as well: one block per pair of frequencies

With r the kernel's radius, a ring of N >= width + r places carries nothing from one edge to the other, so A is a part
(a compression) of the operator on the ring, and its norm cannot be larger.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Method = Literal["symbol", "rows", "exact"]

UNIT = torch.finfo(torch.float64).eps / 2
"""The unit roundoff u of the arithmetic in which proofs are computed."""
CHUNK = 1 << 22
"""So many numbers of A A* are held at once, except where one frequency alone has more."""


@dataclass(frozen=True)
class BandedGram:
    """Block band matrices A A*, one per frequency: block (i, j) is the sum of M[q-i] M[q-j]* over the image's rows q.

    products[s, t] = M[s-r] M[t-r]*, where A takes row q to row i by the matrix M[q-i], |q-i| <= r.
    """

    products: Tensor
    rows: int

    @property
    def size(self) -> int:
        """The number of rows of each of the matrices."""
        return self.rows * self.products.shape[-1]

    def block(self, i: int, j: int) -> Tensor:
        radius = len(self.products) // 2
        first, last = max(0, i - radius, j - radius), min(self.rows - 1, i + radius, j + radius)
        return sum(
            (self.products[q - i + radius, q - j + radius] for q in range(first, last + 1)),
            torch.zeros_like(self.products[0, 0]),
        )

    def unproven(self, square: float) -> Tensor:
        """The frequencies at which `square` I - A A* has no Cholesky factor L L*, one row of blocks after the other."""
        band = len(self.products) - 1
        identity = torch.eye(self.products.shape[-1], dtype=self.products.dtype)
        failed = torch.zeros(self.products.shape[2], dtype=torch.bool)
        factor: dict[tuple[int, int], Tensor] = {}
        for i in range(self.rows):
            for j in range(max(0, i - band), i + 1):
                rest = (square * identity if i == j else 0) - self.block(i, j)
                for m in range(max(0, i - band), j):
                    rest = rest - factor[i, m] @ factor[j, m].mH
                if i == j:
                    factor[i, i], info = torch.linalg.cholesky_ex(rest)
                    finite = torch.isfinite(torch.diagonal(factor[i, i], dim1=1, dim2=2)).all(1)
                    failed |= (info != 0) | ~finite
                else:
                    factor[i, j] = torch.linalg.solve_triangular(factor[j, j].mH, rest, upper=True, left=False)
            factor = {place: block for place, block in factor.items() if place[0] > i - band}
        return failed.nonzero().flatten()

    def at(self, frequencies: Tensor) -> "BandedGram":
        return BandedGram(self.products[:, :, frequencies], self.rows)

    def rounding(self, square: float) -> float:
        """How far below 0 an eigenvalue of `square` I - A A* can lie though the factorisation reached its end.

        The computed factor is that of a matrix within (n+1) u |L| |L*| (Higham, Accuracy and Stability, Theorem 10.3,
        in any order of summation), and the norm of |L| |L*| is at most the trace, n `square`. Complex products and the
        subtraction from `square` are covered by the factor 8.
        """
        return 8 * UNIT * self.size * (self.size + 2) * square


def grams(weight: Tensor, size: tuple[int, int], method: Method) -> Iterator[BandedGram]:
    """A A* of the zero-padded convolution with an odd kernel (O x I x k x k) on images of `size`, in parts."""
    height, width = size
    radius = weight.shape[-1] // 2
    if method == "exact":
        yield BandedGram(_products(_unrolled(weight, width)), height)
        return
    columns = _frequencies(width + radius, weight.shape[-1], half=True)
    per_frequency = len(weight) ** 2 * (height + radius if method == "symbol" else weight.shape[-1] ** 2)
    for part in columns.split(max(1, CHUNK // per_frequency)):
        taps = torch.einsum("fx,oiyx->yfoi", part, weight.to(part.dtype))
        gram = BandedGram(_products(taps), height)
        yield gram if method == "rows" else _ring(gram, height + radius)


def gram_rounding(weight: Tensor) -> float:
    """A bound on the norm of the error in the computed A A*.

    Each entry is a sum of products of entries of W and of Fourier factors, so the error is at most m u |A| |A|*, where
    m counts the roundings on the way to an entry and the norm of |A| is at most the sum of |W_t|_F over the k^2 taps,
    hence at most k |W|_F. The factor 8 covers complex products and the Fourier factors' own errors.
    """
    taps = weight[0, 0].numel()
    roundings = taps * (weight.shape[1] + 64)
    return 8 * UNIT * roundings * taps * float(weight.square().sum())


def _products(taps: Tensor) -> Tensor:
    return torch.stack([torch.stack([s @ t.mH for t in taps]) for s in taps])


def _frequencies(ring: int, taps: int, half: bool = False) -> Tensor:
    """exp(2 pi i f t / ring), a row per frequency f; for a real kernel -f says what f says."""
    turns = torch.arange(ring // 2 + 1 if half else ring)[:, None] * (torch.arange(taps) - taps // 2) % ring
    angle = turns * (2 * math.pi / ring)
    return torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())


def _unrolled(weight: Tensor, width: int) -> Tensor:
    """The matrices M[t] between two rows of the image: k x 1 x (O width) x (I width)."""
    outputs, inputs, kernel, _ = weight.shape
    matrices = weight.new_zeros(kernel, outputs, width, inputs, width)
    for tap in range(kernel):
        offset = tap - kernel // 2
        if abs(offset) < width:
            diagonal = torch.diagonal(matrices, offset, dim1=2, dim2=4)
            diagonal.copy_(weight[..., tap].permute(2, 0, 1)[..., None].expand_as(diagonal))
    return matrices.reshape(kernel, 1, outputs * width, inputs * width)


def _ring(gram: BandedGram, ring: int) -> BandedGram:
    """The rows closed to a ring: one block for each pair of frequencies."""
    kernel, _, _, n, _ = gram.products.shape
    phases = _frequencies(ring, kernel)
    pairs = (phases[:, :, None] * phases[:, None, :].conj()).flatten(1)
    blocks = pairs @ gram.products.flatten(0, 1).flatten(1)
    return BandedGram(blocks.reshape(1, 1, -1, n, n), 1)
