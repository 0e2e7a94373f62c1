"""A branch's value as few operations: what is evaluated again and again while the weights stay.

With q = beta x, LipSwish is x sigmoid(beta x) / c = silu(q) / (beta c). Factors per channel, these and those of dense
layers, are folded into the weights before and after, once, so an activation is one call. With CLipSwish,
silu(-q) = silu(q) - q saves the second sigmoid.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from idn.flows.activations import LipSwish, Mirror
from idn.flows.dense import DenseNet
from idn.flows.maps import Affine, Chain, Map
from idn.flows.rows import along_channels, channels_last

Step = Callable[[Tensor], Tensor]

MANY = 16
"""On one thread, torch multiplies fewer images by a 1x1 weight at half the pace; their lines are images as well."""


@dataclass(frozen=True)
class Product:
    """x -> W x + b."""

    affine: Affine

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 4 and len(x) < MANY and self.affine.weight.shape[2:] == (1, 1):
            n, _, height, width = x.shape
            lines = self.affine.value(x.permute(0, 2, 3, 1).reshape(n * height, 1, width, -1).permute(0, 3, 1, 2))
            return lines.permute(0, 2, 3, 1).reshape(n, height, width, -1).permute(0, 3, 1, 2)
        return self.affine.value(x)


@dataclass(frozen=True)
class Beside:
    """x -> [x ; inner(x)]."""

    inner: list[Step]

    def __call__(self, x: Tensor) -> Tensor:
        new = x
        for step in self.inner:
            new = step(new)
        return torch.cat([x, new], 1)


@dataclass(frozen=True)
class Times:
    """x times a number, or one per channel."""

    factor: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x * (along_channels(self.factor, x) if self.factor.numel() > 1 else self.factor.to(x))


def evaluator(g: Map, precision: torch.dtype | None = None) -> Step:
    """g.value, with products in `precision` if it is given."""
    steps = folded(g, precision)

    @torch.no_grad()
    def value(x: Tensor) -> Tensor:
        out = channels_last(x if precision is None else x.to(precision))
        for step in steps:
            out = step(out)
        return out.to(x.dtype)

    return value


def folded(g: Map, precision: torch.dtype | None = None) -> list[Step]:
    """g as steps, one after the other."""
    steps, factor = _folded(tuple(flat(g)), None, precision)
    return steps + _multiplied(factor)


def flat(g: Map) -> Iterator[Map]:
    """The maps that g is a chain of."""
    for part in g.maps if isinstance(g, Chain) else (g,):
        yield from flat(part) if isinstance(part, Chain) else (part,)


def _folded(
    maps: tuple[Map, ...], factor: Tensor | None, precision: torch.dtype | None
) -> tuple[list[Step], Tensor | None]:
    """The maps as steps, if what enters lacks a `factor` per channel, and the factor that what leaves lacks."""
    steps: list[Step] = []
    while maps:
        if isinstance(maps[0], Affine):
            phi = _lipswish(maps[1:])
            steps.append(_affine(maps[0], factor, phi, precision))
            factor, maps = None, maps[1:]
            if phi is None:
                continue
        elif phi := _lipswish(maps):
            steps += _multiplied(phi.beta if factor is None else factor * phi.beta)
        elif isinstance(maps[0], DenseNet):
            more, factor = _dense(maps[0], factor, precision)
            steps, maps = steps + more, maps[1:]
            continue
        else:
            steps += [*_multiplied(factor), maps[0].value]
            factor, maps = None, maps[1:]
            continue
        mirrored = isinstance(maps[0], Mirror)
        steps.append(mirrored_silu if mirrored else silu)
        factor, maps = 1 / (phi.beta * phi.divisor), maps[1 + mirrored :]
    return steps, factor


def _lipswish(maps: tuple[Map, ...]) -> LipSwish | None:
    """The LipSwish that the maps begin with, mirrored or not."""
    first = maps[1:2] if maps and isinstance(maps[0], Mirror) else maps[:1]
    return first[0] if first and isinstance(first[0], LipSwish) else None


def _affine(affine: Affine, factor: Tensor | None, phi: LipSwish | None, precision: torch.dtype | None) -> Step:
    """The affine map of what lacks the factor, times what the activation after it multiplies with."""
    weight, bias = affine.weight, affine.bias
    if factor is not None:
        weight = weight * along_channels(factor, weight)
    if phi is not None:
        weight, bias = weight * phi.beta, bias * phi.beta
    weight = channels_last(weight.detach().to(precision or weight.dtype))
    return Product(replace(affine, weight=weight, bias=bias.detach().to(weight.dtype)))


def _dense(net: DenseNet, factor: Tensor | None, precision: torch.dtype | None) -> tuple[list[Step], None]:
    """Each layer's new features beside those that came in; the factors of both enter the next weight."""
    ones = torch.ones_like(net.last.bias[:1])
    factor = ones.expand(net.layers[0].affine.inputs) * (ones if factor is None else factor)
    steps: list[Step] = []
    readers = [*(layer.affine for layer in net.layers[1:]), net.last]
    for layer, reader in zip(net.layers, readers, strict=True):
        inner, lacking = _folded((layer.affine, *flat(layer.phi)), factor, precision)
        new = ones.expand(reader.inputs - len(factor)) * (ones if lacking is None else lacking)
        factor = torch.cat([layer.a * factor, layer.b * new])
        steps.append(Beside(inner))
    return [*steps, _affine(net.last, factor, None, precision)], None


def _multiplied(factor: Tensor | None) -> list[Step]:
    return [] if factor is None else [Times(factor)]


def silu(q: Tensor) -> Tensor:
    return F.silu(q, inplace=True)


def mirrored_silu(q: Tensor) -> Tensor:
    up = F.silu(q)
    return torch.cat([up, up - q], 1)
