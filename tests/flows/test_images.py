"""The kernel for narrow image branches finds what the solver finds, and is never trusted."""

import os
import shutil

import pytest
import torch

from idn.flows import correction, images
from idn.flows.block import Block
from idn.flows.inverse import default_tolerance
from idn.streams import stream
from tests.flows.helpers import small_image_flow

native = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
FLOWS = {
    "dense": ("idensenet-lc", {"growth": 16}),
    "dense, odd": ("idensenet", {"growth": 7, "shape": (3, 10, 14)}),
    "dense, several vectors": ("idensenet-lc", {"growth": 36, "shape": (5, 8, 8)}),
    "residual": ("residual", {"width": 39}),
    "residual, wider": ("residual", {"width": 70, "shape": (1, 12, 12)}),
}


def strong_block(name: str) -> tuple[Block, torch.Tensor]:
    """A block whose bounds are active, with images for it."""
    model, overrides = FLOWS[name]
    flow = small_image_flow(model, **{"blocks": (2,), "fc_blocks": 0, **overrides}, dtype=torch.float32)
    with torch.no_grad():
        for _, layer in flow.spectral_layers():
            layer.weight.mul_(4)
    flow.update_norms(20)
    shape = (6, *flow.shape)
    return flow.blocks[1], torch.randn(shape, generator=stream(0, "y"))


def residual(block: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The largest entry, in shares of the tolerance."""
    size = (x + block.branch().value(x) - y).flatten(1).abs().amax(1)
    return size / (default_tolerance(y.dtype) * (1 + y.flatten(1).abs().amax(1)))


def start(block: Block, y: torch.Tensor) -> torch.Tensor | None:
    goals = default_tolerance(y.dtype) * (1 + y.flatten(1).abs().amax(1))
    g = block.branch()
    branch = images.known_branch(g)
    return branch and images.native_start(branch, y, goals, correction.fitted_near(g, y).weight, correction.GATE)


@native
@torch.no_grad()
@pytest.mark.parametrize("name", FLOWS)
def test_starts_are_near_the_inverse(name):
    block, y = strong_block(name)
    x = start(block, y)
    assert residual(block, y, y).min() > 1000
    assert residual(block, x, y).max() < 10
    torch.testing.assert_close(x, block.inverse(y), atol=1e-4, rtol=0)


@native
@torch.no_grad()
def test_images_do_not_depend_on_each_other():
    block, y = strong_block("dense")
    weight, goals = correction.fitted_near(block.branch(), y).weight, torch.full((len(y),), 1e-4)
    both = [
        images.native_start(images.known_branch(block.branch()), part, goals[: len(part)], weight, correction.GATE)
        for part in (y, y[2:3].clone())
    ]
    torch.testing.assert_close(both[0][2:3], both[1], atol=0, rtol=0)


@native
@torch.no_grad()
@pytest.mark.parametrize("name", FLOWS)
def test_inverse_by_kernel_and_without(name, monkeypatch):
    block, y = strong_block(name)
    block.inverse(y)
    by_kernel = block.inverse(y)
    monkeypatch.setattr(images, "library", lambda: None)
    without = block.inverse(y)
    assert residual(block, by_kernel, y).max() <= 1 and residual(block, without, y).max() <= 1
    torch.testing.assert_close(by_kernel, without, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("wrong", [0.0, 1e6, float("nan")])
def test_wrong_starts_are_survived(wrong, monkeypatch):
    block, y = strong_block("residual")
    right = block.inverse(y)

    def half_wrong(*_):
        x = right.clone()
        x[::2] = wrong
        return x

    monkeypatch.setattr(correction, "native_start", half_wrong)
    x = block.inverse(y)
    assert residual(block, x, y).max() <= 1
    torch.testing.assert_close(x, right, atol=1e-4, rtol=0)


@torch.no_grad()
def test_what_the_kernel_does_not_know():
    block, y = strong_block("dense")
    assert start(block, y.double()) is None
    for overrides in ({"activation": "relu"}, {"activation": "clipswish", "growth": 8}, {"growth": images.WIDEST + 1}):
        other = small_image_flow("idensenet", **overrides, dtype=torch.float32)
        y = torch.randn(2, *other.shape, generator=stream(0, "y"))
        assert start(other.blocks[0], y) is None
