"""The kernel that follows a convolution's norm does what the torch code does, whatever the image's size."""

import copy
import os
import shutil

import pytest
import torch
from torch.nn.grad import conv2d_weight

from idn.flows.convolutions import slope_of
from idn.flows.fuse import fuse
from idn.flows.layers import SpectralLayer, _Together
from idn.streams import stream

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
# inputs, outputs, image
SHAPES = [
    (1, 1, (5, 5)),
    (1, 6, (6, 4)),
    (7, 1, (1, 6)),
    (4, 6, (12, 12)),
    (40, 24, (8, 8)),
    (17, 16, (9, 9)),
    (3, 5, (4, 41)),
    (60, 50, (32, 17)),
]


@pytest.fixture(autouse=True)
def kernels():
    threads = torch.get_num_threads()
    yield
    fuse(False)
    torch.set_num_threads(threads)


def make_layer(shape, scale=1.0):
    inputs, outputs, size = shape
    layer = SpectralLayer(inputs, outputs, 0.9, stream(0, "layer"), 3, size)
    with torch.no_grad():
        layer.weight.copy_(scale * torch.randn(layer.weight.shape, generator=stream(0, "weight")))
    layer.update_norm(10)
    return layer


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_slope_is_the_same(shape, threads):
    torch.set_num_threads(threads)
    layer, generator = make_layer(shape), stream(1, "vectors")
    u, v = (torch.randn(x.shape, generator=generator) for x in (layer.u, layer.v))
    fuse(True)
    slope = slope_of(layer.weight, u, v)
    expected = conv2d_weight(v.double(), layer.weight.shape, u.double(), padding=1)
    torch.testing.assert_close(slope.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 1e18, 1e-25])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_the_same(shape, scale, threads):
    torch.set_num_threads(threads)
    layer = make_layer(shape, scale)
    for step in range(3):
        with torch.no_grad():
            layer.weight += 0.02 * scale * torch.randn(layer.weight.shape, generator=stream(step, "move"))
        theirs = copy.deepcopy(layer)
        theirs.update_norm()
        fuse(True)
        versions = layer.u._version, layer.v._version
        layer.update_norm()
        assert layer.u._version > versions[0] and layer.v._version > versions[1]
        fuse(False)
        torch.testing.assert_close(layer.sigma, theirs.sigma, rtol=2e-5, atol=0)
        torch.testing.assert_close(layer.slack, theirs.slack, rtol=0, atol=5e-4)
        torch.testing.assert_close(layer.others, theirs.others, rtol=1e-4, atol=5e-5)
        turned = (layer.v * theirs.v).sum().sign()
        for name in ("u", "v", "climb"):
            mine, other = turned * getattr(layer, name), getattr(theirs, name)
            largest = 1.0 if name != "climb" else other.norm().item() + 1e-3
            assert (mine - other).norm() <= 2e-2 * largest, name
        with torch.no_grad():
            product = layer.operator(layer.weight / scale)[0](layer.v)
        torch.testing.assert_close(product.norm(), layer.sigma / scale, rtol=1e-5, atol=0)
        torch.testing.assert_close(product / product.norm(), layer.u, rtol=0, atol=1e-4)


def test_zero_weights_stay_harmless():
    layer = make_layer((3, 2, (4, 4)), 0.0)
    fuse(True)
    layer.update_norm()
    assert layer.sigma == 0 and layer.slack == 0
    assert all(torch.isfinite(x).all() for x in (layer.u, layer.v, layer.climb, layer.others))


def test_what_the_kernel_does_not_know_is_left_to_torch():
    fuse(True)
    layer = make_layer((4, 6, (6, 6)))
    assert slope_of(layer.weight.double(), layer.u.double(), layer.v.double()) is None
    assert slope_of(torch.zeros(0), layer.u, layer.v) is None
    layer.double().update_norm()
    assert layer.sigma.dtype == torch.float64


@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_is_outweighed_alike(shape, scale):
    layer = make_layer(shape, scale)
    layer.precision = torch.bfloat16
    theirs = copy.deepcopy(layer)
    _Together([theirs]).outweigh_rounding()
    fuse(True)
    assert layer.outweigh_rounding()
    torch.testing.assert_close(layer.shrink, theirs.shrink, rtol=1e-5, atol=0)
