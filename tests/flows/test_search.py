"""The kernel that searches waves finds what the torch code finds, and the bound holds with it."""

import os
import shutil

import pytest
import torch

from idn.flows import search
from idn.flows.fuse import fuse
from idn.flows.layers import SpectralLayer
from idn.flows.waves import first_channels, strongest_wave
from idn.streams import stream
from tests.flows.helpers import true_norm

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
ALLOWED = 1 + 1e-3
# inputs, outputs, kernel, image
SHAPES = [
    (1, 1, 3, (5, 5)),
    (1, 6, 3, (6, 4)),
    (7, 1, 3, (4, 6)),
    (4, 6, 3, (12, 12)),
    (6, 4, 5, (5, 7)),
    (40, 24, 3, (8, 8)),
    (16, 17, 3, (9, 9)),
    (60, 50, 3, (32, 17)),
]


@pytest.fixture(autouse=True)
def kernels():
    threads = torch.get_num_threads()
    fuse(True)
    yield
    fuse(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_finds_what_torch_finds(shape, threads):
    torch.set_num_threads(threads)
    inputs, outputs, width, size = shape
    weight = torch.randn(2, outputs, inputs, width, width, generator=stream(0, "weight"))
    channels = torch.stack([first_channels(one) for one in weight])
    assert search.kernel_for(weight) is not None
    for steps in (2, 8):
        fuse(True)
        ours = strongest_wave(weight, size, channels, steps)
        fuse(False)
        torchs = strongest_wave(weight, size, channels, steps)
        torch.testing.assert_close(ours.gain, torchs.gain, rtol=1e-5, atol=0)
        torch.testing.assert_close(ours.channels, torchs.channels, rtol=1e-4, atol=2e-5)
        for mine, theirs in zip(ours.wave, torchs.wave, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5 * theirs.abs().max().item())


def test_zero_weights_have_finite_waves():
    weight = torch.zeros(1, 3, 2, 3, 3)
    gain, wave, channels = strongest_wave(weight, (4, 4), first_channels(weight[0]).unsqueeze(0))
    assert gain == 0 and all(torch.isfinite(x).all() for x in (*wave, channels))


def test_what_the_kernel_does_not_know_is_left_to_torch():
    assert search.kernel_for(torch.zeros(1, 3, 2, 3, 3, dtype=torch.float64)) is None
    fuse(False)
    assert search.kernel_for(torch.zeros(1, 3, 2, 3, 3)) is None


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES[:6])
def test_bound_holds_while_weights_move(shape, precision):
    inputs, outputs, width, size = shape
    layer = SpectralLayer(inputs, outputs, 0.9, stream(0, "layer"), width, size)
    with torch.no_grad():
        layer.weight.copy_(0.2 * torch.randn(layer.weight.shape, generator=stream(0, "weight")))
    layer.precision = precision
    layer.converge_norm()
    adam = torch.optim.Adam([layer.weight], lr=1e-3)
    generator = stream(1, "moves")
    for step in range(40):
        layer.weight.grad = torch.randn(layer.weight.shape, generator=generator)
        adam.step()
        layer.update_norm()
        if step % 8 == 7:
            assert true_norm(layer, layer.multiplied()) / layer.coeff <= ALLOWED
