"""The fast path gives what plain automatic differentiation gives, for the same draws."""

import pytest
import torch

import idn
from idn.flows import logdet, oracle
from idn.flows.activations import ACTIVATIONS
from idn.flows.draws import Draws
from idn.flows.logdet import LogdetRule
from tests.flows.helpers import data_for, living_bytes, small_image_flow, small_toy_flow

ROULETTE = LogdetRule()
WEIGHTS = torch.tensor([1.0, -0.5, 2.0, 0.1])


def weighted(likelihood, weights=WEIGHTS):
    """A loss that weighs the samples, and the two parts of ln p(x), unequally."""
    return (weights * (likelihood.log_pz + 0.7 * likelihood.logdet)).sum()


def loss_and_gradients(flow, likelihood, weights=WEIGHTS):
    flow.zero_grad(set_to_none=True)
    loss = weighted(likelihood(), weights)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in flow.named_parameters() if p.requires_grad}


def assert_equal(flow, x, rule, saving=False, weights=WEIGHTS):
    object.__setattr__(flow.config, "train_logdet", rule)
    flow.train()
    fast_value, fast = loss_and_gradients(flow, lambda: flow(x, Draws.seeded(5, "fast")), weights)
    plain = lambda: oracle.likelihood(flow, x, Draws.seeded(5, "fast"), saving=saving)  # noqa: E731
    true_value, true = loss_and_gradients(flow, plain, weights)
    torch.testing.assert_close(fast_value, true_value, rtol=1e-5, atol=0)
    assert fast.keys() == true.keys()
    largest = max(g.norm() for g in true.values() if g is not None)
    for name, expected in true.items():
        found = fast[name]
        expected = torch.zeros_like(found) if expected is None else expected
        # Relative to the parameter's own gradient, or, where that is tiny, to the roundoff of the largest.
        assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-6 * largest, name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", ["idensenet-lc", "idensenet", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_image_flow_equals_the_oracle(model, activation, recompute):
    flow = small_image_flow(model, torch.float32, activation=activation)
    flow.recompute = recompute
    assert_equal(flow, data_for(flow, 4), ROULETTE)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", ["idensenet-lc", "residual"])
@pytest.mark.parametrize("rule", [LogdetRule(probes=3), LogdetRule(samples=2), LogdetRule("series", terms=5)])
def test_probes_and_rules(model, rule, recompute):
    flow = small_image_flow(model, torch.float32)
    flow.recompute = recompute
    assert_equal(flow, data_for(flow, 4), rule)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_batch_in_unequal_parts(recompute, monkeypatch):
    """5 images of 64 pixels in pieces of 2, or of 1; several probes go with their samples."""
    flow = small_image_flow("idensenet-lc", torch.float32)
    flow.recompute = recompute
    monkeypatch.setattr(logdet, "PIXELS", 2 * 64)
    weights = torch.tensor([1.0, -0.5, 2.0, 0.1, 0.7])
    assert_equal(flow, data_for(flow, 5), LogdetRule(probes=3), weights=weights)


def test_vector_flow_and_published_form():
    """The memory-saving baseline is the same estimator where all samples weigh alike."""
    flow = small_toy_flow("idensenet-lc", torch.float32)
    rule = LogdetRule(lengths="geometric", parameter=0.5)
    assert_equal(flow, data_for(flow, 4), rule)
    assert_equal(flow, data_for(flow, 4), rule, saving=True, weights=torch.ones(4))


@pytest.mark.parametrize("model", ["idensenet-lc", "residual"])
def test_evaluation_equals_the_oracle(model):
    flow = small_image_flow(model, torch.float32).eval()
    x = data_for(flow, 4)
    with torch.no_grad():
        fast = flow(x, Draws.seeded(5, "fast"))
        true = oracle.likelihood(flow, x, Draws.seeded(5, "fast"))
    torch.testing.assert_close(fast.log_prob, true.log_prob, rtol=1e-5, atol=1e-4)


def test_recomputing_keeps_only_block_inputs():
    """Between the passes, a block that recomputes holds a few tensors of its input's size."""
    flow = small_image_flow("idensenet-lc", torch.float32, growth=32).train()
    x = data_for(flow, 64)  # normalised weights are kept too, and do not grow with the batch
    kept = {}
    for recompute in (False, True):
        flow.recompute = recompute
        before = living_bytes()
        likelihood = flow(x, Draws.seeded(0, "kept"))
        kept[recompute] = living_bytes() - before
        del likelihood
    assert kept[True] < 0.2 * kept[False]


@pytest.mark.parametrize("model", ["idensenet-lc", "residual"])
def test_low_precision_gradient_points_the_same_way(model):
    """bf16 products change the direction of the gradient by less than 1e-3, at a realistic width."""
    width = {
        "growth": 64,
        "width": 128,
        "fc_stem": 32,
        "fc_growth": 16,
        "fc_width": 64,
        "blocks": (1, 1),
        "fc_blocks": 1,
    }
    flow = idn.build("cifar10", model, "paper", shape=(3, 16, 16), **width)
    x = data_for(flow, 8)
    flow.initialize(x)
    flow.train()
    found = {}
    for precision in ("fp32", "bf16"):
        flow.set_precision(precision)
        _, gradients = loss_and_gradients(flow, lambda: flow(x, Draws.seeded(1, "low")), torch.ones(8))
        found[precision] = torch.cat([g.flatten() for g in gradients.values() if g is not None]).double()
    cosine = torch.nn.functional.cosine_similarity(found["fp32"], found["bf16"], dim=0)
    assert cosine >= 0.999
