"""The maps that a branch g is made of, each with its derivative in both directions.

A branch is a chain of affine maps, activations and concatenations. Besides the value g(x), a flow needs the
Jacobian J of g from the right (J v: tangents) and from the left (J^T u: the power series of the log-det).
Every map gives all three from one pass, so no second derivative is ever taken by automatic differentiation:

    rows, pull = g.push(torch.cat([x, v]), n=len(x))    # rows = [g(x); J v],  pull(u) = J^T u

Points and tangents travel as rows of one tensor: the first n rows are points, and each further group of n rows
holds one tangent per point. Maps own no parameters: `layers.py` and `branches.py` hold those.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

Pull = Callable[[Tensor], Tensor]


def per_point(rows: Tensor, factor: Tensor) -> Tensor:
    """Multiplies each group of rows by `factor`, which has one row per point."""
    return (rows.unflatten(0, (-1, len(factor))) * factor).flatten(0, 1)


@dataclass(frozen=True)
class Map(ABC):
    """A differentiable map between batches."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """The map in plain, twice differentiable torch."""

    @abstractmethod
    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        """Values and tangents together, and the transposed Jacobian at the points (outside the graph)."""

    def tensors(self) -> Iterator[Tensor]:
        """All weights of the map, in a fixed order."""
        for field in fields(self):
            part = getattr(self, field.name)
            for item in part if isinstance(part, tuple) else (part,):
                if isinstance(item, Tensor):
                    yield item
                elif isinstance(item, Map):
                    yield from item.tensors()

    def with_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """The same map with other weights, taken from an iterator in the order of `tensors()`."""

        def renewed(item: Any) -> Any:
            if isinstance(item, Tensor):
                return next(tensors)
            return item.with_tensors(tensors) if isinstance(item, Map) else item

        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{
                name: tuple(renewed(item) for item in part) if isinstance(part, tuple) else renewed(part)
                for name, part in parts.items()
            },
        )


@dataclass(frozen=True)
class Affine(Map):
    """W x + b, a matrix (`padding` None) or a zero-padded convolution.

    The product is taken in the weight's precision, whatever the rows come in.
    """

    weight: Tensor
    bias: Tensor
    padding: int | None = None

    def product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = rows.to(self.weight.dtype)
        if self.padding is None:
            return F.linear(rows, self.weight, bias)
        return F.conv2d(rows, self.weight, bias, padding=self.padding)

    def value(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias.to(self.weight.dtype))

    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        if len(rows) == n:
            return self.value(rows), self.transposed
        out = self.product(rows)
        bias = self.bias.to(out.dtype)
        points = out[:n] + (bias if self.padding is None else bias[:, None, None])
        return torch.cat([points, out[n:]]), self.transposed

    def transposed(self, u: Tensor) -> Tensor:
        weight = self.weight.detach()
        u = u.to(weight.dtype)
        if self.padding is None:
            return u @ weight
        return F.conv_transpose2d(u, weight, padding=self.padding)


@dataclass(frozen=True)
class Concatenate(Map):
    """The dense layer h(x) = [a x ; b f(x)] of equation (3), where a and b are the normalised eta 1 and 2."""

    inner: Map
    a: Tensor
    b: Tensor

    def value(self, x: Tensor) -> Tensor:
        lower = self.inner.value(x)
        return torch.cat([self.a.to(lower.dtype) * x, self.b.to(lower.dtype) * lower], 1)

    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        lower, pull_lower = self.inner.push(rows, n)
        a, b, width = self.a.to(lower.dtype), self.b.to(lower.dtype), rows.shape[1]

        def pull(u: Tensor) -> Tensor:
            upper = u[:, :width]
            return a.detach() * upper + pull_lower(b.detach() * u[:, width:])

        return torch.cat([a * rows, b * lower], 1), pull


@dataclass(frozen=True)
class Chain(Map):
    """Maps one after the other."""

    maps: tuple[Map, ...]

    def value(self, x: Tensor) -> Tensor:
        for part in self.maps:
            x = part.value(x)
        return x

    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        pulls: list[Pull] = []
        for part in self.maps:
            rows, pull_part = part.push(rows, n)
            pulls.append(pull_part)

        def pull(u: Tensor) -> Tensor:
            for pull_part in reversed(pulls):
                u = pull_part(u)
            return u

        return rows, pull


@dataclass(frozen=True)
class InPrecision(Map):
    """A branch whose inside runs in a low precision; what enters and leaves keeps its own."""

    inner: Map
    dtype: torch.dtype

    def value(self, x: Tensor) -> Tensor:
        return self.inner.value(x.to(self.dtype)).to(x.dtype)

    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        out, pull = self.inner.push(rows.to(self.dtype), n)
        return out.to(rows.dtype), lambda u: pull(u.to(self.dtype)).to(u.dtype)
