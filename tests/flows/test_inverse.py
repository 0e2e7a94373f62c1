"""What makes the inverse quick: folded evaluation, corrected steps, few dimensions; and that none of it is trusted."""

import pytest
import torch

from idn.flows.correction import Inverter, fitted, narrow_start, reduced
from idn.flows.evaluation import MANY, Product, evaluator
from idn.flows.guess import fitted_guess
from idn.flows.inverse import fixed_point
from idn.flows.maps import Affine
from idn.flows.rows import channels_last
from idn.streams import stream
from tests.flows.helpers import small_image_flow, small_toy_flow

FLOWS = {
    "toy": lambda: small_toy_flow("idensenet-lc", dtype=torch.float64),
    "toy residual": lambda: small_toy_flow("residual", dtype=torch.float64),
    "dense": lambda: small_image_flow("idensenet-lc", dtype=torch.float64),
    "residual": lambda: small_image_flow("residual", dtype=torch.float64),
    "clipswish": lambda: small_image_flow("residual", activation="clipswish", dtype=torch.float64),
    "dense clipswish": lambda: small_image_flow("idensenet-lc", activation="clipswish", dtype=torch.float64),
    "relu": lambda: small_image_flow("idensenet", activation="relu", dtype=torch.float64),
}


def strong_rotation(x: torch.Tensor) -> torch.Tensor:
    """Contracts by 0.9 a step, and differs little from a linear map."""
    return 0.9 * torch.stack([x[:, 1], -x[:, 0]], 1) + 0.01 * torch.sin(x)


def counted(g):
    calls: list[int] = []

    def call(x):
        calls.append(len(x))
        return g(x)

    return call, calls


