"""`idn bench`: how fast the flow is, beside the estimators as the papers write them, in one run."""

import dataclasses
import platform
import statistics
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tqdm import tqdm

from idn.bench.rows import ROWS, Row
from idn.bench.sweep import draw_sweep, sweep
from idn.bench.work import Job, Measured, Worker
from idn.errors import UserError
from idn.files import write_json
from idn.flows.files import load

GIGABYTE = 1e9
TRAINED = ("evaluate", "sample")
"""Work that a trained flow can be measured at."""


@dataclass(frozen=True)
class Result:
    """A row as measured; times in seconds, memory in bytes."""

    name: str
    title: str
    measure: str
    ours: float
    other: float
    ratio: float
    goal: float
    reached: bool
    roofline: float | None
    """Share of the time that the formulation's arithmetic takes at the rate of convolutions alone."""


def bench(
    rows: Annotated[tuple[str, ...], tyro.conf.arg(help="rows to measure; all if none are named")] = (),
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", help="write all figures to this file")] = None,
    plot: Annotated[Path | None, tyro.conf.arg(help="measure a sweep and draw it to this file")] = None,
    threads: Annotated[int, tyro.conf.arg(help="CPU threads of each side")] = 2,
    rounds: Annotated[int | None, tyro.conf.arg(help="repetitions of each row, instead of its own number")] = None,
    clock: Annotated[Literal["wall", "cpu"], tyro.conf.arg(help="cpu: processor time, on a shared machine")] = "wall",
    blocks: Annotated[int | None, tyro.conf.arg(help="blocks per scale of image flows, for a shorter run")] = None,
    flow: Annotated[Path | None, tyro.conf.arg(help="a trained flow to evaluate and to sample from")] = None,
    batch: Annotated[
        int | None, tyro.conf.arg(help="images or points at a time, instead of each row's own number")
    ] = None,
    keep_memory: Annotated[
        bool, tyro.conf.arg(help="the plain side keeps freed memory too, so that only methods are compared")
    ] = False,
) -> None:
    """Measures speed and memory of training, evaluation and sampling against plain automatic differentiation.

    Both sides of a row run in processes of their own and take turns, with the same draws; medians are compared.
    """
    known = [row.name for row in ROWS]
    if unknown := [name for name in rows if name not in known]:
        raise UserError(f"unknown row {unknown[0]!r}; expected some of {', '.join(known)}")
    chosen = [row for row in ROWS if not rows or row.name in rows]
    if flow:
        load(flow)  # says at once what is wrong with the file
        chosen = [
            replace(row, title=f"{row.name}, {flow.resolve().parent.name}") if row.ours.work in TRAINED else row
            for row in chosen
        ]
    if rounds is not None:
        chosen = [replace(row, rounds=rounds) for row in chosen]

    def settled(job: Job) -> Job:
        shorter = {"blocks": (blocks,) * 3} if blocks and job.dataset != "moons" else {}
        trained = str(flow) if flow and job.work in TRAINED else None
        job = replace(job, batch=batch or job.batch, keep_memory=keep_memory)
        return replace(job, threads=threads, clock=clock, overrides=job.overrides | shorter, weights=trained)

    results = []
    with tqdm(total=sum(row.rounds + 1 for row in chosen), unit="round", leave=False) as progress:
        for row in chosen:
            progress.set_description(row.name)
            row = replace(row, ours=settled(row.ours), other=settled(row.other))
            results.append(measure(row, progress))
            tqdm.write(line(results[-1]))
    print("\n".join([machine(threads), header(), *map(line, results)]))
    swept = sweep(threads) if plot else []
    if plot:
        draw_sweep(swept, plot)
    if json_file:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(threads),
            "rows": [dataclasses.asdict(result) for result in results],
            "sweep": swept,
        }
        write_json(json_file, report)


def measure(row: Row, progress: "tqdm[Any]") -> Result:
    """The two sides and the roofline in turn; the first round warms up."""
    jobs = [row.ours] if row.measure == "limit" else [row.ours, row.other]
    roofline = row.measure == "time" and row.ours.work in ("train", "evaluate")
    if roofline:
        jobs.append(replace(row.ours, work="products", recompute=False))
    workers = [Worker(job) for job in jobs]
    try:
        found: list[list[Measured]] = []
        for seed in range(row.rounds + 1):
            found.append([worker.repeat(seed) for worker in workers])
            progress.update()
    finally:
        for worker in workers:
            worker.close()
    times = [statistics.median(each.seconds for each in side[1:]) for side in zip(*found, strict=True)]
    peaks = [max(each.peak for each in side) for side in zip(*found, strict=True)]
    share = None
    if roofline:
        share = (workers[0].flops / times[0]) / (workers[2].flops / times[2])
    return judge(row, times, peaks, share)


def judge(row: Row, times: list[float], peaks: list[int], roofline: float | None) -> Result:
    ours, other = (peaks[0], peaks[-1]) if row.measure in ("memory", "limit") else (times[0], times[1])
    less_is_better = row.measure in ("slowdown", "share")
    ratio = ours / other if less_is_better else row.goal / ours if row.measure == "limit" else other / ours
    if row.measure == "limit":
        other = row.goal
    reached = ratio <= row.goal if less_is_better else ratio >= (1 if row.measure == "limit" else row.goal)
    return Result(row.name, row.title, row.measure, ours, other, ratio, row.goal, reached, roofline)


def header() -> str:
    return f"{'':<54}{'ours':>10}{'other':>10}{'ratio':>8}{'goal':>8}{'roofline':>10}"


def line(result: Result) -> str:
    def shown(number: float) -> str:
        if result.measure in ("memory", "limit"):
            return f"{number / GIGABYTE:.2f} GB"
        return f"{number:.2f} s" if number >= 1 else f"{1000 * number:.1f} ms"

    goal = {"slowdown": "<= {:.2f}", "share": "<= {:.2f}", "limit": "3 GB"}.get(result.measure, ">= {:g}")
    roofline = "" if result.roofline is None else f"{result.roofline:.0%}"
    return (
        f"{result.title:<54}{shown(result.ours):>10}{shown(result.other):>10}{result.ratio:>8.2f}"
        f"{goal.format(result.goal):>8}{roofline:>10}{'' if result.reached else '  missed'}"
    )


def machine(threads: int) -> str:
    """What the figures are from."""
    names = [text for text in _cpu_lines() if text.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{name}, {threads} threads, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
