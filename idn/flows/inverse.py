"""The inverse of x + g(x): the fixed point x = y - g(x), found by Anderson acceleration.

Plain iteration gains a factor Lip(g) per step, which near 1 takes hundreds. Anderson's method combines the last few
steps so that their residuals cancel as well as they can. Each sample stops by itself; where acceleration does not
pay for a sample, that sample takes the plain step, which always converges since Lip(g) < 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MEMORY = 6
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
    x = y - g(y.view(shape)).flatten(1)
    best = torch.full_like(allowed, float("inf"))
    stale = torch.zeros_like(active)
    xs = residuals = y.new_zeros(len(y), 0, y.shape[1])
    for _ in range(iterations):
        residual = y[active] - g(x.view(-1, *shape[1:])).flatten(1) - x
        size = residual.abs().amax(1)
        stale[active] = torch.where(size < 0.9 * best[active], 0, stale[active] + 1)
        done = (size <= GOAL * allowed[active]) | ((size <= allowed[active]) & (stale[active] >= STALE))
        found[active[done]] = x[done]
        if bool(done.all()):
            return found.view(shape)
        keep = ~done
        active, x, residual, size = active[keep], x[keep], residual[keep], size[keep]
        xs = torch.cat([xs[keep], x[:, None]], 1)[:, -MEMORY:]
        residuals = torch.cat([residuals[keep], residual[:, None]], 1)[:, -MEMORY:]
        # A step that made things worse is dropped: that sample goes on from here without memory.
        worse = ~(size < 2 * best[active])
        best[active] = torch.minimum(best[active], size)
        step = _anderson_step(xs, residuals)
        x = torch.where((worse | ~torch.isfinite(step).all(1))[:, None], x + residual, step)
        xs = torch.where(worse[:, None, None], x[:, None] - residual[:, None], xs)
        residuals = torch.where(worse[:, None, None], residual[:, None], residuals)
    size_left = (y[active] - g(x.view(-1, *shape[1:])).flatten(1) - x).abs().amax(1)
    raise NotInvertedError(active.tolist(), size_left.tolist(), tolerance, iterations)


def _anderson_step(xs: Tensor, residuals: Tensor) -> Tensor:
    """sum_i c_i (x_i + r_i) with the weights, summing to 1, that make |sum_i c_i r_i| smallest."""
    x, residual = xs[:, -1], residuals[:, -1]
    if xs.shape[1] == 1:
        return x + residual
    dr = residual[:, None] - residuals[:, :-1]
    dx = x[:, None] - xs[:, :-1]
    gram = dr @ dr.transpose(1, 2)
    ridge = gram.diagonal(dim1=1, dim2=2).amax(1)[:, None, None] * torch.finfo(gram.dtype).eps
    gram = gram + (ridge + torch.finfo(gram.dtype).tiny) * torch.eye(
        gram.shape[1], dtype=gram.dtype, device=gram.device
    )
    weights = torch.linalg.solve_ex(gram, dr @ residual[:, :, None]).result
    return x + residual - ((dx + dr).transpose(1, 2) @ weights)[:, :, 0]
