"""ZeRO stages, exact resume, precision and agreement of 1, 2 and 4 workers, in real Ray workers with real DeepSpeed.

Starting workers is slow, so each group of workers makes all of its runs at once and tests look at what came out.
"""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from idn.flows.bounds import prove
from idn.flows.files import load
from idn.train.group import bit_sum
from tests.train import loops

STAGES = (0, 1, 2, 3)
STEPS = 6
CURVE = 50


def sharded(zero: int) -> dict[str, Any]:
    return {"zero": zero, "steps": STEPS, "accumulation": 2, "deterministic": True, "ema": 0.9}


def two_workers(settings: dict[str, Any]) -> dict[str, Any]:
    folder = Path(settings["folder"])
    found: dict[str, Any] = {}
    for zero in STAGES:
        config = loops.tiny(**sharded(zero))
        found[f"whole {zero}"] = loops.run(config, str(folder / f"whole-{zero}"))
        found[f"parts {zero}"] = loops.interrupted(config, folder / f"parts-{zero}", settings["stop_at"][zero])
        loops.run(config, str(folder / f"handed-over-{zero}"), stop_at=3)
    for name in ("fp32", "bf16", "fp16"):
        config = loops.tiny(precision=name, steps=40, batch=16, ema=0.0, warmup=10, limit_test=64)
        found[name] = loops.run(config, str(folder / name))
    found["plain"] = loops.interrupted(loops.tiny("moons", steps=8, freeze_lc=4), folder / "plain", 5)
    found["plain whole"] = loops.run(loops.tiny("moons", steps=8, freeze_lc=4), str(folder / "plain-whole"))
    found["frozen"] = loops.run(loops.tiny("moons", steps=4, freeze_lc=4), str(folder / "frozen"))
    for zero in (0, 3):
        compiled = loops.tiny("moons", steps=8, freeze_lc=4, compile=True, zero=zero)
        found[f"compiled {zero}"] = loops.run(compiled, str(folder / f"compiled-{zero}"))
    found["curve"] = curve(folder)
    found["broken"] = loops.run_broken(folder, rank=1, at_step=2)
    return found


def other_workers(settings: dict[str, Any]) -> dict[str, Any]:
    folder = Path(settings["folder"])
    found: dict[str, Any] = {"curve": curve(folder)}
    for zero in STAGES:
        # A checkpoint of two workers, taken up at the next ZeRO stage by another number of them.
        copy = loops.copy(folder / f"handed-over-{zero}", folder / f"taken-up-{zero}")
        options = sharded((zero + 1) % 4) | {"accumulation": 1}
        found[f"taken up {zero}"] = loops.run(loops.tiny(**options), str(copy))
    return found


