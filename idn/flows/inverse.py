"""The inverse of x + g(x): the fixed point x = y - g(x), found by Anderson acceleration.

Plain iteration gains a factor Lip(g) per step, which near 1 takes hundreds. Anderson's method combines the last few
steps so that their residuals cancel as well as they can. Each sample stops by itself; where acceleration does not
pay for a sample, that sample takes the plain step, which always converges since Lip(g) < 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MEMORY = 5
MOST_ITERATIONS = 2000


class NotInvertedError(RuntimeError):
    """Samples whose fixed point was not found to the tolerance."""

    def __init__(self, samples: list[int], residuals: list[float], tolerance: float, iterations: int) -> None:
        worst = ", ".join(f"{s} (residual {r:.1e})" for s, r in list(zip(samples, residuals, strict=True))[:8])
        more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
        super().__init__(
            f"the inverse did not converge to {tolerance:.1e} in {iterations} iterations for samples {worst}{more}; "
            "check the Lipschitz bound with `idn certify`"
        )
        self.samples = samples


def default_tolerance(dtype: torch.dtype) -> float:
    """The largest residual per entry that counts as converged, relative to 1 + |y|."""
    return 32 * torch.finfo(dtype).eps


GOAL = 1 / 16
"""Iterations go on to this share of the tolerance, as long as they still gain anything on roundoff."""
STALE = 4
WORTH_LEAVING = 0.75
"""Samples that are done leave when no more than this share would stay: what the others remember is copied then."""


def fixed_point(
    g: Callable[[Tensor], Tensor],
    y: Tensor,
    tolerance: float | None = None,
    iterations: int = MOST_ITERATIONS,
) -> Tensor:
    """Solves x + g(x) = y for each row, to |x + g(x) - y| <= tolerance * (1 + |y|) in the largest entry.

    >>> y = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    >>> x = fixed_point(lambda x: 0.9 * torch.sin(x), y)
    >>> bool(((x + 0.9 * torch.sin(x)) - y).abs().max() < 1e-12)
    True
    """
    tolerance = default_tolerance(y.dtype) if tolerance is None else tolerance
    shape, y = y.shape, y.flatten(1)
    found = y.clone()
    allowed = tolerance * (1 + y.abs().amax(1))
    active = torch.arange(len(y), device=y.device)
    best = torch.full_like(allowed, float("inf"))
    stale = torch.zeros_like(active)
    finished = torch.zeros_like(active, dtype=torch.bool)
    x = y - g(y.view(shape)).flatten(1)
    past = Past(len(y), y)
    for _ in range(iterations):
        residual = y - g(x.view(-1, *shape[1:])).flatten(1) - x
        size = residual.abs().amax(1)
        stale = torch.where(size < 0.9 * best, 0, stale + 1)
        done = (size <= GOAL * allowed) | ((size <= allowed) & (stale >= STALE))
        found[active[done & ~finished]] = x[done & ~finished]
        finished = finished | done
        left = len(finished) - int(finished.sum())
        if not left:
            return found.view(shape)
        if left <= WORTH_LEAVING * len(finished):
            keep = ~finished
            active, y, allowed, best, stale = (each[keep] for each in (active, y, allowed, best, stale))
            finished = finished[keep]
            x, residual, size = (each[keep] for each in (x, residual, size))
            past.keep(keep)
        past.add(x, residual)
        # A step that made things worse is dropped: that sample goes on from here without memory.
        past.forget(~(size < 2 * best))
        best = torch.minimum(best, size)
        step = past.step(x, residual)
        x = torch.where(torch.isfinite(step).all(1, keepdim=True), step, x + residual)
    size_left = (y - g(x.view(-1, *shape[1:])).flatten(1) - x).abs().amax(1)
    raise NotInvertedError(active[~finished].tolist(), size_left[~finished].tolist(), tolerance, iterations)


class Past:
    """The last few steps of each sample: how residuals changed (dr), and residuals and points together (dx + dr).

    Each iteration writes one row and one row of the products dr_i . dr_j; nothing else moves.
    """

    def __init__(self, n: int, like: Tensor) -> None:
        self.dr, self.both = (like.new_zeros(n, MEMORY, like.shape[1]) for _ in range(2))
        self.gram = like.new_zeros(n, MEMORY, MEMORY)
        self.last: tuple[Tensor, Tensor] | None = None
        self.slot = 0

    def keep(self, which: Tensor) -> None:
        """Go on with these samples only."""
        self.dr, self.both, self.gram = self.dr[which], self.both[which], self.gram[which]
        if self.last:
            self.last = self.last[0][which], self.last[1][which]

    def add(self, x: Tensor, residual: Tensor) -> None:
        if self.last:
            dr = residual - self.last[1]
            self.dr[:, self.slot] = dr
            self.both[:, self.slot] = dr + x - self.last[0]
            products = (self.dr @ dr[:, :, None])[:, :, 0]
            self.gram[:, self.slot] = products
            self.gram[:, :, self.slot] = products
            self.slot = (self.slot + 1) % MEMORY
        self.last = x, residual

    def forget(self, which: Tensor) -> None:
        """Zero rows take no part."""
        for rows in (self.dr, self.both, self.gram):
            rows.masked_fill_(which[:, None, None], 0)

    def step(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + r - sum_i c_i (dx_i + dr_i) with the c that make |r - sum_i c_i dr_i| smallest."""
        limits = torch.finfo(x.dtype)
        # Rows shrink as x converges: made equally long, they are solved for equally well.
        scale = self.gram.diagonal(dim1=1, dim2=2).clamp_min(limits.tiny).rsqrt()[:, :, None]
        gram = self.gram * scale * scale.mT + limits.eps * torch.eye(MEMORY, dtype=x.dtype, device=x.device)
        weights = scale * torch.linalg.solve_ex(gram, scale * (self.dr @ residual[:, :, None])).result
        return x + residual - (weights.mT @ self.both)[:, 0]
