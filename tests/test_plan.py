"""`idn plan`: its arithmetic against the model's own counts, its memory against fits, its stragglers against maths."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from idn.errors import UserError
from idn.flows.config import FlowConfig
from idn.flows.cost import Cost, flow_cost
from idn.flows.draws import Draws
from idn.flows.flow import Flow
from idn.flows.logdet import LogdetRule
from idn.plan.command import configured, make_row, plan
from idn.plan.hardware import A100, H100, calibrate, find
from idn.plan.model import communicated, largest_batch, memory, step_time
from idn.plan.stragglers import draw_terms, slowdowns
from idn.streams import stream
from idn.train.config import TrainConfig


def small(dataset: str = "cifar10") -> tuple[TrainConfig, Cost]:
    config = configured(dataset, "idensenet-lc", "tiny", None, "fp32", False)
    return config, flow_cost(Flow(config.flow, converge=False))


def test_the_parts_of_a_step_follow_the_counts() -> None:
    config, cost = small()
    one, four = (step_time(config, cost, A100, workers) for workers in (1, 4))
    assert one.arithmetic == pytest.approx(4 * four.arithmetic)
    rate = config.data.batch * cost.training_flops() / one.arithmetic
    assert rate == pytest.approx(A100.reached * A100.flops["fp32"])
    # Norms and start-up do not shrink with the share of the batch, and one worker has nobody to talk to.
    assert (one.norms, one.start) == (four.norms, four.start)
    assert one.communication == 0 and four.communication > 0
    assert step_time(config, cost, H100, 4).total < four.total
    # Across nodes the slower link counts.
    assert step_time(config, cost, A100, 16).communication > 8 * step_time(config, cost, A100, 8).communication


def test_a_ring_sends_what_a_ring_must() -> None:
    _, cost = small()
    # With two workers each sends half of the gradients, and half of the sums back.
    assert communicated(cost, 2, 0) == 4 * cost.parameters
    assert communicated(cost, 1024, 0) == pytest.approx(8 * cost.parameters, rel=1e-3)
    assert communicated(cost, 8, 3) == 2 * communicated(cost, 8, 2)


def test_the_largest_batch_fits_and_one_sample_more_does_not() -> None:
    config, cost = small()
    for zero in (0, 3):
        most = largest_batch(config, cost, A100, 4, zero)
        sizes = (most, most + 4)
        data = [dataclasses.replace(config.data, batch=size) for size in sizes]
        needed = [memory(dataclasses.replace(config, data=d), cost, 4, zero).total for d in data]
        assert needed[0] <= 0.9 * A100.memory < needed[1]
    tight = dataclasses.replace(A100, memory=1000.0)
    assert largest_batch(config, cost, tight, 4, 0) == 0


def test_zero_saves_memory_stage_by_stage() -> None:
    config, cost = small()
    rows = [make_row(config, cost, A100, 8, zero, 100) for zero in (0, 1, 2, 3)]
    sizes = [row.gigabytes for row in rows]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[3]
    assert all(row.fits and 0 < row.efficiency < 1 for row in rows)
    assert rows[0].dollars == pytest.approx(rows[0].hours * 8 * A100.dollars)


@pytest.mark.parametrize("rule", [LogdetRule(), LogdetRule(lengths="geometric", parameter=0.5), LogdetRule(samples=3)])
def test_the_simulation_draws_what_training_draws(rule: LogdetRule) -> None:
    drawn = draw_terms(rule, (40_000,), np.random.default_rng(0))
    lengths = stream(0, "lengths")
    real = np.array([len(rule.coefficients(Draws(lengths, lengths))) for _ in range(4000)])
    spread = math.sqrt(real.var() / len(real) + drawn.var() / len(drawn))
    assert abs(real.mean() - drawn.mean()) < 5 * spread
    assert drawn.min() == real.min()


def test_waiting_for_the_slowest_of_one_block_is_the_expected_maximum() -> None:
    flow = Flow(FlowConfig(shape=(1, 4, 4), blocks=(1,), depth=1, growth=2, fc_blocks=0), converge=False)
    cost = flow_cost(flow)
    rule = cost.train_logdet
    for found in slowdowns(cost, ranks=(1, 4, 64), steps=4000):
        # A training step takes 5 F beside the terms; E[max] = sum_n P(max >= n).
        maximum = sum(1 - (1 - rule.survival(n)) ** found.ranks for n in range(1, 100))
        expected = (5 + rule.exact_terms + maximum) / (5 + rule.exact_terms + rule.parameter)
        assert found.per_step == pytest.approx(expected, rel=0.02)
        assert found.per_block == found.per_step


def test_more_ranks_wait_longer_and_most_at_every_block() -> None:
    _, cost = small()
    found = slowdowns(cost, steps=100)
    assert [wait.ranks for wait in found] == [2**power for power in range(11)]
    assert found[0].per_step == pytest.approx(1, abs=0.03)
    assert found[-1].per_step > found[5].per_step > found[1].per_step
    assert all(wait.per_block >= wait.per_step - 1e-12 for wait in found)
    exact = dataclasses.replace(cost, train_logdet=LogdetRule(rule="exact"))
    assert {wait.per_step for wait in slowdowns(exact)} == {1.0}


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    config, cost = small("moons")
    here = calibrate(config, workers=2, sizes=(16, 512), repeats=4)
    assert here.per_sample is not None and here.near > 0 and here.memory > 1e8 and here.contention >= 1
    times = [step_time(config, cost, here, workers).total for workers in (1, 2)]
    print(f"predicted step: {times[0] * 1e3:.1f} ms with 1 worker, {times[1] * 1e3:.1f} ms with 2")
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in times)


def test_the_command_prints_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, figures = tmp_path / "stragglers.png", tmp_path / "plan.json"
    plan("cifar10", size="tiny", workers=4, plot=picture, json=figures)
    printed = capsys.readouterr().out
    assert "FLOPs per step" in printed and "4 x a100" in printed and "largest batch" in printed
    assert min(Image.open(picture).size) > 300
    saved = json.loads(figures.read_text())
    assert [row["zero"] for row in saved["stages"]] == [0, 1, 2, 3] and saved["workers"] == 4
    assert saved["stragglers"][-1]["ranks"] == 1024


def test_bad_input_says_what_was_expected() -> None:
    config, _ = small()
    with pytest.raises(UserError, match="--hardware tpu: expected one of a100, h100, here"):
        find("tpu", config)
    with pytest.raises(UserError, match="--workers 0"):
        plan("cifar10", workers=0)
    with pytest.raises(UserError, match="does not divide"):
        plan("cifar10", workers=7)


def test_the_command_starts_without_ray() -> None:
    code = "import sys, idn.plan.command; sys.exit('ray' in sys.modules or 'deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
