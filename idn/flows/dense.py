"""Dense layers [a x ; b phi(W x)] one after the other, and the affine map that ends them, as one map.

What enters an affine map are the features made so far, each times the a's and the b it has passed. They are written
once, with the numbers that the last map wants, to a tensor for each map that reads them, so nothing is concatenated and
no weight is touched: that of a rounded weight is what the bound is about. A map in between wants all of its features
larger by one number, 1 / (a_i ... a_last), which the activation behind it takes in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from idn.flows.dense_images import FEW, image_again, image_run
from idn.flows.features import Feature, SlicesPull, feature_of
from idn.flows.maps import Affine, Back, Gradients, Map, Run, Weights
from idn.flows.rows import channels_last, empty_rows, gathered, over_points, wide
from idn.flows.slices import Ending, Slices
from idn.flows.swish import NARROW


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

    affine: Affine
    feature: Feature
    start: int
    """The channels that come in, after which the new ones go."""


class Made(NamedTuple):
    """What each affine map reads, what it made, and the derivatives of the activations behind."""

    reads: list[Tensor]
    by_front: Tensor
    """What `DenseNet.front` reads."""
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
            steps.append(Step(layer.affine, feature, layer.affine.inputs))
        return steps[::-1], passed

    def run(self, rows: Tensor, n: int) -> Run:
        return image_run(self, rows, n) or self._run(rows, n)

    def again(self, rows: Tensor, n: int, kept: tuple[Tensor, ...]) -> Back:
        return image_again(self, rows, n, kept) or self._run(rows, n).back

    def _run(self, rows: Tensor, n: int) -> Run:
        steps, passed = self.steps()
        ending = self._ending(empty_rows(len(rows), len(self.last.weight), wide(rows)).zero_()) if self.narrow else None
        made = self._make(rows, n, ending)
        pulls = made.pulls
        out = self.front.tangents(made.by_front, n)
        # Of images only what entered the activations is kept: the features, as much again, are quickly made from it.
        # What was made of few channels is quickly made again, too.
        kept = made if rows.dim() == 2 else None
        entered = [
            None if FEW * step.start <= one.shape[1] else one for step, one in zip(steps, made.entered, strict=True)
        ]

        def pull(u: Tensor) -> Tensor:
            into, ending = [self.front.transposed(u)], self._ending(u)
            for step, pull_feature in zip(reversed(steps), reversed(pulls), strict=True):
                sources = Slices(into[self.narrow :], step.start, ending)
                into.append(step.affine.transposed(pull_feature(sources)))
            return gathered(into[-1], into[:-1], passed)

        def back(grad: Tensor) -> tuple[Tensor, Gradients]:
            reads, by_front, entering, _ = kept or self._make(rows, n, None, entered)
            reads = list(reads)
            into, ending = [self.front.transposed(grad)], self._ending(grad)
            into_last = [self.front.into_weight(by_front, grad)]
            del by_front
            into_weights: list[Tensor] = []
            into_features: list[Gradients] = []
            for i, step in reversed(list(enumerate(steps))):
                del reads[i + 1 :]  # each is large
                sources = Slices(into[self.narrow :], step.start, ending)
                inner, into_feature, into_ending = step.feature.back(entering[i], n, sources)
                into.append(step.affine.transposed(inner))
                into_weights.insert(0, step.affine.into_weight(reads[i], inner))
                into_features.insert(0, into_feature)
                if into_ending is not None:
                    into_last.insert(1, into_ending.to(grad.dtype)[:, :, None, None])
            into_weights.append(torch.cat(into_last, 1))
            found: Gradients = []
            affines = (*(step.affine for step in steps), self.last)
            along = [affine.along_weight(found) for affine, found in zip(affines, into_weights, strict=True)]
            for into_weight, into_feature, into_factors in zip(
                into_weights[:-1], into_features, self.into_factors(along), strict=True
            ):
                found += [into_weight, *into_feature, *into_factors]
            found += [into_weights[-1], over_points(grad[:n], self.last.bias.dtype)]
            # What all maps give back to x: the first one directly, the others to x times what it has passed.
            return gathered(into[-1], into[:-1], passed), found

        return Run(out if ending is None else ending.rows.add_(out), pull, back)

    @property
    def narrow(self) -> bool:
        """Whether the last map makes few channels of each pixel: features are better multiplied as they come."""
        return self.last.padding == 0 and len(self.last.weight) <= NARROW

    @property
    def front(self) -> Affine:
        """The last map, or, if it is narrow, what it does to x itself."""
        if not self.narrow:
            return self.last
        return replace(self.last, weight=self.last.weight[:, : self.layers[0].affine.inputs])

    def _ending(self, rows: Tensor) -> Ending | None:
        return Ending(self.last.weight.flatten(1), channels_last(rows)) if self.narrow else None

    def _make(
        self, rows: Tensor, n: int, ending: Ending | None, entered: Sequence[Tensor | None] | None = None
    ) -> Made:
        """The features of the rows; a second time from what entered the activations at first, as far as it is kept."""
        steps, passed = self.steps()
        widths = [step.start for step in steps[1:]] + ([] if self.narrow else [self.last.inputs])
        reads = [rows, *(empty_rows(len(rows), width, rows) for width in widths)]
        scaled = (wide(rows) * passed).to(rows.dtype)
        for later in reads[1:]:
            later[:, : steps[0].start] = scaled
        made = Made(reads, scaled if self.narrow else reads[-1], [], [])
        for i, (affine, feature, start) in enumerate(steps):
            known = entered[i] if entered else None
            y = affine.product(reads[i]) if known is None else known
            into = Slices(reads[i + 1 :], start, ending)
            if entered is None:
                made.pulls.append(feature.make(y, n, into))
            elif into.tensors:
                feature.write(y, n, into)
            made.entered.append(y)
        return made

    def into_factors(self, along: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Gradients of a and b of each layer, from each map's `along_weight`: they multiply columns of all weights of
        later maps."""
        found: list[tuple[Tensor, Tensor]] = []
        into_channels = along[-1]
        for layer, into_read in zip(reversed(self.layers), reversed(along[:-1]), strict=True):
            passing, new = into_channels[: layer.affine.inputs], into_channels[layer.affine.inputs :]
            found.insert(0, ((passing.sum() / layer.a).view_as(layer.a), (new.sum() / layer.b).view_as(layer.b)))
            into_channels = passing + into_read
        return found
