"""Waves show where a convolution's largest singular value is, and the bound holds in real training on images."""

import copy
import math

import pytest
import torch

import idn
from idn.data import dequantise, open_stream
from idn.flows.layers import SpectralLayer
from idn.flows.waves import Taps, first_channels, strongest_wave
from idn.streams import stream
from tests.flows.helpers import true_norm

ALLOWED = 1 + 1e-3
SHAPES = [
    (1, 1, 3, (5, 5)),
    (1, 6, 3, (6, 4)),
    (7, 1, 3, (4, 6)),
    (4, 6, 3, (12, 12)),
    (6, 4, 5, (5, 7)),
    (3, 9, 3, (1, 4)),
]


def make_layer(shape, seed=0):
    inputs, outputs, kernel, image = shape
    return SpectralLayer(inputs, outputs, 0.9, stream(seed, "layer"), kernel, image)


def wave_of(weight, size):
    return strongest_wave(weight.unsqueeze(0), size, first_channels(weight).unsqueeze(0))


def symbol(weight, frequency):
    """K(f), written out."""
    radius = weight.shape[-1] // 2
    total = torch.zeros(weight.shape[:2], dtype=torch.complex128)
    for y in range(-radius, radius + 1):
        for x in range(-radius, radius + 1):
            angle = torch.tensor(y * frequency[0] + x * frequency[1])
            total += weight[..., y + radius, x + radius].double() * torch.polar(torch.ones(()).double(), angle.double())
    return total


