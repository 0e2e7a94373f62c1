"""The estimators as the papers write them, by automatic differentiation: the truth for tests, the baseline for speed.

Nothing here shares code with the maps of `maps.py`: layers are read from the modules, the Jacobian is applied by
`autograd.grad`, and the Neumann gradient is a double backward. As in Residual Flows (section 3.3), that gradient is
taken inside the forward pass so that no graph of the series is kept.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idn.flows.activations import ELU, Activation, CLipSwishActivation, Identity, LipSwishActivation, ReLU, Tanh
from idn.flows.block import Block
from idn.flows.branches import Branch, DenseLayer
from idn.flows.draws import Draws
from idn.flows.elementary import FactorOut
from idn.flows.flow import Flow, Likelihood
from idn.flows.layers import SpectralLayer
from idn.flows.logdet import LogdetRule

Function = Callable[[Tensor], Tensor]


def plain(module: nn.Module) -> Function:
    """A branch or one of its parts as a function in plain torch, differentiable any number of times."""
    if isinstance(module, Branch):
        return chained([plain(part) for part in module.parts])
    if isinstance(module, DenseLayer):
        return dense(module)
    if isinstance(module, SpectralLayer):
        return affine(module)
    if isinstance(module, Activation):
        return activation(module)
    raise TypeError(f"no plain form of {type(module).__name__}")


def chained(functions: list[Function]) -> Function:
    def chain(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    return chain


def dense(layer: DenseLayer) -> Function:
    inner = chained([plain(layer.layer), plain(layer.activation)])
    a, b = layer.concatenation()
    return lambda x: torch.cat([a * x, b * inner(x)], 1)


def affine(layer: SpectralLayer) -> Function:
    """W x + b with W divided by max(1, sigma / coeff), sigma = u^T W v."""
    apply, _ = layer.operator(layer.weight)
    sigma = (layer.u * apply(layer.v)).sum() * (1 + layer.slack)
    weight = layer.weight / torch.clamp(sigma / layer.coeff, min=1)
    padding = layer.padding
    if padding is None:
        return lambda x: F.linear(x, weight, layer.bias)
    return lambda x: F.conv2d(x, weight, layer.bias, padding=padding)


def activation(module: Activation) -> Function:
    if isinstance(module, LipSwishActivation):

        def lipswish(x: Tensor) -> Tensor:
            return x * torch.sigmoid(x * F.softplus(module.raw_beta)) / 1.1

        if isinstance(module, CLipSwishActivation):
            return lambda x: lipswish(torch.cat([x, -x], 1)) / 1.004
        return lipswish
    plain_forms: dict[type, Function] = {ReLU: F.relu, ELU: F.elu, Tanh: torch.tanh, Identity: lambda x: x}
    return plain_forms[type(module.phi)]


def dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def series(g: Function, x: Tensor, v: Tensor, coefficients: list[float], keep: bool) -> tuple[Tensor, Tensor]:
    """g(x) and sum_k (-1)^(k+1) c_k / k v^T J^k v, one `autograd.grad` per term; `keep` keeps every term's graph."""
    with torch.enable_grad():
        x = x if keep else x.detach().requires_grad_()
        gx = g(x)
        power, total = v, x.new_zeros(len(x))
        for k, c in enumerate(coefficients, start=1):
            (power,) = torch.autograd.grad(gx, x, power, create_graph=keep, retain_graph=True)
            total = total + (-1) ** (k + 1) * c / k * dots(power, v)
    return (gx, total) if keep else (gx.detach(), total)


