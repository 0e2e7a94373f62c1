"""What a run leaves behind on the driver: metrics.jsonl, TensorBoard files and pictures."""

import json
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from idn import plots
from idn.files import write_bytes
from idn.train.config import TrainConfig
from idn.train.feed import is_toy
from idn.train.meter import line_of

Record = dict[str, Any]

SCALARS = {
    "log_pz": "likelihood/log p(z)",
    "logdet": "likelihood/log-det",
    "gradient_norm": "training/gradient norm",
    "loss_scale": "training/loss scale",
    "rate": "speed/samples per second",
    "share_of_peak": "speed/share of peak FLOPs",
    "memory_gb": "speed/memory per worker (GB)",
    "sigma_max": "norms/largest sigma",
}


class Monitor:
    """Writes records as they come; a resumed run overwrites the steps that are done again."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.unit = "nats" if is_toy(config) else "bits per dim"
        self._board: Any = None
        self._lines: TextIO | None = None
        (folder / "samples").mkdir(parents=True, exist_ok=True)

    def write(self, record: Record) -> None:
        """Take one record of a worker."""
        if record["kind"] == "start":
            self._start(record["step"], record.get("lines", []))
        if record["kind"] in ("start", "metrics", "validation", "saved"):
            self._line(line_of(record))
        if record["kind"] == "metrics":
            self._metrics(record)
        elif record["kind"] == "validation":
            self._validation(record)
        elif record["kind"] == "pictures":
            self._pictures(record)

    def finish(self, outcome: Record) -> None:
        """Hyper-parameters beside the final figures."""
        if self._board is None:
            return
        self._line({"kind": "finish", **outcome})
        test = outcome.get("test") or {}
        figures = {"hparam/test": test.get("value"), "hparam/validation": outcome.get("best_validation")}
        flat = {name: value for name, value in flatten(self.config.to_dict()).items() if value is not None}
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in flat.items()
        }
        self._board.add_hparams(
            plain, {name: value for name, value in figures.items() if value is not None}, run_name="."
        )

    def close(self) -> None:
        """Flush everything."""
        if self._board is not None:
            self._board.close()
        if self._lines is not None:
            self._lines.close()
        self._board = self._lines = None

    def _start(self, step: int, remembered: list[Record]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        path = self.folder / "metrics.jsonl"
        written = path.read_text().splitlines() if path.exists() else []
        lines = [record for line in written if (record := _record(line))["step"] <= step]
        known = {(record["kind"], record["step"]) for record in lines}
        # What a driver before this one took and did not write.
        lines += [record for record in remembered if (record["kind"], record["step"]) not in known]
        lines.sort(key=lambda record: record["step"])
        write_bytes(path, "".join(json.dumps(record) + "\n" for record in lines).encode())
        self._lines = path.open("a")
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1 if step else None)

    def _line(self, record: Record) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(record) + "\n")
            self._lines.flush()

    def _metrics(self, record: Record) -> None:
        step = record["step"]
        self._board.add_scalar(f"{self.unit}/train", record["value"], step)
        for name, tag in SCALARS.items():
            self._board.add_scalar(tag, record[name], step)
        self._board.add_histogram("norms/sigma", np.array(list(record["sigmas"].values())), step)
        for name, sigma in record["sigmas"].items():
            self._board.add_scalar(f"sigma/{name}", sigma, step)

    def _validation(self, record: Record) -> None:
        step = record["step"]
        self._board.add_scalar(f"{self.unit}/validation", record["value"], step)
        self._board.add_scalar("likelihood/validation log p(z)", record["log_pz"], step)
        self._board.add_scalar("likelihood/validation log-det", record["logdet"], step)
        self._board.add_scalar("training/variance of the estimator", record["estimator_variance"], step)
        self._board.flush()

    def _pictures(self, record: Record) -> None:
        step = record["step"]
        for name, picture in draw(record, self.config).items():
            write_bytes(self.folder / "samples" / f"{name}-{step:09d}.png", plots.png(picture))
            self._board.add_image(name, np.asarray(picture), step, dataformats="HWC")
        if "reconstruction_error" in record:
            self._board.add_scalar("inverse/largest relative error", record["reconstruction_error"], step)
        if "problem" in record:
            self._board.add_text("problem", record["problem"], step)
        self._line({"kind": "pictures", "step": step, "problem": record.get("problem")})
        self._board.flush()


def draw(record: Record, config: TrainConfig) -> dict[str, plots.Picture]:
    """All pictures that a record has the numbers for."""
    drawn = {}
    if "samples" in record:
        drawn["samples"] = plots.grid(record["samples"])
        drawn["reconstructions"] = plots.reconstructions(
            record["originals"], record["reconstructions"], record["reconstruction_error"]
        )
    if "density" in record:
        title = f"{config.dataset}, {config.model}, step {record['step']:,}"
        drawn["density"] = plots.density(record["density"], record["points"], record["samples_2d"], title)
    if record["etas"]:
        drawn["eta1"] = plots.eta_maps(record["etas"], "eta1")
        drawn["eta2"] = plots.eta_maps(record["etas"], "eta2")
    return drawn


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level: {"optimiser": {"lr": 1}} -> {"optimiser.lr": 1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _record(line: str) -> Record:
    """A line's record; a line cut short by a crash belongs to no step."""
    try:
        return {"step": 0} | json.loads(line)
    except ValueError:
        return {"kind": "cut", "step": float("inf")}
