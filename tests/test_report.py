"""`idn collect` and `idn report`: every number traceable, cells not run said so, the page alone in a real browser."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from idn.cli import main
from idn.report.paper import DATASETS, TABLE_1
from idn.report.results import read_result, read_results
from idn.report.tables import Cell, orders, table_1
from idn.train.commands import parse
from idn.train.config import TrainConfig
from idn.train.presets import preset
from idn.train.words import command, variant
from tests.browser import HOW_TO_INSTALL, facts_about, find_chromium, printed_pages
from tests.trained import moons_run

in_browser = pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run, evaluated and drawn."""
    folder = moons_run(tmp_path_factory.mktemp("runs"))
    assert main(["eval", str(folder)]) == 0
    assert main(["plot", str(folder)]) == 0
    assert main(["sample", str(folder)]) == 0
    return folder


def copy_of(run: Path, folder: Path, config: TrainConfig, value: float | None) -> None:
    """The real run's files under another config: what other cells of the table look like on disk."""
    target = folder / config.name
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config.to_dict()))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    if value is None:
        lines = [line for line in lines if json.loads(line)["kind"] != "finish"][:50]
    else:
        figures = json.loads((run / "eval.json").read_text()) | {"value": value}
        (target / "eval.json").write_text(json.dumps(figures))
    (target / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def with_options(config: TrainConfig, name: str, seed: int = 0, **optimiser: float) -> TrainConfig:
    saving = replace(config.saving, name=name)
    return replace(config, saving=saving, seed=seed, optimiser=replace(config.optimiser, **optimiser))


@pytest.fixture(scope="module")
def results(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("all") / "results"
    assert main(["collect", str(run), "--out", str(folder)]) == 0
    copy_of(run, folder, preset("circles", "idensenet-lc"), 3.284)
    copy_of(run, folder, preset("circles", "idensenet"), 3.33)
    copy_of(run, folder, preset("circles", "residual"), 3.4449)
    copy_of(run, folder, preset("moons", "residual"), None)
    copy_of(run, folder, with_options(preset("moons", "residual"), "moons-slow", lr=0.0005), 2.51)
    for seed, value in ((0, 4.0), (1, 4.1)):
        for extra, model in enumerate(("idensenet", "residual", "idensenet-lc")):
            config = with_options(preset("cifar10", model, "tiny"), f"cifar10-{model}-{seed}", seed)
            copy_of(run, folder, config, value + 0.5 * extra)
    assert main(["report", str(folder)]) == 0
    return folder


def table_after(page: str, heading: str) -> list[list[str]]:
    lines = page.split(f"## {heading}\n")[1].strip().split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    "words",
    [
        "moons",
        "cifar10 --model residual --size full --precision bf16 --zero 2 --workers 8",
        "checkerboard --flow.actnorm --flow.coeff 0.97 --ema 0.999 --betas 0.8 0.9 --flow.activation clipswish",
        "mnist --size tiny --no-flip --seed 3 --steps 1500 --batch 64 --name second --flow.blocks 1 2 1",
        "cifar10 --no-flip --epochs 3 --split train+validation --flow.no-actnorm --deterministic",
        "moons --flow.train-logdet.rule series --flow.train-logdet.terms 5 --flow.eval-logdet.rule trace",
    ],
)
def test_a_config_turns_into_the_command_that_makes_it(words):
    config = parsed(words)
    assert parsed(command(config).removeprefix("idn train ")) == config


def parsed(words: str) -> TrainConfig:
    return parse(words.split())[0]


def test_variants_leave_out_what_is_only_chance_or_place():
    config = parsed("moons --seed 4 --name x --runs /tmp --workers 1 --log-every 7 --deterministic")
    assert variant(config) == ""
    assert "/tmp" not in command(config) and "--seed 4" in command(config)
    other = parsed("moons --lr 0.01 --flow.actnorm --seed 4 --precision bf16")
    assert set(variant(other).split("--")) == {"", "lr 0.01 ", "flow.actnorm ", "precision bf16"}


def test_collect_keeps_what_is_small_and_no_paths(run, results):
    kept = results / run.name
    names = {path.name for path in kept.iterdir()}
    assert {"config.json", "metrics.jsonl", "eval.json", "command.txt", "flow.safetensors"} <= names
    assert {"density.png", "curves.png", "eta1.png", "eta2.png", "norms.png", "samples.png"} <= names
    assert (kept / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert json.loads((kept / "config.json").read_text())["saving"]["runs"] is None
    command_line = (kept / "command.txt").read_text().split()
    assert command_line[:3] == ["idn", "train", "moons"] and "2500" in command_line
    assert main(["eval", str(kept), "--limit", "100"]) == 0


def test_collect_again_brings_a_run_up_to_date(run, tmp_path):
    changed = tmp_path / "runs" / run.name
    shutil.copytree(run, changed)
    out = tmp_path / "results"
    assert main(["collect", str(changed), "--out", str(out)]) == 0
    (changed / "samples.png").unlink()
    figures = json.loads((run / "eval.json").read_text()) | {"value": 1.0}
    (changed / "eval.json").write_text(json.dumps(figures))
    assert main(["collect", str(changed), "--out", str(out)]) == 0
    assert not (out / run.name / "samples.png").exists()
    assert read_result(out / run.name).value == 1.0


def test_table_1_has_the_paper_and_ours(results):
    head, _, *rows = table_after((results / "report.md").read_text(), "Table 1")
    assert head == ["model", "numbers of", *DATASETS.values()]
    by_label = {(row[0], row[1]): row[2:] for row in rows}
    paper = [f"{value:.2f}" for value in TABLE_1["residual"].values()]
    assert by_label["Residual Flow", "paper"] == paper == ["3.44", "3.81", "2.60", "1.08", "3.42"]
    ours = by_label["Residual Flow", "ours, paper's settings"]
    # 3.4449 is 3.44 at the paper's decimals: as good as the paper's.
    assert re.fullmatch(r"\*\*3\.445\s±\s0\.\d{3}\*\*", ours[0])
    assert ours[1] == "not run" and ours[2].startswith("at step ") and ours[3:] == ["not run", "not run"]
    assert by_label["Residual Flow", "ours, `--lr 0.0005`"][2].startswith("**2.510")
    assert by_label["i-DenseNet", "ours, paper's settings"][0].startswith("3.330")
    assert by_label["i-DenseNet+LC", "ours, paper's settings"][0].startswith("**3.284")
    assert by_label["the data's entropy", "nobody can go lower"] == [
        "3.268",
        "3.466",
        "2.394",
        "unknown",
        "unknown",
    ]


def test_low_precision_stands_in_where_nothing_else_was_run(run, tmp_path):
    for model, value in (("idensenet", 3.612), ("residual", 3.9)):
        config = preset("checkerboard", model)
        low = replace(config, engine=replace(config.engine, precision="bf16"))
        copy_of(run, tmp_path, with_options(low, f"{model}-bf16"), value)
    copy_of(run, tmp_path, preset("checkerboard", "residual"), 3.95)
    rows = {(row[0], row[1]): row[3] for row in table_1(read_results(tmp_path)).rows}
    assert re.fullmatch(r"\*\*3\.612\s±\s0\.\d{3}\*\* \(bf16\)", rows["i-DenseNet", "ours, paper's settings"])
    assert re.fullmatch(r"3\.950\s±\s0\.\d{3}", rows["Residual Flow", "ours, paper's settings"])


def test_seeds_are_averaged_and_the_order_is_judged(results):
    page = (results / "report.md").read_text()
    _, _, *rows = table_after(page, "Small models at an equal number of parameters")
    cells = {(row[0], row[1]): row[-1] for row in rows}
    assert re.fullmatch(r"4\.050\s±\s0\.071 \(2 seeds\)", cells["i-DenseNet", ""])
    assert (
        "2 circles, size paper: i-DenseNet+LC 3.284 < i-DenseNet 3.330 < Residual Flow 3.445: **the paper's order**"
        in page
    )
    assert "i-DenseNet 4.050 < Residual Flow 4.550 < i-DenseNet+LC 5.050: **not the paper's order**" in page
    assert orders([]) == [] and Cell([]).text() == "not run"


def test_every_run_has_its_command_and_source(results):
    page = (results / "report.md").read_text()
    for config in results.glob("*/config.json"):
        result = read_result(config.parent)
        section = page.split(f"### {result.name}\n")[1].split("\n### ")[0]
        assert f"```sh\n{result.command}\n```" in section
        assert f"`{result.name}/eval.json`" in section or "not evaluated: step" in section
    for target in re.findall(r"\]\(([^)]+\.png)\)", page):
        assert (results / target).is_file()


def test_costs_are_those_of_the_paper_s_models(results):
    _, _, *rows = table_after((results / "report.md").read_text(), "What each cell costs")
    counts = {(row[0], row[1]): int(row[2].replace(",", "")) for row in rows}
    # The published counts include two numbers of the roulette per block.
    assert counts["CIFAR10", "Residual Flow"] == 8_730_441 - 2 * 16
    assert counts["2 moons", "i-DenseNet+LC"] == 504_200 - 2 * 10
    assert len(rows) == 15 and all(re.fullmatch(r"`just cell \S+ \S+`", row[-1]) for row in rows)


def test_the_report_is_the_same_again(results):
    before = [(results / name).read_bytes() for name in ("report.md", "report.html")]
    assert main(["report", str(results)]) == 0
    assert before == [(results / name).read_bytes() for name in ("report.md", "report.html")]


def test_the_page_stands_alone(results):
    page = (results / "report.html").read_text()
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    sources = re.findall(r'src="([^"]{30})', page)
    assert len(sources) >= 6 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert str(Path.cwd()) not in page and str(results) not in page


@in_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_reads_well_in_a_browser(results, tmp_path, width):
    alone = tmp_path / "report.html"
    shutil.copy(results / "report.html", alone)
    facts = facts_about(alone, tmp_path, width)
    assert facts["width"] <= width, "nothing but tables may scroll sideways"
    assert facts["fetched"] == [] and facts["hidden"] == []
    assert len(facts["images"]) >= 6
    assert all(natural > 300 and right <= width for natural, right in facts["images"])
    assert facts["smallest"] >= 10
    assert facts["headings"][1] == "Table 1" and "circles-paper-residual" in facts["headings"]
    assert facts["cells"][0] == ["model", "numbers of", *DATASETS.values()]
    assert facts["cells"][1] == ["Residual Flow", "paper", "3.44", "3.81", "2.60", "1.08", "3.42"]
    assert "not run" in facts["cells"][2]


@in_browser
def test_the_page_prints(results, tmp_path):
    assert 3 <= printed_pages(results / "report.html", tmp_path) <= 20


def test_mistakes_end_with_one_line(results, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "run").mkdir(parents=True)
    (tmp_path / "odd" / "run" / "config.json").write_text("{}")
    shutil.copytree(results / "circles-paper-residual", tmp_path / "part" / "run")
    (tmp_path / "part" / "run" / "eval.json").write_text('{"value": 3.4}')
    cases = {
        ("report", str(tmp_path / "part")): "is not what `idn eval` writes: 'standard_error'",
        ("report", str(tmp_path / "nowhere")): "no folder",
        ("report", str(tmp_path / "empty")): "no runs in",
        ("report", str(tmp_path / "odd")): "is not a run's config",
        ("collect", str(tmp_path / "empty")): "config.json cannot be read",
        ("collect", str(results / "circles-paper-residual"), "--out", str(results)): "is already in",
    }
    for words, message in cases.items():
        assert main(list(words)) == 2
        err = capsys.readouterr().err.strip().splitlines()
        assert len(err) == 1 and err[0].startswith("idn: error: ") and message in err[0], err


def test_pictures_in_the_page_are_the_run_s(results):
    from idn.report.html import WIDEST, embedded

    _, width, height = embedded(results / "moons-tiny-idensenet-lc" / "density.png")
    original = Image.open(results / "moons-tiny-idensenet-lc" / "density.png")
    assert width == WIDEST < original.width
    assert height / width == pytest.approx(original.height / original.width, abs=0.01)
