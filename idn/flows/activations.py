"""Activations with Lip(phi) <= 1, as maps and as modules that hold their parameters."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idn.errors import UserError
from idn.flows.maps import Chain, Map, Pull, per_point

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
        """phi'(x), differentiable."""

    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        points, tangents = wide(rows[:n]), wide(rows[n:])
        slope = self.slope(points)
        out = self.value(points) if len(rows) == n else torch.cat([self.value(points), per_point(tangents, slope)])
        kept = slope.detach().to(rows.dtype)
        return out.to(rows.dtype), lambda u: per_point(u, kept)


@dataclass(frozen=True)
class ReLU(Pointwise):
    def value(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def slope(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)


@dataclass(frozen=True)
class ELU(Pointwise):
    def value(self, x: Tensor) -> Tensor:
        return F.elu(x)

    def slope(self, x: Tensor) -> Tensor:
        return torch.exp(x.clamp(max=0))


@dataclass(frozen=True)
class Tanh(Pointwise):
    def value(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def slope(self, x: Tensor) -> Tensor:
        return 1 - torch.tanh(x) ** 2


@dataclass(frozen=True)
class Identity(Pointwise):
    def value(self, x: Tensor) -> Tensor:
        return x

    def slope(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


@dataclass(frozen=True)
class LipSwish(Pointwise):
    """x * sigmoid(beta x) / slope, with beta = softplus(b) > 0."""

    beta: Tensor
    divisor: float = LIPSWISH_SLOPE

    def value(self, x: Tensor) -> Tensor:
        return (x * torch.sigmoid(self.beta.to(x.dtype) * x)) / self.divisor

    def slope(self, x: Tensor) -> Tensor:
        scaled = self.beta * x
        gate = torch.sigmoid(scaled)
        return gate * (1 + scaled * (1 - gate)) / self.divisor

    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        out, slope = _LipSwishRows.apply(rows, self.beta, n, self.divisor)
        return out, lambda u: per_point(u, slope)


class _LipSwishRows(torch.autograd.Function):
    """LipSwish on points and tangents with its first and second derivatives in closed form.

    With q = beta x and s = sigmoid(q):  phi' = s (1 + q (1 - s)) / c,  and both phi'' = beta e and
    d phi' / d beta = x e  share  e = s (1 - s) (2 + q (1 - 2 s)) / c.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, beta: Tensor, n: int, divisor: float) -> tuple[Tensor, Tensor]:
        points = wide(rows[:n])
        scaled = beta * points
        gate = torch.sigmoid(scaled)
        slope = (torch.addcmul(torch.ones_like(gate), scaled, 1 - gate) * gate).div_(divisor)
        value = points * gate / divisor
        out = torch.empty_like(rows)
        out[:n] = value
        if len(rows) > n:
            out[n:] = per_point(wide(rows[n:]), slope)
        slope = slope.to(rows.dtype)
        ctx.save_for_backward(rows, beta)
        ctx.n, ctx.divisor = n, divisor
        ctx.mark_non_differentiable(slope)
        ctx.set_materialize_grads(False)
        return out, slope

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad = grads[0]
        if grad is None:
            return None, None, None, None
        rows, beta = ctx.saved_tensors
        n = ctx.n
        x, g = wide(rows[:n]), wide(grad[:n])
        q = beta * x
        s = torch.sigmoid(q)
        ds = s * (1 - s)
        slope = (s + q * ds) / ctx.divisor
        bend = ds * (2 + q * (1 - 2 * s)) / ctx.divisor
        grad_x = g * slope
        grad_beta = (g * x * x * ds).sum() / ctx.divisor
        grad_rows = torch.empty_like(rows)
        if len(rows) > n:
            t, gt = wide(rows[n:]), wide(grad[n:])
            through_slope = (t * gt).unflatten(0, (-1, n)).sum(0) * bend
            grad_x = grad_x + beta * through_slope
            grad_beta = grad_beta + (x * through_slope).sum()
            grad_rows[n:] = per_point(gt, slope)
        grad_rows[:n] = grad_x
        return grad_rows, grad_beta.reshape(beta.shape).to(beta.dtype), None, None


@dataclass(frozen=True)
class Mirror(Map):
    """[x ; -x]."""

    def value(self, x: Tensor) -> Tensor:
        return torch.cat([x, -x], 1)

    def push(self, rows: Tensor, n: int) -> tuple[Tensor, Pull]:
        def pull(u: Tensor) -> Tensor:
            up, down = u.chunk(2, 1)
            return up - down

        return self.value(rows), pull


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
