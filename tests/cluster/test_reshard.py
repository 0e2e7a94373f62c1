"""Optimiser state that other numbers of workers take up again, for every ZeRO stage, on three real Ray nodes."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
import pytest
import torch
from torch import Tensor

from idn.train import checkpoint
from tests.cluster.ledgers import check_once
from tests.cluster.nodes import Nodes, real_nodes

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
LOCAL = pyarrow.fs.LocalFileSystem()
# Workers until a step: fewer, more, and never the same number twice in a row.
LEGS = ((3, 6), (1, 12), (2, 18))
# Full learning rate from the start, so that wrong moments would show.
WORDS = ("--warmup", "0", "--lr", "0.002")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with real_nodes(70, 3, tmp_path_factory.mktemp("reshard")) as made:
        made.finish("--name", "calm", "--workers", "3", *WORDS, "--steps", str(LEGS[-1][1]))
        yield made


def moments(runs: Path, name: str) -> dict[str, Tensor]:
    """Both of Adam's moments of all parameters, each in one piece, at the end of a run."""
    path = checkpoint.newest(LOCAL, str(runs / name / "checkpoints"))
    assert path is not None
    parts = list(checkpoint.Restored(LOCAL, path).moments().values())
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_another_number_of_workers_goes_on_with_the_same_state(nodes: Nodes, zero: int) -> None:
    name = f"zero{zero}"
    for workers, steps in LEGS:
        words = ("--workers", str(workers), "--zero", str(zero), "--steps", str(steps))
        nodes.finish("--name", name, *WORDS, *words)
    starts = [(record["workers"], record["step"]) for record in nodes.records(name, "start")]
    assert starts == [(3, 0), (1, 6), (2, 12)]
    check_once(nodes.runs / f"{name}-ledger", LEGS[-1][1])
    losses, calm = nodes.losses(name), nodes.losses("calm")
    worst = max(abs(losses[step] / calm[step] - 1) for step in calm)
    found, wanted = moments(nodes.runs, name), moments(nodes.runs, "calm")
    away = {key: float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted}
    print(f"\nZeRO {zero}, workers 3, 1, 2: losses within {worst:.1e} of an undisturbed run's, moments within {away}")
    assert losses == pytest.approx(calm, rel=1e-4)
    assert all(distance < 0.002 for distance in away.values()), away
