"""Compiled kernels: the same numbers, and a clean way back where there is no compiler."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

import idn.flows.fuse
from idn.flows.draws import Draws
from idn.flows.fuse import fuse, fused
from tests.flows.helpers import data_for, small_image_flow, small_toy_flow


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(idn.flows.fuse, "WORTHWHILE", 0)
    fuse(True)
    yield
    fuse(False)


def value_and_gradient(flow, x):
    flow.zero_grad()
    likelihood = flow(x, Draws.seeded(0, "fuse"))
    likelihood.log_prob.mean().backward()
    return likelihood.log_prob.detach(), {name: p.grad.clone() for name, p in flow.named_parameters()}


def images(activation):
    return small_image_flow("idensenet-lc", torch.float32, activation=activation)


def points(model):
    return small_toy_flow(model, torch.float32)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("make", "kind"), [(images, "lipswish"), (images, "clipswish"), (points, "idensenet-lc"), (points, "residual")]
)
def test_compiled_kernels_change_nothing_but_roundoff(compiled, make, kind):
    flow = make(kind).train()
    x = data_for(flow, 4)
    fast = value_and_gradient(flow, x)
    fuse(False)
    plain = value_and_gradient(flow, x)
    torch.testing.assert_close(fast[0], plain[0], rtol=1e-5, atol=1e-4)
    for name, gradient in plain[1].items():
        error = torch.linalg.vector_norm(fast[1][name] - gradient)
        assert error <= 1e-4 * torch.linalg.vector_norm(gradient) + 1e-7, name


def test_what_is_switched_off_is_the_function_itself():
    calls = []
    twice = fused(lambda x: (calls.append(1), 2 * x)[1])
    assert twice(torch.ones(1)).item() == 2 and calls == [1]


def test_without_a_compiler_the_flow_works_and_says_so(tmp_path):
    """In a process of its own, where no compiler can be found and nothing was compiled before."""
    code = (
        "import logging, torch; logging.basicConfig()\n"
        "from idn.flows.fuse import fuse\n"
        "from idn.flows.swish import lipswish_rows\n"
        "x, beta = torch.randn(4, 3, 100, 100), torch.ones(1)\n"
        "plain = lipswish_rows(x, 2, beta, 1.1)\n"
        "fuse(True)\n"
        "assert torch.equal(lipswish_rows(x, 2, beta, 1.1)[0], plain[0])\n"
    )
    nowhere = {"PATH": str(tmp_path), "CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment = {k: v for k, v in os.environ.items() if k != "CC"} | nowhere
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "not compiled" in ran.stderr
