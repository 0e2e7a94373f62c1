"""Presets, the command line, and what is refused before anything starts."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from idn.errors import UserError
from idn.flows.build import MODELS
from idn.train.commands import parse, train
from idn.train.config import Optimiser, TrainConfig, validate
from idn.train.engine import deepspeed_config
from idn.train.placement import Plan, fit
from idn.train.presets import PAPER_DATASETS, PRESETS, preset
from idn.train.runs import check_same, checkpoint_storage, claim, record
from idn.train.scaling import PATIENCE, LossScale
from idn.train.session import total_steps
from idn.train.worker import learning_rates


def every_preset() -> list[tuple[str, str, str]]:
    return [(data, model, size) for data in PAPER_DATASETS for model in MODELS for size in ("tiny", "paper", "full")]


@pytest.mark.parametrize(("dataset", "model", "size"), every_preset())
def test_presets_follow_the_paper(dataset: str, model: str, size: str) -> None:
    config = validate(preset(dataset, model, size))
    toy = dataset not in ("mnist", "cifar10")
    assert (config.dataset, config.model, config.size) == (dataset, model, size)
    if size != "tiny":
        blocks = {"paper": (10,), "full": (100,)} if toy else {"paper": (4, 4, 4), "full": (16, 16, 16)}
        assert config.flow.blocks == blocks[size]
        assert config.data.batch == (500 if toy else 64)
        assert config.optimiser.warmup == (0 if toy else 1000)
        assert config.optimiser.betas == ((0.9, 0.999) if toy else (0.9, 0.99))
        assert config.optimiser.weight_decay == (1e-5 if toy else 0)
        assert config.optimiser.clip == (0 if toy else 1)
        assert config.optimiser.ema == (0 if toy else 0.999)
        assert (config.length.steps == 50_000) if toy else (config.length.epochs == 200)
    assert config.data.flip == (dataset == "cifar10")
    assert config.data.resize == (32 if dataset == "mnist" else None)
    assert config.flow.learnable_concat == (model == "idensenet-lc")


def test_presets_cover_every_family_and_size() -> None:
    assert len(PRESETS) == 9
    assert all(make.__doc__ for make in PRESETS.values())


def test_a_config_survives_json() -> None:
    config, _ = parse(
        ["moons", "--workers", "1:3", "--batch", "12", "--steps", "7", "--flow.blocks", "3", "--seed", "5"]
    )
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.worker_range == (1, 3) and config.flow.blocks == (3,) and config.flow.seed == 5


def test_the_last_word_wins_so_that_recipes_can_have_defaults() -> None:
    config, dry = parse(["cifar10", "--size", "tiny", "--size", "paper", "--dry-run"])
    assert config.size == "paper" and dry


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("moons --workers 3 --batch 64", "--batch 64 does not divide by 3"),
        ("moons --workers 1:3 --batch 64", "does not divide by 3"),
        ("moons --workers 2 --batch 6 --accumulation 2", "does not divide by 4"),
        ("moons --workers many", "--workers many"),
        ("moons --lr 0", "--lr 0"),
        ("moons --ema 1", "--ema 1"),
        ("moons --name a/b", "--name a/b"),
        ("moons --checkpoint-every 0", "--checkpoint-every 0"),
        ("cifar11", "dataset cifar11"),
        ("cifar10 --size huge", "--size huge"),
        ("cifar10 --model flow", "--model flow"),
    ],
)
def test_bad_values_are_named(words: str, message: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        parse(words.split())
    assert message in str(caught.value)


def test_dry_run_prints_config_cost_and_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        train(["cifar10", "--size", "full", "--dry-run", "--workers", "4", "--zero", "2", "--accumulation", "2"]) == 0
    )
    text = capsys.readouterr().out
    assert "parameters: 24,894," in text
    assert "steps: 140,800 (704 per epoch)" in text
    assert "memory per worker" in text and "FLOPs per worker and step" in text
    settings = json.loads(text.split("# deepspeed\n")[1])
    assert settings["zero_optimization"]["stage"] == 2
    assert settings["train_micro_batch_size_per_gpu"] == 8


def test_zero_stages_save_memory_in_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    totals = []
    for zero in "0123":
        train(f"cifar10 --size full --dry-run --workers 8 --zero {zero}".split())
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
        totals.append(float(line.split()[3]))
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[3]


def test_a_deepspeed_file_wins_and_may_not_contradict(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}))
    config, _ = parse(["cifar10", "--deepspeed", str(path)])
    settings, generated = deepspeed_config(config, 2, 1000), deepspeed_config(preset("cifar10"), 2, 1000)
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"] == generated["zero_optimization"] | {"stage": 1}
    for content in (
        '{"fp16": {"enabled": true}}',
        '{"train_batch_size": 3}',
        "[]",
        "{",
        '{"optimizer": {"type": "Lion"}}',
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=r"ds\.json"):
            deepspeed_config(config, 2, 1000)


NODE = {"CPU": 4.0, "memory": 1e9}


def test_workers_are_placed_on_nodes_that_can_hold_them() -> None:
    base = preset("cifar10")

    def place(words: str, nodes: list[dict[str, float]]) -> Plan:
        return fit(parse(["cifar10", *words.split()])[0], nodes)

    assert fit(base, [NODE]) == Plan(4, 4, 1, 0)
    assert place("--workers 2", [NODE]) == Plan(2, 2, 2, 0)
    assert place("--workers 1:4 --batch 12", [NODE]) == Plan(1, 4, 1, 0)
    assert place("--batch 6", [NODE]) == Plan(3, 3, 1, 0)
    assert fit(base, [NODE | {"GPU": 2.0}, NODE | {"GPU": 2.0}]) == Plan(4, 4, 1, 1)
    with pytest.raises(UserError, match="4 CPUs and 0 GPUs on 1 node, room for 4"):
        place("--workers 8", [NODE])
    with pytest.raises(UserError, match="room for 2"):
        place("--workers 4 --cpus-per-worker 3", [NODE, NODE])
    with pytest.raises(UserError, match="--gpus-per-worker 1: the cluster has 4 CPUs and 0 GPUs"):
        place("--gpus-per-worker 1", [NODE])


def test_a_folder_belongs_to_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDN_RUNS", str(tmp_path))
    config, _ = parse(["moons", "--size", "tiny"])
    claim(config)
    record(config)
    assert (tmp_path / "moons-tiny-idensenet-lc" / "config.json").is_file()
    claim(dataclasses.replace(config, length=dataclasses.replace(config.length, steps=900)))
    with pytest.raises(UserError, match="seed 0, this command says 1"):
        check_same(config.to_dict(), dataclasses.replace(config, seed=1).to_dict(), tmp_path)


def test_storage_may_be_an_address() -> None:
    config, _ = parse(["moons", "--storage", "s3://bucket/flows/"])
    assert checkpoint_storage(config) == "s3://bucket/flows/moons-paper-idensenet-lc"


def test_toy_data_needs_steps() -> None:
    config = dataclasses.replace(preset("moons"), length=dataclasses.replace(preset("moons").length, steps=None))
    with pytest.raises(UserError, match="--steps"):
        total_steps(config, None)
    assert total_steps(preset("cifar10"), 704) == 140_800


def test_the_loss_scale_halves_on_overflow_and_grows_again() -> None:
    scale = LossScale.start("fp16")
    first = scale.value
    assert scale.overflow() and scale.value == first / 2
    for _ in range(PATIENCE):
        scale.good()
    assert scale.value == first
    while scale.overflow():
        pass
    assert scale.value == 1
    assert not LossScale.start("bf16").overflow() and math.isfinite(LossScale.start("fp32").value)


def test_the_learning_rate_warms_up_and_decays() -> None:
    warm = Optimiser(warmup=10, freeze_lc=5)
    assert learning_rates(warm, 4, 100) == (0.5, 0.0)
    assert learning_rates(warm, 99, 100) == (1.0, 1.0)
    cosine = Optimiser(warmup=0, decay="cosine")
    factors = [learning_rates(cosine, step, 100)[0] for step in range(100)]
    assert factors[0] == 1.0 and factors[50] == pytest.approx(0.5) and 0 < factors[-1] < 1e-3
    assert factors == sorted(factors, reverse=True)
