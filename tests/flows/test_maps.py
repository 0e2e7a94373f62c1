"""One contract for every activation and branch: value, tangent, transposed Jacobian and their gradients agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idn.flows.activations import ACTIVATIONS, make_activation
from idn.flows.branches import LayerMaker
from idn.streams import stream
from tests.flows.helpers import perturb

KINDS = [
    "dense conv",
    "dense linear",
    "dense linear with stem",
    "residual conv",
    "residual conv first",
    "residual linear",
]


def make_branch(kind: str, activation: str, learnable: bool = True, seed: int = 0):
    maker = LayerMaker(0.9, 0.98, learnable, activation, stream(seed, "branch"), converge=False)
    branch = {
        "dense conv": lambda: maker.dense_conv_branch(2, (4, 3), 2, 4),
        "dense linear": lambda: maker.dense_linear_branch(6, 2, 4, None),
        "dense linear with stem": lambda: maker.dense_linear_branch(6, 2, 4, 5),
        "residual conv": lambda: maker.residual_conv_branch(2, (4, 3), 4, True, (3, 1, 3)),
        "residual conv first": lambda: maker.residual_conv_branch(2, (4, 3), 4, False, (3, 1, 3)),
        "residual linear": lambda: maker.residual_linear_branch(6, 4, 2),
    }[kind]()
    branch = branch.double()
    perturb(branch, seed)
    for layer in branch.spectral_layers():
        layer.converge_norm()
    shape = (2, 4, 3) if "conv" in kind else (6,)
    return branch, shape


def check_contract(g, shape, seed=0):
    generator = stream(seed, "points")
    n, probes = 3, 2
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    v = torch.randn(probes * n, *shape, generator=generator, dtype=torch.float64)
    rows, pull = g.push(torch.cat([x, v]), n)
    values = g.value(x)
    torch.testing.assert_close(rows[:n], values)
    torch.testing.assert_close(rows, g.tangents(torch.cat([x, v]), n))
    # The Jacobian by plain automatic differentiation of `value`.
    jacobians = [torch.autograd.functional.jacobian(lambda p: g.value(p[None])[0].flatten(), p) for p in x]
    for i in range(probes * n):
        j = jacobians[i % n].flatten(1)
        torch.testing.assert_close(rows[n + i].flatten(), j @ v[i].flatten())
    u = torch.randn(probes * n, *values.shape[1:], generator=generator, dtype=torch.float64)
    pulled = pull(u)
    for i in range(probes * n):
        torch.testing.assert_close(pulled[i].flatten(), jacobians[i % n].flatten(1).T @ u[i].flatten())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_contract(activation):
    check_contract(make_activation(activation).double()(), (6,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["lipswish", "clipswish", "elu"])
def test_branch_contract(kind, activation):
    branch, shape = make_branch(kind, activation)
    check_contract(branch(), shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["lipswish", "clipswish", "tanh"])
def test_gradients_of_tangents_are_second_derivatives(kind, activation):
    """The gradient of w^T J v through `push` equals double backward through `value`, for x and every parameter."""
    branch, shape = make_branch(kind, activation)
    generator = stream(1, "points")
    x, v, w = (torch.randn(3, *shape, generator=generator, dtype=torch.float64) for _ in range(3))
    x.requires_grad_()
    inputs = [x, *branch.parameters()]
    rows, _ = branch().push(torch.cat([x, v]), 3)
    fast = torch.autograd.grad((rows[3:] * w).sum() + rows[:3].sum(), inputs, allow_unused=True)
    g = branch()
    (jtw,) = torch.autograd.grad((g.value(x) * w).sum(), x, create_graph=True)
    plain = torch.autograd.grad((jtw * v).sum() + g.value(x).sum(), inputs, allow_unused=True)
    for a, b in zip(fast, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@given(
    kind=st.sampled_from(KINDS),
    activation=st.sampled_from(ACTIVATIONS),
    learnable=st.booleans(),
    seed=st.integers(0, 10**6),
    distance=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_branches_are_contractions(kind, activation, learnable, seed, distance):
    branch, shape = make_branch(kind, activation, learnable, seed)
    g, generator = branch(), stream(seed, "pair")
    x = 3 * torch.randn(8, *shape, generator=generator, dtype=torch.float64)
    y = x + distance * torch.randn(8, *shape, generator=generator, dtype=torch.float64)
    ratio = (g.value(x) - g.value(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
    # Several layers of norm <= 0.9, so the branch is well below 0.9 (one layer of slack for the first linear map).
    assert ratio.max() <= 0.9
