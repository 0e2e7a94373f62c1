"""Where the search for the inverse of an image block begins: one convolution of y, instead of y itself.

From some y whose x are known, x - y is fitted by least squares as a convolution of y and of max(y, 0). It leaves a few
per cent to a third of what is to be found, at the price of nothing beside an evaluation of the branch. It is a guess:
whatever it is, the search goes on from there.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from idn.flows.rows import channels_last

KERNELS = (5, 3)
"""The first one that is not too wide."""
MOST_UNKNOWNS = 512
"""Per channel."""
FEWEST, ENOUGH = 2, 32
"""Equations per unknown: at least, and at most."""
RIDGE = 1e-3
"""Relative to the mean square of what enters."""


class Guess(NamedTuple):
    """y -> about x."""

    weight: Tensor
    bias: Tensor

    def __call__(self, y: Tensor) -> Tensor:
        return y + F.conv2d(_entering(y, self.parts), self.weight, self.bias, padding=self.weight.shape[2] // 2)

    @property
    def parts(self) -> int:
        return self.weight.shape[1] // len(self.weight)


def fitted_guess(y: Tensor, x: Tensor) -> Guess | None:
    """From images y and their x; None from too few."""
    channels, pixels = y.shape[1], y[0, 0].numel()
    choices = [(parts, kernel) for parts in (2, 1) for kernel in KERNELS]
    for parts, kernel in choices:
        unknowns = parts * channels * kernel**2 + 1
        if unknowns <= MOST_UNKNOWNS and len(y) * pixels >= FEWEST * unknowns:
            break
    else:
        return None
    some = slice(-(-ENOUGH * unknowns // pixels))
    windows = F.unfold(_entering(y[some], parts), kernel, padding=kernel // 2).transpose(1, 2).flatten(0, 1)
    rows = F.pad(windows, (0, 1), value=1.0)
    moved = (x - y)[some].permute(0, 2, 3, 1).flatten(0, 2)
    gram = rows.mT @ rows
    ridge = torch.diag(RIDGE * gram.diagonal().mean().expand(unknowns))
    found = torch.linalg.solve_ex(gram + ridge, rows.mT @ moved).result.mT
    weight = found[:, :-1].unflatten(1, (parts * channels, kernel, kernel))
    return Guess(channels_last(weight), found[:, -1].contiguous())


def _entering(y: Tensor, parts: int) -> Tensor:
    return y if parts == 1 else torch.cat([y, y.relu()], 1)
