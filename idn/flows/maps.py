"""The maps that a branch g is made of, each with its derivative in both directions.

A branch is a chain of affine maps, activations and concatenations. Besides the value g(x), a flow needs the
Jacobian J of g from the right (J v: tangents) and from the left (J^T u: the power series of the log-det).
Every map gives all three from one pass, so no second derivative is ever taken by automatic differentiation:

    rows, pull = g.push(torch.cat([x, v]), n=len(x))    # rows = [g(x); J v],  pull(u) = J^T u

Points and tangents travel as rows of one tensor (`rows.py`). Maps own no parameters: `layers.py` and `branches.py` hold
those.

Derivatives are written by hand: a whole branch is one node of torch's graph, which keeps what its gradient needs and
nothing else. Images are kept channels-last.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from idn.flows.rows import along_channels, channels_last, over_points, pixels

FEW = 8
"""Channels."""

Pull = Callable[[Tensor], Tensor]
Gradients = list[Tensor]
Back = Callable[[Tensor], tuple[Tensor, Gradients]]


class Run(NamedTuple):
    """One pass through a map, outside any graph."""

    rows: Tensor
    pull: Pull
    """u -> J^T u at the points, for one or more groups of rows."""
    back: Back
    """Gradient of `rows` -> gradients of the incoming rows and of the map's `tensors()`."""
    kept: tuple[Tensor, ...] = ()
    """Of points alone: what spares `Map.again` the most arithmetic for the memory it takes."""


@dataclass(frozen=True)
class Weights:
    """A nest of weights that can be listed and replaced."""

    def tensors(self) -> Iterator[Tensor]:
        """All weights, in a fixed order."""
        for field in fields(self):
            part = getattr(self, field.name)
            for item in part if isinstance(part, tuple) else (part,):
                if isinstance(item, Tensor):
                    yield item
                elif isinstance(item, Weights):
                    yield from item.tensors()

    def with_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """The same with other weights, taken from an iterator in the order of `tensors()`."""

        def renewed(item: Any) -> Any:
            if isinstance(item, Tensor):
                return next(tensors)
            return item.with_tensors(tensors) if isinstance(item, Weights) else item

        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{
                name: tuple(renewed(item) for item in part) if isinstance(part, tuple) else renewed(part)
                for name, part in parts.items()
            },
        )


@dataclass(frozen=True)
class Map(Weights, ABC):
    """A differentiable map between batches."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """The map in plain, twice differentiable torch."""

    @abstractmethod
    def run(self, rows: Tensor, n: int) -> Run:
        """Values and tangents together, with what their derivatives need. Called where gradients are disabled."""

    def again(self, rows: Tensor, n: int, kept: tuple[Tensor, ...]) -> Back:
        """`run(rows, n).back` where nothing else of the run is wanted, with what a run of the points kept."""
        return self.run(rows, n).back

    @abstractmethod
    def tangents(self, rows: Tensor, n: int) -> Tensor:
        """The rows of `run` in plain torch, which automatic differentiation and the compiler can follow."""

    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        """Values and tangents as one differentiable step, and the transposed Jacobian (outside the graph)."""
        pulls: list[Pull] = []
        out = _Pushed.apply(self, rows, n, pulls, *self.tensors())
        return out, pulls[0]


class _Pushed(torch.autograd.Function):
    """`Map.run` as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, g: Map, rows: Tensor, n: int, pulls: list[Pull], *tensors: Tensor) -> Tensor:
        out, pull, ctx.back, _ = g.run(rows, n)
        pulls.append(pull)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        into_rows, into_tensors = ctx.back(grads[0])
        return (None, into_rows, None, None, *into_tensors)


