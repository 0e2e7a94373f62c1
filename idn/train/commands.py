"""`idn train`: from the words of a command to a finished run."""

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from idn.train.config import TrainConfig, validate
from idn.train.presets import preset


@dataclass(frozen=True)
class Choice:
    """Train a flow. DATASET, --model and --size choose a preset; every other option changes it."""

    dataset: tyro.conf.Positional[str]
    """circles, checkerboard, moons, ..., mnist, cifar10, cifar10-sample, ..., or a folder or URL of shards."""
    model: Annotated[str, tyro.conf.arg(metavar="{residual,idensenet,idensenet-lc}")] = "idensenet-lc"
    """Which flow."""
    size: Annotated[str, tyro.conf.arg(metavar="{tiny,paper,full}")] = "paper"
    """tiny: a few minutes on a laptop; paper: 4-4-4 (10 toy) blocks; full: 16-16-16 (100 toy) blocks."""
    dry_run: bool = False
    """Print the resolved config, its cost and DeepSpeed's config, and start nothing."""


def parse(argv: list[str]) -> tuple[TrainConfig, bool]:
    """The complete config of a command, and whether it is a dry run."""
    wants_help = any(word in ("-h", "--help") for word in argv)
    if wants_help and argv[0].startswith("-"):
        argv = ["cifar10", *argv]
    words = [word for word in argv if word not in ("-h", "--help")]
    choice, rest = tyro.cli(Choice, args=words, prog="idn train", return_unknown_args=True)
    chosen = preset(choice.dataset, choice.model, choice.size)
    prog = f"idn train {choice.dataset} --model {choice.model} --size {choice.size} [--dry-run]"
    if wants_help:
        rest = [*rest, "--help"]
    config = tyro.cli(
        TrainConfig, default=chosen, args=rest, prog=prog, description=Choice.__doc__, config=(tyro.conf.SuppressFixed,)
    )
    return validate(config), choice.dry_run


def train(argv: list[str]) -> int:
    """Train a flow on Ray workers; the exit code."""
    config, dry_run = parse(argv)
    if dry_run:
        from idn.train.dryrun import describe

        print(describe(config))
        return 0
    return launch(config)


def launch(config: TrainConfig) -> int:
    """Checks, runs, sums up. Everything that can be refused is refused before a worker starts."""
    from idn.data import toy
    from idn.train import runs, storage, summary, trainer
    from idn.train.data import require_data
    from idn.train.engine import read_overrides
    from idn.train.feed import is_toy
    from idn.train.monitor import Monitor
    from idn.train.progress import ProgressBar

    started = time.monotonic()
    folder = runs.run_folder(config)
    if config.engine.deepspeed:
        read_overrides(config.engine.deepspeed)
    require_data(config)
    runs.claim(config)
    trainer.prepare_storage(config)
    bar = ProgressBar("nats" if is_toy(config) else "bits/dim")
    monitor = Monitor(config, folder)
    storage.hush_threads()

    def on_record(record: dict[str, Any]) -> None:
        monitor.write(record)
        bar.update(record)

    try:
        try:
            with trainer.cluster(config.cluster.address):
                plan = trainer.plan(config, bar.note)
                runs.record(config)
                outcome = trainer.run(config, plan, on_record, bar.note)
            if outcome["finished"]:
                monitor.finish(outcome)
        finally:
            bar.close()
            monitor.close()
    except (trainer.TrainingFailed, OSError) as error:
        # The driver's own files, metrics and pictures, may be what has no room.
        words = storage.refusal(error) if isinstance(error, OSError) else None
        if "--debug" in sys.argv or (isinstance(error, OSError) and words is None):
            raise
        print(f"idn: training failed: {storage.advice(words, str(folder)) if words else error}", file=sys.stderr)
        return 1
    trainer.prepare_storage(config)
    if not outcome["finished"]:
        print(summary.stopped(outcome, folder))
        return 128 + (outcome["signal"] or 0)
    entropy = toy.entropy(config.dataset) if is_toy(config) else None
    print(summary.finished(outcome, folder, bar.unit, entropy, time.monotonic() - started))
    return 0
