"""One contract for every model: exact log-det, round trip, save and load; and errors that name what is wrong."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import idn
from idn.errors import UserError
from idn.flows.elementary import ActNorm, Flatten, Logit, Squeeze
from idn.flows.inverse import NotInvertedError, fixed_point
from idn.streams import stream
from tests.flows.helpers import data_for, ready, small_image_flow, small_toy_flow

FLOWS = {
    "toy residual": lambda **k: small_toy_flow("residual", **k),
    "toy dense": lambda **k: small_toy_flow("idensenet", **k),
    "toy dense lc, actnorm": lambda **k: small_toy_flow("idensenet-lc", actnorm=True, **k),
    "image residual": lambda **k: small_image_flow("residual", **k),
    "image dense": lambda **k: small_image_flow("idensenet", **k),
    "image dense lc": lambda **k: small_image_flow("idensenet-lc", **k),
    "clipswish": lambda **k: small_image_flow("idensenet-lc", activation="clipswish", **k),
    "residual clipswish": lambda **k: small_image_flow("residual", activation="clipswish", **k),
    "factor out": lambda **k: small_image_flow("idensenet", factor_out=True, **k),
    "squeeze first, no fc": lambda **k: small_image_flow("residual", squeeze_first=True, fc_blocks=0, **k),
    "relu": lambda **k: small_image_flow("idensenet", activation="relu", **k),
}
_MADE: dict[tuple[str, torch.dtype], idn.Flow] = {}


def flow_named(name: str, dtype: torch.dtype = torch.float64) -> idn.Flow:
    if (name, dtype) not in _MADE:
        _MADE[name, dtype] = FLOWS[name](dtype=dtype)
    return _MADE[name, dtype]


@pytest.mark.parametrize("name", FLOWS)
def test_exact_logdet_is_that_of_the_whole_jacobian(name):
    flow = flow_named(name)
    x = data_for(flow, 2)
    _, logdet = flow.encode(x, exact=True)
    d = flow.dims
    for i in range(2):
        jacobian = torch.autograd.functional.jacobian(lambda p: flow.encode(p[None])[0][0], x[i]).reshape(d, d)
        torch.testing.assert_close(logdet[i].detach(), torch.linalg.slogdet(jacobian).logabsdet)


@pytest.mark.parametrize("name", FLOWS)
def test_evaluation_estimate_is_close_to_exact(name):
    flow = flow_named(name)
    x = data_for(flow, 3)
    with torch.no_grad():
        exact = flow.log_prob(x, exact=True)
        draws = torch.stack([flow.log_prob(x, draws=idn.Draws.seeded(0, i)) for i in range(60)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() <= 5 * error + 1e-9).all()


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_round_trip(name, dtype, allowed):
    flow = flow_named(name, dtype)
    x = data_for(flow, 8)
    with torch.no_grad():
        z, _ = flow.encode(x)
    assert (flow.decode(z) - x).abs().max() <= allowed


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(FLOWS)), seed=st.integers(0, 10**6), n=st.integers(1, 5), spread=st.floats(0.1, 3))
def test_round_trip_from_the_latent_side(name, seed, n, spread):
    flow = flow_named(name)
    z = spread * torch.randn(n, flow.dims, generator=stream(seed, "z"), dtype=torch.float64)
    x = flow.decode(z)
    with torch.no_grad():
        # Straight through the chain: a latent far out may leave [0, 1] by roundoff of the sigmoid.
        back, _ = flow._encode(x, idn.Draws.seeded(0), idn.LogdetRule("series", terms=1))
    assert (back - z).abs().max() <= 1e-8


@pytest.mark.parametrize("name", FLOWS)
def test_gradient_reaches_every_parameter(name):
    flow = flow_named(name).train()
    loss = -flow(data_for(flow, 3), idn.Draws.seeded(0)).log_prob.mean()
    gradients = torch.autograd.grad(loss, list(flow.parameters()))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert sum(bool(g.abs().max() > 0) for g in gradients) >= 0.9 * len(gradients)
    flow.eval()


@pytest.mark.parametrize("name", FLOWS)
def test_save_and_load_change_nothing(name, tmp_path):
    flow = flow_named(name)
    flow.save(tmp_path / "flow.safetensors")
    again = idn.load(tmp_path / "flow.safetensors")
    assert again.config == flow.config
    x = data_for(flow, 2)
    torch.testing.assert_close(again.log_prob(x), flow.log_prob(x), rtol=0, atol=0)


def test_averaged_weights_travel_beside_the_raw_ones(tmp_path):
    flow = small_toy_flow("idensenet-lc", dtype=torch.float32)
    ema = {name: 0.5 * p.detach() for name, p in flow.named_parameters()}
    flow.save(tmp_path / "f", ema=ema)
    raw, averaged = idn.load(tmp_path / "f", ema=False), idn.load(tmp_path / "f")
    for name, parameter in averaged.named_parameters():
        torch.testing.assert_close(parameter, ema[name])
        torch.testing.assert_close(raw.get_parameter(name), flow.get_parameter(name))
    # The averaged weights have other norms, and the loaded flow knows them.
    for (_, layer), (_, old) in zip(averaged.spectral_layers(), flow.spectral_layers(), strict=True):
        assert layer.sigma.item() == pytest.approx(0.5 * old.sigma.item(), rel=2e-3)


def test_actnorm_starts_at_mean_zero_and_variance_one():
    layer = ActNorm(3).double()
    x = 5 + 2 * torch.randn(64, 3, 4, 4, generator=stream(0, "x"), dtype=torch.float64)
    layer.initialize(x, lambda t: t)
    y, logdet = layer(x)
    columns = y.detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(columns.mean(1), torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(columns.var(1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(layer.inverse(y), x)
    assert logdet.shape == (64,)


def test_actnorm_over_ranks_equals_one_rank():
    """Two halves, whose sums are added, give what the whole batch gives."""
    x = torch.randn(8, 3, 2, 2, generator=stream(0, "x"), dtype=torch.float64)
    whole = ActNorm(3).double()
    whole.initialize(x, lambda t: t)
    count, total = 16.0 * 2, x.transpose(0, 1).flatten(1).sum(1)
    squares = ((x.transpose(0, 1).flatten(1) - (total / count)[:, None]) ** 2).sum(1)
    sums = iter([torch.tensor(count, dtype=torch.float64), total, squares])
    half = ActNorm(3).double()
    half.initialize(x[:4], lambda t: next(sums))
    torch.testing.assert_close(half.bias, whole.bias)
    torch.testing.assert_close(half.log_scale, whole.log_scale)


@pytest.mark.parametrize("layer", [Logit(0.05), Logit(1e-6), Squeeze(), Flatten((2, 4, 4))])
def test_elementary_layers(layer):
    x = torch.rand(2, 2, 4, 4, generator=stream(0, "x"), dtype=torch.float64)
    y, logdet = layer(x)
    torch.testing.assert_close(layer.inverse(y), x)
    jacobian = torch.autograd.functional.jacobian(lambda p: layer(p[None])[0][0].flatten(), x[0]).reshape(32, 32)
    torch.testing.assert_close(logdet[0], torch.linalg.slogdet(jacobian).logabsdet)


@pytest.mark.parametrize("lip", [0.5, 0.95, 0.99])
def test_inverse_meets_its_tolerance_for_each_sample(lip):
    y = torch.linspace(-20, 20, 101, dtype=torch.float64)[:, None]
    x = fixed_point(lambda x: lip * torch.sin(x), y)
    assert ((x + lip * torch.sin(x) - y).abs() <= 1e-12 * (1 + y.abs())).all()


def test_inverse_stops_each_sample_by_itself():
    """Once a sample has converged, g is not asked about it again."""
    asked: list[int] = []

    def g(x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return torch.where(x > 5, 0.98 * torch.sin(x), torch.zeros_like(x))

    fixed_point(g, torch.tensor([[1.0], [2.0], [30.0]], dtype=torch.float64))
    assert asked[0] == 3
    assert asked[-1] == 1


def test_inverse_names_the_samples_that_do_not_converge():
    def g(x: torch.Tensor) -> torch.Tensor:  # no inverse beyond 1: the sign flips
        return torch.where(x.abs() > 1, -2 * torch.sign(x) * 100 + torch.sin(40 * x), 0.1 * x)

    with pytest.raises(NotInvertedError, match="samples 1") as caught:
        fixed_point(g, torch.tensor([[0.5], [7.0]], dtype=torch.float64), iterations=60)
    assert caught.value.samples == [1]


def test_no_point_of_the_plane_wanders():
    """Combinations of few steps can lead astray where a map bends; each sample must find back at once."""
    turn = torch.linalg.qr(torch.randn(2, 2, generator=stream(0, "turn")))[0]
    evaluations = 0

    def g(x):
        nonlocal evaluations
        evaluations += 1
        return 0.09 * torch.sin(10 * x @ turn)

    y = 2 * torch.randn(20_000, 2, generator=stream(0, "points"))
    x = fixed_point(g, y)
    assert (x + g(x) - y).abs().max() < 1e-5
    assert evaluations < 30


def test_a_sample_that_is_done_is_not_named_though_it_waits_for_the_others():
    """One of eight has its fixed point at once; of the rest, every one is named and that one is not."""
    y = torch.ones(8, 1, dtype=torch.float64)
    y[3] = 0
    with pytest.raises(NotInvertedError) as caught:
        fixed_point(lambda x: 0.999 * torch.sin(3 * x) / 3, y, iterations=2)
    assert caught.value.samples == [0, 1, 2, 4, 5, 6, 7]


def test_samples_repeat_with_a_generator_and_obey_temperature():
    flow = flow_named("image dense lc", torch.float32)
    a, b = (flow.sample(4, stream(1, "s")) for _ in range(2))
    assert torch.equal(a, b)
    assert a.shape == (4, 2, 8, 8)
    assert a.min() >= 0
    assert a.max() <= 1
    cold = flow.sample(4, stream(1, "s"), temperature=1e-3)
    assert cold.std(0).max() < 0.05 < a.std(0).mean()


def test_log_prob_integrates_to_one():
    """The density of a toy flow on a fine grid."""
    flow = small_toy_flow("idensenet-lc")
    axis = torch.linspace(-9, 9, 360, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        mass = flow.log_prob(grid).exp().sum() * (axis[1] - axis[0]) ** 2
    assert mass.item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_close_and_gradient_scale_cancels(precision):
    flow = small_image_flow("idensenet-lc", dtype=torch.float32).train()
    x, draws = data_for(flow, 4), lambda: idn.Draws.seeded(0)
    parameters = list(flow.parameters())

    def gradient():
        loss = -flow(x, draws()).log_prob.mean()
        return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    loss, full = gradient()
    flow.set_precision(precision)
    low_loss, low = gradient()
    assert all(p.dtype == torch.float32 for p in parameters)
    assert abs(low_loss - loss) / flow.dims < 0.01
    assert torch.cosine_similarity(full, low, dim=0) > 0.99
    flow.gradient_scale = 128.0
    _, scaled = gradient()
    assert torch.cosine_similarity(scaled, low, dim=0) > 0.9999
    assert scaled.norm() / low.norm() == pytest.approx(1, abs=0.01)


def test_a_low_precision_flow_still_inverts():
    flow = small_image_flow("idensenet-lc", dtype=torch.float32)
    flow.set_precision("bf16")
    x = data_for(flow, 2)
    z, _ = flow.encode(x)
    assert (flow.decode(z) - x).abs().max() < 0.05


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (torch.zeros(2, 3, 8, 8), r"\(2, 3, 8, 8\).*2 x 8 x 8"),
        (torch.zeros(2, 8, 8), r"\(2, 8, 8\)"),
        (torch.zeros(2, 2, 8, 8, dtype=torch.uint8), "uint8"),
        (torch.full((2, 2, 8, 8), 1.5), "1.5"),
        (torch.full((2, 2, 8, 8), -0.1), "-0.1"),
        (torch.full((2, 2, 8, 8), float("nan")), "NaN"),
    ],
)
def test_bad_data_is_named(x, named):
    with pytest.raises(UserError, match=named) as caught:
        flow_named("image dense lc", torch.float32).log_prob(x)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "named"),
    [
        (("cifar11", "idensenet", "paper"), {}, "cifar11.*cifar10"),
        (("cifar10", "resnet", "paper"), {}, "resnet.*idensenet-lc"),
        (("cifar10", "idensenet", "huge"), {}, "huge.*paper"),
        (("cifar10", "idensenet", "tiny"), {"activation": "gelu"}, "gelu.*lipswish"),
        (("cifar10", "idensenet", "tiny"), {"activation": "clipswish", "growth": 7}, "7.*halved"),
        (("cifar10", "idensenet", "tiny"), {"coeff": 1.2}, "1.2"),
        (("cifar10", "idensenet", "tiny"), {"depht": 2}, "depht"),
        (("cifar10", "idensenet", "tiny"), {"shape": (3, 30, 30)}, "30x30"),
        (("moons", "idensenet", "tiny"), {"blocks": (2, 2)}, "2, 2"),
    ],
)
def test_bad_models_are_named(name, overrides, named):
    with pytest.raises(UserError, match=named):
        idn.build(*name, **overrides)


def test_damaged_and_foreign_files_are_named(tmp_path):
    flow = small_toy_flow("idensenet", dtype=torch.float32, blocks=(1,))
    good = tmp_path / "flow"
    flow.save(good)
    whole = good.read_bytes()

    def refused(content: bytes, match: str) -> None:
        bad = tmp_path / "bad"
        bad.write_bytes(content)
        with pytest.raises(UserError, match=match):
            idn.load(bad)

    refused(whole[:-10], "damaged")
    refused(b"", "damaged")
    refused(b"\x80\x04pickle", "damaged")
    with pytest.raises(UserError, match="no file"):
        idn.load(tmp_path / "missing")
    other = tmp_path / "other"
    save_file({"a": torch.zeros(1)}, other)
    with pytest.raises(UserError, match="something else"):
        idn.load(other)
    save_file({"a": torch.zeros(1)}, other, {"idn": json.dumps({"format": 1, "config": flow.config.to_dict()})})
    with pytest.raises(UserError, match="tensor"):
        idn.load(other)
    save_file({"a": torch.zeros(1)}, other, {"idn": json.dumps({"format": 99})})
    with pytest.raises(UserError, match="99"):
        idn.load(other)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    flow = small_toy_flow("idensenet", dtype=torch.float32, blocks=(1,))
    flow.save(tmp_path / "flow")
    before = (tmp_path / "flow").read_bytes()
    with pytest.raises(UserError, match="nonsense"):
        flow.save(tmp_path / "flow", ema={"nonsense": torch.zeros(1)})
    with pytest.raises(UserError, match="cannot write"):
        flow.save(tmp_path / "nowhere" / "flow")
    assert (tmp_path / "flow").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["flow"]


def test_equal_seeds_give_equal_flows_and_others_do_not():
    a, b, c = (idn.build("moons", "idensenet", "tiny", seed=seed) for seed in (1, 1, 2))
    same = [torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    other = [torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True)]
    assert all(same)
    assert not all(other)


def test_concatenations_are_listed_for_the_heat_map():
    flow = small_image_flow("idensenet-lc")
    etas = list(flow.concatenations())
    assert len(etas) == 3 * flow.config.depth
    assert {eta.scale for eta in etas} == {"scale1", "scale2", "fc"}
    assert all(eta.eta1**2 + eta.eta2**2 == pytest.approx(1) for eta in etas)
    fixed = ready(idn.build("moons", "idensenet", "tiny"), torch.float64)
    assert all(eta.eta1 == pytest.approx(0.5**0.5) for eta in fixed.concatenations())
