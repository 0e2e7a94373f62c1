"""The tables of the page: the paper's Table 1 with ours in it, other sizes, and what every cell costs."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from idn.data import toy
from idn.flows.build import MODELS
from idn.flows.cost import Cost, flow_cost
from idn.flows.flow import Flow
from idn.models import MODEL_TITLES
from idn.report.paper import DATASETS, ORDER, TABLE_1
from idn.report.parts import Table, literal
from idn.report.results import Result
from idn.train.config import TrainConfig
from idn.train.presets import preset

NOT_RUN = "not run"
LOW = "--precision bf16"
"""Not a setting of the paper: such runs stand for those with its settings where there are no others, and say so."""
TRAIN_IMAGES = {"mnist": 60_000, "cifar10": 50_000}
HELD_OUT = 0.1
"""Share of them that the split named train leaves for validation."""


@dataclass(frozen=True)
class Cell:
    """Runs that differ in nothing but chance."""

    runs: list[Result]

    @property
    def values(self) -> list[float]:
        return [run.value for run in self.runs if run.value is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float:
        """Between seeds where there are several, else the standard error of the one test."""
        if len(self.values) > 1:
            return statistics.stdev(self.values)
        tests = [float(run.test["standard_error"]) for run in self.runs if run.test]
        return tests[0] if tests else 0.0

    @property
    def is_low(self) -> bool:
        return any(run.variant == LOW for run in self.runs)

    def text(self, goal: float | None = None) -> str:
        """The number, bold if it is at or below `goal`; for a run under way, how far it is."""
        if self.mean is None:
            if not self.runs:
                return NOT_RUN
            furthest = max(self.runs, key=lambda run: run.step)
            return f"at step {furthest.step:,}" + (f" of {furthest.steps:,}" if furthest.steps else "")
        number = f"{self.mean:.3f}\u00a0±\u00a0{self.spread:.3f}"
        seeds = f" ({len(self.values)} seeds)" if len(self.values) > 1 else ""
        seeds += " (bf16)" if self.is_low else ""
        # Compared at the two decimals that the paper prints.
        return (f"**{number}**" if goal is not None and round(self.mean, 2) <= goal else number) + seeds


def cell(results: Sequence[Result], dataset: str, model: str, size: str, variant: str) -> Cell:
    own = [run for run in results if identity(run) == (dataset, model, size)]
    exact = [run for run in own if run.variant == variant]
    return Cell(exact if exact or variant else [run for run in own if run.variant == LOW])


def identity(run: Result) -> tuple[str, str, str]:
    return run.config.dataset, run.config.model, run.config.size


def variants(results: Sequence[Result], model: str, size: str, datasets: Sequence[str]) -> list[str]:
    """Settings other than the preset's that were tried, in alphabetical order."""
    found = {
        run.variant
        for run in results
        if run.config.model == model and run.config.size == size and run.config.dataset in datasets
    }
    return sorted(found - {"", LOW})


def table_1(results: Sequence[Result]) -> Table:
    """The paper's numbers, ours under its settings, and ours under other settings."""
    rows = []
    for model in MODELS:
        title = MODEL_TITLES[model]
        rows.append([title, "paper", *(f"{TABLE_1[model][name]:.2f}" for name in DATASETS)])
        for variant in ["", *variants(results, model, "paper", list(DATASETS))]:
            label = "ours, paper's settings" if not variant else f"ours, {literal(variant)}"
            cells = [cell(results, name, model, "paper", variant) for name in DATASETS]
            texts = [one.text(TABLE_1[model][name]) for one, name in zip(cells, DATASETS, strict=True)]
            rows.append(
                [
                    title,
                    label,
                    *(text if one.runs or not variant else "" for one, text in zip(cells, texts, strict=True)),
                ]
            )
    entropies = [f"{toy.entropy(name):.3f}" if name in toy.NAMES else "unknown" for name in DATASETS]
    rows.append(["the data's entropy", "nobody can go lower", *entropies])
    caption = (
        "Negative log-likelihood on test data: nats for toy data, bits per dimension for images; lower is better. "
        "± is the standard error of the test, or the standard deviation between seeds. "
        "Bold: at or below the paper's number, at its two decimals. (bf16): products in bf16, all else the same."
    )
    return Table(["model", "numbers of", *DATASETS.values()], rows, caption)


