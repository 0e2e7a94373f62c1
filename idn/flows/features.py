"""What a dense layer adds to the features, r phi(a y + b), for any activation: y is what its product made."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from idn.flows.activations import LipSwish, Mirror
from idn.flows.maps import Chain, Gradients, Map, Run
from idn.flows.rows import along_channels, over_points, wide
from idn.flows.slices import Slices
from idn.flows.swish import Swish

SlicesPull = Callable[[Slices], Tensor]
"""J^T u, where u is what the slices hold."""


class FeatureGradients(NamedTuple):
    y: Tensor
    tensors: Gradients
    """Of the bias and of the activation."""
    ending: Tensor | None


class Feature(ABC):
    """r phi(a y + b)."""

    @abstractmethod
    def make(self, y: Tensor, n: int, into: Slices) -> SlicesPull:
        """Writes the rows for y."""

    @abstractmethod
    def write(self, y: Tensor, n: int, into: Slices) -> None:
        """The same, where no pull is wanted."""

    @abstractmethod
    def back(self, y: Tensor, n: int, sources: Slices) -> FeatureGradients:
        """Gradients, where the sources hold that of the rows."""


@dataclass(frozen=True)
class SwishFeature(Feature):
    swish: Swish

    def make(self, y: Tensor, n: int, into: Slices) -> SlicesPull:
        slope = self.swish.write_with_slope(y, n, into)
        return lambda sources: self.swish.pull(slope, sources)

    def write(self, y: Tensor, n: int, into: Slices) -> None:
        self.swish.write(y, n, into)

    def back(self, y: Tensor, n: int, sources: Slices) -> FeatureGradients:
        found = self.swish.back(y, n, sources)
        assert found.bias is not None
        return FeatureGradients(found.y, [found.bias, found.beta.view_as(self.swish.beta)], found.ending)


@dataclass(frozen=True)
class AnyFeature(Feature):
    """By the activation's own `run`."""

    phi: Map
    bias: Tensor
    before: Tensor | None
    after: Tensor

    def make(self, y: Tensor, n: int, into: Slices) -> SlicesPull:
        run = self._run(y, n)
        into.write(_times(run.rows, self.after))
        width = run.rows.shape[1]
        return lambda sources: _times(run.pull(_times(sources.read(width), self.after)), self.before)

    def write(self, y: Tensor, n: int, into: Slices) -> None:
        self.make(y, n, into)

    def back(self, y: Tensor, n: int, sources: Slices) -> FeatureGradients:
        run = self._run(y, n)
        into, found = run.back(_times(sources.read(run.rows.shape[1]), self.after))
        into_ending = sources.into_ending(_times(run.rows, self.after))
        tensors = [over_points(into[:n], self.bias.dtype), *found]
        return FeatureGradients(_times(into, self.before), tensors, into_ending)

    def _run(self, y: Tensor, n: int) -> Run:
        x = wide(y).clone() if self.before is None else wide(y) * self.before
        x[:n] += along_channels(self.bias, x)
        return self.phi.run(x.to(y.dtype), n)


def _times(x: Tensor, number: Tensor | None) -> Tensor:
    return x if number is None else (wide(x) * number).to(x.dtype)


def feature_of(phi: Map, bias: Tensor, before: Tensor | None, after: Tensor) -> Feature:
    """r phi(a y + b) with the number a before and r after phi."""
    match phi:
        case LipSwish(beta, divisor):
            return SwishFeature(Swish(beta, divisor, False, before, bias, after))
        case Chain((Mirror(), LipSwish(beta, divisor))):
            return SwishFeature(Swish(beta, divisor, True, before, bias, after))
    return AnyFeature(phi, bias, before, after)