@dataclass(frozen=True)
class Affine(Map):
    """W x + b, a matrix (`padding` None) or a zero-padded convolution.

    The product is taken in the weight's precision, whatever the rows come in.
    """

    weight: Tensor
    bias: Tensor
    padding: int | None = None

    @property
    def inputs(self) -> int:
        """Channels that come in."""
        return self.weight.shape[1]

    def product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = rows.to(self.weight.dtype)
        if self.padding is None:
            return F.linear(rows, self.weight, bias)
        return F.conv2d(channels_last(rows), self.weight, bias, padding=self.padding)

    def value(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias.to(self.weight.dtype))

    def tangents(self, rows: Tensor, n: int) -> Tensor:
        """W on all rows; b on the points alone."""
        if len(rows) == n:
            return self.value(rows)
        out = self.product(rows)
        out[:n] += along_channels(self.bias, out)
        return out

    def run(self, rows: Tensor, n: int) -> Run:
        def back(grad: Tensor) -> tuple[Tensor, Gradients]:
            return self.transposed(grad).to(rows.dtype), self.gradients(rows, grad, n)

        return Run(self.tangents(rows, n), self.transposed, back)

    def transposed(self, u: Tensor) -> Tensor:
        """W^T u."""
        u = u.to(self.weight.dtype)
        if self.padding is None:
            return u @ self.weight
        return F.conv_transpose2d(channels_last(u), self.weight, padding=self.padding)

    def gradients(self, rows: Tensor, grad: Tensor, n: int) -> Gradients:
        """Of weight and bias, for the rows that came in and the gradient of those that went out."""
        return [self.into_weight(rows, grad), over_points(grad[:n], self.bias.dtype)]

    def along_weight(self, into_weight: Tensor) -> Tensor:
        """The weight times its gradient, summed for each channel that comes in: its gradient by ln of a factor."""
        products = self.weight.to(self.bias.dtype) * into_weight
        return products.sum([0, *range(2, products.dim())])

    def into_weight(self, rows: Tensor, grad: Tensor) -> Tensor:
        rows, grad = rows.to(self.weight.dtype), grad.to(self.weight.dtype)
        if self.padding is None:
            return grad.T @ rows
        # 1x1: one product over all pixels, unless there are many channels in fp32, which convolutions are better at.
        if self.padding == 0 and (len(self.weight) <= FEW or self.weight.dtype != torch.float32):
            return (pixels(grad).T @ pixels(rows)).view_as(self.weight)
        return conv2d_weight(channels_last(rows), self.weight.shape, channels_last(grad), padding=self.padding)


@dataclass(frozen=True)
class Chain(Map):
    """Maps one after the other."""

    maps: tuple[Map, ...]

    def value(self, x: Tensor) -> Tensor:
        for part in self.maps:
            x = part.value(x)
        return x

    def tangents(self, rows: Tensor, n: int) -> Tensor:
        for part in self.maps:
            rows = part.tangents(rows, n)
        return rows

    def run(self, rows: Tensor, n: int) -> Run:
        if len(self.maps) == 1:
            return self.maps[0].run(rows, n)
        pulls: list[Pull] = []
        backs: list[Back] = []
        for part in self.maps:
            rows, pull_part, back_part, _ = part.run(rows, n)
            pulls.append(pull_part)
            backs.append(back_part)

        def pull(u: Tensor) -> Tensor:
            for pull_part in reversed(pulls):
                u = pull_part(u)
            return u

        def back(grad: Tensor) -> tuple[Tensor, Gradients]:
            found: Gradients = []
            for back_part in reversed(backs):
                grad, into_tensors = back_part(grad)
                found = into_tensors + found
            return grad, found

        return Run(rows, pull, back)

    def again(self, rows: Tensor, n: int, kept: tuple[Tensor, ...]) -> Back:
        return self.maps[0].again(rows, n, kept) if len(self.maps) == 1 else self.run(rows, n).back


@dataclass(frozen=True)
class InPrecision(Map):
    """A branch whose inside runs in a low precision; what enters and leaves keeps its own."""

    inner: Map
    dtype: torch.dtype

    def value(self, x: Tensor) -> Tensor:
        return self.inner.value(x.to(self.dtype)).to(x.dtype)

    def tangents(self, rows: Tensor, n: int) -> Tensor:
        return self.inner.tangents(rows.to(self.dtype), n).to(rows.dtype)

    def run(self, rows: Tensor, n: int) -> Run:
        out, pull, back, kept = self.inner.run(rows.to(self.dtype), n)
        back = self._widened(back, rows.dtype)
        return Run(out.to(rows.dtype), lambda u: pull(u.to(self.dtype)).to(u.dtype), back, kept)

    def again(self, rows: Tensor, n: int, kept: tuple[Tensor, ...]) -> Back:
        return self._widened(self.inner.again(rows.to(self.dtype), n, kept), rows.dtype)

    def _widened(self, back: Back, dtype: torch.dtype) -> Back:
        def widened(grad: Tensor) -> tuple[Tensor, Gradients]:
            into_rows, into_tensors = back(grad.to(self.dtype))
            return into_rows.to(dtype), into_tensors

        return widened