def size_table(results: Sequence[Result], size: str) -> Table | None:
    """All runs of another size than the paper's: no number of the paper stands beside them."""
    own = [run for run in results if run.config.size == size]
    datasets = list(dict.fromkeys(run.config.dataset for run in sorted(own, key=place)))
    if not own:
        return None
    rows = []
    labels = sorted({"" if run.variant == LOW else run.variant for run in own})
    for variant in labels:
        for model in MODELS:
            cells = [cell(own, name, model, size, variant) for name in datasets]
            counts = sorted({run.parameters for one in cells for run in one.runs if run.parameters})
            if any(one.runs for one in cells):
                parameters = " / ".join(f"{count:,}" for count in counts) or "unknown"
                rows.append([MODEL_TITLES[model], literal(variant), parameters, *(one.text() for one in cells)])
    head = ["model", "options beside the preset's", "parameters", *(DATASETS.get(name, name) for name in datasets)]
    caption = f"Size `{size}`. ± is the standard deviation between seeds, or the standard error of the only test."
    return Table(head, rows, caption)


def place(run: Result) -> tuple[int, str]:
    names = list(DATASETS)
    return (names.index(run.config.dataset) if run.config.dataset in names else len(names), run.config.dataset)


def orders(results: Sequence[Result]) -> list[str]:
    """For every dataset and setting under which all three models ran: does the paper's order hold?"""
    lines = []
    settings = sorted({(*place(run), run.config.size, "" if run.variant == LOW else run.variant) for run in results})
    for _, dataset, size, variant in settings:
        cells = {model: cell(results, dataset, model, size, variant) for model in MODELS}
        means = {model: one.mean for model, one in cells.items()}
        if any(mean is None for mean in means.values()):
            continue
        ranked = sorted(MODELS, key=lambda model: means[model] or 0.0)
        text = " < ".join(f"{MODEL_TITLES[model]} {means[model]:.3f}" for model in ranked)
        close = any(
            (means[b] or 0.0) - (means[a] or 0.0) < cells[a].spread + cells[b].spread for a, b in pairwise(ranked)
        )
        verdict = "the paper's order" if in_order(dataset, ranked) else "not the paper's order"
        caution = "; some of the differences are within ±" if close else ""
        options = f", {literal(variant)}" if variant else ""
        lines.append(f"{DATASETS.get(dataset, dataset)}, size {size}{options}: {text}: **{verdict}**{caution}.")
    return lines


def in_order(dataset: str, ranked: Sequence[str]) -> bool:
    """Whether no model stands before one that the paper found better; models that tie there may stand either way.

    >>> in_order("moons", ["idensenet", "idensenet-lc", "residual"]), in_order("mnist", ["idensenet", "idensenet-lc"])
    (True, False)
    """
    paper = {model: TABLE_1[model].get(dataset, float(ORDER.index(model))) for model in MODELS}
    return all(paper[first] <= paper[second] for first, second in pairwise(ranked))


def cost_table() -> Table:
    """What each cell of Table 1 takes, counted from its layers, run or not."""
    rows = []
    for name, title in DATASETS.items():
        for model in MODELS:
            config = preset(name, model, "paper")
            cost = cell_cost(name, model)
            seen = samples_seen(config)
            flops = cost.training_flops(False)
            rows.append(
                [
                    title,
                    MODEL_TITLES[model],
                    f"{cost.parameters:,}",
                    scaled(flops, "FLOP"),
                    f"{seen / 1e6:.1f} M",
                    scaled(flops * seen, "FLOP"),
                    literal(f"just cell {name} {model}"),
                ]
            )
    head = ["dataset", "model", "parameters", "per training sample", "samples", "whole training", "command"]
    return Table(head, rows, "Cost of every cell of Table 1: parameters and arithmetic counted from the layers.")


@lru_cache
def cell_cost(dataset: str, model: str) -> Cost:
    return flow_cost(Flow(preset(dataset, model, "paper").flow, converge=False))


def samples_seen(config: TrainConfig) -> int:
    if config.length.steps is not None:
        return config.length.steps * config.data.batch
    held_out = HELD_OUT if config.data.split == "train" else 0.0
    return config.length.epochs * round(TRAIN_IMAGES[config.dataset] * (1 - held_out))


def scaled(number: float, unit: str) -> str:
    """
    >>> scaled(5.53e10, "FLOP"), scaled(12, "FLOP")
    ('55.3 GFLOP', '12 FLOP')
    """
    for letter, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}"
