"""`idn collect RUN ...`: the small artefacts of runs, side by side in one folder that can be kept and shared."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import tyro

from idn.errors import UserError
from idn.files import write_bytes, write_json
from idn.models import find_model, read_settings
from idn.report.results import read_result
from idn.train.words import PLACES

SMALL = 3_000_000
"""Weights up to this many bytes are kept."""
PICTURES = ("samples.png", "reconstructions.png", "interpolations.png", "plots/*.png")


def collect(
    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(help="folders of runs", metavar="RUN ...")],
    out: Annotated[Path, tyro.conf.arg(help="folder of results")] = Path("results"),
) -> None:
    """Copy config, metrics, evaluation, pictures, small weights and the command of runs to OUT/RUN."""
    if not runs:
        raise UserError("collect which runs? Name their folders, for example runs/*")
    for run in runs:
        read_settings(run)  # refuse before anything is written
    for run in runs:
        print(f"{run} -> {collect_run(run, out)}")


def collect_run(run: Path, out: Path) -> Path:
    """Copies one run; a file that the run no longer has goes from the results too."""
    target = out / run.resolve().name
    if target.resolve() == run.resolve():
        raise UserError(f"{run} is already in {out}")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    write_json(target / "config.json", without_places(read_settings(run)))
    found = [run / name for name in ("metrics.jsonl", "eval.json")]
    for pattern in PICTURES:
        found += sorted(run.glob(pattern))
    for path in found:
        if path.is_file():
            write_bytes(target / path.name, path.read_bytes())
    if (flow := weights(run)) is not None and flow.stat().st_size <= SMALL:
        write_bytes(target / "flow.safetensors", flow.read_bytes())
    write_bytes(target / "command.txt", f"{read_result(target).command}\n".encode())
    return target


def without_places(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without the paths and addresses of the machine that the run was on."""
    kept = {name: dict(part) if isinstance(part, dict) else part for name, part in settings.items()}
    for place in PLACES:
        section, _, field = place.partition(".")
        if field in kept.get(section, {}):
            kept[section][field] = None
    return kept


def weights(run: Path) -> Path | None:
    try:
        return find_model(run)
    except UserError:
        return None
