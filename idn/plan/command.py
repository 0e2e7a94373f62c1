"""`idn plan`: what a run would take on hardware that may not be here."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from idn.errors import UserError
from idn.files import write_bytes, write_json
from idn.flows.cost import Cost, flow_cost
from idn.flows.flow import Flow
from idn.plan.hardware import Hardware, find
from idn.plan.model import communicated, largest_batch, memory, step_time
from idn.plan.stragglers import Slowdown, slowdowns
from idn.train.config import Precision, TrainConfig, check_batch
from idn.train.dryrun import epoch_steps
from idn.train.estimate import kernel_bytes
from idn.train.feed import is_toy
from idn.train.presets import preset
from idn.train.session import total_steps

STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class Row:
    """One ZeRO stage."""

    zero: int
    gigabytes: float
    fits: bool
    sent_megabytes: float
    step_seconds: float
    efficiency: float
    hours: float
    dollars: float
    largest_batch: int


def plan(
    dataset: tyro.conf.Positional[str],
    model: Annotated[str, tyro.conf.arg(metavar="{residual,idensenet,idensenet-lc}")] = "idensenet-lc",
    size: Annotated[str, tyro.conf.arg(metavar="{tiny,paper,full}")] = "paper",
    hardware: str = "a100",
    workers: int = 8,
    batch: int | None = None,
    precision: Precision = "bf16",
    recompute: bool = False,
    price: float | None = None,
    plot: Path | None = None,
    json: Path | None = None,
) -> None:
    """Plan a run: arithmetic, memory, communication, time and money, for every ZeRO stage.

    Args:
        dataset: Whose preset to plan.
        model: Which flow.
        size: tiny, paper or full.
        hardware: a100, h100, or here: this machine, measured for half a minute, one thread per worker.
        workers: Number of workers, one device each.
        batch: Global batch instead of the preset's.
        precision: Arithmetic of the convolutions.
        recompute: Recompute activations in the backward pass.
        price: Dollars per device and hour instead of a rough list price.
        plot: File for a picture of what per-rank roulette draws would cost, 1 to 1,024 ranks.
        json: File for all figures.
    """
    if workers < 1:
        raise UserError(f"--workers {workers}: expected at least 1")
    config = configured(dataset, model, size, batch, precision, recompute)
    check_batch(config, workers)
    machine = find(hardware, config, workers)
    if price is not None:
        machine = dataclasses.replace(machine, dollars=price)
    cost = flow_cost(Flow(config.flow, converge=False), kernel_bytes(config.engine, machine.device))
    steps = total_steps(config, None if is_toy(config) else epoch_steps(config))
    rows = [make_row(config, cost, machine, workers, zero, steps) for zero in STAGES]
    waits = slowdowns(cost)
    print(describe(config, cost, machine, workers, steps, rows, waits))
    if plot is not None:
        write_bytes(plot, draw(waits, config.name))
    if json is not None:
        write_json(json, report(config, cost, machine, workers, steps, rows, waits))


def configured(
    dataset: str, model: str, size: str, batch: int | None, precision: Precision, recompute: bool
) -> TrainConfig:
    """The preset with the plan's own options."""
    base = preset(dataset, model, size)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, batch=batch or base.data.batch),
        engine=dataclasses.replace(base.engine, precision=precision, recompute=recompute),
    )


def make_row(
    config: TrainConfig, cost: Cost, machine: Hardware, workers: int, zero: Literal[0, 1, 2, 3], steps: int
) -> Row:
    """Figures of one ZeRO stage."""
    staged = dataclasses.replace(config, engine=dataclasses.replace(config.engine, zero=zero))
    needed = memory(staged, cost, workers, zero).total
    most = largest_batch(staged, cost, machine, workers, zero)
    seconds = step_time(staged, cost, machine, workers).total
    alone = step_time(staged, cost, machine, 1).total
    hours = seconds * steps / 3600
    return Row(
        zero=zero,
        gigabytes=needed / 1e9,
        fits=config.data.batch <= most,
        sent_megabytes=communicated(cost, workers, zero) / 1e6,
        step_seconds=seconds,
        efficiency=alone / (workers * seconds),
        hours=hours,
        dollars=hours * workers * machine.dollars,
        largest_batch=most,
    )


def describe(
    config: TrainConfig,
    cost: Cost,
    machine: Hardware,
    workers: int,
    steps: int,
    rows: list[Row],
    waits: list[Slowdown],
) -> str:
    """The plan as text."""
    flops = cost.training_flops(config.engine.recompute)
    parts = step_time(config, cost, machine, workers)
    shares = {name: seconds / parts.total for name, seconds in vars(parts).items() if seconds > 0}
    lines = [
        f"{config.name}: {cost.parameters:,} parameters, {steps:,} steps of {config.data.batch} samples, "
        f"{config.engine.precision}, {workers} x {machine.name}",
        f"FLOPs per step: {flops * config.data.batch:.4g} ({flops:.4g} per sample, expected over the roulette)",
        "",
        "ZeRO  memory GB  sent MB/step  step s   efficiency  hours    dollars  largest batch",
    ]
    for row in rows:
        lines.append(
            f"{row.zero:<4}  {row.gigabytes:9.2f}  {row.sent_megabytes:12.1f}  {row.step_seconds:<7.4f}  "
            f"{row.efficiency:10.0%}  {row.hours:<7.1f}  {row.dollars:7.0f}  {row.largest_batch:13,}"
            + ("" if row.fits else "  DOES NOT FIT")
        )
    lines += ["", "a step at ZeRO 0: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())]
    chosen = next((wait for wait in waits if wait.ranks >= workers), waits[-1])
    lines.append(
        f"roulette lengths are shared by all ranks; with draws of their own {chosen.ranks} ranks would take "
        f"{chosen.per_step:.2f} times as long (ZeRO 3: {chosen.per_block:.2f})"
    )
    return "\n".join(lines)


def report(
    config: TrainConfig,
    cost: Cost,
    machine: Hardware,
    workers: int,
    steps: int,
    rows: list[Row],
    waits: list[Slowdown],
) -> dict[str, Any]:
    """All figures, ready for JSON."""
    return {
        "run": config.name,
        "hardware": dataclasses.asdict(machine),
        "workers": workers,
        "batch": config.data.batch,
        "steps": steps,
        "flops_per_sample": cost.training_flops(config.engine.recompute),
        "stages": [dataclasses.asdict(row) for row in rows],
        "stragglers": [dataclasses.asdict(wait) for wait in waits],
    }


def draw(waits: list[Slowdown], title: str) -> bytes:
    """Slowdown over the number of ranks."""
    from idn.plots import finish, png, pyplot_module

    figure, axes = pyplot_module().subplots(figsize=(6, 4))
    ranks = [wait.ranks for wait in waits]
    axes.plot(ranks, [wait.per_block for wait in waits], "s-", label="own draws, waiting at every block (ZeRO 3)")
    axes.plot(ranks, [wait.per_step for wait in waits], "o-", label="own draws, waiting once per step")
    axes.plot(ranks, [1.0] * len(ranks), "-", label="shared draws")
    axes.set(xscale="log", xlabel="ranks", ylabel="time of a step", title=title)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks], fontsize=8)
    axes.legend()
    return png(finish(figure))
