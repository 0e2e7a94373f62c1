"""The branches g of a block F(x) = x + g(x): modules that hold the parameters and give g as a map."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idn.errors import UserError
from idn.flows.activations import Activation, make_activation
from idn.flows.dense import Concatenate, DenseNet
from idn.flows.layers import SpectralLayer
from idn.flows.maps import Chain, InPrecision, Map


class Concatenation(nn.Module):
    """The factors (a, b) = coeff (eta1, eta2) / sqrt(eta1^2 + eta2^2) of a dense layer (section 3.2).

    With Lip <= 1 in both parts, [a x; b f(x)] is at most coeff-Lipschitz. Fixed factors keep eta1 = eta2.
    """

    raw: Tensor

    def __init__(self, coeff: float, learnable: bool) -> None:
        super().__init__()
        self.coeff = coeff
        if learnable:
            self.raw = nn.Parameter(torch.ones(2))
        else:
            self.register_buffer("raw", torch.ones(2))

    def normalised(self) -> Tensor:
        """The normalised eta 1 and 2 on the unit circle."""
        eta = F.softplus(self.raw) + 0.1
        return eta / torch.linalg.vector_norm(eta)

    def forward(self) -> tuple[Tensor, Tensor]:
        a, b = self.coeff * self.normalised()
        return a, b


class DenseLayer(nn.Module):
    """h(x) = [a x ; b phi(W x)], equation (3)."""

    def __init__(self, layer: SpectralLayer, activation: Activation, concatenation: Concatenation) -> None:
        super().__init__()
        self.layer, self.activation, self.concatenation = layer, activation, concatenation

    def forward(self) -> Concatenate:
        return Concatenate(self.layer(), self.activation(), *self.concatenation())


class Branch(nn.Module):
    """Modules whose maps, one after the other, are g."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.precision: torch.dtype | None = None
        # Looking for them takes longer than following small norms.
        self._spectral = [module for module in self.modules() if isinstance(module, SpectralLayer)]

    def forward(self) -> Map:
        maps = [part() for part in self.parts]
        dense = tuple(part for part in maps if isinstance(part, Concatenate))
        if dense:
            first = [part for part in maps[:-1] if not isinstance(part, Concatenate)]
            maps = [*first, DenseNet(dense, maps[-1])]
        g = Chain(tuple(maps))
        return g if self.precision is None else InPrecision(g, self.precision)

    def set_precision(self, precision: torch.dtype | None) -> None:
        """Products run in `precision` (None: that of the parameters); parameters stay as they are."""
        self.precision = precision
        for layer in self.spectral_layers():
            layer.precision = precision
            layer.update_norm()

    def spectral_layers(self) -> Iterator[SpectralLayer]:
        return iter(self._spectral)

    def dense_layers(self) -> Iterator[DenseLayer]:
        return (part for part in self.parts if isinstance(part, DenseLayer))


def halved(width: int, activation: str) -> int:
    """The width before an activation that widens it to `width`."""
    widening = make_activation(activation).widening
    if width % widening:
        raise UserError(f"width {width} cannot be halved for {activation}: expected an even growth or width")
    return width // widening


class LayerMaker:
    """Makes the layers of one flow: what they all share, and the stream their first weights come from."""

    def __init__(
        self,
        coeff: float,
        concat_coeff: float,
        learnable_concat: bool,
        activation: str,
        generator: torch.Generator,
        converge: bool,
    ) -> None:
        self.coeff, self.concat_coeff, self.learnable_concat = coeff, concat_coeff, learnable_concat
        self.activation, self.generator, self.converge = activation, generator, converge

    def linear(self, inputs: int, outputs: int, weight_scale: float = 1.0) -> SpectralLayer:
        return self._started(SpectralLayer(inputs, outputs, self.coeff, self.generator, weight_scale=weight_scale))

    def conv(self, inputs: int, outputs: int, kernel: int, image_size: tuple[int, int]) -> SpectralLayer:
        return self._started(SpectralLayer(inputs, outputs, self.coeff, self.generator, kernel, image_size))

    def _started(self, layer: SpectralLayer) -> SpectralLayer:
        if self.converge:
            layer.converge_norm()
        return layer

    def dense(self, layer: SpectralLayer) -> DenseLayer:
        return DenseLayer(
            layer, make_activation(self.activation), Concatenation(self.concat_coeff, self.learnable_concat)
        )

    def dense_conv_branch(self, channels: int, image_size: tuple[int, int], depth: int, growth: int) -> Branch:
        """`depth` times 3x3 convolution, activation, concatenation; then a 1x1 convolution back (Table 2)."""
        new = halved(growth, self.activation)
        parts: list[nn.Module] = [
            self.dense(self.conv(channels + i * growth, new, 3, image_size)) for i in range(depth)
        ]
        return Branch([*parts, self.conv(channels + depth * growth, channels, 1, image_size)])

    def dense_linear_branch(self, dims: int, depth: int, growth: int, stem: int | None) -> Branch:
        """The same with linear layers, after a linear layer to `stem` dimensions if there is one (Appendix B)."""
        new, width = halved(growth, self.activation), stem or dims
        parts: list[nn.Module] = [self.linear(dims, stem)] if stem else []
        parts += [self.dense(self.linear(width + i * growth, new)) for i in range(depth)]
        return Branch([*parts, self.linear(width + depth * growth, dims)])

    def residual_branch(self, layers: Sequence[SpectralLayer], first_activation: bool) -> Branch:
        """Activation, layer, activation, layer, ...; the first activation may be left out."""
        parts: list[nn.Module] = []
        for i, layer in enumerate(layers):
            if i > 0 or first_activation:
                parts.append(make_activation(self.activation))
            parts.append(layer)
        return Branch(parts)

    def residual_conv_branch(
        self,
        channels: int,
        image_size: tuple[int, int],
        width: int,
        first_activation: bool,
        kernels: Sequence[int],
    ) -> Branch:
        """3x3, 1x1 and 3x3 convolutions with `width` channels between them."""
        plan = self._widths([channels] + [width] * (len(kernels) - 1) + [channels], first_activation)
        layers = [self.conv(i, o, kernel, image_size) for (i, o), kernel in zip(plan, kernels, strict=True)]
        return self.residual_branch(layers, first_activation)

    def residual_linear_branch(self, dims: int, width: int, hidden: int, last_scale: float = 1.0) -> Branch:
        """`hidden` + 1 linear layers, an activation before each; the last starts at `last_scale` of its size."""
        plan = self._widths([dims] + [width] * hidden + [dims], True)
        layers = [self.linear(i, o, last_scale if n == hidden else 1.0) for n, (i, o) in enumerate(plan)]
        return self.residual_branch(layers, True)

    def _widths(self, widths: Sequence[int], first_activation: bool) -> list[tuple[int, int]]:
        """(inputs, outputs) of each layer when an activation that widens stands before it."""
        widening = make_activation(self.activation).widening
        pairs = []
        for i, (before, after) in enumerate(pairwise(widths)):
            last = i == len(widths) - 2
            inputs = before if i > 0 else before * (widening if first_activation else 1)
            pairs.append((inputs, after if last else halved(after, self.activation)))
        return pairs
