"""Layers with a closed-form inverse: logit, ActNorm, squeeze, flatten."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Reduce = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """An invertible layer: `forward` gives (y, log |det dy/dx| per sample), `inverse` gives x."""

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def inverse(self, y: Tensor) -> Tensor:
        raise NotImplementedError


def no_volume(x: Tensor) -> Tensor:
    return x.new_zeros(len(x))


class Logit(Layer):
    """y = logit(alpha + (1 - 2 alpha) x), from [0, 1] to the real line."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        # y = ln s - ln(1 - s) and dy/dx = (1 - 2 alpha) / (s (1 - s)), where 1 - s is not taken from s, which has
        # lost its last digits near 1, but from 1 - x, which is exact there.
        log_s = torch.log(self.alpha + (1 - 2 * self.alpha) * x)
        log_rest = torch.log(self.alpha + (1 - 2 * self.alpha) * (1 - x))
        logdet = math.log(1 - 2 * self.alpha) - log_s - log_rest
        return log_s - log_rest, logdet.flatten(1).sum(1)

    def inverse(self, y: Tensor) -> Tensor:
        return (torch.sigmoid(y) - self.alpha) / (1 - 2 * self.alpha)


class ActNorm(Layer):
    """y = (x + bias) exp(log_scale) per channel, started so that the first batch has mean 0 and variance 1."""

    LEAST_VARIANCE = 0.2

    bias: nn.Parameter
    log_scale: nn.Parameter
    initialized: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))
        self.log_scale = nn.Parameter(torch.zeros(channels))
        self.register_buffer("initialized", torch.tensor(False))

    def _shaped(self, parameter: Tensor, x: Tensor) -> Tensor:
        return parameter.view(1, -1, *[1] * (x.dim() - 2))

    @torch.no_grad()
    def initialize(self, x: Tensor, reduce: Reduce) -> None:
        """Takes mean and variance over all ranks' batches, which `reduce` sums."""
        columns = x.transpose(0, 1).flatten(1).double()
        count = reduce(torch.tensor(float(columns.shape[1]), dtype=torch.float64, device=x.device))
        mean = reduce(columns.sum(1)) / count
        variance = reduce(((columns - mean[:, None]) ** 2).sum(1)) / (count - 1).clamp_min(1)
        self.bias.copy_(-mean)
        self.log_scale.copy_(-0.5 * torch.log(variance.clamp_min(self.LEAST_VARIANCE)))
        self.initialized.fill_(True)

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        y = (x + self._shaped(self.bias, x)) * torch.exp(self._shaped(self.log_scale, x))
        per_sample = self.log_scale.sum() * math.prod(x.shape[2:])
        return y, per_sample.expand(len(x))

    def inverse(self, y: Tensor) -> Tensor:
        return y * torch.exp(-self._shaped(self.log_scale, y)) - self._shaped(self.bias, y)


class Squeeze(Layer):
    """Space to depth: C x 2H x 2W becomes 4C x H x W."""

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return F.pixel_unshuffle(x, 2), no_volume(x)

    def inverse(self, y: Tensor) -> Tensor:
        return F.pixel_shuffle(y, 2)


class Flatten(Layer):
    """An image as a vector."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return x.flatten(1), no_volume(x)

    def inverse(self, y: Tensor) -> Tensor:
        return y.unflatten(1, self.shape)


class FactorOut(nn.Module):
    """Half of the channels leave the flow here and become part of z."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What goes on, and what leaves."""
        stay, out = x.chunk(2, 1)
        return stay, out

    def join(self, x: Tensor, out: Tensor) -> Tensor:
        """The inverse of `split`; `out` may come flattened."""
        return torch.cat([x, out.view_as(x)], 1)