def test_taps_apply_the_symbol():
    weight = torch.randn(2, 4, 5, 3, 3, generator=stream(0, "weight"), dtype=torch.float64)
    frequencies = torch.tensor([[0.3, -1.1], [2.0, 0.7]], dtype=torch.float64)
    channels = torch.randn(2, 2, 2, 4, generator=stream(0, "channels"), dtype=torch.float64)
    taps, each = Taps(weight), frequencies.expand(2, -1, -1)
    found = taps.gram(each)(channels)
    lengths = taps.lengths_at(torch.stack([each, 2 * each], 2), channels)
    for i, one in enumerate(weight):
        for j, frequency in enumerate(frequencies):
            c = torch.complex(*channels[i, j])
            near, far = (symbol(one, place.tolist()) for place in (frequency, 2 * frequency))
            torch.testing.assert_close(torch.complex(*found[i, j]), near @ near.mH @ c)
            expected = torch.stack([(k.mH @ c).norm() ** 2 for k in (near, far)])
            torch.testing.assert_close(lengths[i, j], expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_gain_is_the_largest_norm_of_the_symbol(shape):
    """To 0.5 % of the largest on a fine grid, and not below the norm on an image by more than that."""
    for seed in range(2):
        layer = make_layer(shape, seed)
        weight = layer.weight.detach()
        gain, wave, _ = wave_of(weight, shape[3])
        angles = [2 * math.pi * i / 36 for i in range(36)]
        largest = max(torch.linalg.matrix_norm(symbol(weight, (y, x)), 2).item() for y in angles for x in angles[:19])
        assert gain.item() == pytest.approx(largest, rel=5e-3)
        assert gain.item() >= true_norm(layer, weight) * (1 - 5e-3)
        assert wave.images.shape == (1, 2, layer.v.numel())
        apply, _ = layer.operator(weight)
        responses = apply(wave.images.view(2, *layer.v.shape[1:])).flatten(1)
        torch.testing.assert_close(wave.responses[0], responses, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_gain_is_found_between_the_places_of_the_grid(seed):
    """Kernels that are made of a wave have the sharpest peaks."""
    generator = stream(seed, "peak")
    peak = math.pi * torch.rand(2, generator=generator)
    angles = peak[0] * torch.tensor([[-1.0], [0.0], [1.0]]) + peak[1] * torch.tensor([-1.0, 0.0, 1.0])
    channels = torch.randn(2, 20, 30, generator=generator)
    weight = torch.einsum("xoi,xhw->oihw", channels, torch.stack([angles.cos(), angles.sin()]))
    weight += 0.5 * torch.randn(weight.shape, generator=generator)
    near = [(peak[axis] + 0.05 * torch.arange(-6, 7)).tolist() for axis in range(2)]
    largest = max(torch.linalg.matrix_norm(symbol(weight, (y, x)), 2).item() for y in near[0] for x in near[1])
    assert wave_of(weight, (8, 8)).gain.item() >= largest * (1 - 5e-4)


def test_kept_channels_follow_weights_that_move():
    """Two steps at every frequency suffice, also while a direction that was not there outgrows all others."""
    weight = torch.randn(24, 40, 3, 3, generator=stream(0, "weight"))
    coming = torch.einsum(
        "o,i,hw->oihw", *(torch.randn(n, generator=stream(n, "coming")) for n in (24, 40)), torch.ones(3, 3)
    )
    channels = first_channels(weight).unsqueeze(0)
    for step in range(30):
        weight = weight + 0.02 * torch.randn(weight.shape, generator=stream(step, "move")) + 0.005 * coming
        gain, _, channels = strongest_wave(weight.unsqueeze(0), (8, 8), channels, steps=2)
        if step >= 10:
            assert gain.item() == pytest.approx(wave_of(weight, (8, 8)).gain.item(), rel=5e-3)


def test_the_wave_itself_is_lengthened_by_nearly_the_gain_on_a_large_image():
    for shape in [(5, 3, 3, (40, 40)), (3, 5, 3, (40, 40))]:
        layer = make_layer(shape)
        gain, wave, _ = wave_of(layer.weight.detach(), shape[3])
        apply, _ = layer.operator(layer.weight.detach())
        for image in wave.images.view(2, 1, *layer.v.shape[1:]):
            assert apply(image).norm() / image.norm() > 0.99 * gain


def test_zero_and_extreme_weights_have_finite_waves():
    for scale in (0.0, 1.0):
        gain, wave, channels = wave_of(torch.full((3, 2, 3, 3), scale), (4, 4))
        assert all(torch.isfinite(x).all() for x in (gain, *wave, channels))


def test_a_pattern_of_another_frequency_that_outgrows_v_is_found_at_once():
    """From constant images to checkerboards, which share no frequency."""
    layer = make_layer((2, 3, 3, (12, 12)))
    smooth = torch.ones(3, 2, 3, 3)
    signs = torch.tensor([1.0, -1.0, 1.0])
    checkers = smooth * signs[:, None] * signs
    with torch.no_grad():
        layer.weight.copy_(smooth + 0.9 * checkers)
        layer.converge_norm()
        layer.weight.copy_(0.9 * smooth + checkers)
    layer.update_norm()
    assert true_norm(layer, layer.multiplied()) / layer.coeff <= ALLOWED


def converged_norm(layer: SpectralLayer) -> float:
    """Of the weight that is multiplied, from other vectors."""
    other = copy.deepcopy(layer)
    other.weight.data, other.precision = layer.multiplied(), None
    if not layer.small:  # whose norms are found without further vectors
        other.others.copy_(torch.randn(other.others.shape, generator=stream(1, "others")))
    other.update_norm(40)
    return other.sigma.item()


@pytest.mark.parametrize("model", ["idensenet-lc", "residual"])
def test_bound_holds_while_a_flow_learns_images(model):
    flow = idn.build("cifar10", model, "tiny").train()
    images = iter(open_stream("cifar10-sample", batch=8, rank=0, world=1, workers=0, seed=0))
    flow.initialize(dequantise(next(images).images, stream(0, "first")))
    adam = torch.optim.Adam(flow.parameters(), lr=1e-3)
    for step in range(16):
        x = dequantise(next(images).images, stream(0, "noise", step))
        (-flow(x, idn.Draws.seeded(0, step)).log_prob.mean()).backward()
        adam.step()
        adam.zero_grad()
        flow.update_norms()
        if step % 5 == 0:
            assert max(converged_norm(layer) / layer.coeff for _, layer in flow.spectral_layers()) <= ALLOWED
