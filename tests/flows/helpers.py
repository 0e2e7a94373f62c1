"""Small flows whose weights look trained, and exact answers to compare with."""

import gc

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

import idn
from idn.flows.flow import Flow
from idn.flows.layers import SpectralLayer
from idn.streams import stream

SMALL = {"growth": 6, "width": 8, "fc_blocks": 1, "fc_width": 6, "fc_stem": 6, "fc_growth": 4}


def perturb(module: torch.nn.Module, seed: int = 0, size: float = 0.2) -> None:
    """Moves every parameter at random, far enough that all norms are active."""
    generator = stream(seed, "perturb")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(2.0 if name.endswith("weight") else 1.0).add_((size * noise).to(parameter))


def small_image_flow(model: str, dtype: torch.dtype = torch.float64, **overrides) -> Flow:
    settings = SMALL | {"shape": (2, 8, 8), "blocks": (1, 1), "squeeze_first": False} | overrides
    return ready(idn.build("cifar10", model, "tiny", **settings), dtype)


def small_toy_flow(model: str, dtype: torch.dtype = torch.float64, **overrides) -> Flow:
    return ready(idn.build("moons", model, "tiny", **overrides), dtype)


def ready(flow: Flow, dtype: torch.dtype) -> Flow:
    flow = flow.to(dtype)
    perturb(flow)
    flow.update_norms(30)
    flow.initialize(data_for(flow, 16, seed=1))
    return flow.eval()


def data_for(flow: Flow, n: int, seed: int = 0) -> Tensor:
    parameter = next(flow.parameters())
    generator = stream(seed, "data")
    if flow.config.logit_alpha is None:
        return torch.randn(n, *flow.shape, generator=generator, dtype=torch.float64).to(parameter)
    return torch.rand(n, *flow.shape, generator=generator, dtype=torch.float64).to(parameter)


def unrolled(layer: SpectralLayer, weight: Tensor) -> Tensor:
    """The layer's operator as a matrix, in float64: one column per input entry, zero padding included."""
    apply, _ = layer.operator(weight.double())
    n = layer.v.numel()
    return apply(torch.eye(n, dtype=torch.float64).view(n, *layer.v.shape[1:])).flatten(1).T


def true_norm(layer: SpectralLayer, weight: Tensor) -> float:
    return torch.linalg.matrix_norm(unrolled(layer, weight), 2).item()


def living_bytes() -> int:
    """Storage of all tensors that are alive; what the compiler traces with has none."""
    gc.collect()
    real = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not isinstance(t, FakeTensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in real}.values())
