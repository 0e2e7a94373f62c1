"""How likely a flow finds data: mean, standard error and the two parts of the likelihood."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from idn.flows.draws import Draws
from idn.flows.flow import Flow
from idn.streams import stream


class Scored(NamedTuple):
    """A batch to evaluate and each sample's place in the split, which keys its probes."""

    x: Tensor
    places: list[int]


@dataclass(frozen=True)
class Score:
    """Bits per dimension of images, nats of points; lower is better."""

    value: float
    standard_error: float
    log_pz: float
    logdet: float
    samples: int


def bits_or_nats(flow: Flow, log_prob: Tensor) -> Tensor:
    """The number people compare: bits per dimension for 8-bit images, nats for anything else."""
    if flow.config.logit_alpha is None:
        return -log_prob
    return -log_prob / (flow.dims * math.log(2)) + 8


@torch.no_grad()
def evaluate(
    flow: Flow, batches: Iterable[Scored], seed: int = 0, reduce: Callable[[Tensor], Tensor] = lambda total: total
) -> Score:
    """Scores all batches of all ranks; `reduce` sums a tensor over ranks."""
    totals = torch.zeros(5, dtype=torch.float64)
    for number, (x, places) in enumerate(batches):
        if not places:
            continue
        probes = [stream(seed, "evaluation", place) for place in places]
        z, logdet = flow.encode(x, draws=Draws(stream(seed, "evaluation lengths", number), probes))
        log_pz = -0.5 * (z.square().sum(1) + flow.dims * math.log(2 * math.pi))
        values = bits_or_nats(flow, log_pz + logdet).double()
        parts = (values.sum(), values.square().sum(), log_pz.double().sum(), logdet.double().sum(), len(places))
        totals += torch.tensor([float(part) for part in parts], dtype=torch.float64)
    total, squares, log_pz_sum, logdet_sum, count = reduce(totals).tolist()
    mean = total / max(count, 1)
    variance = max(squares / max(count, 1) - mean**2, 0.0) * count / max(count - 1, 1)
    error = math.sqrt(variance / max(count, 1))
    return Score(mean, error, log_pz_sum / max(count, 1), logdet_sum / max(count, 1), int(count))
