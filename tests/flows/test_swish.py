"""LipSwish between two products: the kernel, the compiled form and plain torch agree, and so does autograd."""

import shutil

import pytest
import torch

from idn.flows.fuse import fuse
from idn.flows.rows import channels_last, empty_rows, over_points, row_kernel
from idn.flows.slices import Ending, Slices
from idn.flows.swish import Swish

SHAPES = [(3,), (16,), (37,), (5, 4, 4), (44, 4, 4), (1, 4, 4)]
START = 2


@pytest.fixture
def kernels():
    fuse(True)
    yield
    fuse(False)


def make(channels: int, mirrored: bool, dtype=torch.float32) -> Swish:
    torch.manual_seed(1)
    numbers = {"before": torch.tensor(1.4, dtype=dtype), "after": torch.tensor(0.6, dtype=dtype)}
    bias = torch.randn(channels, dtype=dtype)
    return Swish(torch.tensor([0.9], dtype=dtype), 1.1, mirrored, bias=bias, **numbers)


def random_rows(n: int, shape, dtype) -> torch.Tensor:
    return channels_last(3 * torch.randn(n, *shape)).to(dtype)


def everything(swish: Swish, n: int, groups: int, shape, dtype, ends: int):
    torch.manual_seed(0)
    y, width = random_rows(n * (1 + groups), shape, dtype), shape[0] * (1 + swish.mirrored)
    into = [empty_rows(len(y), START + width + more, y).zero_() for more in (0, 3)]
    again = [torch.zeros_like(one) for one in into]
    gradients = [random_rows(len(y), (START + width + more, *shape[1:]), dtype) for more in (0, 5)]
    weight, u = torch.randn(ends, START + width).to(dtype), random_rows(len(y), (ends, *shape[1:]), dtype)
    out = torch.zeros_like(u, dtype=torch.float32)
    ending = (lambda rows: Ending(weight, rows)) if ends else lambda _: None
    slope = swish.write_with_slope(y, n, Slices(into, START, ending(out)))
    swish.write(y, n, Slices(again, START))
    sources = Slices(gradients[: 1 if ends else 2], START, ending(u))
    found = swish.back(y, n, sources)
    entries = [*into, *again, out, *swish.rows(y, n), swish.pull(slope, sources), found.y]
    return entries, [found.bias, found.beta, *([found.ending.float()] if ends else [])]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_torch(kernels, shape, groups, mirrored, dtype):
    swish = make(shape[0], mirrored)
    assert row_kernel(random_rows(2, shape, dtype)) is not None
    case = (300, groups, shape, dtype, 0) if len(shape) == 1 else (6, groups, shape, dtype, 3 if mirrored else groups)
    fast, fast_sums = everything(swish, *case)
    fuse(False)
    plain, plain_sums = everything(swish, *case)
    # In low precision tangents are multiplied with a slope that torch has rounded.
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.1}
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    # Sums, over up to 300 points with terms of both signs.
    for ours, theirs in zip(fast_sums, plain_sums, strict=True):
        torch.testing.assert_close(ours, theirs, **{name: 20 * value for name, value in close.items()})


@pytest.mark.parametrize("mirrored", [False, True])
def test_derivatives_are_those_of_autograd(mirrored):
    swish, n, shape = make(3, mirrored, torch.float64), 2, (3, 4, 4)
    y, tangent, u = (torch.randn(n, *shape, dtype=torch.float64) for _ in range(3))

    def value(y, bias, beta):
        x = swish.before * y + bias.view(1, -1, 1, 1)
        x = torch.cat([x, -x], 1) if mirrored else x
        return swish.after * x * torch.sigmoid(beta * x) / swish.divisor

    given = (y, swish.bias, swish.beta)
    out, jv = torch.func.jvp(lambda y: value(y, *given[1:]), (y,), (tangent,))
    rows, slope = swish.rows(torch.cat([y, tangent]), n)
    torch.testing.assert_close(rows, torch.cat([out, jv]))
    u = torch.randn_like(out)
    torch.testing.assert_close(
        swish.pull(slope, Slices([u])), torch.func.vjp(lambda y: value(y, *given[1:]), y)[1](u)[0]
    )

    def both(y, tangent, bias, beta):
        return torch.cat(torch.func.jvp(lambda y: value(y, bias, beta), (y,), (tangent,)))

    grad = torch.randn_like(rows)
    into_y, into_tangent, *others = torch.func.vjp(both, y, tangent, *given[1:])[1](grad)
    found = swish.back(torch.cat([y, tangent]), n, Slices([grad]))
    torch.testing.assert_close(found.y, torch.cat([into_y, into_tangent]))
    torch.testing.assert_close(found.bias, others[0])
    torch.testing.assert_close(found.beta.view(1), others[1])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_extreme_numbers_stay_what_they_are(kernels):
    swish = Swish(torch.tensor([1.0]), 1.1)
    y = torch.tensor([[1e30, -1e30, 200.0, -200.0, 0.0, float("inf"), float("nan")]])
    rows, slope = swish.rows(y, 1)
    torch.testing.assert_close(rows[0, :5], torch.tensor([1e30 / 1.1, 0.0, 200 / 1.1, 0.0, 0.0]), atol=1e-6, rtol=1e-6)
    assert rows[0, 5].isinf() and rows[0, 6].isnan() and slope[0, 6].isnan()


@pytest.mark.parametrize("on", [False, True])
def test_wide_sums(on):
    fuse(on)
    x = channels_last(torch.randn(3, 20, 30, 20)).bfloat16()
    torch.testing.assert_close(over_points(x, torch.float32), x.double().sum((0, 2, 3)).float(), rtol=1e-4, atol=1e-3)
    fuse(False)
