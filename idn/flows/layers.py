"""Spectrally normalised layers: equation (2), ||W||_2 <= coeff < 1, for the weight that is really multiplied."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from idn.flows.convolutions import Convolution, follow_convolution, slope_of
from idn.flows.maps import Affine
from idn.flows.matrices import is_small, top_of_small
from idn.flows.norms import FOLLOWED, Operator, TopSingular, lengths, top_beside_wave, top_singular, unit
from idn.flows.rounding import BEYOND, NOISE, Rounding, outweighed
from idn.flows.small import SmallMatrix, follow_small
from idn.flows.waves import STEPS, first_channels, strongest_wave

START_ITERATIONS = 10
CONVERGED = 2e-3
"""From a random vector: rounds of so many iterations, until so little can be missing, and at most so many rounds."""
START_ROUNDS = 8
LARGE = 2**16
"""Numbers in v,"""
HEAVY = 2**18
"""or in the weight."""
WAVE_STEPS = 3
"""At every frequency, beside one per iteration. With one, large layers that moved fast came 2 % above the bound."""
ADAPTED_ITERATIONS = 10
"""After so many iterations a wave has adapted to the image's edges, and v misses no more than its gradient says."""
ADAPTS = 2 / 3
"""Before, it is expected to win back this share of what the edges take from its gain, as it did in training."""


class SpectralLayer(nn.Module):
    """W x + b with W = weight / max(1, sigma / coeff), a matrix or a zero-padded convolution.

    sigma is the norm of the operator: for a k x k convolution that of the map between images of `image_size`. The
    singular vectors u and v are kept from step to step, for large weights with `others` that help to follow them (of a
    convolution also the gradient `climb` that v had), and the gradient flows through sigma = u^T W v with both held
    fixed. `slack` is the share by which the norm may exceed sigma; the weight is divided by that much more.
    `forward` returns the affine map with the normalised weight.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    u: Tensor
    v: Tensor
    others: Tensor
    climb: Tensor
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
        self.sparing = False
        self._kept: _Kept | None = None
        self.padding = None if kernel is None else kernel // 2
        shape = (outputs, inputs) if kernel is None else (outputs, inputs, kernel, kernel)
        spread = 1 / math.sqrt(math.prod(shape[1:]))
        self.weight = nn.Parameter(torch.empty(shape).uniform_(-spread, spread, generator=generator) * weight_scale)
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-spread, spread, generator=generator))
        # A 1x1 convolution acts on each pixel alone, so one pixel has the operator's norm.
        size = () if kernel is None else (1, 1) if kernel == 1 else image_size
        self.register_buffer("v", unit(torch.randn(1, inputs, *size, generator=generator)))
        self.register_buffer("u", torch.zeros(1, outputs, *size))
        # Whether the weight mixes several pixels.
        self.spatial = self.v[0, 0].numel() > 1
        # A small matrix, whose norm is proven at every step, needs no vectors but these two.
        self.small = not self.spatial and is_small(self.weight)
        if self.spatial:
            self.register_buffer("others", first_channels(self.weight.detach()))
            self.register_buffer("climb", torch.zeros_like(self.v))
        elif not self.small:
            self.register_buffer("others", torch.randn(FOLLOWED, inputs, *size, generator=generator))
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
        limit = self.coeff / (1 + self.slack)
        # Of a matrix the slope is u v^T, which need not be made.
        # Without gradients a sparing layer is in the backward pass, which asks for the slope once more, or evaluates.
        slope = None if self.padding is None else self.slope(keep=self.sparing and not torch.is_grad_enabled())
        again = self._slope_once_more if self.sparing and slope is not None else None
        weight: Tensor = _Normalised.apply(self.weight, self.u, self.v, slope, again, limit)
        return weight if self.precision is None else weight * self.shrink

    @torch.no_grad()
    def slope(self, keep: bool = False) -> Tensor:
        """Of sigma = u^T W v over a convolution's weight.

        It takes one product, so that sigma and its gradient need none. May be kept, for as long as u and v stay: it is
        as large as the weight.
        """
        if self._kept is not None and self._kept.is_of(self.u, self.v):
            return self._kept.slope
        slope = slope_of(self.weight, self.u, self.v) if self.spatial else None
        if slope is None:
            slope = conv2d_weight(self.v, self.weight.shape, self.u, padding=self.padding)
        self._kept = _Kept(slope, self.u, self.v, (self.u._version, self.v._version)) if keep else None
        return slope

    def _slope_once_more(self) -> Tensor:
        slope, self._kept = self.slope(), None
        return slope

    def outweigh_rounding(self) -> bool:
        """Of a convolution's bf16 weight, if a kernel can; whether it did."""
        return outweighed(
            self.weight, self.slope(keep=not self.sparing), self.sigma, self.slack, self.shrink, self.coeff
        )

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

    def update_norm(self, iterations: int | None = None) -> None:
        """Follows the weight's largest singular value; to be called after every change of the weight."""
        update_norms([self], iterations)


