"""A normalising flow with invertible residual blocks: ln p(x) = ln p(z) + ln |det J_F(x)|, equation (1)."""

import math
import re
from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from idn.errors import UserError
from idn.flows.assemble import assemble
from idn.flows.block import Block
from idn.flows.config import FlowConfig
from idn.flows.draws import Draws
from idn.flows.elementary import ActNorm, FactorOut, Reduce
from idn.flows.layers import SpectralLayer, update_norms
from idn.flows.logdet import LogdetRule

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTLED = 2e-3
"""A matrix whose largest singular value may still miss more than this share gets further iterations."""
MOVED = 0.01
"""So does one that changed by more than this share."""
VAGUE = 0.05
"""And so does a convolution whose norm may miss more than this; up to here being safe costs less than knowing."""
HARMLESS = 0.95
"""A norm below this share of its bound needs neither: one iteration per step sees it come up."""
MORE_ITERATIONS = 8
MOST_ROUNDS = 10


class Likelihood(NamedTuple):
    """The two parts of ln p(x), one number per sample each."""

    log_pz: Tensor
    logdet: Tensor

    @property
    def log_prob(self) -> Tensor:
        return self.log_pz + self.logdet


class EtaHat(NamedTuple):
    """The normalised eta 1 and 2 of one dense layer, and where it stands."""

    name: str
    scale: str
    block: int
    layer: int
    eta1: float
    eta2: float