def neumann(g: Function, x: Tensor, v: Tensor, coefficients: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """g(x), the value of the series, and w^T J v, whose gradient is that of the log-det."""
    gx = g(x)
    power, w, value = v, torch.zeros_like(v), x.new_zeros(len(x))
    for k, c in enumerate(coefficients, start=1):
        sign = (-1) ** (k + 1)
        w = w + sign * c * power
        (power,) = torch.autograd.grad(gx, x, power, retain_graph=True)
        value = value + sign * c / k * dots(power, v)
    (jtw,) = torch.autograd.grad(gx, x, w, create_graph=True)
    return gx, value, dots(jtw, v)


class MemorySaving(torch.autograd.Function):
    """The Neumann gradient, taken in the forward pass for each sample alike and scaled in the backward pass.

    One gradient of the sum over samples serves all of them, so the loss must weigh all samples equally: this is what
    the published code does, and why it is a baseline only.
    """

    @staticmethod
    def forward(
        ctx: Any, g: Function, x: Tensor, v: Tensor, coefficients: list[float], *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gx, value, surrogate = neumann(g, x, v, coefficients)
            inputs = (x, *parameters)
            found = torch.autograd.grad(surrogate.sum(), inputs, retain_graph=True, allow_unused=True)
        ctx.gx, ctx.inputs, ctx.found = gx, inputs, found
        return gx.detach(), value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        direct = torch.autograd.grad(ctx.gx, ctx.inputs, grads[0], allow_unused=True)
        both = []
        for along, through in zip(direct, ctx.found, strict=True):
            scaled = None if through is None else through * grads[1][0]
            both.append(along if scaled is None else scaled if along is None else along + scaled)
        ctx.gx, ctx.inputs, ctx.found = None, (), ()
        return (None, both[0], None, None, *both[1:])


def block_likelihood(block: Block, x: Tensor, draws: Draws, rule: LogdetRule, saving: bool) -> tuple[Tensor, Tensor]:
    """x + g(x) and its log-det estimate, with the same draws as `block_logdet` takes."""
    coefficients = rule.coefficients(draws)
    probes = [draws.normal(x) for _ in range(rule.probes)]
    if not torch.is_grad_enabled():
        found = [series(plain(block.branch), x, v, coefficients, keep=False) for v in probes]
    elif saving:
        parameters = [p for p in block.branch.parameters() if p.requires_grad]
        found = [MemorySaving.apply(plain_inside(block.branch), x, v, coefficients, *parameters) for v in probes]
    else:
        x = x if x.requires_grad else x.requires_grad_()
        found = []
        for v in probes:
            gx, value, surrogate = neumann(plain(block.branch), x, v, coefficients)
            found.append((gx, value.detach() + surrogate - surrogate.detach()))
    return x + found[0][0], torch.stack([logdet for _, logdet in found]).mean(0)


def plain_inside(branch: Branch) -> Function:
    """The branch, built anew at each call, so that its weights belong to the graph of that call."""
    return lambda x: plain(branch)(x)


def likelihood(flow: Flow, x: Tensor, draws: Draws, rule: LogdetRule | None = None, saving: bool = False) -> Likelihood:
    """`flow(x, draws)` by plain automatic differentiation; `saving` is the published memory-saving form."""
    rule = rule or (flow.config.train_logdet if flow.training else flow.config.eval_logdet)
    total, left = x.new_zeros(len(x)), []
    for layer in flow.chain:
        if isinstance(layer, FactorOut):
            x, out = layer.split(x)
            left.append(out.flatten(1))
            continue
        if isinstance(layer, Block):
            x, logdet = block_likelihood(layer, x, draws, rule, saving)
        else:
            x, logdet = layer(x, draws, rule)
        total = total + logdet
    z = torch.cat([*left, x.flatten(1)], 1)
    return Likelihood(-0.5 * (z.square().sum(1) + flow.dims * math.log(2 * math.pi)), total)


@torch.no_grad()
def fixed_point(g: Function, y: Tensor, tolerance: float, iterations: int = 1000) -> Tensor:
    """x <- y - g(x) for the whole batch, until no entry's residual is above tolerance * (1 + |y|)."""
    allowed = tolerance * (1 + y.flatten(1).abs().amax(1))
    x = y
    for _ in range(iterations):
        moved = y - g(x)
        if bool(((moved - x).flatten(1).abs().amax(1) <= allowed).all()):
            return x
        x = moved
    return x


@torch.no_grad()
def power_iteration(layer: SpectralLayer) -> None:
    """One plain iteration, as after every training step of the published code."""
    apply, transpose = layer.operator(layer.weight)
    v = transpose(layer.u)
    layer.v.copy_(v / v.norm())
    u = apply(layer.v)
    layer.u.copy_(u / u.norm())
    layer.sigma.copy_(u.norm())