class _Kept(NamedTuple):
    """A slope and the vectors it belongs to, as they were."""

    slope: Tensor
    u: Tensor
    v: Tensor
    versions: tuple[int, int]

    def is_of(self, u: Tensor, v: Tensor) -> bool:
        return u is self.u and v is self.v and (u._version, v._version) == self.versions


class _Normalised(torch.autograd.Function):
    """W / max(1, sigma / limit) with sigma = u^T W v = <slope, W>, u and v held fixed.

    The slope is kept for the backward pass, or made `again`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        u: Tensor,
        v: Tensor,
        slope: Tensor | None,
        again: Callable[[], Tensor] | None,
        limit: Tensor,
    ) -> Tensor:
        along, other = (u, F.linear(v, weight)) if slope is None else (slope, weight)
        sigma = torch.dot(along.flatten(), other.flatten())
        factor = limit / torch.maximum(sigma, limit)
        ctx.again = again
        ctx.save_for_backward(weight, u, v, None if again else slope, sigma, limit, factor)
        return weight * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The factor limit / sigma falls by itself / sigma per unit of sigma."""
        weight, u, v, slope, sigma, limit, factor = ctx.saved_tensors
        slope = ctx.again() if ctx.again else slope
        # Of a convolution it comes channels-last. Put right once, it meets the weight in the same order every time.
        grad = grads[0].contiguous()
        along = torch.dot(grad.flatten(), weight.flatten()) * factor / sigma
        into_sigma = torch.where(sigma > limit, -along, torch.zeros_like(along))
        into_weight = grad * factor
        if slope is None:
            into_weight.addr_(u[0] * into_sigma, v[0])
        else:
            into_weight.addcmul_(slope, into_sigma)
        return into_weight, None, None, None, None, None


@torch.no_grad()
def update_norms(layers: Iterable[SpectralLayer], iterations: int | None = None) -> None:
    """Follows the largest singular values of many layers, those of equal shape together."""
    alike: dict[Any, list[SpectralLayer]] = defaultdict(list)
    for layer in _left_by_kernels(list(layers), iterations or 1):
        # A large layer alone keeps the machine busy, and less is in memory at a time.
        alone = id(layer) if layer.v.numel() > LARGE or layer.weight.numel() > HEAVY else None
        alike[layer.weight.shape, layer.v.shape, layer.coeff, layer.precision, alone].append(layer)
    for group in alike.values():
        _Together(group).update(iterations or 1)


def _left_by_kernels(layers: Sequence[SpectralLayer], iterations: int) -> list[SpectralLayer]:
    """All layers but the small matrices whose norms a kernel has followed and proven, and the convolutions that another
    has followed."""
    small = [layer for layer in layers if layer.small]
    proven = follow_small([_small_matrix(layer) for layer in small])
    done = {layer for layer, one in zip(small, proven, strict=True) if one}
    for x in layers if iterations == 1 else ():
        tensors = Convolution(x.weight, x.u, x.v, x.climb, x.others, x.sigma, x.slack) if x.spatial else None
        if tensors and follow_convolution(tensors, WAVE_STEPS + iterations, ADAPTS):
            if x.precision != torch.bfloat16 or not x.outweigh_rounding():
                _Together([x]).outweigh_rounding()
            done.add(x)
    return [layer for layer in layers if layer not in done]


def _small_matrix(layer: SpectralLayer) -> SmallMatrix:
    """From torch's dictionaries: there are many, and as attributes tensors take ten times as long."""
    own: dict[str, Any] = layer._buffers
    weight: Any = layer._parameters["weight"]
    vectors, numbers = (own["u"], own["v"]), (own["sigma"], own["slack"], own["shrink"])
    return SmallMatrix(weight, *vectors, *numbers, layer.coeff, layer.precision)


