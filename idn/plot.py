"""`idn plot RUN`: every picture of a run that its numbers allow."""

import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from idn import curves, plots
from idn.data import toy
from idn.errors import UserError
from idn.files import write_bytes
from idn.models import Model, open_model
from idn.streams import stream
from idn.views import density_grid, draw_samples, layer_norms

DENSITY_POINTS = 20_000


def plot(
    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="a run's folder or a flow's file")],
    out: Annotated[Path | None, tyro.conf.arg(help="folder for the pictures (default: RUN/plots)")] = None,
    raw: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="raw weights, not averaged ones")] = False,
) -> None:
    """Draw a 2-D flow's density beside its data, learning curves, the eta heat maps, and the norm of every layer."""
    opened = open_model(model, raw)
    folder = out or opened.beside("plots")
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures(opened).items():
        write_bytes(folder / f"{name}.png", plots.png(picture))
        print(f"written to {folder / name}.png ({picture.width} x {picture.height})")


def pictures(model: Model) -> dict[str, plots.Picture]:
    """All pictures of a flow and its run."""
    flow, title = model.flow, model.title
    drawn = {}
    if flow.shape == (2,):
        drawn["density"] = density(model)
    if flow.config.learnable_concat:
        etas = [eta._asdict() for eta in flow.concatenations()]
        for which in ("eta1", "eta2"):
            drawn[which] = plots.eta_maps(etas, which, title)
    drawn["norms"] = curves.layer_norms(layer_norms(flow), f"{title}: norm of every layer")
    records = read_records(model.run) if model.run else []
    if any(record["kind"] == "metrics" for record in records):
        dataset = model.config["dataset"]
        is_toy = dataset in toy.NAMES
        entropy = toy.entropy(dataset) if is_toy else None
        drawn["curves"] = curves.learning_curves(records, "nats" if is_toy else "bits per dimension", title, entropy)
    return drawn


def density(model: Model) -> plots.Picture:
    """A 2-D flow's density between samples of the data, if it is known, and of the flow."""
    seed = model.seed(None)
    samples = draw_samples(model.flow, DENSITY_POINTS, stream(seed, "samples")).numpy()
    name = model.config.get("dataset")
    data = toy.sample(name, DENSITY_POINTS, stream(seed, "picture data")).numpy() if name in toy.NAMES else None
    return plots.density(density_grid(model.flow), data, samples, model.title)


def read_records(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; one that a crash cut short does not count."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    records = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{path}, line {number} is not JSON: {error}") from error
    return records
