"""Activations with Lip(phi) <= 1, as maps and as modules that hold their parameters."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idn.errors import UserError
from idn.flows.maps import Chain, Gradients, Map, Run
from idn.flows.rows import overlap, per_point, wide
from idn.flows.slices import Slices
from idn.flows.swish import Swish

LIPSWISH_SLOPE = 1.1
"""The largest slope of x * sigmoid(x) is 1.0998."""
CLIPSWISH_SLOPE = 1.004
"""The Lipschitz constant of [LipSwish(x); LipSwish(-x)], rounded up."""


@dataclass(frozen=True)
class Pointwise(Map):
    """phi, applied to each entry."""

    @abstractmethod
    def slope(self, x: Tensor) -> Tensor:
        """phi'(x)."""

    @abstractmethod
    def bend(self, x: Tensor) -> Tensor:
        """phi''(x)."""

    def tangents(self, rows: Tensor, n: int) -> Tensor:
        points = wide(rows[:n])
        return torch.cat([self.value(points).to(rows.dtype), per_point(rows[n:], self.slope(points).to(rows.dtype))])

    def run(self, rows: Tensor, n: int) -> Run:
        points, tangents = rows[:n], rows[n:]
        slope = self.slope(wide(points)).to(rows.dtype)
        out = torch.empty_like(rows)
        out[:n] = self.value(wide(points))
        if len(tangents):
            out[n:] = per_point(tangents, slope)

        def back(grad: Tensor) -> tuple[Tensor, Gradients]:
            into = per_point(grad, self.slope(wide(points)).to(grad.dtype))
            if len(tangents):
                into[:n] += overlap(tangents, grad[n:], n) * self.bend(wide(points))
            return into, []

        return Run(out, lambda u: per_point(u, slope), back)


@dataclass(frozen=True)
class ReLU(Pointwise):
    def value(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def slope(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    def bend(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@dataclass(frozen=True)
class ELU(Pointwise):
    def value(self, x: Tensor) -> Tensor:
        return F.elu(x)

    def slope(self, x: Tensor) -> Tensor:
        return torch.exp(x.clamp(max=0))

    def bend(self, x: Tensor) -> Tensor:
        return torch.where(x < 0, self.slope(x), 0.0)


@dataclass(frozen=True)
class Tanh(Pointwise):
    def value(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def slope(self, x: Tensor) -> Tensor:
        return 1 - torch.tanh(x) ** 2

    def bend(self, x: Tensor) -> Tensor:
        return -2 * torch.tanh(x) * self.slope(x)


@dataclass(frozen=True)
class Identity(Pointwise):
    def value(self, x: Tensor) -> Tensor:
        return x

    def slope(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def bend(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@dataclass(frozen=True)
class LipSwish(Map):
    """x * sigmoid(beta x) / slope, with beta = softplus(b) > 0."""

    beta: Tensor
    divisor: float = LIPSWISH_SLOPE

    def value(self, x: Tensor) -> Tensor:
        return (x * torch.sigmoid(self.beta.to(x.dtype) * x)) / self.divisor

    def tangents(self, rows: Tensor, n: int) -> Tensor:
        points = wide(rows[:n])
        gate = torch.sigmoid(self.beta * points)
        value = points * gate / self.divisor
        slope = gate / self.divisor + self.beta * value * (1 - gate)
        return torch.cat([value.to(rows.dtype), per_point(rows[n:], slope.to(rows.dtype))])

    def run(self, rows: Tensor, n: int) -> Run:
        swish = Swish(self.beta.detach(), self.divisor)
        out, slope = swish.rows(rows, n)

        def back(grad: Tensor) -> tuple[Tensor, Gradients]:
            found = swish.back(rows, n, Slices([grad]))
            return found.y, [found.beta.view_as(self.beta)]

        return Run(out, lambda u: per_point(u, slope), back)


@dataclass(frozen=True)
class Mirror(Map):
    """[x ; -x]."""

    def value(self, x: Tensor) -> Tensor:
        return torch.cat([x, -x], 1)

    def tangents(self, rows: Tensor, n: int) -> Tensor:
        return self.value(rows)

    def run(self, rows: Tensor, n: int) -> Run:
        def pull(u: Tensor) -> Tensor:
            up, down = u.chunk(2, 1)
            return up - down

        return Run(self.value(rows), pull, lambda grad: (pull(grad), []))


class Activation(nn.Module):
    """A parameter-free activation; `widening` says by how much it multiplies the channels."""

    widening = 1

    def __init__(self, phi: Map) -> None:
        super().__init__()
        self.phi = phi

    def forward(self) -> Map:
        return self.phi


class LipSwishActivation(Activation):
    """LipSwish with its own learnable b, which starts at 0.5."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.raw_beta = nn.Parameter(torch.tensor([0.5]))

    def forward(self) -> Map:
        return LipSwish(F.softplus(self.raw_beta))


class CLipSwishActivation(LipSwishActivation):
    """LipSwish of [x; -x], which doubles the channels and is 1-Lipschitz after division by 1.004."""

    widening = 2

    def forward(self) -> Map:
        return Chain((Mirror(), LipSwish(F.softplus(self.raw_beta), LIPSWISH_SLOPE * CLIPSWISH_SLOPE)))


ACTIVATIONS = ("lipswish", "clipswish", "relu", "elu", "tanh", "identity")


def make_activation(name: str) -> Activation:
    """The activation of that name, with parameters of its own."""
    match name:
        case "lipswish":
            return LipSwishActivation()
        case "clipswish":
            return CLipSwishActivation()
        case "relu":
            return Activation(ReLU())
        case "elu":
            return Activation(ELU())
        case "tanh":
            return Activation(Tanh())
        case "identity":
            return Activation(Identity())
    raise UserError(f"unknown activation {name!r}; expected one of {', '.join(ACTIVATIONS)}")
