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

import torch
import torch.nn.functional as F
from torch import Tensor

from idn.flows.dense import DenseNet
from idn.flows.evaluation import evaluator, flat
from idn.flows.inverse import SLOW, Correct, NotInvertedError, fixed_point
from idn.flows.maps import Affine, Map, channels_last
from idn.streams import stream

KERNEL = 3
GATE = 2.0
"""The entry of x up to which the second part of P follows it."""
ROUNDS = 2
"""Of the fit: the second adds what P of the first leaves of the probes, which is what steps find hard."""
ENOUGH = 4
"""Equations per unknown of the fit."""
FEWEST = 8
"""Points of the fit, if there are as many."""
MOST_UNKNOWNS = 512
"""Per channel: beyond, the fit would cost more than it saves."""
NARROW = 8
"""Times fewer dimensions."""
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


class Inverter:
    """Inverts x + g(x) for one branch, and keeps what it has fitted as long as the weights stay."""

    def __init__(self) -> None:
        self.fitted: Tensor | None = None
        self.known: object = None

    @torch.no_grad()
    def __call__(self, g: Map, y: Tensor, tolerance: float | None, version: object) -> Tensor:
        """The x with x + g(x) = y; `version` names the weights, and differs when they do."""
        low = torch.bfloat16 if y.dtype == torch.float32 and y.dim() == 4 and quick_in_bf16(y.device.type) else None
        known = (version, y.shape[1:], y.dtype, y.device)
        again = known == self.known
        self.known, self.fitted = known, self.fitted if again else None

        def corrector(x: Tensor) -> Correct | None:
            self.fitted = fitted(g, x, gated(x)) if self.fitted is None else self.fitted
            if self.fitted is None:
                return None
            weight = channels_last(self.fitted.to(low or y.dtype))
            x = x.to(weight.dtype)

            def correct(r: Tensor) -> Tensor:
                r = r.to(weight.dtype)
                return F.conv2d(with_gate(x, r) if gated(x) else r, weight, padding=KERNEL // 2)

            return correct

        rough = None if low is None else evaluator(g, low)
        start = narrow_start(g, y, tolerance)
        # Weights that come again are worth a fit, however quickly plain steps gain.
        slow = 0 if again else SLOW
        return fixed_point(evaluator(g), y, tolerance, start=start, rough=rough, corrector=corrector, slow=slow)


def gated(x: Tensor) -> bool:
    """Whether P has a second part: where that would not be too many unknowns."""
    return x.dim() == 4 and 2 * x.shape[1] * KERNEL**2 <= MOST_UNKNOWNS


def with_gate(x: Tensor, r: Tensor) -> Tensor:
    """What enters P at the points x."""
    return torch.cat([r, x.clamp(-GATE, GATE).mul_(r)], 1)


def fitted(g: Map, x: Tensor, gate: bool = False) -> Tensor | None:
    """The weight of P, about (I + J)^-1 near the points x; None where a fit would cost too much."""
    if x.dim() != 4:
        return None
    channels, pixels = x.shape[1], x[0, 0].numel()
    unknowns = (1 + gate) * channels * KERNEL**2
    points = x[: max(FEWEST, -(-ENOUGH * unknowns // pixels))]
    n = len(points)
    if unknowns > MOST_UNKNOWNS or n * pixels < unknowns:
        return None
    probes = torch.randn(points.shape, generator=stream(0, "correction")).to(points)
    gram, wanted = points.new_zeros(unknowns, unknowns), points.new_zeros(unknowns, channels)
    for _ in range(ROUNDS):
        images = probes + g.tangents(torch.cat([points, probes]), n)[n:]
        entering = with_gate(points, images) if gate else images
        rows = F.unfold(entering, KERNEL, padding=KERNEL // 2).transpose(1, 2).flatten(0, 1)
        weighted = rows.mT / probes.square().mean()
        gram += weighted @ rows
        wanted += weighted @ probes.permute(0, 2, 3, 1).flatten(0, 2)
        ridge = torch.diag(RIDGE * gram.diagonal().mean().expand(unknowns))
        weight = torch.linalg.solve_ex(gram + ridge, wanted).result.mT.reshape(channels, -1, KERNEL, KERNEL)
        probes = probes - F.conv2d(entering, weight, padding=KERNEL // 2)
    return weight


def narrow_start(g: Map, y: Tensor, tolerance: float | None) -> Tensor | None:
    """Where a branch begins with a matrix A to few dimensions and ends with a matrix: x, from the few alone.

    With g(x) = h(u) and u = A x + a, the fixed point is u + A h(u) = A y + a, and x = y - h(u).
    """
    first, *rest = flat(g)
    if not (isinstance(first, Affine) and y.dim() == 2 and NARROW * len(first.bias) <= y.shape[1]):
        return None
    if not (len(rest) == 1 and isinstance(net := rest[0], DenseNet)):
        return None
    last = Affine(first.weight @ net.last.weight, first.product(net.last.bias))
    try:
        u = fixed_point(evaluator(replace(net, last=last)), first.value(y), tolerance)
    except NotInvertedError:
        return None
    return y - evaluator(net)(u)
