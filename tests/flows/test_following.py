"""The kernels that follow norms find what the torch code finds, and the bound holds with them."""

import copy
import os
import shutil

import pytest
import torch

from idn.flows.following import gradients, grams, kernel_for, longest
from idn.flows.fuse import fuse
from idn.flows.layers import SpectralLayer
from idn.flows.norms import INDEPENDENT, best_combinations, lengths, units
from idn.flows.rounding import Rounding
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
    assert kernel_for(weight, "waves") is not None
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
    assert kernel_for(torch.zeros(1, 3, 2, 3, 3, dtype=torch.float64), "waves") is None
    fuse(False)
    assert kernel_for(torch.zeros(1, 3, 2, 3, 3), "waves") is None


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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [(7, 5), (5000, 9001), (16, 4097)])
def test_the_kernel_combines_as_torch_does(sizes, threads):
    torch.set_num_threads(threads)
    generator = stream(sizes[0], "combine")
    basis, images = (torch.randn(3, 4, size, generator=generator) for size in sizes)
    basis[0, 1] = images[0, 1] = 0  # no gradient yet
    basis[1, 3], images[1, 3] = 2 * basis[1, 0], 2 * images[1, 0]  # nothing new
    kernel = kernel_for(basis, "longest")
    halves = (x.split(2, 1) for x in (basis, images))
    (pair, wave), (applied, responses) = halves
    vector, image, square = longest(kernel, pair, wave, applied, responses, INDEPENDENT)
    mix = best_combinations(basis.double(), images.double(), 1)
    expected, expected_image = (units(mix @ basis.double()), mix @ images.double() / lengths(mix @ basis.double()))
    sign = (vector * expected).sum((1, 2), keepdim=True).sign()
    torch.testing.assert_close(vector.double(), sign * expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(image.double(), sign * expected_image, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(square, image.square().sum((1, 2)), rtol=1e-5, atol=0)

    pulled = torch.randn(vector.shape, generator=generator)
    expected = pulled - square[:, None, None] * vector
    climb, length = gradients(kernel, pulled.clone(), vector, square)
    torch.testing.assert_close(climb, expected)
    torch.testing.assert_close(length, lengths(expected)[:, 0, 0])


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 124, 31, 3, 3), (2, 33, 64)])
def test_the_kernel_rounds_as_torch_does(shape):
    generator = stream(shape[0], "rounding")
    weight = torch.randn(shape, generator=generator)
    factors, slope = torch.rand(shape[0], generator=generator), torch.randn(shape, generator=generator)
    u, v = torch.randn(shape[:2], generator=generator), torch.randn(shape[0], weight[0, 0].numel(), generator=generator)
    ours = Rounding(weight, torch.bfloat16)
    fuse(False)
    torchs = Rounding(weight, torch.bfloat16)
    assert ours.kernel is not None and torchs.kernel is None
    torch.testing.assert_close(ours.errors(factors), torchs.errors(factors))
    torch.testing.assert_close(ours.along(factors, u, v), torchs.along(factors, u, v), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        ours.along_slope(factors, slope), torchs.along_slope(factors, slope), rtol=1e-4, atol=1e-4
    )


def test_a_kept_slope_follows_u_and_v():
    layer = SpectralLayer(4, 6, 0.9, stream(0, "layer"), 3, (6, 6))
    layer.precision = torch.bfloat16
    layer.converge_norm()
    kept = layer.slope()
    assert layer.slope() is kept
    copied = copy.deepcopy(layer)
    for changed in (layer, copied):
        with torch.no_grad():
            changed.u.neg_()
        torch.testing.assert_close(changed.slope(), -kept)
    layer.double()
    assert layer.slope().dtype == torch.float64


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 300, 70), (3, 64, 400), (2, 500, 48), (1, 1, 1)])
def test_the_kernel_multiplies_matrices_with_themselves(shape, threads):
    torch.set_num_threads(threads)
    weight = torch.randn(shape, generator=stream(shape[1], "weight"))
    rows = weight if shape[1] <= shape[2] else weight.mT
    torch.testing.assert_close(grams(kernel_for(weight, "grams"), weight), rows @ rows.mT, rtol=1e-5, atol=1e-4)
