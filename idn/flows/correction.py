"""Better steps towards the inverse of x + g(x): one small linear map instead of (I + J)^-1.

A plain step moves x by the residual r, where Newton's method moves it by (I + J)^-1 r. The Jacobian J of a branch
differs from point to point, but most of it does not: it is a convolution with small taps, whose mean over points and
pixels has an inverse that is again close to a small convolution. That one, P, is fitted to the tangents of random
probes v, P (v + J v) = v, by least squares. What differs is, for a good part, that activations are flat where x is low
and steep where it is high: so P has a second part, which multiplies r times x entry by entry (x within limits), and is
fitted together with the first. P need not be exact: steps are only steps, convergence is judged on residuals.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from idn.flows.dense import DenseNet
from idn.flows.evaluation import evaluator, flat
from idn.flows.guess import Guess, fitted_guess
from idn.flows.images import known_branch, native_start
from idn.flows.inverse import ROUGH, Correct, NotInvertedError, fixed_point, residual_goals
from idn.flows.maps import Affine, Map
from idn.flows.rows import channels_last
from idn.flows.values import tiled_value
from idn.streams import stream

KERNELS = (5, 3)
"""Of P: the first one with few unknowns; the second one for narrow branches, whose kernel knows no other."""
FEW_UNKNOWNS = 160
"""Per channel."""
GATE = 2.0
"""The entry of x up to which the second part of P follows it."""
ROUNDS = 2
"""Of the fit: the second adds what P of the first leaves of the probes, which is what steps find hard."""
ENOUGH = 4
"""Equations per unknown of the fit."""
FEWEST = 8
"""Points of the fit, if there are enough of them, and four times as many to invert."""
MOST_UNKNOWNS = 512
"""Per channel: beyond, the fit would cost more than it saves."""
NARROW = 8
"""Times fewer dimensions."""
LITTLE = 0.01
"""Where the first step leaves less, rounding errors of a second one in low precision would leave as much."""
RIDGE = 1e-3
"""Relative to the mean square of what enters, against fitting noise."""


@cache
def quick_in_bf16(device: str) -> bool:
    """Whether the machine has products of its own for bf16."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    has = torch.cpu.get_capabilities()
    return any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))


class Correction(NamedTuple):
    """P, and the share that its first step leaves of residuals."""

    weight: Tensor
    left: float


class Inverter:
    """Inverts x + g(x) for one branch, and keeps what it has fitted as long as the weights stay."""

    def __init__(self) -> None:
        self.fitted: Correction | None = None
        self.guess: Guess | None = None
        self.reduced: Reduced | None = None
        self.known: object = None

    @torch.no_grad()
    def __call__(self, g: Map, y: Tensor, tolerance: float | None, version: object) -> Tensor:
        """The x with x + g(x) = y; `version` names the weights, and differs when they do."""
        known = (version, y.shape[1:], y.dtype, y.device)
        if self.known != known or (self.fitted is None and self.reduced is None):
            self.known, self.fitted, self.reduced, self.guess = known, fitted_near(g, y), reduced(g, y), None
        if self.fitted is None:
            start = narrow_start(g, y, tolerance, self.reduced) if self.reduced else None
            return fixed_point(evaluator(g), y, tolerance, start=start)
        low = torch.bfloat16 if y.dtype == torch.float32 and quick_in_bf16(y.device.type) else None
        weight = channels_last(self.fitted.weight)

        def corrector(x: Tensor) -> Correct:
            return lambda r: corrected(weight, x, r)

        branch = known_branch(g)
        tiled = tiled_value(branch, y) if branch else None
        value = tiled or evaluator(g)
        start = native_start(branch, y, residual_goals(y, tolerance), self.fitted.weight, GATE) if branch else None
        if start is not None:
            return fixed_point(value, y, tolerance, start=start, corrector=corrector)
        x = fixed_point(
            value,
            y,
            tolerance,
            start=self.guess(y) if self.guess else None,
            rough=evaluator(g, low) if low and not tiled else None,
            corrector=corrector,
            rough_steps=1 if self.fitted.left < LITTLE else ROUGH,
        )
        self.guess = self.guess or fitted_guess(y, x)
        return x


