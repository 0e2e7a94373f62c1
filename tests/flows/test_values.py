"""Values of dense branches in tiles: as exact as sums of nine taps, and the inverse ends where it did without them."""

import os
import shutil

import pytest
import torch

from idn.flows import correction
from idn.flows.block import Block
from idn.flows.evaluation import evaluator
from idn.flows.images import known_branch
from idn.flows.inverse import default_tolerance
from idn.flows.maps import Map
from idn.flows.values import tiled_value
from idn.streams import stream
from tests.flows.helpers import perturb, small_image_flow

native = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
SHAPES = [(1, 8, 8), (3, 10, 14), (20, 4, 2), (3, 16, 16)]
"""Few and many channels, sides that are no whole tiles, images smaller than a tile."""


def block(shape, growth: int, depth: int = 3, activation: str = "lipswish") -> Block:
    """One whose numbers all matter, and that begins with an activation."""
    sizes = {"growth": growth, "blocks": (2,), "depth": depth, "fc_blocks": 0, "squeeze_first": False}
    flow = small_image_flow("idensenet-lc", torch.float32, shape=shape, activation=activation, **sizes)
    with torch.no_grad():
        for _, layer in flow.spectral_layers():
            layer.weight.mul_(4)
    perturb(flow)
    flow.update_norms(20)
    return flow.blocks[1]


def images(n: int, shape) -> torch.Tensor:
    return 2 * torch.randn(n, *shape, generator=stream(0, "x"))


def tiled(g: Map, x: torch.Tensor):
    branch = known_branch(g)
    return branch and tiled_value(branch, x)


def in_float64(g: Map) -> Map:
    return g.with_tensors(tensor.double() for tensor in g.tensors())


@native
@torch.no_grad()
@pytest.mark.parametrize("activation", ["lipswish", "clipswish"])
@pytest.mark.parametrize("growth", [6, 34, 130])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_as_exact_as_taps(shape, growth, activation):
    g = block(shape, growth, activation=activation).branch()
    for n in (1, 7):
        x = images(n, shape)
        right = in_float64(g).value(x.double())
        ours, theirs = ((found - right).norm() / right.norm() for found in (tiled(g, x)(x), evaluator(g)(x)))
        assert ours < 4 * theirs  # where channels are many, mostly less: these are shorter sums
        assert ours < 1e-6


@native
@torch.no_grad()
def test_first_blocks_and_other_depths():
    """A flow's first branch has no activation before its first layer."""
    flows = [small_image_flow("idensenet", torch.float32, activation=name) for name in ("lipswish", "clipswish")]
    for g in (
        *(flow.blocks[0].branch() for flow in flows),
        block((3, 8, 8), 10, depth=1).branch(),
        block((3, 8, 8), 10, depth=5).branch(),
    ):
        x = images(3, (g.maps[-1].last.weight.shape[0], 8, 8))
        torch.testing.assert_close(tiled(g, x)(x), g.value(x), atol=1e-5, rtol=1e-5)


@native
@torch.no_grad()
def test_images_do_not_depend_on_each_other_or_on_threads():
    g, x = block((3, 16, 16), 34).branch(), images(9, (3, 16, 16))
    value = tiled(g, x)
    torch.testing.assert_close(value(x)[4:6], value(x[4:6]), atol=0, rtol=0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.testing.assert_close(tiled(g, x)(x), value(x), atol=0, rtol=0)
    finally:
        torch.set_num_threads(threads)
    assert len(value(x[:0])) == 0


@native
@torch.no_grad()
def test_the_inverse_of_a_wide_branch_by_tiles(monkeypatch):
    """Exact values say how near it is."""
    wide = block((3, 8, 8), 130)
    y, g = images(6, (3, 8, 8)), wide.branch()
    found = [wide.inverse(y)]
    monkeypatch.setattr(correction, "tiled_value", lambda *_: None)
    found.append(wide.inverse(y))
    for x in found:
        residual = x.double() + in_float64(g).value(x.double()) - y
        assert (
            residual.flatten(1).abs().amax(1) <= default_tolerance(y.dtype) * (1 + y.flatten(1).abs().amax(1))
        ).all()
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


@torch.no_grad()
def test_what_tiles_do_not_know():
    g, x = block((3, 8, 8), 6).branch(), images(2, (3, 8, 8))
    assert tiled(in_float64(g), x.double()) is None
    for model, overrides in (("residual", {}), ("idensenet", {"activation": "relu"})):
        other = small_image_flow(model, torch.float32, **overrides)
        assert tiled(other.blocks[0].branch(), images(2, other.shape)) is None
