"""Runs as they lie in a folder of results: what was trained, how it went, what came out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idn.errors import UserError
from idn.models import read_settings
from idn.plot import read_records
from idn.train.config import TrainConfig
from idn.train.words import command, variant

Record = dict[str, Any]
FIGURES = ("value", "standard_error", "log_pz", "logdet", "samples")


@dataclass(frozen=True)
class Result:
    """One run."""

    folder: Path
    config: TrainConfig
    records: list[Record]
    evaluation: Record | None
    """eval.json, which wins over the run's own test at its end."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def command(self) -> str:
        return command(self.config)

    @property
    def variant(self) -> str:
        """How its settings differ from the preset's."""
        return variant(self.config)

    @property
    def test(self) -> Record | None:
        """Value, standard error, log p(z), log-det and number of samples on the test split."""
        finish = self.last("finish")
        return self.evaluation or (finish.get("test") if finish else None)

    @property
    def source(self) -> str:
        """The file that the test figure comes from."""
        return "eval.json" if self.evaluation else "metrics.jsonl"

    @property
    def value(self) -> float | None:
        return None if self.test is None else float(self.test["value"])

    @property
    def unit(self) -> str:
        return "nats" if self.config.flow.logit_alpha is None else "bits/dim"

    @property
    def step(self) -> int:
        """Steps done so far."""
        return max((int(record.get("step", 0)) for record in self.records), default=0)

    @property
    def steps(self) -> int | None:
        """Steps of the whole run."""
        start = self.last("start")
        return int(start["steps"]) if start else self.config.length.steps

    @property
    def is_finished(self) -> bool:
        return self.last("finish") is not None or (self.steps is not None and self.step >= self.steps)

    @property
    def parameters(self) -> int | None:
        start = self.last("start")
        return int(start["parameters"]) if start else None

    @property
    def workers(self) -> int | None:
        start = self.last("start")
        return int(start["workers"]) if start else None

    @property
    def hours(self) -> float:
        """Time spent in optimiser steps: what is left out is validation, pictures and waiting."""
        seconds, before = 0.0, 0
        for record in self.kind("metrics"):
            seconds += (record["step"] - before) * self.config.data.batch / record["rate"]
            before = record["step"]
        return seconds / 3600

    @property
    def rate(self) -> float | None:
        """Samples per second over the whole run."""
        return self.step * self.config.data.batch / (3600 * self.hours) if self.hours else None

    @property
    def flops(self) -> float | None:
        """Arithmetic of all training steps."""
        start = self.last("start")
        return float(start["flops_per_sample"]) * self.step * self.config.data.batch if start else None

    @property
    def pictures(self) -> dict[str, Path]:
        return {path.stem: path for path in sorted(self.folder.glob("*.png"))}

    def kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def last(self, kind: str) -> Record | None:
        found = self.kind(kind)
        return found[-1] if found else None


def read_results(folder: Path) -> list[Result]:
    """All runs of a folder, in the order of their names."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; expected results, as `idn collect RUN ... --out {folder}` writes them")
    return [read_result(path.parent) for path in sorted(folder.glob("*/config.json"))]


def read_result(folder: Path) -> Result:
    """One run's results."""
    config = TrainConfig.from_dict(read_settings(folder))
    return Result(folder, config, read_records(folder), read_evaluation(folder / "eval.json"))


def read_evaluation(path: Path) -> Record | None:
    if not path.is_file():
        return None
    try:
        figures = json.loads(path.read_text())
        for name in FIGURES:
            float(figures[name])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what `idn eval` writes: {error}") from error
    return figures
