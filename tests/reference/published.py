"""Checkpoints as the two published repositories write them, and what their models compute, in float64.

The modules here have the published names (of classes, attributes and options) because those are what a checkpoint
holds; what they compute is written from the papers, shares nothing with `idn`, and takes exact routes instead: the
norm of a layer is that of its unrolled matrix, the log-det that of the whole flow's Jacobian.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_DEFAULTS: dict[str, Any] = {
    "data": "cifar10", "imagesize": 8, "nbits": 8, "block": "resblock", "coeff": 0.98, "vnorms": "2222",
    "n_lipschitz_iters": None, "sn_tol": 1e-3, "learn_p": False, "factor_out": False, "n_dist": "poisson",
    "act": "swish", "idim": 12, "nblocks": "2-2", "squeeze_first": False, "actnorm": True, "fc_actnorm": False,
    "batchnorm": False, "dropout": 0.0, "fc": False, "kernels": "3-1-3", "quadratic": False, "fc_end": True,
    "fc_idim": 10, "preact": True, "padding": 0, "first_resblock": True, "task": "density", "seed": 3,
}  # fmt: skip
DENSE_DEFAULTS: dict[str, Any] = {
    "densenet": True, "densenet_depth": 2, "densenet_growth": 8, "fc_densenet_growth": 6,
    "learnable_concat": True, "start_learnable_concat": 25, "lip_coeff": 0.98,
}  # fmt: skip
TOY_DEFAULTS: dict[str, Any] = {
    "data": "moons", "arch": "iresnet", "coeff": 0.9, "vnorms": "222222", "n_lipschitz_iters": 5, "atol": None,
    "learn_p": False, "dims": "16-16-16-16", "act": "swish", "nblocks": 3, "actnorm": False, "batchnorm": False,
}  # fmt: skip


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


class Builder:
    """The published models, built from their options."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = argparse.Namespace(**{**DENSE_DEFAULTS, "densenet": False, "learnable_concat": False, **args})
        self.doubling = self.args.act == "CLipSwish"

    def act(self) -> nn.Module:
        kinds = {"swish": Swish, "CLipSwish": CLipSwish, "elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh}
        return {**kinds, "identity": nn.Identity}[self.args.act]()

    def widths(self, width: int) -> int:
        return width // 2 if self.doubling else width

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        return InducedNormLinear(inputs, outputs, self.args.coeff)

    def conv(self, inputs: int, outputs: int, kernel: int, size: tuple[int, int]) -> nn.Module:
        return InducedNormConv2d(inputs, outputs, self.args.coeff, kernel, size)

    def concat(self, layer: nn.Module) -> nn.Module:
        return LipschitzDenseLayer(nn.Sequential(layer, self.act()), self.args.learnable_concat, self.args.lip_coeff)

    def conv_branch(self, c: int, size: tuple[int, int], leading_act: bool) -> nn.Module:
        a = self.args
        if a.densenet:
            grown = [c + i * a.densenet_growth for i in range(a.densenet_depth + 1)]
            layers = [self.concat(self.conv(n, self.widths(a.densenet_growth), 3, size)) for n in grown[:-1]]
            return nn.Sequential(*layers, self.conv(grown[-1], c, 1, size))
        first, middle, last = map(int, a.kernels.split("-"))
        entry = 2 * c if self.doubling and leading_act else c
        lead = [self.act()] if leading_act else []
        half = self.widths(a.idim)
        layers = [self.conv(entry, half, first, size), self.act(), self.conv(a.idim, half, middle, size), self.act()]
        return nn.Sequential(*lead, *layers, self.conv(a.idim, c, last, size))

    def fc_branch(self, dims: int) -> nn.Module:
        a = self.args
        if a.densenet:
            grown = [64 + i * a.fc_densenet_growth for i in range(a.densenet_depth + 1)]
            layers = [self.concat(self.linear(n, self.widths(a.fc_densenet_growth))) for n in grown[:-1]]
            return FCNet(nn.Sequential(self.linear(dims, 64), *layers, self.linear(grown[-1], dims)))
        lead = [self.act()] if a.preact else []
        half, entry = self.widths(a.fc_idim), 2 * dims if self.doubling else dims
        layers = [self.linear(entry, half), self.act(), self.linear(a.fc_idim, half), self.act()]
        return FCNet(nn.Sequential(*lead, *layers, self.linear(a.fc_idim, dims)))

    def image_flow(self) -> nn.Module:
        a = self.args
        c, h = (1 if a.data == "mnist" else 3), a.imagesize
        if a.squeeze_first:
            c, h = 4 * c, h // 2
        possible = sum(h // 2**k >= 4 for k in range(10))
        counts = [int(n) for n in a.nblocks.split("-")][:possible]
        transforms: list[nn.Module] = []
        for scale, count in enumerate(counts):
            first, last = scale == 0, scale == len(counts) - 1
            chain: list[nn.Module] = []
            if first:
                chain.append(LogitTransform(1e-6 if a.data == "mnist" else 0.05))
                chain += [ActNorm(c)] if a.actnorm and a.first_resblock else []
            for block in range(count):
                bare = a.first_resblock and first and block == 0 and not last
                chain.append(iResBlock(self.conv_branch(c, (h, h), a.preact and not bare)))
                chain += [ActNorm(c)] if a.actnorm else []
            if not last:
                chain.append(SqueezeLayer())
            elif a.fc_end:
                for _ in range(4):
                    chain.append(iResBlock(self.fc_branch(c * h * h)))
                    chain += [FCWrapper(ActNorm(c * h * h))] if a.actnorm else []
            transforms.append(StackediResBlocks(chain))
            c, h = (2 * c if a.factor_out else 4 * c), h // 2
        return ResidualFlow(transforms, a.factor_out, a.squeeze_first)

    def toy_flow(self) -> nn.Module:
        a = self.args
        chain: list[nn.Module] = [ActNorm(2)] if a.actnorm else []
        for _ in range(a.nblocks):
            if a.densenet:
                grown = [2 + i * a.densenet_growth for i in range(a.densenet_depth + 1)]
                layers = [self.concat(self.linear(n, self.widths(a.densenet_growth))) for n in grown[:-1]]
                layers.append(self.linear(grown[-1], 2))
            else:
                dims = [2, *map(int, a.dims.split("-")), 2]
                layers = []
                for inputs, outputs in itertools.pairwise(dims):
                    layers += [self.act(), self.linear(inputs, outputs)]
            chain.append(iResBlock(nn.Sequential(*layers)))
            chain += [ActNorm(2)] if a.actnorm else []
        return SequentialFlow(chain)


class Published:
    """A published model, its moving average, and a file of both."""

    def __init__(self, toy: bool = False, **args: Any) -> None:
        self.args: dict[str, Any] = {**(TOY_DEFAULTS if toy else IMAGE_DEFAULTS), **args}
        # The published layers draw from the global generator; here it is lent to them and given back.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            builder = Builder(self.args)
            self.model = builder.toy_flow() if toy else builder.image_flow()
            raw = dict(self.model.named_parameters())
            self.state = self.model.state_dict()
            self.shadow = {name: p.data + 0.03 * torch.randn_like(p) for name, p in raw.items()}
        channels = 1 if self.args["data"] == "mnist" else 3
        self.shape = (2,) if toy else (channels, self.args["imagesize"], self.args["imagesize"])

    def save(self, path: Path, package: str = "lib", prefix: str = "", zipped: bool = True, ema: bool = True) -> Path:
        state = {prefix + name: tensor for name, tensor in self.state.items()}
        content: dict[str, Any] = {"state_dict": state, "args": argparse.Namespace(**self.args)}
        with published_package(package):
            if ema:
                shadow = {prefix + name: tensor for name, tensor in self.shadow.items()}
                content["ema"] = ExponentialMovingAverage(self.model, shadow)
                optimizer = torch.optim.Adam(self.model.parameters())
                content |= {"optimizer_state_dict": optimizer.state_dict(), "test_bpd": 3.5}
            torch.save(content, path, _use_new_zipfile_serialization=zipped)
        return path

    def expected(self, x: Tensor, ema: bool) -> tuple[Tensor, Tensor]:
        """z and the exact log-det, in float64: raw weights with the stored u and v, EMA weights with the true norm."""
        model = Builder(self.args).toy_flow() if self.shape == (2,) else Builder(self.args).image_flow()
        model.load_state_dict({**self.model.state_dict(), **(self.shadow if ema else {})})
        model.double()
        for layer in model.modules():
            if isinstance(layer, InducedNorm):
                layer.settle(converged=ema)
        x = x.double()
        with torch.no_grad():
            z = model(x)
        jacobians = [
            torch.autograd.functional.jacobian(lambda row: model(row[None])[0], row, vectorize=True) for row in x
        ]
        square = torch.stack([jacobian.reshape(z.shape[1], -1) for jacobian in jacobians])
        return z, torch.linalg.slogdet(square).logabsdet
