"""Dense layers [a x ; b phi(W x)] one after the other, and the affine map that ends them, as one map.

All features live in one buffer, each written once, unscaled: what enters a layer is a prefix of the buffer times one
number per channel, the product of the a's and b's it has passed. Those numbers are folded into the layer's weight, so
the concatenations cost and keep nothing. A rounded weight must stay as it is, since its norm is what the bound is
about: in low precision the prefix is multiplied instead, while it is copied for the convolution.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from idn.flows.maps import Affine, Back, Gradients, Map, Pull, Run, Weights, along_channels

Derivative = TypeVar("Derivative")
FEW = 8
"""Channels that come in are few where so many times as many come out."""


@dataclass(frozen=True)
class Concatenate(Weights):
    """The dense layer h(x) = [a x ; b phi(W x)] of equation (3), where a and b are the normalised eta 1 and 2."""

    affine: Affine
    phi: Map
    a: Tensor
    b: Tensor

    def value(self, x: Tensor) -> Tensor:
        lower = self.phi.value(self.affine.value(x))
        return torch.cat([self.a.to(lower.dtype) * x, self.b.to(lower.dtype) * lower], 1)

    def tangents(self, rows: Tensor, n: int) -> Tensor:
        lower = self.phi.tangents(self.affine.tangents(rows, n), n)
        return torch.cat([self.a.to(lower.dtype) * rows, self.b.to(lower.dtype) * lower], 1)


class Reader:
    """An affine map that reads a prefix of the features, each channel times its number in `scale`."""

    def __init__(self, affine: Affine, scale: Tensor) -> None:
        self.width, self.scale, self.original = len(scale), scale, affine
        self.fold = affine.weight.dtype == scale.dtype
        self.affine = replace(affine, weight=self._columns(affine.weight)) if self.fold else affine

    def _columns(self, weight: Tensor) -> Tensor:
        return weight * along_channels(self.scale, weight)

    def entering(self, features: Tensor) -> Tensor:
        prefix = features[:, : self.width]
        return prefix if self.fold else prefix * along_channels(self.scale, prefix)

    def read(self, features: Tensor, n: int) -> Tensor:
        return self.affine.tangents(self.entering(features), n)

    def transposed(self, u: Tensor) -> Tensor:
        into = self.affine.transposed(u)
        return into if self.fold else into.mul_(along_channels(self.scale, into))

    def gradients(self, features: Tensor, grad: Tensor, n: int) -> tuple[Gradients, Tensor]:
        """Of weight and bias, and of `scale`: a channel's number multiplies its column of the weight."""
        into_weight, into_bias = self.affine.gradients(self.entering(features), grad, n)
        dots = (self.original.weight.to(self.scale.dtype) * into_weight).transpose(0, 1).flatten(1).sum(1)
        if self.fold:
            return [self._columns(into_weight), into_bias], dots
        return [into_weight, into_bias], dots / self.scale


class Made(NamedTuple):
    """All features, what entered the activations that made them, and those activations' derivatives."""

    features: Tensor
    entered: list[Tensor]
    pulls: list[Pull]
    backs: list[Back]


@dataclass(frozen=True)
class DenseNet(Map):
    """Dense layers and the affine map that ends them."""

    layers: tuple[Concatenate, ...]
    last: Affine

    def value(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.value(x)
        return self.last.value(x)

    def tangents(self, rows: Tensor, n: int) -> Tensor:
        for layer in self.layers:
            rows = layer.tangents(rows, n)
        return self.last.tangents(rows, n)

    def readers(self) -> list[Reader]:
        """The affine maps of all layers, and the last one."""
        affines = [*(layer.affine for layer in self.layers), self.last]
        readers = [Reader(affines[0], self.layers[0].a.new_ones(affines[0].inputs))]
        for layer, affine in zip(self.layers, affines[1:], strict=True):
            before = readers[-1].scale
            new = layer.b.expand(affine.inputs - len(before))
            readers.append(Reader(affine, torch.cat([layer.a * before, new])))
        return readers

    def run(self, rows: Tensor, n: int) -> Run:
        *readers, last = self.readers()
        made = self._make(rows, n, readers, last.width)
        pulls = made.pulls
        # Of images only what entered the activations is kept: the features, as much again, are quickly made from it.
        # What was made of few channels is quickly made again, too.
        kept = made if rows.dim() == 2 else None
        entered = [
            None if FEW * reader.width <= one.shape[1] else one
            for reader, one in zip(readers, made.entered, strict=True)
        ]

        def pull(u: Tensor) -> Tensor:
            total = last.transposed(u)
            for _, reader, pull_phi in self._backwards(readers, pulls):
                into = reader.transposed(pull_phi(total[:, reader.width :]))
                total = into.add_(total[:, : reader.width])
            return total

        def back(grad: Tensor) -> tuple[Tensor, Gradients]:
            *readers, last = self.readers()  # again: kept, their weights would take as much as all parameters
            made = kept or self._make(rows, n, readers, last.width, entered)
            features, backs = made.features, made.backs
            del made  # and with it the pulls, which hold slopes
            found, into_scale = last.gradients(features, grad, n)
            total = last.transposed(grad)
            for layer, reader, back_phi in self._backwards(readers, backs):
                inner, into_phi = back_phi(total[:, reader.width :])
                into_affine, directly = reader.gradients(features, inner, n)
                into_a = (into_scale[: reader.width] * reader.scale).sum().view_as(layer.a)
                into_b = into_scale[reader.width :].sum().view_as(layer.b)
                found = [*into_affine, *into_phi, into_a, into_b, *found]
                into_scale = layer.a * into_scale[: reader.width] + directly
                total = reader.transposed(inner).add_(total[:, : reader.width])
            return total, found

        return Run(last.read(made.features, n), pull, back)

    def _make(
        self, rows: Tensor, n: int, readers: list[Reader], width: int, entered: Sequence[Tensor | None] = ()
    ) -> Made:
        """All features of the rows; a second time from what entered the activations at first, as far as it is kept."""
        features = self._buffer(rows, width)
        features[:, : readers[0].width] = rows
        made = Made(features, [], [], [])
        for i, (layer, reader) in enumerate(zip(self.layers, readers, strict=True)):
            kept = entered[i] if entered else None
            entering = reader.read(features, n) if kept is None else kept
            phi = layer.phi.run(entering, n)
            features[:, reader.width : reader.width + phi.rows.shape[1]] = phi.rows
            made.entered.append(entering)
            made.pulls.append(phi.pull)
            made.backs.append(phi.back)
        return made

    def _backwards(
        self, readers: list[Reader], derivatives: list[Derivative]
    ) -> Iterator[tuple[Concatenate, Reader, Derivative]]:
        return zip(reversed(self.layers), reversed(readers), reversed(derivatives), strict=True)

    def _buffer(self, rows: Tensor, width: int) -> Tensor:
        memory_format = torch.channels_last if rows.dim() == 4 else torch.contiguous_format
        shape = (len(rows), width, *rows.shape[2:])
        return torch.empty(shape, dtype=rows.dtype, device=rows.device, memory_format=memory_format)
