"""Certified bounds against the truth: SVDs of unrolled operators, and Jacobians of branches at many points."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from idn.flows.activations import ACTIVATIONS, make_activation
from idn.flows.bounds import (
    SWISH_SLOPE,
    TOLERANCE,
    activation_bound,
    lipschitz_bound,
    methods_for,
    norm_bound,
    prove,
    simple_bound,
)
from idn.flows.branches import DenseLayer
from idn.flows.gram import gram_rounding, grams
from idn.streams import stream
from tests.flows.helpers import small_image_flow, small_toy_flow, true_norm

METHODS = ("symbol", "rows", "exact")
TIGHT = 1 + 2 * TOLERANCE
SVD_ERROR = 1 - 1e-12

KINDS = ("gaussian", "positive", "low rank", "orthogonal", "one entry", "corners", "checkered", "near zero")


def kernel(kind, shape, seed):
    """Weights of different characters; the last three put the largest gain at an edge of what is possible."""
    generator = stream(seed, "bounds", kind)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    rows, columns = torch.meshgrid(torch.arange(shape[2]), torch.arange(shape[3]), indexing="ij")
    match kind:
        case "positive":
            return weight.abs()
        case "low rank":
            return weight[:1] * torch.randn(shape[0], 1, 1, 1, generator=generator, dtype=torch.float64)
        case "orthogonal":
            u, _, v = torch.linalg.svd(weight.flatten(1), full_matrices=False)
            return (u @ v).view(shape)
        case "one entry":
            return weight * (weight == weight.abs().max() * weight.sign())
        case "corners":
            return weight.abs() * ((rows % max(shape[2] - 1, 1) == 0) & (columns % max(shape[3] - 1, 1) == 0))
        case "checkered":
            return weight.abs() * (-1.0) ** (rows + columns)
        case "near zero":
            return 1e-3 * weight + (torch.arange(shape[1]) == 0).double()[:, None, None]
    return weight


def truth(weight, size):
    """The largest singular value of the unrolled, zero-padded convolution."""
    inputs = weight.shape[1]
    n = inputs * math.prod(size)
    columns = F.conv2d(torch.eye(n, dtype=torch.float64).view(n, inputs, *size), weight, padding=weight.shape[-1] // 2)
    return torch.linalg.matrix_norm(columns.flatten(1), 2).item()


@settings(max_examples=100)
@given(
    kind=st.sampled_from(KINDS),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    taps=st.sampled_from([1, 3, 5]),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    exponent=st.sampled_from([-30, -3, 0, 4, 30]),
    guess=st.sampled_from([0.0, 0.3, 0.999, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_a_bound_is_never_below_the_norm(kind, channels, taps, size, exponent, guess, seed):
    weight = kernel(kind, (*channels, taps, taps), seed) * 10.0**exponent
    norm = truth(weight, size)
    bounds = {method: norm_bound(weight, size, method, guess * norm) for method in METHODS}
    for method, bound in bounds.items():
        assert bound >= norm * SVD_ERROR, method
    # Far below what the kernel could do on a larger image, the search has its floor.
    floor = 1e-3 * simple_bound(weight)
    assert bounds["exact"] <= max(norm, floor) * TIGHT
    assert bounds["exact"] <= max(bounds["rows"], floor) * TIGHT
    assert bounds["rows"] <= max(bounds["symbol"], floor) * TIGHT


@settings(max_examples=20)
@given(
    kind=st.sampled_from(KINDS),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.tuples(st.integers(8, 9), st.integers(8, 9)),
    seed=st.integers(0, 2**16),
)
def test_bounds_are_tight_from_eight_pixels_on(kind, channels, size, seed):
    weight = kernel(kind, (*channels, 3, 3), seed)
    norm = truth(weight, size)
    assert SVD_ERROR <= norm_bound(weight, size, "rows") / norm <= 1.10
    assert SVD_ERROR <= norm_bound(weight, size, "symbol") / norm <= 1.15
    assert norm_bound(weight, size, methods_for(weight, size)[-1]) / norm <= TIGHT


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 40), (30, 30)])
def test_matrices(shape):
    weight = torch.randn(shape, generator=stream(0, "matrix"))
    assert methods_for(weight, (1, 1)) == ("exact",)
    norm = torch.linalg.matrix_norm(weight.double(), 2).item()
    assert norm * SVD_ERROR <= norm_bound(weight, (1, 1), "exact") <= norm * TIGHT


def test_a_proof_fails_just_below_the_norm_and_succeeds_just_above():
    weight, size = kernel("gaussian", (3, 4, 3, 3), 0), (5, 6)
    norm = truth(weight, size)
    (gram,) = grams(weight, size, "exact")
    assert len(gram.unproven((norm * (1 - 1e-9)) ** 2)) == 1
    assert len(gram.unproven((norm * (1 + 1e-9)) ** 2)) == 0


def test_rounding_allowances_are_far_below_the_tolerance_and_above_real_errors():
    weight, size = kernel("gaussian", (8, 12, 3, 3), 0), (8, 8)
    n = weight.shape[1] * math.prod(size)
    columns = F.conv2d(torch.eye(n, dtype=torch.float64).view(n, -1, *size), weight, padding=1).flatten(1)
    # Rows of the image are the outer index of a band matrix, channels that of an unrolled convolution.
    exact = (columns.T @ columns).view(8, 8, 8, 8, 8, 8).permute(1, 0, 2, 4, 3, 5).reshape(512, 512)
    (gram,) = grams(weight, size, "exact")
    blocks = [
        torch.cat([gram.block(i, j)[0] if abs(i - j) <= 2 else torch.zeros(64, 64) for j in range(8)], 1)
        for i in range(8)
    ]
    error = torch.linalg.matrix_norm(torch.cat(blocks) - exact, 2).item()
    square = torch.linalg.matrix_norm(exact, 2).item()
    assert error < gram_rounding(weight) < 1e-8 * square
    assert gram.rounding(square) < 1e-8 * square


def test_weights_that_are_not_numbers_have_no_bound_and_zero_has_zero():
    weight = torch.zeros(2, 3, 3, 3)
    assert norm_bound(weight, (4, 4), "symbol") == 0
    weight[0, 0, 0, 0] = math.nan
    assert norm_bound(weight, (4, 4), "symbol") == math.inf
    with pytest.raises(ValueError, match="kernel of size 2"):
        norm_bound(torch.ones(1, 1, 2, 2), (4, 4), "symbol")


# --- Activations ------------------------------------------------------------------------------------------------


def swish_slope(x):
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def test_the_largest_swish_slope():
    """On a grid of step h the slope is at most its largest value there + h/2 max|s'|, and |s'| <= 1/2 everywhere.

    s' = gate (1 - gate) (2 + x (1 - 2 gate)), where gate (1 - gate) <= 1/4 and the bracket is at most 2. Beyond 20,
    |s - 1| <= 21 exp(-20).
    """
    far = torch.linspace(-20, 20, 800_001, dtype=torch.float64)
    far = far[(far <= 2) | (far >= 3)]
    near = torch.linspace(2, 3, 1_000_001, dtype=torch.float64)
    assert swish_slope(far).max().item() + 0.5 * 5e-5 / 2 < SWISH_SLOPE
    assert swish_slope(near).max().item() + 0.5 * 1e-6 / 2 + 1e-14 < SWISH_SLOPE
    assert torch.allclose(swish_slope(-near), 1 - swish_slope(near), rtol=0, atol=1e-14)


def test_the_constants_suffice_for_one_lipschitz_activations():
    assert math.hypot(SWISH_SLOPE, SWISH_SLOPE - 1) < 1.1 * 1.004
    for name in ACTIVATIONS:
        assert activation_bound(make_activation(name)) <= 1


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("raw_beta", [-10.0, 0.5, 8.0])
def test_activation_bounds_hold(name, raw_beta):
    activation = make_activation(name).double()
    for parameter in activation.parameters():
        torch.nn.init.constant_(parameter, raw_beta)
    x = torch.linspace(-30, 30, 200_001, dtype=torch.float64)[:, None].requires_grad_()
    value = activation().value(x)
    slopes = [torch.autograd.grad(column.sum(), x, retain_graph=True)[0] for column in value.unbind(1)]
    length = torch.stack(slopes).square().sum(0).sqrt().max().item()
    assert length <= activation_bound(activation)
    if raw_beta == 0.5:
        assert length > 0.999 * activation_bound(activation)


# --- Branches ---------------------------------------------------------------------------------------------------


def steepest(branch, shape, points=8, steps=15):
    """A lower bound on Lip(g): |J v| made as large as gradient ascent can, over points x and directions v."""
    generator = stream(0, "steepest")
    x = torch.randn(points, *shape, generator=generator, dtype=torch.float64).mul_(3).requires_grad_()
    v = torch.randn(points, *shape, generator=generator, dtype=torch.float64)
    g = branch().value
    best = 0.0
    for _ in range(steps):
        jv = torch.func.jvp(g, (x,), (v / v.flatten(1).norm(dim=1).view(-1, *[1] * len(shape)),))[1]
        gain = jv.flatten(1).norm(dim=1)
        best = max(best, gain.max().item())
        (slope,) = torch.autograd.grad(gain.sum(), x)
        _, pull = torch.func.vjp(g, x.detach())
        v = pull(jv.detach())[0]
        x = (x.detach() + 0.3 * slope).requires_grad_()
    return best


@pytest.mark.parametrize("activation", ["lipswish", "clipswish", "relu", "identity"])
@pytest.mark.parametrize("model", ["residual", "idensenet", "idensenet-lc"])
def test_a_branch_is_never_steeper_than_its_bound(model, activation):
    flows = [
        small_image_flow(model, activation=activation, shape=(2, 4, 4)),
        small_toy_flow(model, activation=activation, blocks=(1,)),
    ]
    for block in (block for flow in flows for block in flow.blocks):
        proof = prove(block.branch)
        found = steepest(block.branch, shape_of(block))
        assert 0 < found <= proof.bound
        assert proof.estimate <= proof.bound
        if activation == "identity":
            origin = torch.zeros(1, *shape_of(block), dtype=torch.float64)
            jacobian = torch.autograd.functional.jacobian(block.branch().value, origin)
            norm = torch.linalg.matrix_norm(jacobian.reshape(origin.numel(), -1), 2).item()
            assert 0.95 * norm < found <= norm * (1 + 1e-9)


def shape_of(block):
    """The shape of a branch's input, from its first layer's singular vector and its last layer's outputs."""
    layers = list(block.branch.spectral_layers())
    return (len(layers[-1].weight), *layers[0].v.shape[2:])


