"""Dense layers [a x ; b phi(W x)] one after the other, and the affine map that ends them, as one map.

What enters an affine map are the features made so far, each times the a's and the b it has passed. They are written
once, with the numbers that the last map wants, to a tensor for each map that reads them, so nothing is concatenated and
no weight is touched: that of a rounded weight is what the bound is about. A map in between wants all of its features
larger by one number, 1 / (a_i ... a_last), which the activation behind it takes in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from idn.flows.features import Feature, SlicesPull, feature_of
from idn.flows.maps import Affine, Gradients, Map, Run, Weights
from idn.flows.rows import empty_rows, gathered, wide

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


class Step(NamedTuple):
    """A dense layer as it is computed."""

    layer: Concatenate
    affine: Affine
    feature: Feature
    start: int
    """The channels that come in, after which the new ones go."""


class Made(NamedTuple):
    """What each affine map reads, what it made, and the derivatives of the activations behind."""

    reads: list[Tensor]
    entered: list[Tensor]
    pulls: list[SlicesPull]


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

    def steps(self) -> tuple[list[Step], Tensor]:
        """The layers, and the product of all a's, which x is multiplied with on its way to the last map."""
        steps: list[Step] = []
        passed = torch.ones_like(self.layers[-1].a)
        for layer in reversed(self.layers):
            after, passed = layer.b * passed, layer.a * passed
            before = None if layer is self.layers[0] else 1 / passed  # the first map reads x itself
            feature = feature_of(layer.phi, layer.affine.bias, before, after)
            steps.append(Step(layer, layer.affine, feature, layer.affine.inputs))
        return steps[::-1], passed

    def run(self, rows: Tensor, n: int) -> Run:
        steps, passed = self.steps()
        made = self._make(rows, n)
        pulls = made.pulls
        # Of images only what entered the activations is kept: the features, as much again, are quickly made from it.
        # What was made of few channels is quickly made again, too.
        kept = made if rows.dim() == 2 else None
        entered = [
            None if FEW * step.start <= one.shape[1] else one for step, one in zip(steps, made.entered, strict=True)
        ]

        def pull(u: Tensor) -> Tensor:
            into = [self.last.transposed(u)]
            for step, pull_feature in zip(reversed(steps), reversed(pulls), strict=True):
                into.append(step.affine.transposed(pull_feature(into, step.start)))
            return self._into_rows(into, passed)

        def back(grad: Tensor) -> tuple[Tensor, Gradients]:
            reads, entering, _ = kept or self._make(rows, n, entered)
            reads = list(reads)
            found = self.last.gradients(reads[-1], grad, n)
            into, into_channels = [self.last.transposed(grad)], self.last.along_weight(found[0])
            for i, (layer, affine, feature, start) in reversed(list(enumerate(steps))):
                del reads[i + 1 :]  # each is large
                inner, into_feature = feature.back(entering[i], n, into, start)
                into_weight = affine.into_weight(reads[i], inner)
                into_a = (into_channels[:start].sum() / layer.a).view_as(layer.a)
                into_b = (into_channels[start:].sum() / layer.b).view_as(layer.b)
                found = [into_weight, *into_feature, into_a, into_b, *found]
                into_channels = into_channels[:start] + affine.along_weight(into_weight)
                into.append(affine.transposed(inner))
            return self._into_rows(into, passed), found

        return Run(self.last.tangents(made.reads[-1], n), pull, back)

    def _make(self, rows: Tensor, n: int, entered: Sequence[Tensor | None] | None = None) -> Made:
        """The features of the rows; a second time from what entered the activations at first, as far as it is kept."""
        steps, passed = self.steps()
        affines = [*(step.affine for step in steps[1:]), self.last]
        reads = [rows, *(empty_rows(len(rows), affine.inputs, rows) for affine in affines)]
        scaled = (wide(rows) * passed).to(rows.dtype)
        for later in reads[1:]:
            later[:, : steps[0].start] = scaled
        made = Made(reads, [], [])
        for i, (_, affine, feature, start) in enumerate(steps):
            known = entered[i] if entered else None
            y = affine.product(reads[i]) if known is None else known
            if entered is None:
                made.pulls.append(feature.make(y, n, reads[i + 1 :], start))
            else:
                feature.write(y, n, reads[i + 1 :], start)
            made.entered.append(y)
        return made

    def _into_rows(self, into: list[Tensor], passed: Tensor) -> Tensor:
        """What all maps give back to x: the first one directly, the others to x times what it has passed."""
        *later, first = into
        return gathered(first, later, passed)
