"""The kernel of plane blocks: the same values and gradients as the maps, and a clean way back without it."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

import idn
from idn.flows import block, plane
from idn.flows.draws import Draws
from idn.flows.flow import Likelihood
from idn.flows.fuse import fuse
from tests.flows.helpers import data_for, ready

WIDTHS = [
    ("lipswish", {"size": "paper"}),
    ("clipswish", {"size": "paper"}),
    ("lipswish", {"growth": 13, "width": 11, "depth": 3}),
    ("clipswish", {"growth": 26, "width": 22, "depth": 3}),
    ("lipswish", {"growth": 66, "width": 34, "hidden": 1}),
]
"""Odd ones, and such that fill no vector."""
MODELS = ("idensenet-lc", "idensenet", "residual")
native = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def kernel_or_maps():
    threads = torch.get_num_threads()
    yield
    fuse(False)
    torch.set_num_threads(threads)


def toy(model, activation="lipswish", size="tiny", **overrides):
    return ready(idn.build("moons", model, size, activation=activation, **{"blocks": (2,), **overrides}), torch.float32)


def gradients(flow, x, likelihood=None):
    """Both parts of ln p(x), and the gradients of x and every parameter, where samples weigh unequally."""
    flow.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    found = likelihood(flow, x) if likelihood else flow(x, Draws.seeded(0, "plane"))
    weights = torch.linspace(-0.5, 2.0, len(x))
    (weights * (found.log_pz + 0.7 * found.logdet)).sum().backward()
    values = torch.stack([found.log_pz, found.logdet]).detach()
    return values, {"x": x.grad} | {name: p.grad.clone() for name, p in flow.named_parameters()}


def plain(flow, x):
    """By automatic differentiation alone, twice."""
    total = torch.zeros(len(x))
    for one in flow.blocks:
        gx = one.branch().value(x)
        rows = [torch.autograd.grad(gx[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
        total = total + torch.linalg.slogdet(torch.eye(2) + torch.stack(rows, 1)).logabsdet
        x = x + gx
    return Likelihood(-0.5 * x.square().sum(1) - math.log(2 * math.pi), total)


def by_kernel(flow, x, monkeypatch):
    """The same by the kernel, and by nothing else."""
    with monkeypatch.context() as patch:
        patch.setattr(block, "_plane_step", None)
        fuse(True)
        found = gradients(flow, x)
        fuse(False)
    return found


def assert_equal(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    largest = max(gradient.norm() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).norm()
        assert error <= 1e-4 * gradient.norm() + 1e-6 * largest, name


@native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [1, 17, 500])
@pytest.mark.parametrize("activation", ["lipswish", "clipswish"])
@pytest.mark.parametrize("model", MODELS)
def test_kernel_equals_the_maps(model, activation, n, threads, monkeypatch):
    flow = toy(model, activation).train()
    x = data_for(flow, n)
    torch.set_num_threads(threads)
    found = by_kernel(flow, x, monkeypatch)
    assert_equal(found, gradients(flow, x))
    again = by_kernel(flow, x, monkeypatch)
    assert torch.equal(found[0], again[0])
    assert all(torch.equal(gradient, again[1][name]) for name, gradient in found[1].items())


@native
@pytest.mark.parametrize(("activation", "overrides"), WIDTHS)
@pytest.mark.parametrize("model", ["idensenet-lc", "residual"])
def test_kernel_equals_automatic_differentiation(model, activation, overrides, monkeypatch):
    flow = toy(model, activation, **overrides).train()
    x = data_for(flow, 33)
    assert_equal(by_kernel(flow, x, monkeypatch), gradients(flow, x, plain))


@native
def test_norms_below_their_bound():
    """New weights are not divided."""
    flow = idn.build("moons", "idensenet-lc", "tiny", blocks=(1,)).train()
    x = data_for(flow, 9)
    expected = gradients(flow, x)
    fuse(True)
    assert_equal(gradients(flow, x), expected)


@native
@pytest.mark.parametrize(("activation", "overrides"), WIDTHS)
@pytest.mark.parametrize("model", MODELS)
def test_low_precision_points_the_same_way(model, activation, overrides, monkeypatch):
    flow = toy(model, activation, **overrides).train()
    x = data_for(flow, 100)
    exact = gradients(flow, x)
    flow.set_precision("bf16")
    kernel = plane.library()
    if not (kernel and kernel.plane_low()):
        pytest.skip("the processor multiplies no bf16 numbers")
    low = by_kernel(flow, x, monkeypatch)
    torch.testing.assert_close(low[0], exact[0], rtol=0, atol=0.03)
    a, b = (torch.cat([g.flatten() for g in found[1].values()]).double() for found in (exact, low))
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) >= 0.999


def test_what_the_kernel_does_not_know():
    x = torch.zeros(3, 2)
    assert plane.native_step(x.double(), toy("idensenet-lc").blocks[0].branch) is None
    assert plane.native_step(x, toy("idensenet-lc", "tanh").blocks[0].branch) is None
    half = toy("residual")
    half.set_precision("fp16")
    assert plane.native_step(x, half.blocks[0].branch) is None


def test_without_a_compiler_the_maps_are_used_with_one_warning(tmp_path):
    """In a process of its own, where no compiler can be found and nothing was compiled before."""
    code = (
        "import logging, torch; logging.basicConfig()\n"
        "import idn\n"
        "from idn.flows import block, fuse, logdet, plane\n"
        "from idn.flows.draws import Draws\n"
        "block._plane_step = lambda x, branch: logdet.exact_logdet(branch(), x)\n"
        "flow, x = idn.build('moons', 'idensenet-lc', 'tiny').train(), torch.randn(5, 2)\n"
        "plain = flow(x, Draws.seeded(0, 'none'))\n"
        "fuse.fuse(True)\n"
        "assert torch.equal(flow(x, Draws.seeded(0, 'none')).log_prob, plain.log_prob)\n"
    )
    nowhere = {"PATH": str(tmp_path), "CXX": str(tmp_path / "none"), "IDN_CACHE": str(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, "-c", code], env=os.environ | nowhere, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("not compiled") == 1