def test_a_dense_layer_is_bounded_with_its_rounded_factors():
    flow = small_image_flow("idensenet-lc", dtype=torch.float32)
    flow.set_precision("bf16")
    for part in flow.blocks[0].branch.parts:
        if not isinstance(part, DenseLayer):
            continue
        map_ = part()
        a, b = (float(factor.to(torch.bfloat16)) for factor in (map_.a.detach(), map_.b.detach()))
        assert (a, b) != (map_.a.item(), map_.b.item())
        expected = math.hypot(a, b * 0.5 * SWISH_SLOPE / 1.1)
        assert lipschitz_bound(part, {part.layer: 0.5}) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", ["residual", "idensenet-lc"])
def test_small_flows_are_proven_in_every_precision(model, precision):
    flow = small_image_flow(model, dtype=torch.float32)
    flow.set_precision(precision)
    for block in flow.blocks:
        proof = prove(block.branch)
        assert proof.proven
        for layer in proof.layers:
            norm = true_norm(layer.layer, layer.layer.multiplied())
            assert layer.estimate * (1 - 1e-5) <= norm <= layer.bound <= norm * 1.01


def test_proofs_get_tighter_until_one_suffices(monkeypatch):
    """With unrolling at once switched off, a branch near 1 needs more than the first proof."""
    monkeypatch.setattr("idn.flows.bounds.UNROLLED_AT_ONCE", 0)
    (block,) = small_image_flow("residual", blocks=(1,), fc_blocks=0, shape=(2, 4, 4)).blocks
    layers = list(block.branch.spectral_layers())
    with torch.no_grad():
        for layer in layers:
            layer.coeff = 0.995
    proof = prove(block.branch)
    assert proof.proven
    assert "exact" in {layer.method for layer in proof.layers if layer.layer.weight.shape[-1] == 3}


def test_a_parameter_that_is_not_a_number_is_refused():
    (block, *_) = small_toy_flow("idensenet").blocks
    assert prove(block.branch).proven
    with torch.no_grad():
        next(p for n, p in block.branch.named_parameters() if n.endswith("raw_beta")).fill_(math.nan)
    proof = prove(block.branch)
    assert not proof.proven
    assert proof.bound == math.inf
