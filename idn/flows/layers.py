"""Spectrally normalised layers: equation (2), ||W||_2 <= coeff < 1, for the weight that is really multiplied."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idn.flows.maps import Affine
from idn.flows.norms import FOLLOWED, Operator, TopSingular, top_singular, unit

START_ITERATIONS = 10
CONVERGED = 2e-3
"""From a random vector: rounds of so many iterations, until so little can be missing, and at most so many rounds."""
START_ROUNDS = 8
FEW_CHANNELS = 16
CROWDED_ITERATIONS = 8
"""A convolution of few channels has a singular value for each frequency, many of them near the largest: it takes
more iterations, which cost little."""


class SpectralLayer(nn.Module):
    """W x + b with W = weight / max(1, sigma / coeff), a matrix or a zero-padded convolution.

    sigma is the norm of the operator: for a k x k convolution that of the map between images of `image_size`. The
    singular vectors u and v are kept from step to step, and the gradient flows through sigma = u^T W v with both
    held fixed. `forward` returns the affine map with the normalised weight.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    u: Tensor
    v: Tensor
    others: Tensor
    sigma: Tensor
    slack: Tensor
    shrink: Tensor
    noise: Tensor
    previous: Tensor
    moved: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        coeff: float,
        generator: torch.Generator,
        kernel: int | None = None,
        image_size: tuple[int, int] = (1, 1),
        weight_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.coeff = coeff
        self.precision: torch.dtype | None = None
        self.padding = None if kernel is None else kernel // 2
        shape = (outputs, inputs) if kernel is None else (outputs, inputs, kernel, kernel)
        spread = 1 / math.sqrt(math.prod(shape[1:]))
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-spread, spread, generator=generator) * weight_scale)
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-spread, spread, generator=generator))
        # A 1x1 convolution acts on each pixel alone, so one pixel has the operator's norm.
        size = () if kernel is None else (1, 1) if kernel == 1 else image_size
        self.register_buffer("v", unit(torch.randn(1, inputs, *size, generator=generator)))
        self.register_buffer("others", torch.randn(FOLLOWED, inputs, *size, generator=generator))
        self.register_buffer("u", torch.zeros(1, outputs, *size))
        self.register_buffer("noise", unit(torch.randn(1, inputs, *size, generator=generator)), persistent=False)
        self.register_buffer("previous", self.weight.detach().clone(), persistent=False)
        self.register_load_state_dict_post_hook(_weight_is_known)
        self.register_buffer("moved", torch.zeros(()), persistent=False)
        self.register_buffer("sigma", torch.zeros(()))
        self.register_buffer("slack", torch.zeros(()))
        self.register_buffer("shrink", torch.ones(()))

    def operator(self, weight: Tensor) -> tuple[Operator, Operator]:
        """x -> W x and its transpose, without the bias."""
        if self.padding is None:
            return lambda x: F.linear(x, weight), lambda u: u @ weight
        return (
            lambda x: F.conv2d(x, weight, padding=self.padding),
            lambda u: F.conv_transpose2d(u, weight, padding=self.padding),
        )

    def forward(self) -> Affine:
        weight = self.normalised()
        return Affine(weight if self.precision is None else weight.to(self.precision), self.bias, self.padding)

    def normalised(self) -> Tensor:
        """The weight before it is rounded to `precision`."""
        apply, _ = self.operator(self.weight)
        sigma = (self.u * apply(self.v)).sum() * (1 + self.slack)
        weight = self.weight / torch.clamp(sigma / self.coeff, min=1)
        return weight if self.precision is None else weight * self.shrink

    @torch.no_grad()
    def multiplied(self) -> Tensor:
        """The weight that the layer really multiplies with, rounding included."""
        return self.forward().weight.to(self.weight.dtype)

    def converge_norm(self) -> None:
        """From a random vector to a converged one."""
        for _ in range(START_ROUNDS):
            self.update_norm(START_ITERATIONS)
            harmless = self.sigma * (1 + self.slack) < self.coeff
            if harmless or self.slack < CONVERGED:
                return

    @torch.no_grad()
    def update_norm(self, iterations: int | None = None) -> None:
        """Follows the weight's largest singular value; to be called after every change of the weight."""
        weight = self.weight.detach()
        if iterations is None:
            crowded = self.v[0, 0].numel() > 1 and self.v.shape[1] <= FEW_CHANNELS
            iterations = CROWDED_ITERATIONS if crowded else 1
        # Squares of huge or tiny weights leave the range of fp32, so the largest entry is made 1.
        largest = weight.abs().amax().clamp_min(torch.finfo(weight.dtype).tiny)
        self.moved.copy_(torch.linalg.vector_norm((weight - self.previous) / largest))
        self.moved.div_(torch.linalg.vector_norm(weight / largest).clamp_min(torch.finfo(weight.dtype).tiny))
        self.previous.copy_(weight)
        top = self._top(weight / largest, iterations)
        self.u.copy_(top.u)
        self.v.copy_(top.v)
        self.others.copy_(top.others)
        self.sigma.copy_(top.sigma * largest)
        self.slack.copy_(top.missing)
        if self.precision is not None:
            self._fit_rounding(weight, self.precision)

    def _top(self, weight: Tensor, iterations: int) -> TopSingular:
        return top_singular(*self.operator(weight), self.v, self.others, self.noise, iterations)

    def _fit_rounding(self, weight: Tensor, precision: torch.dtype, rounds: int = 3) -> None:
        """Finds a factor <= 1 for which the rounded weight obeys the bound as well."""
        scaled = weight / torch.clamp(self.sigma * (1 + self.slack) / self.coeff, min=1)
        shrink = torch.ones_like(self.shrink)
        for _ in range(rounds):
            rounded = (scaled * shrink).to(precision).to(weight.dtype)
            norm = self._top(rounded, iterations=1).sigma
            # One unit of roundoff below: shrunk by less, a coarse entry could round up to where it was.
            smaller = shrink * (self.coeff / norm.clamp_min(self.coeff) - torch.finfo(precision).eps / 2)
            shrink = torch.where(norm > self.coeff * (1 + 2e-4), smaller, shrink)
        self.shrink.copy_(shrink)


def _weight_is_known(layer: nn.Module, _: object) -> None:
    """A loaded weight's norms were loaded with it: it has not moved."""
    if isinstance(layer, SpectralLayer):
        layer.previous.copy_(layer.weight.detach())