class _Together:
    """Layers of equal shape as one batch: every tensor has the layers as its first dimension."""

    def __init__(self, layers: Sequence[SpectralLayer]) -> None:
        self.layers, self.first = layers, layers[0]
        self.weight = _stack([layer.weight.detach() for layer in layers])
        self.v = self._buffers("v").flatten(2)

    def _buffers(self, name: str) -> Tensor:
        return _stack([getattr(layer, name) for layer in self.layers])

    def _write(self, name: str, values: Tensor) -> None:
        torch._foreach_copy_([getattr(layer, name) for layer in self.layers], list(values.unbind()))

    def update(self, iterations: int) -> None:
        # Squares of huge or tiny weights leave the range of fp32, so the largest entry is made 1.
        tiny = torch.finfo(self.weight.dtype).tiny
        entries = self.weight.flatten(1)
        largest = torch.maximum(entries.amax(1), -entries.amin(1)).clamp_min(tiny)
        scaled = self.weight / self._per_layer(largest)
        top = self._top(scaled, iterations)
        self.v, sigma = top.v, top.sigma * largest
        self._write("u", top.u.view(-1, *self.first.u.shape))
        self._write("v", top.v.view(-1, *self.first.v.shape))
        self._write("sigma", sigma)
        self._write("slack", top.missing)
        if not (self.first.spatial or self.first.small):
            change = (self._buffers("previous") - self.weight) / self._per_layer(largest)
            length, moved = (torch.linalg.vector_norm(w.flatten(1), dim=1) for w in (scaled, change))
            self._write("moved", moved / length.clamp_min(tiny))
            self._write("previous", self.weight)
        self.outweigh_rounding()

    def outweigh_rounding(self) -> None:
        """Of weights that are rounded."""
        if self.first.precision is not None:
            norm = self._buffers("sigma") * (1 + self._buffers("slack"))
            self._write("shrink", self._outweigh_rounding(norm, self.first.precision))

    def _per_layer(self, numbers: Tensor) -> Tensor:
        return numbers.view(-1, *[1] * (self.weight.dim() - 1))

    def _top(self, weight: Tensor, iterations: int) -> TopSingular:
        if self.first.spatial:
            return self._beside_wave(weight, iterations)
        if self.first.small:
            return top_of_small(weight.flatten(2), self.v)
        others, noise = self._buffers("others").flatten(2), self._buffers("noise").flatten(2)
        top, others = top_singular(*self._operator(weight), self.v, others, noise, iterations)
        self._write("others", others.view(-1, *self.first.others.shape))
        return top

    def _beside_wave(self, weight: Tensor, iterations: int) -> TopSingular:
        height, width = self.first.v.shape[-2:]
        kept, steps = self._buffers("others"), min(WAVE_STEPS + iterations, STEPS)
        gain, wave, channels = strongest_wave(weight, (height, width), kept, steps)
        climb = self._buffers("climb").flatten(2)
        top, climb = top_beside_wave(*self._operator(weight), self.v, climb, wave, iterations)
        self._write("climb", climb.view(-1, *self.first.v.shape))
        self._write("others", channels)
        tiny = torch.finfo(gain.dtype).tiny
        sigma, missing = top.sigma.clamp_min(tiny), top.missing
        length = (lengths(wave.responses) / lengths(wave.images).clamp_min(tiny)).amax((1, 2))
        if iterations < ADAPTED_ITERATIONS:
            missing = torch.maximum(missing, torch.lerp(length, gain, ADAPTS) / sigma - 1)
        return top._replace(missing=torch.minimum(missing, (gain / sigma - 1).clamp_min(0)))

    def _operator(self, weight: Tensor) -> tuple[Operator, Operator]:
        """x -> W x and its transpose for all layers, each with several vectors: L x m x n."""
        if self.first.padding is None:
            return lambda x: x @ weight.mT, lambda u: u @ weight
        singly = [self.first.operator(one) for one in weight]

        def each(which: int, shape: torch.Size) -> Operator:
            def products(x: Tensor) -> Tensor:
                images = x.unflatten(2, shape)
                return _stack([f[which](one).flatten(1) for f, one in zip(singly, images, strict=True)])

            return products

        return each(0, self.first.v.shape[1:]), each(1, self.first.u.shape[1:])

    def _outweigh_rounding(self, norm: Tensor, precision: torch.dtype) -> Tensor:
        """Factors <= 1 for which the rounded weights obey the bound as well: rounding adds E, and |W + E| <= |W| + |E|.

        The entries of E are as good as independent of each other, so that its norm (of a convolution, at every
        frequency) comes close to |E|_F (1 / sqrt(inputs) + 1 / sqrt(outputs)). Where they are not, E shows along v.
        """
        coeff, rounding = self.first.coeff, Rounding(self.weight, precision)
        outputs, inputs = self.weight.shape[1:3]
        bounding = 1 / (norm / coeff).clamp_min(1)
        noise = NOISE * rounding.errors(bounding) * (inputs**-0.5 + outputs**-0.5)
        shrink = coeff / (norm.clamp_max(coeff) + noise).clamp_min(coeff)
        if self.first.spatial:
            slopes = _stack([layer.slope(keep=not layer.sparing) for layer in self.layers])
            norm = rounding.along_slope(bounding * shrink, slopes)
        else:
            norm = rounding.along(bounding * shrink, self._buffers("u").flatten(1), self._buffers("v").flatten(1))
        # One unit of roundoff below: shrunk by less, a coarse entry could round up to where it was.
        smaller = shrink * (coeff / norm.clamp_min(coeff) - torch.finfo(precision).eps / 2)
        return torch.where(norm > coeff * (1 + BEYOND), smaller, shrink)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Along a new first dimension; a single one as it is, without a copy."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _weight_is_known(layer: nn.Module, _: object) -> None:
    """A loaded weight's norms were loaded with it: it has not moved."""
    if isinstance(layer, SpectralLayer):
        layer.previous.copy_(layer.weight.detach())
