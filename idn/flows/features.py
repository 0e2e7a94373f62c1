"""What a dense layer adds to the features, r phi(a y + b), for any activation: y is what its product made."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from idn.flows.activations import LipSwish, Mirror
from idn.flows.maps import Chain, Gradients, Map, Run
from idn.flows.rows import along_channels, over_points, summed, wide
from idn.flows.swish import Swish, copy_channels

SlicesPull = Callable[[Sequence[Tensor], int], Tensor]
"""J^T u, where u is the sum of some tensors' channels from a certain one on."""


class Feature(ABC):
    """r phi(a y + b), written to channels of the tensors that read it."""

    @abstractmethod
    def make(self, y: Tensor, n: int, into: Sequence[Tensor], start: int) -> SlicesPull:
        """Writes the rows for y to the channels from `start` on."""

    @abstractmethod
    def write(self, y: Tensor, n: int, into: Sequence[Tensor], start: int) -> None:
        """The same, where no pull is wanted."""

    @abstractmethod
    def back(self, y: Tensor, n: int, sources: Sequence[Tensor], start: int) -> tuple[Tensor, Gradients]:
        """Gradients of y, and of bias and activation, where that of the rows is the sum of the sources' channels."""


@dataclass(frozen=True)
class SwishFeature(Feature):
    swish: Swish

    def make(self, y: Tensor, n: int, into: Sequence[Tensor], start: int) -> SlicesPull:
        slope = self.swish.write_with_slope(y, n, into, start)
        return lambda sources, start: self.swish.pull(slope, sources, start)

    def write(self, y: Tensor, n: int, into: Sequence[Tensor], start: int) -> None:
        self.swish.write(y, n, into, start)

    def back(self, y: Tensor, n: int, sources: Sequence[Tensor], start: int) -> tuple[Tensor, Gradients]:
        inner, into_bias, into_beta = self.swish.back(y, n, sources, start)
        assert into_bias is not None
        return inner, [into_bias, into_beta.view_as(self.swish.beta)]


@dataclass(frozen=True)
class AnyFeature(Feature):
    """By the activation's own `run`."""

    phi: Map
    bias: Tensor
    before: Tensor | None
    after: Tensor

    def make(self, y: Tensor, n: int, into: Sequence[Tensor], start: int) -> SlicesPull:
        run = self._run(y, n)
        copy_channels(_times(run.rows, self.after), into, start)
        width = run.rows.shape[1]
        return lambda sources, start: _times(run.pull(self._leaving(sources, start, width)), self.before)

    def write(self, y: Tensor, n: int, into: Sequence[Tensor], start: int) -> None:
        self.make(y, n, into, start)

    def back(self, y: Tensor, n: int, sources: Sequence[Tensor], start: int) -> tuple[Tensor, Gradients]:
        run = self._run(y, n)
        into, found = run.back(self._leaving(sources, start, run.rows.shape[1]))
        return _times(into, self.before), [over_points(into[:n], self.bias.dtype), *found]

    def _run(self, y: Tensor, n: int) -> Run:
        x = wide(y).clone() if self.before is None else wide(y) * self.before
        x[:n] += along_channels(self.bias, x)
        return self.phi.run(x.to(y.dtype), n)

    def _leaving(self, sources: Sequence[Tensor], start: int, width: int) -> Tensor:
        return _times(summed(sources, start, width), self.after)


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
