"""The last thing a person reads: how good it is, where things are, what to type next."""

from pathlib import Path
from typing import Any

from idn.train.progress import duration


def finished(outcome: dict[str, Any], folder: Path, unit: str, entropy: float | None, seconds: float) -> str:
    """After a run that reached its last step."""
    test = outcome["test"]
    score = f"{test['value']:.4f} +- {test['standard_error']:.4f}"
    limit = "" if entropy is None else f"; the data's own entropy is {entropy:.3f}"
    best = outcome.get("best_validation")
    lines = [
        f"finished: step {outcome['step']:,} in {duration(seconds)}",
        f"  test        {score} {unit} ({test['samples']:,} samples{limit})",
        f"  validation  {best:.4f} {unit} (best)" if best is not None else "",
        f"  run         {folder}",
        f"  pictures    {folder / 'samples'}",
        f"  next        tensorboard --logdir {folder.parent}",
    ]
    return "\n".join(line for line in lines if line)


def stopped(outcome: dict[str, Any], folder: Path) -> str:
    """After a run that was asked to stop."""
    return f"stopped at step {outcome['step']:,}, saved in {folder}\n  the same command again goes on from there"
