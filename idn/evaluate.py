"""`idn eval MODEL`: how likely a flow finds data, with standard error and the estimator's share of it."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from idn.data import toy
from idn.errors import UserError
from idn.files import write_json
from idn.flows.draws import Draws
from idn.flows.flow import Flow
from idn.models import Model, open_model
from idn.splits import Scored, Split, matching
from idn.streams import stream

TOY_TEST_POINTS = 100_000
SHARED_LENGTHS = 64
"""Neighbours in the split that share roulette lengths, whatever batch they come in."""


@dataclass(frozen=True)
class Score:
    """Bits per dimension of images, nats of points; lower is better."""

    value: float
    standard_error: float
    """Of the mean: the spread of samples and of the log-det's estimator together."""
    log_pz: float
    logdet: float
    """Mean ln p(z) and log-det in nats: their sum is ln p(x)."""
    samples: int
    estimator_noise: float | None
    """Standard deviation that one pass's probes and roulette give one sample's value; None if not measured."""


def bits_or_nats(flow: Flow, log_prob: Tensor) -> Tensor:
    """The number people compare: bits per dimension for 8-bit images, nats for anything else."""
    if flow.config.logit_alpha is None:
        return -log_prob
    return -log_prob / (flow.dims * math.log(2)) + 8


def is_exact(flow: Flow, exact: bool) -> bool:
    return exact or flow.config.eval_logdet.rule in ("exact", "trace")


def evaluate(
    flow: Flow, batches: Iterable[Scored], seed: int = 0, reduce: Callable[[Tensor], Tensor] = lambda total: total
) -> Score:
    """Scores all batches of all ranks; `reduce` sums a tensor over ranks."""
    totals = add(partial_sums(flow, batches, seed))
    return score(reduce(totals), noise_known=is_exact(flow, False))


@torch.no_grad()
def partial_sums(
    flow: Flow, batches: Iterable[Scored], seed: int, passes: int = 1, exact: bool = False
) -> Iterator[Tensor]:
    """Per batch the sums that `score` needs: values, their squares, estimator's variances, log p(z), log-det, count."""
    certain = is_exact(flow, exact)
    for batch in batches:
        for x, places in [batch] if certain else neighbours(batch):
            if not places:
                continue
            runs = []
            for number in range(1 if certain else passes):
                draws = Draws.seeded(seed) if certain else keyed_draws(seed, number, places)
                z, logdet = flow.encode(x.to(flow.device), exact, draws)
                runs.append(logdet.double())
            log_pz = -0.5 * (z.double().square().sum(1) + flow.dims * math.log(2 * math.pi))
            values = torch.stack([bits_or_nats(flow, log_pz + logdet) for logdet in runs])
            mean, logdet = values.mean(0), torch.stack(runs).mean(0)
            noise = values.var(0) if len(runs) > 1 else torch.zeros_like(mean)
            sums = [part.sum() for part in (mean, mean.square(), noise, log_pz, logdet)]
            yield torch.tensor([*map(float, sums), len(places)], dtype=torch.float64)


