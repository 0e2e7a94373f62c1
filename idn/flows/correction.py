"""Better steps towards the inverse of x + g(x): one small linear map instead of (I + J)^-1.

A plain step moves x by the residual r, where Newton's method moves it by (I + J)^-1 r. The Jacobian J of a branch
differs from point to point, but most of it does not: it is a convolution with small taps, whose mean over points and
pixels has an inverse that is again close to a small convolution. That one, P, is fitted to the tangents of random
probes v, P (v + J v) = v, by least squares. It need not be exact: steps are only steps, convergence is judged on
residuals.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from idn.flows.maps import Map
from idn.streams import stream

KERNEL = 3
ENOUGH = 4
"""Equations per unknown of the fit."""
FEWEST = 8
"""Points of the fit, if there are as many."""
MOST_UNKNOWNS = 512
"""Per channel: beyond, the fit would cost more than it saves."""
RIDGE = 1e-3
"""Relative to the mean square of what enters, against fitting noise."""


@torch.no_grad()
def corrector(g: Map, y: Tensor) -> Callable[[Tensor], Tensor] | None:
    """r -> P r, about (I + J)^-1 r near y; None where there is no such map to be had cheaply."""
    if y.dim() != 4:
        return None
    channels, pixels = y.shape[1], y[0, 0].numel()
    unknowns = channels * KERNEL**2
    points = y[: max(FEWEST, -(-ENOUGH * unknowns // pixels))]
    if unknowns > MOST_UNKNOWNS or len(points) * pixels < unknowns:
        return None
    n, padding = len(points), KERNEL // 2
    probes = torch.randn(points.shape, generator=stream(0, "correction"), dtype=torch.float32).to(points)
    images = probes + g.tangents(torch.cat([points, probes]), n)[n:]
    entering = F.unfold(images, KERNEL, padding=padding).transpose(1, 2).flatten(0, 1)
    gram = entering.mT @ entering
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    wanted = probes.permute(0, 2, 3, 1).flatten(0, 2)
    weight = torch.linalg.solve_ex(gram, entering.mT @ wanted).result.mT.reshape(channels, channels, KERNEL, KERNEL)
    return lambda residual: F.conv2d(residual, weight, padding=padding)
