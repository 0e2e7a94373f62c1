"""All randomness of one pass through a flow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from idn.streams import stream


class Draws:
    """Roulette lengths, which all ranks share, and probes, which are each rank's own.

    One generator per sample instead of one for all makes the probes independent of how a batch is split over ranks.

    >>> draws = Draws.seeded(0, "example")
    >>> draws.normal(torch.empty(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, lengths: torch.Generator, probes: torch.Generator | Sequence[torch.Generator]) -> None:
        self.lengths, self.probes = lengths, probes

    @classmethod
    def seeded(cls, seed: int, *key: int | str) -> "Draws":
        """Both streams from one key, for a single process."""
        return cls(stream(seed, "lengths", *key), stream(seed, "probes", *key))

    def normal(self, like: Tensor) -> Tensor:
        """A standard normal tensor, made on the CPU so that every device sees the same draws."""
        if isinstance(self.probes, torch.Generator):
            drawn = torch.randn(like.shape, generator=self.probes, dtype=torch.float32)
        else:
            each = [torch.randn(like.shape[1:], generator=probe, dtype=torch.float32) for probe in self.probes]
            drawn = torch.stack(each)
        return drawn.to(like)

    def uniform(self) -> float:
        """One number in [0, 1) from the shared stream."""
        return float(torch.rand((), generator=self.lengths, dtype=torch.float64))
