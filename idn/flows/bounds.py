"""Certified upper bounds on the Lipschitz constants of layers, activations and branches: proofs, not estimates.

They speak of the function in exact arithmetic, with the weights and concatenation factors as they are after rounding
to the layer's precision.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from idn.flows.activations import (
    CLIPSWISH_SLOPE,
    ELU,
    LIPSWISH_SLOPE,
    Activation,
    CLipSwishActivation,
    Identity,
    LipSwishActivation,
    ReLU,
    Tanh,
)
from idn.flows.branches import Branch, DenseLayer
from idn.flows.gram import BandedGram, Method, gram_rounding, grams
from idn.flows.layers import SpectralLayer
from idn.flows.norms import unit

TOLERANCE = 1e-3
"""A bound is lowered until the next proof would gain less than this share."""
UNROLLED_AT_ONCE = 5e8
UNROLLED_AT_MOST = 1e10
"""(channels x columns)^3 x rows of the image up to which a convolution is unrolled: at once, or only where it must be.

One factorisation takes about 10 times as many operations: a fraction of a second, or a few seconds."""
SWISH_SLOPE = 1.09984
"""Above the largest slope of x sigmoid(x), 1.0998393..., at the root of x tanh(x/2) = 2."""
ROUND_UP = 1 + 1e-9
"""Covers the rounding of sums of up to a million numbers and of operations on the bounds themselves."""


def methods_for(weight: Tensor, size: tuple[int, int]) -> tuple[Method, ...]:
    """The proofs that can be afforded for a layer, from the quickest to the tightest."""
    cost = (min(weight.shape[:2]) * size[1]) ** 3 * size[0]
    if weight[0, 0].numel() == 1 or cost <= UNROLLED_AT_ONCE:
        return ("exact",)
    return ("symbol", "rows", "exact") if cost <= UNROLLED_AT_MOST else ("symbol", "rows")


def simple_bound(weight: Tensor) -> float:
    """The smaller of k |W|_F, from the sum over taps, and sqrt(||A||_1 ||A||_inf)."""
    taps = weight[0, 0].numel()
    sums = weight.abs().flatten(2).sum(2)
    mixed = math.sqrt(float(sums.sum(0).max()) * float(sums.sum(1).max()))
    return min(math.sqrt(taps) * float(torch.linalg.vector_norm(weight)), mixed) * ROUND_UP


def norm_bound(
    weight: Tensor, size: tuple[int, int], method: Method, guess: float = 0.0, known: float = math.inf
) -> float:
    """An upper bound on the norm of a matrix (O x I) or of a zero-padded convolution on images of `size`.

    `guess` is where the search begins and `known` an upper bound from elsewhere; neither has to be good.

    >>> round(norm_bound(2 * torch.eye(3), (1, 1), "exact"), 2)
    2.0
    """
    if not torch.isfinite(weight).all():
        return math.inf
    if not weight.any():
        return 0.0
    weight = _wide(weight.detach().cpu().double())
    # A power of two, so that nothing is rounded, puts all numbers where nothing overflows or vanishes.
    scale = 2.0 ** math.frexp(float(weight.abs().max()))[1]
    weight = weight / scale
    known = min(known / scale, simple_bound(weight))
    proven = min(max(guess / scale * (1 + TOLERANCE / 2), 1e-4 * known), known)
    rounding = 0.0
    for gram in grams(weight, (1, 1) if weight[0, 0].numel() == 1 else size, method):
        proven = _least_proven(gram, proven, known)
        rounding = max(rounding, gram.rounding(proven**2))
    bound = math.sqrt(proven**2 + rounding + gram_rounding(weight)) * ROUND_UP
    return min(bound, known) * scale


def _wide(weight: Tensor) -> Tensor:
    """The weight as a convolution with no more outputs than inputs; the transposed one has the same norm."""
    weight = weight if weight.dim() == 4 else weight[:, :, None, None]
    if weight.shape[-1] % 2 == 0:
        raise ValueError(f"a kernel of size {weight.shape[-1]} changes the image's size; expected an odd one")
    return weight if len(weight) <= weight.shape[1] else weight.flip(2, 3).transpose(0, 1).contiguous()


def _least_proven(gram: BandedGram, low: float, high: float) -> float:
    """The least bound between `low` and `high` that a proof is found for, within the tolerance; else `high`."""
    failed = gram.unproven(low**2)
    if not len(failed):
        return low
    gram, step = gram.at(failed), TOLERANCE
    while high > low * (1 + TOLERANCE):
        # `low` is nearly right as a rule, so steps start small.
        middle = min(low * (1 + step), math.sqrt(low * high))
        failed = gram.unproven(middle**2)
        if len(failed):
            low, gram, step = middle, gram.at(failed), 3 * step
        else:
            high = middle
    return high


def activation_bound(activation: Activation) -> float:
    """The largest slope of an activation, whatever its parameter.

    The slope s of x sigmoid(x) obeys s(-x) = 1 - s(x), so it lies in [1 - m, m] with m its maximum, and the length of
    (s(x), s(-x)), the slope of CLipSwish before division, is at most that of (m, 1 - m).
    """
    match activation:
        case CLipSwishActivation():
            return math.hypot(SWISH_SLOPE, SWISH_SLOPE - 1) / (LIPSWISH_SLOPE * CLIPSWISH_SLOPE) * ROUND_UP
        case LipSwishActivation():
            return SWISH_SLOPE / LIPSWISH_SLOPE * ROUND_UP
        case Activation(phi=ReLU() | ELU() | Tanh() | Identity()):
            return 1.0
    raise TypeError(f"no bound is known for {activation}")


def lipschitz_bound(part: nn.Module, norms: Mapping[SpectralLayer, float]) -> float:
    """The bound on Lip of a branch or a part of it that follows from bounds on the norms of its layers."""
    match part:
        case SpectralLayer():
            return norms[part]
        case Activation():
            return activation_bound(part)
        case DenseLayer():
            # |[a dx; b df]|^2 = a^2 |dx|^2 + b^2 |df|^2
            a, b = (factor.to(part.layer.precision or factor.dtype).item() for factor in part.concatenation())
            inner = norms[part.layer] * activation_bound(part.activation)
            return math.hypot(a, b * inner) * ROUND_UP
        case Branch():
            return math.prod(lipschitz_bound(inner, norms) for inner in part.parts) * ROUND_UP
    raise TypeError(f"no bound is known for {type(part).__name__}")


@dataclass
class LayerProof:
    """The bound on one layer's norm, the power iteration's estimate of it, and the proofs that are left to try."""

    layer: SpectralLayer
    bound: float = math.inf
    method: str = ""
    estimate: float = field(init=False)
    left: list[Method] = field(init=False)

    def __post_init__(self) -> None:
        weight, image = self.layer.multiplied(), self.layer.v.shape[2:]
        self.size = (image[0], image[1]) if image else (1, 1)
        apply, _ = self.layer.operator(weight)
        self.estimate = float(torch.linalg.vector_norm(apply(unit(self.layer.v))))
        self.left = list(methods_for(weight, self.size))
        self.tighten()

    @property
    def looseness(self) -> float:
        """By how much a tighter proof could lower the bound, at most."""
        return self.bound / max(self.estimate, 1e-30) if self.left else 0.0

    def tighten(self) -> None:
        """Tries the next proof."""
        self.method = self.left.pop(0)
        self.bound = norm_bound(self.layer.multiplied(), self.size, self.method, self.estimate, self.bound)


@dataclass(frozen=True)
class BranchProof:
    """Lip(g) <= bound; the estimate composes the layers' estimates in the same way."""

    bound: float
    estimate: float
    layers: list[LayerProof]

    @property
    def proven(self) -> bool:
        return self.bound < 1


@torch.no_grad()
def prove(branch: Branch) -> BranchProof:
    """Bounds Lip(g), tightening the loosest layer until Lip(g) < 1 is proven or nothing tighter can be afforded."""
    layers = [LayerProof(layer) for layer in branch.spectral_layers()]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in branch.state_dict().values()):
        return BranchProof(math.inf, math.inf, layers)
    # A layer's norm is at least |W v|: where these alone give 1 or more, no proof layer by layer exists.
    estimate = lipschitz_bound(branch, {proof.layer: proof.estimate for proof in layers})
    while True:
        bound = lipschitz_bound(branch, {proof.layer: proof.bound for proof in layers})
        loosest = max(layers, key=lambda proof: proof.looseness)
        if bound < 1 or estimate >= 1 or not loosest.left:
            return BranchProof(bound, estimate, layers)
        loosest.tighten()