def curve(folder: Path) -> list[float]:
    """A deterministic run: noise and probes by a sample's place in the batch."""
    config = loops.tiny(deterministic=True, steps=CURVE, batch=8, lr=1e-3, warmup=20)
    workers = loops.group().workers
    losses = loops.run(config, str(folder / f"curve-{workers}"))["losses"]
    return [losses[step] for step in range(1, CURVE + 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def stop_at() -> list[int]:
    """Random on purpose: an interruption at any step must not show. The failing step is in the message."""
    return [random.SystemRandom().randint(1, STEPS - 1) for _ in STAGES]


@pytest.fixture(scope="module")
def two(in_workers: Any, folder: Path, stop_at: list[int]) -> dict[str, Any]:
    return in_workers(two_workers, 2, folder=str(folder), stop_at=stop_at)


@pytest.fixture(scope="module")
def four(two: dict[str, Any], in_workers: Any, folder: Path) -> dict[str, Any]:
    return in_workers(other_workers, 4, folder=str(folder))


@pytest.fixture(scope="module")
def one(two: dict[str, Any], in_workers: Any, folder: Path) -> dict[str, Any]:
    return in_workers(loops.only(curve), 1, folder=str(folder))


@pytest.mark.parametrize("zero", STAGES)
def test_every_zero_stage_trains_like_none(two: dict[str, Any], zero: int) -> None:
    losses, reference = two[f"whole {zero}"]["losses"], two["whole 0"]["losses"]
    assert len(losses) == STEPS
    assert list(losses.values()) == pytest.approx(list(reference.values()), rel=1e-5)
    assert two[f"whole {zero}"]["norms"] == pytest.approx(two["whole 0"]["norms"], rel=1e-4)


@pytest.mark.parametrize("zero", STAGES)
def test_an_interrupted_run_equals_a_whole_one_bit_for_bit(two: dict[str, Any], stop_at: list[int], zero: int) -> None:
    whole, parts = two[f"whole {zero}"], two[f"parts {zero}"]
    stopped = stop_at[zero]
    assert parts["losses"] == {step: loss for step, loss in whole["losses"].items() if step > stopped}, stopped
    assert parts["state"] == whole["state"], stopped


def test_resume_without_deterministic_mode_is_exact_too(two: dict[str, Any]) -> None:
    assert two["plain"]["state"] == two["plain whole"]["state"]


@pytest.mark.parametrize("zero", [0, 3])
def test_compiled_blocks_of_the_plane_train_like_others(two: dict[str, Any], zero: int) -> None:
    losses, reference = two[f"compiled {zero}"]["losses"], two["plain whole"]["losses"]
    assert list(losses.values()) == pytest.approx(list(reference.values()), rel=1e-5)


@pytest.mark.parametrize("zero", STAGES)
def test_a_checkpoint_goes_on_at_another_stage_and_number_of_workers(
    two: dict[str, Any], four: dict[str, Any], zero: int
) -> None:
    went_on, reference = four[f"taken up {zero}"]["losses"], two["whole 0"]["losses"]
    assert sorted(went_on) == list(range(4, STEPS + 1))
    assert [went_on[step] for step in sorted(went_on)] == pytest.approx(
        [reference[step] for step in sorted(went_on)], rel=1e-4
    )


def test_one_two_and_four_workers_give_the_same_curve(
    one: dict[str, Any], two: dict[str, Any], four: dict[str, Any]
) -> None:
    assert len(one["curve"]) == CURVE
    assert two["curve"] == pytest.approx(one["curve"], rel=1e-4)
    assert four["curve"] == pytest.approx(one["curve"], rel=1e-4)


def test_bf16_trains_as_well_as_fp32(two: dict[str, Any], folder: Path) -> None:
    scores = {name: two[name]["outcome"]["test"]["value"] for name in ("fp32", "bf16")}
    assert abs(scores["fp32"] - scores["bf16"]) < 0.02, scores
    for name in scores:
        for path in (folder / name).glob("step-*/flow.safetensors"):
            flow = load(path, ema=False)
            flow.set_precision(name)
            assert all(prove(block.branch).bound < 1 for block in flow.blocks), name


def test_fp16_scales_its_loss_and_skips_overflows(two: dict[str, Any]) -> None:
    losses = list(two["fp16"]["losses"].values())
    assert all(math.isfinite(loss) for loss in losses)
    assert two["fp16"]["scale"] > 1
    assert losses[-1] < losses[0]


def test_a_frozen_concatenation_does_not_move(two: dict[str, Any]) -> None:
    start = int(bit_sum(torch.ones(2)))

    def moved(run: str) -> set[bool]:
        raws = {name: bits for name, bits in two[run]["state"].items() if name.endswith("concatenation.raw")}
        return {bits != start for name, bits in raws.items() if name.startswith("chain.")}

    assert moved("frozen") == {False}
    assert moved("plain whole") == {True}


def test_a_gradient_that_is_not_finite_stops_all_ranks_before_the_update(two: dict[str, Any]) -> None:
    broken = two["broken"]
    assert "step 2, rank 1" in broken["error"]
    assert "scale1.block1" in broken["error"]
    assert broken["state"] == broken["state before"]
