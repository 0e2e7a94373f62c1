"""Settled norms are those of the unrolled operator, also where power iteration would rest on a smaller one."""

import pytest
import torch

from idn.flows.layers import SpectralLayer
from idn.reference.settle import settle
from idn.streams import stream

LAYERS = [(1, 12, 3, 8), (12, 1, 3, 8), (3, 24, 3, 8), (24, 24, 1, 8), (8, 8, 5, 6), (1, 1, 3, 12), (40, 60, None, 1)]


def exact_norm(layer: SpectralLayer) -> float:
    apply, _ = layer.operator(layer.weight.detach().double())
    inputs = layer.v.numel()
    basis = torch.eye(inputs, dtype=torch.float64).view(inputs, *layer.v.shape[1:])
    return torch.linalg.matrix_norm(apply(basis).flatten(1), 2).item()


def layer_of(inputs: int, outputs: int, kernel: int | None, size: int, seed: int) -> SpectralLayer:
    return SpectralLayer(inputs, outputs, 0.9, stream(seed, "layer"), kernel, (size, size))


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_random_layers(shape: tuple[int, int, int | None, int], scale: float) -> None:
    for seed in range(3):
        layer = layer_of(*shape, seed)
        layer.weight.data *= scale
        settle(layer, stream(seed, "start"))
        assert layer.sigma.item() == pytest.approx(exact_norm(layer), rel=1e-5)
        assert layer.slack == 0
        image = layer.operator(layer.weight.detach())[0](layer.v)
        assert (layer.u * image).sum().item() == pytest.approx(layer.sigma.item())


def test_a_start_at_the_second_singular_vector() -> None:
    """Where a gradient is zero, so that a method that only climbs would stay."""
    layer = layer_of(6, 6, None, 1, 0)
    layer.weight.data = torch.diag(torch.tensor([1.0, 3.0, 2.999, 0.0, 2.0, 1.0]))
    layer.v.copy_(torch.eye(6)[2:3])
    settle(layer, stream(0, "start"))
    assert layer.sigma.item() == pytest.approx(3.0, rel=1e-6)


def test_a_weight_of_zeros() -> None:
    layer = layer_of(4, 4, 3, 6, 0)
    layer.weight.data.zero_()
    settle(layer, stream(0, "start"))
    assert layer.sigma == 0 and torch.isfinite(layer.u).all() and torch.isfinite(layer.v).all()
