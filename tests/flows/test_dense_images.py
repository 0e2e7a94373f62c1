"""Dense branches of images by the kernel: what torch gives, and what plain automatic differentiation gives."""

import shutil

import pytest
import torch

import idn
from idn.flows.cost import flow_cost
from idn.flows.dense import DenseNet
from idn.flows.dense_images import image_again, image_run
from idn.flows.fuse import fuse
from idn.flows.logdet import LogdetRule
from idn.flows.maps import InPrecision
from idn.flows.rows import channels_last
from tests.flows.helpers import data_for, perturb, small_image_flow
from tests.flows.test_fast import ROULETTE, assert_equal

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

POINTS = 3
SHAPES = [(1, 8, 8), (3, 5, 11), (20, 3, 2), (3, 16, 16)]
"""Few and many channels, lines that are no whole blocks of pixels, images smaller than a convolution's reach."""


@pytest.fixture(autouse=True)
def kernels():
    fuse(True)
    yield
    fuse(False)


def branch(shape, growth: int, activation: str, precision: str) -> DenseNet:
    """A dense branch of three layers, whose numbers all matter."""
    sizes = {"growth": growth, "blocks": (1,), "depth": 3, "fc_blocks": 0, "squeeze_first": False}
    flow = idn.build("cifar10", "idensenet-lc", "tiny", shape=shape, activation=activation, **sizes)
    perturb(flow)
    flow.update_norms(5)
    flow.set_precision(precision)
    g = flow.blocks[0].branch()
    net = (g.inner if isinstance(g, InPrecision) else g).maps[0]
    assert isinstance(net, DenseNet)
    return net


def rows_like(net: DenseNet, n: int, shape) -> torch.Tensor:
    return channels_last(torch.randn(n, *shape)).to(net.last.weight.dtype)


def everything(net: DenseNet, run, rows, u, grad):
    return [run.rows, run.pull(u), run.pull(u[:POINTS]), *flattened(run.back(grad))]


def flattened(gradients):
    into, found = gradients
    return [into, *found]


def assert_close(ours, theirs, dtype):
    """Each tensor, relative to its own length; in low precision, numbers are rounded in other places."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        one, other = one.float(), other.float()
        assert one.shape == other.shape
        if dtype == torch.float32:
            assert (one - other).norm() <= 1e-5 * other.norm() + 1e-5
        else:
            assert (one - other).norm() <= 0.02 * other.norm() + 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("activation", ["lipswish", "clipswish"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("growth", [6, 34, 40])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_the_kernel_equals_torch(shape, growth, groups, activation, precision):
    torch.manual_seed(0)
    net = branch(shape, growth, activation, precision)
    rows, u, grad = (rows_like(net, n * POINTS, shape) for n in (1 + groups, 2, 1 + groups))
    ours = image_run(net, rows, POINTS)
    if ours is None and precision == "bf16":
        pytest.skip("this processor has no products in bf16")
    assert ours is not None
    theirs = everything(net, net._run(rows, POINTS), rows, u, grad)
    assert_close(everything(net, ours, rows, u, grad), theirs, rows.dtype)

    # Recomputing, from what a run of the points alone has kept and from nothing.
    points = image_run(net, rows[:POINTS], POINTS)
    assert_close([points.rows, points.pull(u)], [ours.rows[:POINTS], ours.pull(u)], rows.dtype)
    for kept in (points.kept, ()):
        back = image_again(net, rows, POINTS, kept)
        assert_close(flattened(back(grad)), theirs[3:], rows.dtype)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["lipswish", "clipswish"])
@pytest.mark.parametrize("rule", [ROULETTE, LogdetRule(probes=2), LogdetRule(probes=5)])
def test_flows_equal_the_oracle(rule, activation, recompute):
    """Values and gradients; with more probes than the kernel takes, too."""
    flow = small_image_flow("idensenet-lc", torch.float32, activation=activation, growth=20)
    flow.recompute = recompute
    assert_equal(flow, data_for(flow, 4), rule)


@torch.no_grad()
def test_what_the_kernel_does_not_know_is_left_to_torch():
    net = branch((3, 8, 8), 6, "elu", "fp32")
    rows = rows_like(net, 2 * POINTS, (3, 8, 8))
    assert image_run(net, rows, POINTS) is None and image_again(net, rows, POINTS, ()) is None
    net = branch((3, 8, 8), 6, "lipswish", "fp32")
    assert image_run(net, rows, POINTS) is not None
    assert image_run(net, rows.double(), POINTS) is None
    assert image_run(net, rows[:2], 1) is None or torch.get_num_threads() == 1, "one image would keep one thread busy"


@pytest.mark.parametrize(
    ("precision", "growth", "images"),
    [("fp32", 64, (4, 4)), ("fp32", 128, (0, 4)), ("fp32", 256, (0, 2)), ("bf16", 128, (4, 4)), ("bf16", 256, (0, 4))],
)
@torch.no_grad()
def test_costs_count_what_recomputing_keeps(precision, growth, images):
    """512 bytes a pixel, the last layer's first; nothing in torch."""
    sizes = {"growth": growth, "blocks": (1,), "fc_blocks": 0, "squeeze_first": False, "activation": "lipswish"}
    flow = idn.build("cifar10", "idensenet", "tiny", shape=(3, 8, 8), depth=3, **sizes)
    flow.set_precision(precision)
    g, x = flow.blocks[0].branch(), channels_last(torch.randn(4, 3, 8, 8))
    run = g.run(x, 4)
    if not run.kept and precision == "bf16":
        pytest.skip("this processor has no products in bf16")
    number = run.kept[0].element_size()
    assert len(run.kept) == sum(images)
    by_torch, by_kernel = flow_cost(flow), flow_cost(flow, number)
    kept = [cost.training_memory(4, recompute=True).kept for cost in (by_torch, by_kernel)]
    assert kept[1] - kept[0] == sum(tensor.nbytes for tensor in run.kept)
    fuse(False)
    assert not g.run(x, 4).kept

    # Points and tangents are made again, but for the last products before activations.
    (block,), layers = by_kernel.blocks, list(flow.blocks[0].branch.spectral_layers())[1:3]
    added = [cost.training_flops(True) - cost.training_flops() for cost in (by_torch, by_kernel)]
    assert added[0] == pytest.approx(2 * block.forward_flops)
    spared = sum(count / 4 * 2 * 64 * layer.weight.numel() for count, layer in zip(images, layers, strict=True))
    assert added[1] == pytest.approx(added[0] - spared)


@torch.no_grad()
def test_another_branch_brings_its_own_weights():
    """Weights are packed once per branch, and never taken for another's."""
    nets = [branch((3, 8, 8), growth, "lipswish", "fp32") for growth in (6, 6, 10)]
    nets[1] = nets[1].with_tensors(iter([0.5 * tensor for tensor in nets[1].tensors()]))
    rows = rows_like(nets[0], 2 * POINTS, (3, 8, 8))
    for net in (*nets, *nets):
        assert_close([image_run(net, rows, POINTS).rows], [net._run(rows, POINTS).rows], rows.dtype)
