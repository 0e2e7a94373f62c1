"""How long ranks wait for the unluckiest when each draws its own roulette lengths.

With shared draws all ranks take the same number of terms, and nobody waits. With draws of its own a rank's step takes
sum_b F_b (c + K_b) for blocks b of forward cost F_b, and the step ends with the slowest rank; under ZeRO 3, which
gathers every block's weights from all ranks, they even wait at every block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from idn.flows.cost import Cost, expected_terms, products
from idn.flows.logdet import LogdetRule
from idn.streams import stream_seed

RANKS = tuple(2**power for power in range(11))


@dataclass(frozen=True)
class Slowdown:
    """Time of a step against shared draws, 1 is as fast."""

    ranks: int
    per_step: float
    """Ranks wait at the end of a step."""
    per_block: float
    """Ranks wait at every block."""


@cache
def tail(rule: LogdetRule) -> np.ndarray:
    """P(N >= n) for n = 1, 2, ..."""
    return np.array([rule.survival(n) for n in range(1, 200)])


def draw_terms(rule: LogdetRule, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Numbers of terms of a series, one per block, rank and step."""
    if rule.rule != "roulette":
        return np.full(shape, rule.terms)
    uniform = random.random((rule.samples, *shape))
    # N is the number of n >= 1 with P(N >= n) > u.
    lengths = np.searchsorted(-tail(rule), -uniform, side="left")
    return rule.exact_terms + lengths.max(axis=0)


def slowdowns(cost: Cost, ranks: Sequence[int] = RANKS, steps: int = 200, seed: int = 0) -> list[Slowdown]:
    """Simulated steps; all figures have a relative standard error below a percent."""
    rule = cost.train_logdet
    if not cost.blocks or rule.rule in ("exact", "trace"):
        return [Slowdown(count, 1.0, 1.0) for count in ranks]
    work = np.array([block.forward_flops for block in cost.blocks])
    mean = expected_terms(rule)
    fixed = products(rule, 1, training=True) - rule.probes * mean
    expected = float(work.sum()) * (fixed + rule.probes * mean)
    found = []
    for count in ranks:
        random = np.random.default_rng(stream_seed(seed, "stragglers", count))
        per_step = per_block = 0.0
        for _ in range(steps):
            terms = draw_terms(rule, (count, len(work)), random)
            times = work * (fixed + rule.probes * terms)
            per_step += float(times.sum(axis=1).max())
            per_block += float(times.max(axis=0).sum())
        found.append(Slowdown(count, per_step / steps / expected, per_block / steps / expected))
    return found