def neighbours(batch: Scored) -> Iterator[Scored]:
    """The batch cut where lengths change, so that any number of workers gives every sample the same ones."""
    groups: dict[int, list[int]] = {}
    for row, place in enumerate(batch.places):
        groups.setdefault(place // SHARED_LENGTHS, []).append(row)
    for rows in groups.values():
        yield Scored(batch.x[rows], [batch.places[row] for row in rows])


def keyed_draws(seed: int, number: int, places: list[int]) -> Draws:
    """The randomness of pass `number` over neighbours."""
    lengths = stream(seed, "evaluation lengths", number, places[0] // SHARED_LENGTHS)
    return Draws(lengths, [stream(seed, "evaluation", number, place) for place in places])


def add(sums: Iterable[Tensor]) -> Tensor:
    """The sum, rounded once: the order in which workers answer does not matter."""
    columns = zip(*(part.tolist() for part in sums), strict=True)
    return torch.tensor([math.fsum(column) for column in columns] or [0.0] * 6, dtype=torch.float64)


def score(totals: Tensor, noise_known: bool) -> Score:
    """Means and errors from sums over all samples."""
    value, squares, noise, log_pz, logdet, count = totals.tolist()
    if not count:
        return Score(math.nan, math.nan, math.nan, math.nan, 0, None)
    mean = value / count
    variance = max(squares / count - mean**2, 0.0) * count / max(count - 1, 1)
    deviation = math.sqrt(noise / count) if noise_known else None
    return Score(mean, math.sqrt(variance / count), log_pz / count, logdet / count, int(count), deviation)


def eval_command(
    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="a run's folder or a flow's file")],
    data: Annotated[str | None, tyro.conf.arg(help="what to evaluate on (default: what it was trained on)")] = None,
    split: Annotated[str, tyro.conf.arg(help="train, validation or test")] = "test",
    exact: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="log-det from whole Jacobians: no noise, but slow")
    ] = False,
    probes: Annotated[int, tyro.conf.arg(help="log-dets per sample; 2 or more measure the estimator's noise")] = 1,
    limit: Annotated[int | None, tyro.conf.arg(help="only the first so many samples (100,000 toy points)")] = None,
    seed: Annotated[int | None, tyro.conf.arg(help="seed of noise, probes and toy points (default: the run's)")] = None,
    raw: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="raw weights, not averaged ones")] = False,
    workers: Annotated[int, tyro.conf.arg(help="Ray workers to share the samples; 0: this process alone")] = 0,
    address: Annotated[str | None, tyro.conf.arg(help="Ray cluster (default: RAY_ADDRESS, else a private one)")] = None,
    json: Annotated[Path | None, tyro.conf.arg(help="file for the figures (default for a run: its eval.json)")] = None,
) -> None:
    """Bits per dimension (images) or nats (points) of a flow, with standard error.

    The same seed gives the same number, on any number of workers up to roundoff. With --probes 2 or more the table
    says how much of the standard error is the noise of the log-det's estimator.
    """
    for option, value, least in (("--probes", probes, 1), ("--limit", limit or 1, 1), ("--workers", workers, 0)):
        if value < least:
            raise UserError(f"{option} {value}: expected at least {least}")
    if json is not None and not json.parent.is_dir():
        raise UserError(f"cannot write {json}: there is no folder {json.parent}")
    opened, started = open_model(model, raw), time.monotonic()
    part = Split(opened.dataset(data), split, opened.seed(seed), limit)
    if part.is_toy and limit is None:
        part = Split(part.dataset, split, part.seed, TOY_TEST_POINTS)
    part = matching(part, opened.flow.shape)
    with tqdm(total=part.samples, unit="sample", leave=False) as bar:
        totals = all_sums(opened.flow, part, probes, exact, workers, address, bar.update)
    certain = is_exact(opened.flow, exact)
    found = score(totals, noise_known=certain or probes > 1)
    figures = describe(opened, part, found, exact, 1 if certain else probes) | {"seconds": time.monotonic() - started}
    print(table(figures))
    whole_test = opened.run and data is None and split == "test" and limit is None
    target = json or (opened.beside("eval.json") if whole_test else None)
    if target:
        write_json(target, figures)
        print(f"  written to    {target}")


def all_sums(
    flow: Flow,
    split: Split,
    passes: int,
    exact: bool,
    workers: int,
    address: str | None,
    advance: Callable[[int], Any],
) -> Tensor:
    """Totals over the split, here or on a Ray cluster; `advance` hears of every finished batch."""
    if workers:
        from idn.train.evaluate import sums_on_ray

        parts = sums_on_ray(flow, split, passes, exact, workers, address)
    else:
        parts = partial_sums(flow, split.batches(), split.seed, passes, exact)

    def told() -> Iterator[Tensor]:
        for part in parts:
            advance(int(part[-1]))
            yield part

    return add(told())


def describe(model: Model, split: Split, found: Score, exact: bool, passes: int) -> dict[str, Any]:
    """All that eval.json says."""
    rule = model.flow.config.eval_logdet
    is_certain = is_exact(model.flow, exact)
    return {
        "model": model.name,
        "weights": model.weights,
        "parameters": model.flow.parameter_count(),
        "dataset": split.dataset,
        "split": split.name,
        "unit": "nats" if model.flow.config.logit_alpha is None else "bits/dim",
        **asdict(found),
        "logdet_rule": "exact" if exact else rule.rule,
        "probes": passes,
        "estimator_error": None
        if found.estimator_noise is None
        else found.estimator_noise / math.sqrt(passes * found.samples),
        "exact": is_certain,
        "entropy": toy.entropy(split.dataset) if split.is_toy else None,
        "seed": split.seed,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    unit = figures["unit"]
    entropy = figures["entropy"]
    limit = "" if entropy is None else f"   (the data's own entropy: {entropy:.4f})"
    lines = [
        f"{figures['model']}: {figures['weights']} weights, {figures['parameters']:,} parameters",
        f"{figures['dataset']} {figures['split']}, {figures['samples']:,} samples, seed {figures['seed']}",
        f"  {unit:<13} {figures['value']:.4f} +- {figures['standard_error']:.4f}{limit}",
        f"  log p(z)      {figures['log_pz']:.4f} nats per sample",
        f"  log-det       {figures['logdet']:.4f} nats per sample",
        f"  estimator     {noise_text(figures)}",
    ]
    return "\n".join(lines)


def noise_text(figures: dict[str, Any]) -> str:
    """How much of the standard error the log-det's estimator has to answer for."""
    if figures["exact"]:
        return f"{figures['logdet_rule']} log-det: no noise"
    noise, unit = figures["estimator_noise"], figures["unit"]
    if noise is None:
        return "one probe per sample, its noise is part of the +-; --probes 4 would measure it"
    return (
        f"{figures['probes']} probes per sample; one alone scatters by {noise:.2g} {unit} per sample, "
        f"all together by {figures['estimator_error']:.2g} in the mean (part of the +-)"
    )