def corrected(weight: Tensor, x: Tensor, r: Tensor) -> Tensor:
    """P r at the points x."""
    return F.conv2d(entering(weight, x, r), weight, padding=weight.shape[2] // 2)


def entering(weight: Tensor, x: Tensor, r: Tensor) -> Tensor:
    """What P multiplies: r and, if there is a second part, x times r."""
    return r if weight.shape[1] == r.shape[1] else torch.cat([r, x.clamp(-GATE, GATE).mul_(r)], 1)


def fitted_near(g: Map, y: Tensor) -> Correction | None:
    """P near the inverses of some of y; None where a fit would cost too much."""
    if y.dim() != 4:
        return None
    channels, pixels = y.shape[1], y[0, 0].numel()
    large, kernel = KERNELS
    parts = 2 if 2 * channels * kernel**2 <= MOST_UNKNOWNS else 1
    branch = known_branch(g)
    if parts * channels * large**2 <= FEW_UNKNOWNS and not (branch and branch.narrow):
        kernel = large
    unknowns = parts * channels * kernel**2
    some = y[: max(min(FEWEST, len(y) // 4), -(-ENOUGH * unknowns // pixels))]
    if unknowns > MOST_UNKNOWNS or len(some) * pixels < unknowns:
        return None
    first = -g.value(some)
    weight = fitted(g, some + first, parts, kernel)
    step = corrected(weight, some, first)
    left = -g.value(some + step) - step
    return Correction(weight, float(left.norm() / first.norm()))


def fitted(g: Map, points: Tensor, parts: int = 1, kernel: int = KERNELS[-1]) -> Tensor:
    """The weight of P, about (I + J)^-1 near the points."""
    n, channels = points.shape[:2]
    unknowns = parts * channels * kernel**2
    probes = torch.randn(points.shape, generator=stream(0, "correction")).to(points)
    weight = points.new_zeros(channels, parts * channels, kernel, kernel)
    gram, wanted = points.new_zeros(unknowns, unknowns), points.new_zeros(unknowns, channels)
    for _ in range(ROUNDS):
        images = probes + g.tangents(torch.cat([points, probes]), n)[n:]
        windows = F.unfold(entering(weight, points, images), kernel, padding=kernel // 2)
        rows = windows.transpose(1, 2).flatten(0, 1)
        weighted = rows.mT / probes.square().mean()
        gram += weighted @ rows
        wanted += weighted @ probes.permute(0, 2, 3, 1).flatten(0, 2)
        ridge = torch.diag(RIDGE * gram.diagonal().mean().expand(unknowns))
        weight = torch.linalg.solve_ex(gram + ridge, wanted).result.mT.reshape_as(weight)
        probes = probes - corrected(weight, points, images)
    return weight


class Reduced(NamedTuple):
    """A branch that begins with a matrix A to few dimensions, in these alone: u = A x + a to A g."""

    last: Affine
    """What the matrix at the end and A make together."""
    step: Tensor
    """The inverse of I + J at one point, by which steps are corrected."""


def reduced(g: Map, y: Tensor) -> Reduced | None:
    """None where a branch is not as narrow, or does not end with a matrix."""
    first, *rest = flat(g)
    if not (isinstance(first, Affine) and y.dim() == 2 and NARROW * len(first.bias) <= y.shape[1]):
        return None
    if not (len(rest) == 1 and isinstance(net := rest[0], DenseNet)):
        return None
    last = Affine(first.weight @ net.last.weight, first.product(net.last.bias))
    one = torch.eye(len(first.bias)).to(y)
    point = first.value(y).mean(0).expand_as(one)
    jacobian = replace(net, last=last).tangents(torch.cat([point, one]), len(one))[len(one) :]
    return Reduced(last, torch.linalg.inv_ex(one + jacobian).inverse)


def narrow_start(g: Map, y: Tensor, tolerance: float | None, known: Reduced) -> Tensor | None:
    """x from few dimensions: with g(x) = h(u), the fixed point is u + A h(u) = A y + a, and x = y - h(u)."""
    first, net = flat(g)
    assert isinstance(first, Affine) and isinstance(net, DenseNet)
    narrow = evaluator(replace(net, last=known.last))
    try:
        u = fixed_point(narrow, first.value(y), tolerance, corrector=lambda _: lambda r: r @ known.step)
    except NotInvertedError:
        return None
    return y - evaluator(net)(u)
