"""Activations with Lip(phi) <= 1, as maps and as modules that hold their parameters."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idn.errors import UserError
from idn.flows.fuse import fused
from idn.flows.maps import Chain, Gradients, Map, Run, per_point

LIPSWISH_SLOPE = 1.1
"""The largest slope of x * sigmoid(x) is 1.0998."""
CLIPSWISH_SLOPE = 1.004
"""The Lipschitz constant of [LipSwish(x); LipSwish(-x)], rounded up."""


def wide(x: Tensor) -> Tensor:
    """Low precision is for products; elementwise functions are computed in fp32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


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


def overlap(tangents: Tensor, grads: Tensor, n: int) -> Tensor:
    """Products of tangents with their gradients, summed over the tangents of each point."""
    product = wide(tangents) * grads
    return product if len(product) == n else product.unflatten(0, (-1, n)).sum(0)


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
        beta = self.beta.detach()
        out, slope = lipswish_rows(rows, n, beta, self.divisor)

        def back(grad: Tensor) -> tuple[Tensor, Gradients]:
            into, into_beta = lipswish_rows_back(rows, grad, n, beta, self.divisor)
            return into, [into_beta.view_as(self.beta)]

        return Run(out, lambda u: per_point(u, slope), back)


@fused
def lipswish_rows(rows: Tensor, n: int, beta: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """phi of the points with phi' times the tangents, and phi'."""
    value, slope = lipswish(wide(rows[:n]), beta, divisor)
    value, slope = value.to(rows.dtype), slope.to(rows.dtype)
    return (torch.cat([value, per_point(rows[n:], slope)]) if len(rows) > n else value), slope


@fused
def lipswish_rows_back(rows: Tensor, grad: Tensor, n: int, beta: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of beta."""
    through = overlap(rows[n:], grad[n:], n) if len(rows) > n else None
    into, slope, into_beta = lipswish_back(wide(rows[:n]), wide(grad[:n]), through, beta, divisor)
    into, slope = into.to(grad.dtype), slope.to(grad.dtype)
    return (torch.cat([into, per_point(grad[n:], slope)]) if len(rows) > n else into), into_beta


# With q = beta x and s = sigmoid(q):  phi = x s / c,  phi' = (s + q s (1 - s)) / c,  and both phi'' = beta e and
# d phi' / d beta = x e share e = s (1 - s) (2 + q (1 - 2 s)) / c. Work is done in place: these tensors are large.


def lipswish(x: Tensor, beta: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """phi and phi'."""
    gate = torch.mul(x, beta).sigmoid_()
    value = torch.mul(x, gate).div_(divisor)
    # phi' = s / c + beta phi (1 - s)
    slope = torch.addcmul(value, value, gate, value=-1).mul_(beta).add_(gate.div_(divisor))
    return value, slope


def lipswish_back(
    x: Tensor, grad: Tensor, through: Tensor | None, beta: Tensor, divisor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x, phi', and gradient of beta; `through` is the gradient of phi', where there are tangents."""
    scaled = x * beta
    gate = torch.sigmoid(scaled)
    hill = torch.addcmul(gate, gate, gate, value=-1).div_(divisor)  # s (1 - s) / c
    slope = torch.addcmul(gate / divisor, scaled, hill)
    into = grad * slope
    into_beta = torch.mul(grad, x).mul_(x).mul_(hill)
    if through is not None:
        bend = torch.addcmul(scaled, scaled, gate, value=-2).add_(2).mul_(hill).mul_(through)
        into.addcmul_(bend, beta.expand_as(bend))
        into_beta.addcmul_(bend, x)
    return into, slope, into_beta.sum()


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