@pytest.mark.parametrize("name", FLOWS)
def test_folded_evaluation_is_the_value(name):
    for block in FLOWS[name]().blocks:
        g, layer = block.branch(), next(block.branch.spectral_layers())
        shape = (3, *layer.v.shape[1:2]) if layer.padding is None else (3, layer.weight.shape[1], *layer.v.shape[2:])
        if name.endswith("clipswish") and type(next(iter(block.branch.parts))).__name__ == "CLipSwishActivation":
            shape = (shape[0], shape[1] // 2, *shape[2:])
        x = torch.randn(shape, generator=stream(0, "x"), dtype=torch.float64)
        torch.testing.assert_close(evaluator(g)(x), g.value(x))
        torch.testing.assert_close(evaluator(g, torch.bfloat16)(x), g.value(x), atol=0.05, rtol=0.05)


def test_few_images_are_multiplied_by_lines():
    """What torch does slowly is put to it in another shape."""
    product = Product(Affine(torch.randn(5, 6, 1, 1), torch.randn(5), padding=0))
    x = channels_last(torch.randn(MANY, 6, 4, 3))
    right = product(x)
    assert torch.equal(right, product.affine.value(x))
    torch.testing.assert_close(product(x[:2]), right[:2])
    assert product(x[:2]).stride() == right[:2].stride()


def test_corrected_steps_need_fewer_evaluations():
    y = torch.randn(50, 2, generator=stream(0, "y"), dtype=torch.float64)
    turn = torch.linalg.inv(torch.eye(2) + 0.9 * torch.tensor([[0.0, 1.0], [-1.0, 0.0]])).double()
    g, plain_calls = counted(strong_rotation)
    plain = fixed_point(g, y)
    g, calls = counted(strong_rotation)
    torch.testing.assert_close(fixed_point(g, y, corrector=lambda _: lambda r: r @ turn.T), plain)
    assert sum(calls) < sum(plain_calls)


@pytest.mark.parametrize("wrong", [lambda r: -r, lambda r: 30 * r, lambda r: r * float("nan")])
def test_wrong_corrections_are_survived(wrong):
    y = torch.randn(50, 2, generator=stream(0, "y"), dtype=torch.float64)
    x = fixed_point(strong_rotation, y, corrector=lambda _: wrong)
    assert (x + strong_rotation(x) - y).abs().max() < 1e-12 * (1 + y.abs().max())


def test_a_rough_beginning_is_not_believed():
    """The rough branch has another fixed point; the exact one is found."""
    y = torch.randn(50, 2, generator=stream(0, "y"), dtype=torch.float64)
    x = fixed_point(strong_rotation, y, rough=lambda x: strong_rotation(x) + 0.02)
    assert (x + strong_rotation(x) - y).abs().max() < 1e-12 * (1 + y.abs().max())


def test_samples_that_are_done_at_once_leave():
    """A start may be the solution already for most samples."""
    y = torch.randn(50, 2, generator=stream(0, "y"), dtype=torch.float64)
    right = fixed_point(strong_rotation, y)
    start = torch.where(torch.arange(50)[:, None] < 40, right, y)
    torch.testing.assert_close(fixed_point(strong_rotation, y, start=start), right)


@torch.no_grad()
def test_rough_values_are_asked_for_no_more_often_than_allowed():
    g = small_image_flow("idensenet-lc", dtype=torch.float64).blocks[0].branch()
    y = torch.randn(16, g.maps[-1].last.weight.shape[0], 8, 8, generator=stream(0, "y"), dtype=torch.float64)
    rough, calls = counted(evaluator(g, torch.bfloat16))
    x = fixed_point(g.value, y, rough=rough, rough_steps=1)
    assert len(calls) == 1
    torch.testing.assert_close(x + g.value(x), y)


def test_a_fitted_convolution_undoes_most_of_a_block():
    g = small_image_flow("idensenet-lc", dtype=torch.float64).blocks[0].branch()
    channels = g.maps[-1].last.weight.shape[0]
    x, v = (torch.randn(64, channels, 8, 8, generator=stream(0, name), dtype=torch.float64) for name in "xv")
    weight = fitted(g, x)
    image = v + g.tangents(torch.cat([x, v]), 64)[64:]
    undone = torch.nn.functional.conv2d(image, weight, padding=1)
    assert (undone - v).norm() < 0.5 * (image - v).norm()


def test_corrections_are_fitted_anew_when_weights_change():
    block = small_image_flow("idensenet-lc", dtype=torch.float64).blocks[0]
    before = block._version_of_weights()
    with torch.no_grad():
        next(block.branch.parameters()).mul_(0.5)
    assert block._version_of_weights() != before


@torch.no_grad()
def test_a_narrow_branch_is_solved_in_few_dimensions():
    g = small_image_flow("idensenet-lc", dtype=torch.float64, fc_stem=4).blocks[-1].branch()
    y = torch.randn(5, g.maps[0].weight.shape[1], generator=stream(0, "y"), dtype=torch.float64)
    x = narrow_start(g, y, None, reduced(g, y))
    assert x is not None
    torch.testing.assert_close(x + g.value(x), y)
    torch.testing.assert_close(Inverter()(g, y, None, 0), x)


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 3, 20])
def test_a_fitted_guess_is_nearer_than_y(channels):
    """It is fitted to some images and tried on others, whose pixels see their neighbours and have their own bias."""
    generator = stream(0, "guess")
    mix = 0.2 * torch.randn(channels, channels, 3, 3, generator=generator, dtype=torch.float64) / channels

    def inverse(y: torch.Tensor) -> torch.Tensor:
        return y + torch.nn.functional.conv2d(y, mix, padding=1) + 0.3 + 0.05 * torch.sin(y)

    y, new = (torch.randn(60, channels, 8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    guess = fitted_guess(y, inverse(y))
    assert (guess(new) - inverse(new)).norm() < 0.3 * (new - inverse(new)).norm()
    assert fitted_guess(y[:1, :, :2, :2], y[:1, :, :2, :2]) is None


@torch.no_grad()
@pytest.mark.parametrize("wrong", [1e3, float("nan")])
def test_a_wrong_guess_is_survived(wrong, monkeypatch):
    block = small_image_flow("idensenet-lc", dtype=torch.float64).blocks[0]
    y = torch.randn(50, 2, 8, 8, generator=stream(0, "y"), dtype=torch.float64)
    right = block.inverse(y)
    assert block.inverter.guess is not None
    torch.testing.assert_close(block.inverse(y), right)
    monkeypatch.setattr(block.inverter, "guess", lambda y: y + wrong)
    torch.testing.assert_close(block.inverse(y), right)
