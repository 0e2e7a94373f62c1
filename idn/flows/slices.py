"""Channels of several tensors, which the features of a dense layer are written to and get their gradients from."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from idn.flows.rows import pixels, summed


class Ending(NamedTuple):
    """A map of each pixel to few channels at the end of a branch: features are multiplied with it as they are made."""

    weight: Tensor
    """A matrix with a column per feature."""
    rows: Tensor
    """What goes out, to be added to; or, on the way back, what comes in."""

    def columns(self, start: int, width: int) -> Tensor:
        return self.weight[:, start : start + width, None, None]


class Slices(NamedTuple):
    """The channels from `start` on of tensors that later maps read or have given back, and of an ending, if any."""

    tensors: Sequence[Tensor]
    start: int = 0
    ending: Ending | None = None

    def write(self, rows: Tensor) -> None:
        """Rows to all tensors, and their product to the ending."""
        width = rows.shape[1]
        for one in self.tensors:
            one[:, self.start : self.start + width] = rows
        if self.ending is not None:
            self.ending.rows.add_(F.conv2d(rows, self.ending.columns(self.start, width)))

    def read(self, width: int) -> Tensor:
        """The sum of so many channels of all tensors, and of what the ending gives back to them."""
        tensors, start = list(self.tensors), self.start
        if self.ending is None:
            return summed(tensors, start, width)
        end = F.conv_transpose2d(self.ending.rows, self.ending.columns(start, width))
        return end + summed(tensors, start, width) if tensors else end

    def into_ending(self, rows: Tensor) -> Tensor | None:
        """Gradient of the ending's columns, where `rows` were written and its own rows are gradients."""
        return None if self.ending is None else pixels(self.ending.rows).T @ pixels(rows)
