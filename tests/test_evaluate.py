"""`idn eval` on a trained flow with known nats, and on images against the exact log-det."""

import json
import math

import pytest
import torch

from idn.cli import main
from idn.data import toy
from idn.evaluate import add, evaluate, partial_sums, score
from idn.models import find_run, open_model
from idn.splits import Split, matching
from tests.flows.helpers import small_image_flow
from tests.trained import KNOWN_NATS, moons_run


@pytest.fixture(scope="module")
def moons(tmp_path_factory):
    return moons_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A flow over 3x8x8 images, not near the identity."""
    path = tmp_path_factory.mktemp("images") / "small.safetensors"
    small_image_flow("idensenet-lc", dtype=torch.float32, shape=(3, 8, 8)).save(path)
    return path


def run_eval(tmp_path, *words):
    target = tmp_path / "figures.json"
    assert main(["eval", *map(str, words), "--json", str(target)]) == 0
    return json.loads(target.read_text())


def test_the_trained_flow_has_its_known_nats(tmp_path, moons, capsys):
    figures = run_eval(tmp_path, moons)
    out = capsys.readouterr().out
    assert figures["samples"] == 100_000
    assert figures["value"] == pytest.approx(KNOWN_NATS, abs=4 * figures["standard_error"] + 1e-3)
    assert 0.0005 < figures["standard_error"] < 0.003
    assert figures["log_pz"] + figures["logdet"] == pytest.approx(-figures["value"], abs=1e-9)
    assert figures["value"] > figures["entropy"] == toy.entropy("moons")
    assert figures["estimator_error"] == 0 and figures["unit"] == "nats"
    assert f"{figures['value']:.4f} +- {figures['standard_error']:.4f}" in out
    assert "2.3939" in out and "exact log-det: no noise" in out


def test_nats_are_minus_the_mean_of_log_prob(tmp_path, moons):
    figures = run_eval(tmp_path, moons, "--limit", 3000)
    flow = open_model(moons).flow
    with torch.no_grad():
        log_prob = flow.log_prob(Split("moons", limit=3000).first(3000)).double()
    assert figures["value"] == pytest.approx(float(-log_prob.mean()), abs=1e-5)
    assert figures["standard_error"] == pytest.approx(float(log_prob.std()) / math.sqrt(3000), rel=1e-4)


def test_the_same_seed_gives_the_same_number(tmp_path, moons, images):
    for words in ([moons, "--limit", 2000], [images, "--data", "cifar10-sample", "--limit", 32, "--seed", 5]):
        first, second = (run_eval(tmp_path, *words) for _ in range(2))
        assert first["value"] == second["value"] and first["logdet"] == second["logdet"]
        other = run_eval(tmp_path, *words, "--seed", 1)
        assert other["value"] != first["value"]
        assert abs(other["value"] - first["value"]) < 6 * math.hypot(first["standard_error"], other["standard_error"])


def test_probes_measure_how_far_the_estimate_is_from_the_exact_value(tmp_path, images, capsys):
    words = [images, "--data", "cifar10-sample", "--limit", 48]
    exact = run_eval(tmp_path, *words, "--exact")
    assert exact["estimator_error"] == 0 and exact["logdet_rule"] == "exact" and exact["unit"] == "bits/dim"
    capsys.readouterr()
    noisy = run_eval(tmp_path, *words, "--probes", 4)
    assert "4 probes per sample; one alone scatters by" in capsys.readouterr().out
    assert noisy["log_pz"] == pytest.approx(exact["log_pz"], rel=1e-6)
    assert 0 < noisy["estimator_error"] < noisy["standard_error"]
    assert noisy["value"] != exact["value"]
    assert abs(noisy["value"] - exact["value"]) < 5 * noisy["estimator_error"]
    bits = -(exact["log_pz"] + exact["logdet"]) / (192 * math.log(2)) + 8
    assert exact["value"] == pytest.approx(bits, abs=1e-6)


def test_one_probe_says_that_its_noise_was_not_measured(tmp_path, images, capsys):
    figures = run_eval(tmp_path, images, "--data", "cifar10-sample", "--limit", 8)
    assert figures["estimator_noise"] is None and figures["estimator_error"] is None
    assert "--probes 4 would measure it" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_number(images, workers):
    flow = open_model(images).flow
    split = matching(Split("cifar10-sample", "train", seed=3, limit=150), flow.shape)
    alone = add(partial_sums(flow, split.batches(), 3, passes=2))
    parts = [part for rank in range(workers) for part in partial_sums(flow, split.batches(rank, workers), 3, passes=2)]
    assert torch.allclose(add(parts), alone, rtol=1e-6)
    assert score(alone, True).samples == 150
    assert add(parts).tolist() == add(parts[::-1]).tolist()


def test_evaluate_joins_ranks_by_its_reduce(moons):
    flow = open_model(moons).flow
    split = Split("moons", limit=900)
    whole = evaluate(flow, split.batches())
    second = add(partial_sums(flow, split.batches(1, 2), 0))
    joined = evaluate(flow, split.batches(0, 2), reduce=lambda total: total + second)
    assert joined.samples == whole.samples == 900
    assert joined.value == pytest.approx(whole.value, rel=1e-6)
    assert joined.standard_error == pytest.approx(whole.standard_error, rel=1e-5)


def test_a_run_keeps_the_figures_of_its_whole_test(tmp_path):
    run = moons_run(tmp_path)
    assert find_run(run / "best.safetensors") == run
    assert main(["eval", str(run), "--limit", "500"]) == 0
    assert not (run / "eval.json").exists()
    assert main(["eval", str(run / "best.safetensors")]) == 0
    assert json.loads((run / "eval.json").read_text())["samples"] == 100_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["IMAGES"], "does not say what it was trained on; add --data"),
        (["IMAGES", "--data", "moons"], "moons has size 2, the flow takes 3x8x8"),
        (["IMAGES", "--data", "mnist-sample"], "mnist-sample has size 1x28x28, the flow takes 3x8x8"),
        (["MOONS", "--data", "nonsense"], "no shards at"),
        (["MOONS", "--probes", "0"], "--probes 0: expected at least 1"),
        (["MOONS", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["nothing-here"], "no file or folder nothing-here"),
    ],
)
def test_mistakes_end_with_one_line(words, message, moons, images, capsys):
    words = [{"IMAGES": str(images), "MOONS": str(moons)}.get(word, word) for word in words]
    assert main(["eval", *words]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("idn: error: ") and message in err