class Flow(nn.Module):
    """An i-DenseNet or Residual Flow.

    Image inputs are floats in [0, 1], N x C x H x W. The flow applies the logit itself, and log_prob is that of x.

    >>> import idn
    >>> flow = idn.build("moons", "idensenet", "tiny")
    >>> x = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
    >>> z, logdet = flow.encode(x)
    >>> bool((flow.decode(z) - x).abs().max() < 1e-5)
    True
    """

    def __init__(self, config: FlowConfig, converge: bool = True) -> None:
        super().__init__()
        self.config = config
        self.chain = assemble(config, converge)
        self._gradient_scale = 1.0
        self._unscaling: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.config.shape

    @property
    def dims(self) -> int:
        return self.config.dims

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def blocks(self) -> list[Block]:
        return [layer for layer in self.chain if isinstance(layer, Block)]

    def forward(self, x: Tensor, draws: Draws) -> Likelihood:
        """The differentiable likelihood of a batch, with the training or the evaluation rule for the log-det."""
        rule = self.config.train_logdet if self.training else self.config.eval_logdet
        z, logdet = self._encode(x, draws, rule)
        log_pz = -0.5 * (z.square().sum(1) + self.dims * math.log(2 * math.pi))
        return Likelihood(
            _scaled_gradient(log_pz, self._gradient_scale), _scaled_gradient(logdet, self._gradient_scale)
        )

    def encode(self, x: Tensor, exact: bool = False, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
        """z = F(x), N x d, and log |det J_F(x)| per sample; `exact` takes every Jacobian as a whole."""
        self._check_data(x)
        rule = LogdetRule("exact") if exact else self.config.eval_logdet
        return self._encode(x, draws or Draws.seeded(0, "evaluation"), rule)

    def log_prob(self, x: Tensor, exact: bool = False, draws: Draws | None = None) -> Tensor:
        """ln p(x) per sample, in nats."""
        z, logdet = self.encode(x, exact, draws)
        return logdet - 0.5 * (z.square().sum(1) + self.dims * math.log(2 * math.pi))

    def _encode(self, x: Tensor, draws: Draws, rule: LogdetRule) -> tuple[Tensor, Tensor]:
        total, left = x.new_zeros(len(x)), []
        for layer in self.chain:
            if isinstance(layer, FactorOut):
                x, out = layer.split(x)
                left.append(out.flatten(1))
            else:
                x, logdet = layer(x, draws, rule)
                total = total + logdet
        return torch.cat([*left, x.flatten(1)], 1), total

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """x = F^-1(z), to the tolerance of `idn.flows.inverse`; an error names samples that did not converge."""
        if z.dim() < 2 or z[0].numel() != self.dims:
            raise UserError(f"z has shape {tuple(z.shape)}; expected N x {self.dims}")
        if not torch.isfinite(z).all():
            raise UserError("z holds values that are not finite")
        x = z.flatten(1)
        splits = [layer for layer in self.chain if isinstance(layer, FactorOut)]
        left = []
        for i in range(len(splits)):
            size = self.dims // 2 ** (i + 1)
            left.append(x[:, :size])
            x = x[:, size:]
        for layer in reversed(list(self.chain)):
            x = layer.join(x, left.pop()) if isinstance(layer, FactorOut) else layer.inverse(x)  # type: ignore[operator]
        return x

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None, temperature: float = 1.0) -> Tensor:
        """n new data points; the base's standard deviation is `temperature`."""
        if n < 1:
            raise UserError(f"cannot draw {n} samples; expected at least 1")
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        z = temperature * torch.randn(n, self.dims, generator=generator)
        x = self.decode(z.to(next(self.parameters())))
        return x if self.config.logit_alpha is None else x.clamp(0, 1)

    @torch.no_grad()
    def initialize(self, x: Tensor, reduce: Reduce = lambda total: total) -> None:
        """Starts every ActNorm from the first batch; `reduce` sums a tensor over all ranks."""
        rule = LogdetRule("series", terms=1)
        for layer in self.chain:
            if isinstance(layer, FactorOut):
                x, _ = layer.split(x)
                continue
            if isinstance(layer, ActNorm) and not layer.initialized:
                layer.initialize(x, reduce)
            x = layer.moved(x) if isinstance(layer, Block) else layer(x, None, rule)[0]

    @torch.no_grad()
    def update_norms(self, iterations: int | None = None) -> None:
        """Follows all largest singular values; to be called after every change of the weights."""
        layers = [layer for _, layer in self.spectral_layers()]
        update_norms(layers, iterations)
        # One look for all layers but small matrices, whose norms are proven. Where a matrix moved far, another pattern
        # may have come up: it goes on anyway.
        layers = [layer for layer in layers if not layer.small]
        looks = list(self._looked_at(layers))
        moved = [x for x, (harm, share, _) in looks if harm and share > MOVED and not x.spatial]
        vague = [x for x, (harm, _, share) in looks if harm and share > VAGUE and x.spatial]
        update_norms(moved + vague, MORE_ITERATIONS)
        matrices = [layer for layer in layers if not layer.spatial]
        for _ in range(MOST_ROUNDS):
            matrices = [x for x, (harm, _, share) in self._looked_at(matrices) if harm and share > SETTLED]
            if not matrices:
                return
            update_norms(matrices, MORE_ITERATIONS)

    @staticmethod
    def _looked_at(layers: list[SpectralLayer]) -> Iterator[tuple[SpectralLayer, tuple[bool, float, float]]]:
        """Layers with whether they could break their bound, how far they moved, and what their norm may miss."""
        states = [torch.stack([layer.sigma, layer.moved, layer.slack]) for layer in layers]
        for layer, (sigma, moved, slack) in zip(layers, torch.stack(states).tolist() if states else [], strict=True):
            yield layer, (sigma * (1 + slack) > HARMLESS * layer.coeff, moved, slack)

    def set_precision(self, precision: str) -> None:
        """Convolutions and matrix products in fp32, bf16 or fp16; parameters, norms and sums stay fp32."""
        if precision not in PRECISIONS:
            raise UserError(f"unknown precision {precision!r}; expected one of {', '.join(PRECISIONS)}")
        for block in self.blocks:
            block.branch.set_precision(PRECISIONS[precision])

    @property
    def recompute(self) -> bool:
        """Whether blocks make their activations again in the backward pass instead of keeping them."""
        return all(block.recompute for block in self.blocks)

    @recompute.setter
    def recompute(self, on: bool) -> None:
        for block in self.blocks:
            block.recompute = on

    @property
    def gradient_scale(self) -> float:
        """Gradients are this much larger inside the flow, so that fp16 keeps small ones; outside they are as ever."""
        return self._gradient_scale

    @gradient_scale.setter
    def gradient_scale(self, scale: float) -> None:
        self._gradient_scale = scale
        if scale != 1.0 and not self._unscaling:
            for parameter in self.parameters():
                if parameter.requires_grad:
                    self._unscaling.append(parameter.register_hook(lambda grad: grad / self._gradient_scale))

    def spectral_layers(self) -> Iterator[tuple[str, SpectralLayer]]:
        """All normalised layers with names like scale1.block2.layer3."""
        for block in self.blocks:
            for i, layer in enumerate(block.branch.spectral_layers(), start=1):
                yield f"{block.name}.layer{i}", layer

    def concatenations(self) -> Iterator[EtaHat]:
        """The normalised eta 1 and 2 of all dense layers (Appendix C)."""
        for block in self.blocks:
            scale = block.name.rpartition(".")[0] or "toy"
            number = int(re.findall(r"\d+$", block.name)[0])
            for i, dense in enumerate(block.branch.dense_layers(), start=1):
                eta1, eta2 = dense.concatenation.normalised().tolist()
                yield EtaHat(f"{block.name}.layer{i}", scale, number, i, eta1, eta2)

    def parameter_count(self) -> int:
        """Trainable parameters."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def save(self, path: str | PathLike[str], ema: dict[str, Tensor] | None = None) -> None:
        """Writes weights and configuration as safetensors; `ema` is a second set of weights stored beside."""
        from idn.flows.files import save

        save(self, path, ema)

    def _check_data(self, x: Tensor) -> None:
        if x.dim() != 1 + len(self.shape) or tuple(x.shape[1:]) != self.shape:
            raise UserError(f"x has shape {tuple(x.shape)}; expected N x {' x '.join(map(str, self.shape))}")
        if not x.is_floating_point():
            raise UserError(f"x has type {x.dtype}; expected floating point numbers")
        if not torch.isfinite(x).all():
            raise UserError("x holds values that are not finite (NaN or infinity)")
        if self.config.logit_alpha is not None and len(x) and (x.min() < 0 or x.max() > 1):
            raise UserError(f"x lies in [{x.min().item():g}, {x.max().item():g}]; expected pixels in [0, 1]")


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


def _scaled_gradient(x: Tensor, scale: float) -> Tensor:
    """x, whose gradient is multiplied by `scale` on its way back."""
    return x if scale == 1.0 else _ScaledGradient.apply(x, scale)


def bits_per_dim(log_prob: Tensor, dims: int) -> Tensor:
    """-ln p(x) of dequantised 8-bit data in bits per dimension."""
    return -log_prob / (dims * math.log(2)) + 8
