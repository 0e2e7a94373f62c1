"""Norms of small matrices: never below the truth, hardly above it, wherever the vectors were."""

import pytest
import torch

from idn.flows.matrices import SMALL, is_small, top_of_small
from idn.flows.norms import units
from idn.streams import stream

SHAPES = [(1, 1), (2, 40), (40, 2), (30, 30), (24, 90), (90, 24)]


def check(weight, v):
    top = top_of_small(weight, v)
    norm = torch.linalg.matrix_norm(weight, 2)
    bound = top.sigma * (1 + top.missing)
    assert (bound >= norm * (1 - 1e-6)).all() and (bound <= norm * (1 + 4e-3)).all()
    torch.testing.assert_close((weight @ top.v.mT).mT, top.sigma[:, None, None] * top.u)
    return top.v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_that_move(shape, dtype):
    generator = stream(0, "matrices")
    weight = torch.randn(5, *shape, generator=generator, dtype=dtype)
    v = units(torch.randn(5, 1, shape[1], generator=generator, dtype=dtype))
    for _ in range(20):
        v = check(weight, v)
        weight = weight * (1 + 0.03 * torch.randn(weight.shape, generator=generator, dtype=dtype))


def test_a_direction_that_v_does_not_see():
    """v is a singular vector already; another one, orthogonal to it, has outgrown it."""
    weight = torch.diag(torch.tensor([1.0, 3.0, 0.5])).repeat(2, 1, 1)
    weight[1, 1, 1] = 0.7
    v = torch.eye(3)[:1].repeat(2, 1, 1)
    found = check(weight, v)
    assert found[0, 0].abs().argmax() == 1 and found[1, 0].abs().argmax() == 0


def test_equal_singular_values_and_zero():
    q, _ = torch.linalg.qr(torch.randn(8, 8, generator=stream(0, "q")))
    check(q[None], units(torch.ones(1, 1, 8)))
    top = top_of_small(torch.zeros(1, 4, 6), units(torch.ones(1, 1, 6)))
    assert top.sigma == 0 and top.missing == 0 and torch.isfinite(top.v).all()


def test_what_is_small():
    assert is_small(torch.zeros(SMALL, 1000)) and is_small(torch.zeros(1000, SMALL, 1, 1))
    assert not is_small(torch.zeros(SMALL + 1, SMALL + 1))
