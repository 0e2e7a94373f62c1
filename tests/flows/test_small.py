"""The kernel of small matrices: proven norms as good as torch's, and a clean way back to torch."""

import os
import shutil

import pytest
import torch

import idn
from idn.flows import small
from idn.flows.fuse import fuse
from idn.flows.layers import SpectralLayer, update_norms
from idn.streams import stream
from tests.flows.helpers import true_norm

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
SHAPES = [(1, 1), (2, 40), (40, 2), (30, 30), (90, 272), (96, 97), (1000, 5), (33, 96)]
PRECISIONS = [None, torch.bfloat16]


@pytest.fixture(autouse=True)
def kernels():
    fuse(True)
    yield
    fuse(False)


def layer_of(shape, precision, weight=None, kernel=None):
    """outputs x inputs."""
    layer = SpectralLayer(shape[1], shape[0], 0.9, stream(0, "layer"), kernel)
    if weight is None:
        weight = 0.3 * torch.randn(layer.weight.shape, generator=stream(1, "weight"))
    layer.weight.data = weight
    layer.precision = precision
    return layer


def left_to_torch(layers, monkeypatch):
    """Updates norms; which layers the kernel did not prove."""
    answers = []

    def follow(matrices):
        answers.extend(small.follow_small(matrices))
        return answers

    monkeypatch.setattr("idn.flows.layers.follow_small", follow)
    update_norms(layers)
    return [layer for layer, proven in zip(layers, answers, strict=True) if not proven]


@pytest.mark.parametrize("kernel", [None, 1])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bound_holds_while_weights_move(precision, kernel, monkeypatch):
    layers = [layer_of(shape, precision, kernel=kernel) for shape in SHAPES]
    generator, unproven = stream(2, "moves"), 0
    for _ in range(20):
        unproven += len(left_to_torch(layers, monkeypatch))
        for layer in layers:
            norm = torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)
            assert norm * (1 - 1e-6) <= layer.sigma * (1 + layer.slack) <= norm * (1 + 4e-3)
            assert true_norm(layer, layer.multiplied()) <= layer.coeff * (1 + 1e-3)
            layer.weight.data *= 1 + 0.03 * torch.randn(layer.weight.shape, generator=generator)
    assert unproven < 20 * len(SHAPES) / 10


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scale", [1.0, 1e18, 1e-25])
def test_as_torch_finds_them(scale, precision):
    pairs = [[layer_of(shape, precision) for _ in range(2)] for shape in SHAPES]
    for ours, plain in pairs:
        for layer in (ours, plain):
            layer.weight.data *= scale
        for on, layer in ((True, ours), (False, plain)):
            fuse(on)
            for _ in range(4):
                update_norms([layer])
        torch.testing.assert_close(ours.sigma, plain.sigma, rtol=1e-4, atol=0)
        torch.testing.assert_close(ours.shrink, plain.shrink, rtol=1e-3, atol=0)
        # Both are top vectors as good as it gets; where two singular values are close they may differ.
        torch.testing.assert_close(ours.u, (ours.weight @ ours.v[0] / ours.sigma)[None], rtol=1e-4, atol=1e-5)


def test_what_is_not_proven_is_left_to_torch(monkeypatch):
    """A direction that v does not see, and zeros."""
    hidden, zero = torch.diag(torch.tensor([1.0, 3.0, 0.5])), torch.zeros(4, 6)
    layers = [layer_of((3, 3), None, hidden), layer_of((4, 6), None, zero), layer_of((5, 5), None)]
    layers[0].v.copy_(torch.eye(3)[:1])
    assert left_to_torch(layers, monkeypatch) == layers[:2]
    torch.testing.assert_close(layers[0].sigma, torch.tensor(3.0))
    assert layers[1].sigma == 0 and torch.isfinite(layers[1].v).all()


def test_other_precisions_and_no_compiler_are_left_to_torch(monkeypatch):
    half, double = layer_of((5, 7), torch.float16), layer_of((5, 7), None).double()
    assert left_to_torch([half, double], monkeypatch) == [half, double]
    monkeypatch.setattr(small, "kernel_library", lambda name: None)
    layer = layer_of((5, 7), None)
    assert left_to_torch([layer], monkeypatch) == [layer]
    torch.testing.assert_close(layer.sigma, torch.linalg.matrix_norm(layer.weight.detach(), 2), rtol=1e-3, atol=0)


def test_a_whole_flow_whatever_the_number_of_threads():
    flows = [idn.build("moons", "idensenet-lc", "tiny") for _ in range(2)]
    threads = torch.get_num_threads()
    for flow, count in zip(flows, (1, 2), strict=True):
        torch.set_num_threads(count)
        flow.set_precision("bf16")
        flow.update_norms()
    torch.set_num_threads(threads)
    for one, two in zip(flows[0].buffers(), flows[1].buffers(), strict=True):
        assert torch.equal(one, two)
