"""The page as a list of parts: what it says, in which order."""

from collections.abc import Collection, Sequence
from pathlib import Path

from idn.flows.build import MODELS
from idn.models import MODEL_TITLES
from idn.report.paper import DATASETS
from idn.report.parts import Bullets, Code, Figure, Gallery, Heading, Part, Table, Text, literal
from idn.report.results import Result
from idn.report.tables import cell, cost_table, orders, place, scaled, size_table, table_1

TITLE = "Invertible DenseNets: the paper's table, run again"
SIZES = {
    "full": "Full size: 16-16-16 blocks (toy data: 100)",
    "tiny": "Small models at an equal number of parameters",
}
CAPTIONS = {
    "density": "samples of the data, the flow's density, samples of the flow",
    "curves": "learning curves",
    "samples": "samples",
    "reconstructions": "data and its reconstruction by the inverse",
    "interpolations": "walks in the latent space",
    "eta1": "share of the input in each concatenation (Appendix C)",
    "eta2": "share of the transformed signal (Appendix C)",
    "norms": "norm of every layer under its bound",
}
FORMATS = ("density", "samples", "curves", "reconstructions", "interpolations", "eta1", "eta2", "norms")


def build_page(results: Sequence[Result]) -> list[Part]:
    """Tables first, then pictures, then every run with its command."""
    parts: list[Part] = [Heading(TITLE, 1), Text(introduction(results)), Heading("Table 1"), table_1(results)]
    if verdicts := orders([run for run in results if run.config.size == "paper"]):
        parts += [Text("Does the order of the models hold?"), Bullets(verdicts)]
    for size, title in SIZES.items():
        if table := size_table(results, size):
            parts += [Heading(title), table]
            if verdicts := orders([run for run in results if run.config.size == size]):
                parts += [Bullets(verdicts)]
    figures = densities(results)
    if figures:
        parts += [Heading("Densities (the paper's Figure 2)"), Gallery(figures)]
    shown = {figure.path for figure in figures}
    parts += [Heading("What each cell costs"), cost_table()]
    if results:
        parts += [Heading("Runs"), runs_table(results)]
        for run in sorted(
            results, key=lambda run: (place(run), run.config.size, MODELS.index(run.config.model), run.name)
        ):
            parts += run_parts(run, shown)
    return parts


def introduction(results: Sequence[Result]) -> str:
    done = sum(run.value is not None for run in results)
    filled = sum(bool(cell(results, name, model, "paper", "").runs) for name in DATASETS for model in MODELS)
    count = "1 evaluated run" if done == 1 else f"{done} evaluated runs"
    return (
        f"{count}; {filled} of {len(DATASETS) * len(MODELS)} cells of Table 1 under the paper's own "
        "settings. Every number is a test figure of a run below, whose settings and metrics lie beside this page; "
        "`idn report` makes the page again from them. Cells that nobody has run say so."
    )


def densities(results: Sequence[Result]) -> list[Figure]:
    """One picture per dataset and model: the best run's."""
    figures = []
    for dataset in DATASETS:
        for model in MODELS:
            runs = [run for run in results if (run.config.dataset, run.config.model) == (dataset, model)]
            runs = [run for run in runs if "density" in run.pictures and run.value is not None]
            if runs:
                best = min(runs, key=lambda run: run.value or 0.0)
                title = f"{DATASETS[dataset]}, {MODEL_TITLES[model]}: {best.value:.3f} nats ({best.name})"
                figures.append(Figure(best.pictures["density"], title))
    return figures


def runs_table(results: Sequence[Result]) -> Table:
    rows = []
    for run in sorted(results, key=lambda run: run.name):
        test = run.test
        rows.append(
            [
                run.name,
                f"{test['value']:.4f} ± {test['standard_error']:.4f} {run.unit}" if test else "no test yet",
                f"{test['samples']:,}" if test else "",
                f"{run.step:,}",
                f"{run.parameters:,}" if run.parameters else "unknown",
                duration(run.hours),
                f"{run.rate:,.0f}/s" if run.rate else "",
                scaled(run.flops, "FLOP") if run.flops else "",
            ]
        )
    head = ["run", "test", "test samples", "steps", "parameters", "training time", "samples", "arithmetic"]
    return Table(head, rows, "All runs. Training time is that of the optimiser's steps.")


def run_parts(run: Result, shown: Collection[Path]) -> list[Part]:
    """A run's heading, figures, command, and the pictures not yet shown."""
    config = run.config
    dataset, model = DATASETS.get(config.dataset, config.dataset), MODEL_TITLES[config.model]
    lines = [f"{dataset}, {model}, size {config.size}, seed {config.seed}"]
    if test := run.test:
        weights = f", {test['weights']} weights" if "weights" in test else ""
        lines.append(
            f"test {test['value']:.4f} ± {test['standard_error']:.4f} {run.unit}: log p(z) {test['log_pz']:.3f}, "
            f"log-det {test['logdet']:.3f} nats per sample{weights} ({literal(f'{run.name}/{run.source}')})"
        )
    else:
        lines.append(f"not evaluated: step {run.step:,}" + (f" of {run.steps:,}" if run.steps else ""))
    if run.variant:
        lines.append(f"other than the preset: {literal(run.variant)}")
    names = [name for name in FORMATS if name in run.pictures]
    names += [name for name in run.pictures if name not in FORMATS]
    new = [name for name in names if run.pictures[name] not in shown]
    figures = [Figure(run.pictures[name], f"{run.name}: {CAPTIONS.get(name, name)}") for name in new]
    parts: list[Part] = [Heading(run.name, 3), Bullets(lines), Code(run.command)]
    return [*parts, Gallery(figures)] if figures else parts


def duration(hours: float) -> str:
    """
    >>> duration(0.01), duration(0.5), duration(30.25)
    ('36 s', '30 min', '30 h 15 min')
    """
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    minutes = round(hours * 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
