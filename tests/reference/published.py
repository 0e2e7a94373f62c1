"""Checkpoints as the two published repositories write them, and what their models compute, in float64."""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference.modules import (
    ActNorm,
    CLipSwish,
    ExponentialMovingAverage,
    FCNet,
    FCWrapper,
    InducedNorm,
    InducedNormConv2d,
    InducedNormLinear,
    LipschitzDenseLayer,
    LogitTransform,
    ResidualFlow,
    SequentialFlow,
    SqueezeLayer,
    StackediResBlocks,
    Swish,
    iResBlock,
    published_package,
)

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
