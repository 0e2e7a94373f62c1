"""Log-det estimators against exact values and exact gradients, with stated confidence."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import idn
from idn.errors import UserError
from idn.flows.draws import Draws
from idn.flows.logdet import LogdetRule, block_logdet, exact_logdet, series_logdet
from idn.streams import stream
from tests.flows.helpers import data_for, living_bytes, small_image_flow, small_toy_flow
from tests.flows.test_maps import make_branch

SIGMAS = 5.0
"""An unbiased mean lies within five standard errors of the truth but once in two million."""

RULES = [
    LogdetRule("roulette", lengths="poisson", parameter=2.0),
    LogdetRule("roulette", lengths="geometric", parameter=0.5),
    LogdetRule("roulette", lengths="poisson", parameter=1.0, exact_terms=4, samples=3, probes=2),
    LogdetRule("roulette", lengths="geometric", parameter=0.3, exact_terms=0),
]


def points(shape, n, seed=0):
    return torch.randn(n, *shape, generator=stream(seed, "points"), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["dense conv", "residual linear"])
@pytest.mark.parametrize("rule", RULES)
def test_roulette_value_and_gradient_are_unbiased(kind, rule):
    """Per sample values, and the gradient of a weighted sum for every parameter and for x, with unequal weights."""
    branch, shape = make_branch(kind, "lipswish")
    x = points(shape, 3).requires_grad_()
    weights = torch.tensor([1.0, -2.0, 0.25], dtype=torch.float64)
    inputs = [x, *branch.parameters()]
    _, truth = exact_logdet(branch(), x)
    true_gradient = flat(torch.autograd.grad((truth * weights).sum(), inputs, allow_unused=True), inputs)
    values, gradients = [], []
    for i in range(400):
        _, logdet = block_logdet(branch(), x, Draws.seeded(7, i), rule, recompute=i % 2 == 0)
        values.append(logdet.detach())
        found = torch.autograd.grad((logdet * weights).sum(), inputs, allow_unused=True)
        gradients.append(flat(found, inputs))
    assert_mean(torch.stack(values), truth.detach())
    # Many coordinates: compare along fixed random directions and along the true gradient.
    directions = torch.randn(6, len(true_gradient), generator=stream(5, "directions"), dtype=torch.float64)
    directions = torch.cat([directions, true_gradient[None]])
    assert_mean(torch.stack(gradients) @ directions.T, directions @ true_gradient)


def flat(gradients, inputs):
    pairs = zip(gradients, inputs, strict=True)
    return torch.cat([torch.zeros(i.numel()).double() if g is None else g.flatten() for g, i in pairs])


def assert_mean(draws, truth):
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - truth).abs() <= SIGMAS * error + 1e-12).all()


@pytest.mark.parametrize("rule", RULES)
def test_expected_coefficients_are_one(rule):
    """E[c_k] = 1 for every term, from the distribution itself: no sampling."""
    for k in range(1, 12):
        expected = rule.survival(k - rule.exact_terms) * (1 / rule.survival(k - rule.exact_terms))
        assert expected == pytest.approx(1)
    counts = torch.zeros(8)
    n = 20_000
    uniform = torch.rand(n, generator=stream(0, "u"), dtype=torch.float64)
    for u in uniform.tolist():
        counts[: min(rule.length(u), 7) + 1] += 1
    survival = torch.tensor([rule.survival(k) for k in range(8)])
    error = torch.sqrt(survival * (1 - survival) / n)
    assert ((counts / n - survival).abs() <= SIGMAS * error + 1e-9).all()


def test_poisson_survival_is_exact():
    rule = LogdetRule(lengths="poisson", parameter=2.0)
    pmf = [math.exp(-2) * 2**k / math.factorial(k) for k in range(60)]
    for n in range(20):
        assert rule.survival(n) == pytest.approx(sum(pmf[n:]), rel=1e-12)


@pytest.mark.parametrize("terms", [1, 2, 5, 30])
def test_truncated_series_with_exact_traces(terms):
    branch, shape = make_branch("dense linear", "lipswish")
    x = points(shape, 4)
    g = branch()
    j = torch.stack([torch.autograd.functional.jacobian(lambda p: g.value(p[None])[0], p) for p in x])
    powers = [torch.linalg.matrix_power(j, k).diagonal(dim1=1, dim2=2).sum(1) for k in range(1, terms + 1)]
    expected = sum((-1) ** (k + 1) / k * trace for k, trace in enumerate(powers, start=1))
    _, found = block_logdet(g, x, Draws.seeded(0), LogdetRule("trace", terms=terms))
    torch.testing.assert_close(found, expected)


def test_truncated_series_with_probes_is_unbiased_for_the_truncated_sum():
    branch, shape = make_branch("dense linear", "lipswish")
    x, rule = points(shape, 2), LogdetRule("series", terms=4, probes=5)
    with torch.no_grad():
        _, truth = block_logdet(branch(), x, Draws.seeded(0), LogdetRule("trace", terms=4))
        draws = [block_logdet(branch(), x, Draws.seeded(1, i), rule)[1] for i in range(300)]
    assert_mean(torch.stack(draws), truth)


@pytest.mark.parametrize("kind", ["dense conv", "residual conv", "dense linear"])
def test_exact_logdet_against_autograd(kind):
    branch, shape = make_branch(kind, "elu")
    x = points(shape, 2)
    g = branch()
    d = x[0].numel()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            gx, found = exact_logdet(g, x)
        torch.testing.assert_close(gx, g.value(x))
        for i in range(2):
            j = torch.autograd.functional.jacobian(lambda p: g.value(p[None])[0].flatten(), x[i]).reshape(d, d)
            truth = torch.linalg.slogdet(torch.eye(d, dtype=torch.float64) + j).logabsdet
            torch.testing.assert_close(found[i].detach(), truth)


def test_value_with_and_without_gradient_agree():
    branch, shape = make_branch("dense conv", "lipswish")
    x, v = points(shape, 3), points(shape, 3, seed=1)
    coefficients = [1.0, 1.0, 1.3, 2.0]
    _, with_graph = series_logdet(branch(), x, v, coefficients)
    with torch.no_grad():
        _, without = series_logdet(branch(), x, v, coefficients)
    torch.testing.assert_close(with_graph.detach(), without)


def test_recomputation_changes_nothing():
    branch, shape = make_branch("dense conv", "clipswish")
    x = points(shape, 3).requires_grad_()
    inputs = [x, *branch.parameters()]
    results = []
    for recompute in (False, True):
        gx, logdet = block_logdet(branch(), x, Draws.seeded(3), RULES[0], recompute)
        loss = (logdet * torch.tensor([1.0, 2.0, -1.0])).sum() + gx.square().sum()
        results.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_memory_does_not_grow_with_the_number_of_terms():
    branch, shape = make_branch("dense conv", "lipswish")
    x, v = points(shape, 3).requires_grad_(), points(shape, 3, seed=2)

    def kept(terms: int) -> int:
        before = living_bytes()
        _, logdet = series_logdet(branch(), x, v, [1.0] * terms)
        assert logdet.requires_grad
        return living_bytes() - before

    few, many = kept(2), kept(40)
    assert few > 0
    assert many == few


@given(st.integers(0, 10**6))
def test_global_random_state_is_untouched(seed):
    flow = small_flow()
    before = torch.get_rng_state()
    flow.train()
    flow(data_for(flow, 2), Draws.seeded(seed))
    flow.sample(1)
    idn.build("moons", "idensenet", "tiny", seed=seed)
    assert torch.equal(before, torch.get_rng_state())


_FLOWS: dict[str, idn.Flow] = {}


def small_flow() -> idn.Flow:
    if "toy" not in _FLOWS:
        _FLOWS["toy"] = small_toy_flow("idensenet-lc", blocks=(1,))
    return _FLOWS["toy"]


def test_per_sample_probes_do_not_depend_on_the_split():
    """With one generator per sample, two halves give what the whole batch gives."""
    flow = small_image_flow("idensenet-lc").train()
    x = data_for(flow, 4)

    def draws(positions):
        return Draws(stream(0, "lengths"), [stream(0, "probe", p) for p in positions])

    whole = flow(x, draws(range(4))).log_prob
    halves = torch.cat([flow(x[:2], draws([0, 1])).log_prob, flow(x[2:], draws([2, 3])).log_prob])
    torch.testing.assert_close(whole, halves)


def test_ranks_share_lengths_and_not_probes():
    flow = small_image_flow("residual").train()
    one, two = (Draws(stream(0, "lengths"), stream(0, "probes", rank)) for rank in range(2))
    flow(data_for(flow, 2), one)
    flow(data_for(flow, 2), two)
    assert one.uniform() == two.uniform()
    assert not torch.equal(one.normal(torch.empty(4)), two.normal(torch.empty(4)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rule": "magic"}, "magic"),
        ({"lengths": "uniform"}, "uniform"),
        ({"terms": 0}, "0"),
        ({"lengths": "geometric", "parameter": 1.5}, "1.5"),
        ({"parameter": -1.0}, "-1.0"),
    ],
)
def test_bad_rules_are_named(settings, named):
    with pytest.raises(UserError, match=named):
        LogdetRule(**settings)
