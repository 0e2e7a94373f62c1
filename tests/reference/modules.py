"""The published models' modules, with what they compute taken by exact routes.

They have the published names (of classes and attributes) because those are what a checkpoint holds; what they
compute is written from the papers and shares nothing with `idn`: a layer's norm is that of its unrolled matrix.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InducedNorm(nn.Module):
    """A linear layer, or a convolution over maps of `size`, divided by max(1, sigma/coeff)."""

    def __init__(
        self, inputs: int, outputs: int, coeff: float, kernel: int = 0, size: tuple[int, int] = (1, 1)
    ) -> None:
        super().__init__()
        self.coeff, self.kernel, self.divisor = coeff, kernel, 1.0
        shape = (outputs, inputs, kernel, kernel) if kernel else (outputs, inputs)
        # Wide enough that the norm is above coeff in most layers, and below it in some.
        self.weight = nn.Parameter(torch.randn(shape) * 0.8 / math.sqrt(math.prod(shape[1:])))
        self.bias = nn.Parameter(0.1 * torch.randn(outputs))
        if kernel:
            self.register_buffer("initialized", torch.tensor(1))
            self.register_buffer("spatial_dims", torch.tensor(size).float())
        self.register_buffer("scale", torch.tensor(0.0))
        self.map_size = size if kernel > 1 else (1, 1) if kernel else ()
        matrix, v = self.matrix(), torch.randn(inputs * math.prod(self.map_size))
        for _ in range(3):
            u = F.normalize(matrix @ v, dim=0)
            v = F.normalize(matrix.T @ u, dim=0)
        self.register_buffer("u", u)
        self.register_buffer("v", v)

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """The operator unrolled: column j is the image of the j-th unit vector."""
        if not self.kernel:
            return self.weight
        inputs = self.weight.shape[1] * math.prod(self.map_size)
        basis = torch.eye(inputs, dtype=self.weight.dtype).view(inputs, -1, *self.map_size)
        return F.conv2d(basis, self.weight, padding=self.kernel // 2).flatten(1).T

    @torch.no_grad()
    def settle(self, converged: bool) -> None:
        """Fixes sigma: the true norm, or what the stored u and v say."""
        matrix = self.matrix()
        sigma = torch.linalg.matrix_norm(matrix, 2) if converged else self.u @ matrix @ self.v
        self.divisor = max(1.0, float(sigma) / self.coeff)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / self.divisor
        if not self.kernel:
            return F.linear(x, weight, self.bias)
        return F.conv2d(x, weight, self.bias, padding=self.kernel // 2)


class InducedNormConv2d(InducedNorm):
    pass


class InducedNormLinear(InducedNorm):
    pass


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(0.5 + 0.3 * torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x * torch.log(1 + self.beta.exp()))) / 1.1


class CLipSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swish = Swish()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.swish(x), self.swish(-x)], 1) / 1.004


class LipschitzDenseLayer(nn.Module):
    def __init__(self, network: nn.Sequential, learnable: bool, lip_coeff: float) -> None:
        super().__init__()
        self.network, self.lip_coeff = network, lip_coeff
        for name in ("K1_unnormalized", "K2_unnormalized"):
            if learnable:
                setattr(self, name, nn.Parameter(1 + torch.randn(1)))
            else:
                self.register_buffer(name, torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        etas = torch.cat([torch.log(1 + raw.exp()) + 0.1 for raw in (self.K1_unnormalized, self.K2_unnormalized)])
        a, b = self.lip_coeff * etas / etas.norm()
        return torch.cat([a * x, b * self.network(x)], 1)


class ActNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(features))
        self.bias = nn.Parameter(0.1 * torch.randn(features))
        self.register_buffer("initialized", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return (x + self.bias.view(shape)) * self.weight.view(shape).exp()


class FCWrapper(nn.Module):
    def __init__(self, fc_module: nn.Module) -> None:
        super().__init__()
        self.fc_module = fc_module

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_module(x.flatten(1)).view_as(x)


class FCNet(nn.Module):
    def __init__(self, nnet: nn.Sequential) -> None:
        super().__init__()
        self.nnet = nnet

    def forward(self, x: Tensor) -> Tensor:
        return self.nnet(x.flatten(1)).view_as(x)


class iResBlock(nn.Module):
    def __init__(self, nnet: nn.Module) -> None:
        super().__init__()
        self.nnet = nnet
        self.geom_p = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
        self.lamb = nn.Parameter(torch.tensor(2.0))
        for name in ("last_n_samples", "last_firmom", "last_secmom"):
            self.register_buffer(name, torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nnet(x)


class SqueezeLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return torch.stack(corners, 2).flatten(1, 2)


class LogitTransform(nn.Module):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        s = self.alpha + (1 - 2 * self.alpha) * x
        return torch.log(s / (1 - s))


class SequentialFlow(nn.Module):
    def __init__(self, chain: list[nn.Module]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(chain)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.chain:
            x = layer(x)
        return x


class StackediResBlocks(SequentialFlow):
    pass


class ResidualFlow(nn.Module):
    def __init__(self, transforms: list[nn.Module], factor_out: bool, squeeze_first: bool) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(transforms)
        self.factor_out, self.squeeze_first = factor_out, squeeze_first

    def forward(self, x: Tensor) -> Tensor:
        if self.squeeze_first:
            x = SqueezeLayer()(x)
        done = []
        for place, transform in enumerate(self.transforms):
            x = transform(x)
            if self.factor_out and place < len(self.transforms) - 1:
                x, factored = x.chunk(2, 1)
                done.append(factored)
        return torch.cat([part.flatten(1) for part in (*done, x)], 1)


class ExponentialMovingAverage:
    def __init__(self, module: nn.Module, shadow_params: dict[str, Tensor]) -> None:
        self.module, self.shadow_params, self.decay = module, shadow_params, 0.999


PLACES: dict[type, str] = {
    InducedNormConv2d: "layers.base.mixed_lipschitz",
    InducedNormLinear: "layers.base.mixed_lipschitz",
    Swish: "layers.base.activations",
    CLipSwish: "layers.base.activations",
    LipschitzDenseLayer: "layers.dense_layer",
    ActNorm: "layers.act_norm",
    iResBlock: "layers.iresblock",
    SqueezeLayer: "layers.squeeze",
    LogitTransform: "layers.elemwise",
    SequentialFlow: "layers.container",
    FCNet: "resflow",
    FCWrapper: "resflow",
    StackediResBlocks: "resflow",
    ResidualFlow: "resflow",
    ExponentialMovingAverage: "utils",
}


@contextmanager
def published_package(name: str) -> Iterator[None]:
    """Lets the classes above be pickled by the paths they have in the package `name`, which does not exist."""
    before = {kind: kind.__module__ for kind in PLACES}
    paths = {f"{name}.{place}" for place in PLACES.values()}
    parents = {path.rsplit(".", depth)[0] for path in paths for depth in (1, 2, 3)}
    modules = {path: ModuleType(path) for path in paths | parents}
    try:
        for kind, place in PLACES.items():
            kind.__module__ = f"{name}.{place}"
            setattr(modules[kind.__module__], kind.__name__, kind)
        sys.modules.update(modules)
        yield
    finally:
        for kind, module in before.items():
            kind.__module__ = module
        for module in modules:
            sys.modules.pop(module)
