"""The watch names the first tensor that is not finite."""

import math

import pytest
import torch

from idn.flows.build import build
from idn.flows.draws import Draws
from idn.train.ema import AveragedWeights
from idn.train.group import bit_sum
from idn.train.watch import FiniteWatch


def test_all_is_well_then_a_bad_activation_then_a_bad_gradient() -> None:
    flow = build("moons", "idensenet-lc", "tiny").train()
    watch = FiniteWatch(flow)

    def step() -> str | None:
        flow.zero_grad()
        flow(torch.ones(4, 2), Draws.seeded(0, "watch")).log_prob.sum().backward()
        index, is_gradient = watch.first_bad()
        return None if index < 0 else f"{'gradient' if is_gradient else 'output'} of {watch.names[index]}"

    assert step() is None
    weight = flow.blocks[1].branch.get_parameter("parts.0.layer.weight")
    hook = weight.register_hook(lambda gradient: gradient * math.inf)
    watch.close()
    watch = FiniteWatch(flow)
    assert step() == f"gradient of {flow.blocks[1].name} (chain.1.branch.parts.0.layer.weight)"
    hook.remove()
    assert step() is None
    with torch.no_grad():
        flow.blocks[2].branch.get_parameter("parts.0.layer.bias").fill_(math.nan)
    assert step() == f"output of {flow.blocks[2].name}"


def test_averages_follow_the_weights() -> None:
    flow = build("moons", "idensenet", "tiny")
    average = AveragedWeights(flow, 0.75)
    name, parameter = next(iter(flow.named_parameters()))
    first = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(1.0)
    average.update(flow)
    assert torch.allclose(average.shadow[name], first + 0.25)
    other = build("moons", "idensenet", "tiny", seed=1)
    average.copy_to(other)
    assert torch.equal(other.get_parameter(name), average.shadow[name])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_any_changed_bit_changes_the_fingerprint(kind: torch.dtype) -> None:
    tensor = torch.ones(10).to(kind)
    before = bit_sum(tensor)
    tensor[3] = 0
    assert bit_sum(tensor) != before
