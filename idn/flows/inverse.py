"""The inverse of x + g(x): the fixed point x = y - g(x), found by Anderson acceleration.

Plain iteration gains a factor Lip(g) per step, which near 1 takes hundreds. Anderson's method combines the last few
steps so that they cancel as well as they can:

    x <- sum_i a_i (x_i + s_i),    sum_i a_i = 1,    |sum_i a_i s_i| as small as can be.

A step s_i is the residual r_i = y - g(x_i) - x_i itself, or what a correction makes of it: an estimate of
(I + J)^-1 r_i, see `correction.py`. Whether a sample has converged is read from r_i alone.

Each sample stops by itself. A sample whose residual grows, or stays as it is for long, goes back to the best point it
has seen and takes the plain step x + r from there, which shortens the residual by the factor Lip(g) < 1 at least: so
every sample converges, whatever combinations do.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

Correct = Callable[[Tensor], Tensor]
MEMORY = 6
"""Steps that are combined."""
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
"""Steps without a gain after which a sample within the tolerance is done."""
PATIENCE = 20
"""Steps without a gain after which others go back, and take as many plain steps."""
ROUGH = 5
"""Evaluations of low precision, at most."""
NOISE = 0.03
"""What steps of low precision count as unknown, relative to the length of g(x): well above their rounding errors, which
are much the same at all points, so that combinations keep them."""
NEAR = 0.1
"""Low precision leads no further than about so close, in shares of the first g(x), and is not asked more often."""
WORTH_LEAVING = 0.75
"""Samples that are done leave when no more than this share would stay: what the others remember is copied then."""


def residual_goals(y: Tensor, tolerance: float | None) -> Tensor:
    """The largest entry that each sample's residual is brought to."""
    tolerance = default_tolerance(y.dtype) if tolerance is None else tolerance
    return GOAL * tolerance * (1 + y.flatten(1).abs().amax(1))


def fixed_point(
    g: Callable[[Tensor], Tensor],
    y: Tensor,
    tolerance: float | None = None,
    iterations: int = MOST_ITERATIONS,
    start: Tensor | None = None,
    rough: Callable[[Tensor], Tensor] | None = None,
    corrector: Callable[[Tensor], Correct | None] = lambda _: None,
    rough_steps: int = ROUGH,
) -> Tensor:
    """Solves x + g(x) = y for each row, to |x + g(x) - y| <= tolerance * (1 + |y|) in the largest entry.

    It begins at `start` (y, if there is none), with `rough`, a g of low precision, as far as that leads, and no more
    than `rough_steps` times. `corrector` is asked, at each of the points reached, for what makes better steps of
    residuals.

    >>> y = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    >>> x = fixed_point(lambda x: 0.9 * torch.sin(x), y)
    >>> bool(((x + 0.9 * torch.sin(x)) - y).abs().max() < 1e-12)
    True
    """
    tolerance = default_tolerance(y.dtype) if tolerance is None else tolerance
    layout = Layout(y)
    search = Search.of(layout.rows(y), tolerance)
    found = search.y.clone()
    x = search.y if start is None else layout.rows(start)
    past = Past(x)
    for iteration in range(iterations):
        value = layout.rows((rough or g)(layout.samples(x)))
        moved = search.y - value
        residual = moved - x
        square = torch.linalg.vecdot(residual, residual)
        if iteration == 0:
            first = value.square().sum()
        # Rough residuals are no measure for exact ones: nothing is judged by them.
        if not rough:
            done = search.judge(moved, square, residual.abs().amax(1))
            if bool(done.any()):
                found[search.index[done]] = x[done]
                left = len(done) - int(search.finished.sum())
                if not left:
                    return layout.samples(found).contiguous()
                if left <= WORTH_LEAVING * len(done):
                    keep = ~search.finished
                    x, moved, residual, square = (each[keep] for each in (x, moved, residual, square))
                    search.keep(keep)
                    past.keep(keep)
        correct = corrector(layout.samples(x))
        noise = NOISE**2 * torch.linalg.vecdot(value, value) if rough else 0
        past.add(x, layout.rows(correct(layout.samples(residual))) if correct else residual, noise)
        x = past.best()
        if rough:
            rough = None if iteration + 1 == rough_steps or bool(square.sum() <= NEAR**2 * first) else rough
            continue
        lost, plain = search.astray(square)
        if bool((lost | plain).any()):
            x = torch.where(lost[:, None], search.back, torch.where(plain[:, None], moved, x))
            past.forget(lost)
    size = (search.y - layout.rows(g(layout.samples(x))) - x).abs().amax(1)
    left_over = ~search.finished
    raise NotInvertedError(search.index[left_over].tolist(), size[left_over].tolist(), tolerance, iterations)


@dataclass
class Search:
    """How far each sample is, of those that are still searched for."""

    index: Tensor
    """Its place in the batch."""
    y: Tensor
    allowed: Tensor
    """The largest entry that its residual may have."""
    back: Tensor
    """Where a plain step leads from the best point it has seen."""
    best: Tensor
    """The square of that point's residual."""
    mark: Tensor
    """The square that the next gain is measured against."""
    stale: Tensor
    """Steps since the last gain."""
    plainly: Tensor
    """Plain steps that it is to take yet."""
    finished: Tensor

    @classmethod
    def of(cls, y: Tensor, tolerance: float) -> Self:
        allowed, index = tolerance * (1 + y.abs().amax(1)), torch.arange(len(y), device=y.device)
        far, none = torch.full_like(allowed, float("inf")), torch.zeros_like(index)
        return cls(index, y, allowed, y, far, far, none, none, torch.zeros_like(index, dtype=torch.bool))

    def keep(self, which: Tensor) -> None:
        """Go on with these samples only."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[which])

    def judge(self, moved: Tensor, square: Tensor, size: Tensor) -> Tensor:
        """Which samples have just come to their end, from the length of the residual and its largest entry."""
        gained, better = square < 0.8 * self.mark, square < self.best
        self.back = moved if bool(better.all()) else torch.where(better[:, None], moved, self.back)
        self.mark, self.stale = torch.where(gained, square, self.mark), torch.where(gained, 0, self.stale + 1)
        done = (size <= GOAL * self.allowed) | ((size <= self.allowed) & (self.stale >= STALE))
        new = done & ~self.finished
        self.finished = self.finished | done
        return new

    def astray(self, square: Tensor) -> tuple[Tensor, Tensor]:
        """Which samples go back to their best point, and which take a plain step."""
        stuck = self.stale >= PATIENCE
        lost = stuck | ~(square < 4 * self.best)
        self.best = torch.fmin(self.best, square)
        self.stale = self.stale.masked_fill(stuck, 0)
        self.plainly = torch.where(stuck, PATIENCE, self.plainly - 1)
        return lost, self.plainly > 0


class Layout:
    """Samples as rows of a matrix and back; images channels-last, as convolutions want them, so neither is a copy."""

    def __init__(self, like: Tensor) -> None:
        self.image, self.shape = like.dim() == 4, like.shape[1:]

    def rows(self, samples: Tensor) -> Tensor:
        return (samples.permute(0, 2, 3, 1) if self.image else samples).flatten(1)

    def samples(self, rows: Tensor) -> Tensor:
        if not self.image:
            return rows.view(-1, *self.shape)
        channels, height, width = self.shape
        return rows.view(-1, height, width, channels).permute(0, 3, 1, 2)


class Past:
    """The last few steps s_i of each sample, where they lead, x_i + s_i, and the products s_i . s_j.

    A step that is forgotten has zeros for its products, and takes no part.
    """

    def __init__(self, like: Tensor) -> None:
        n, d = like.shape
        self.size = min(MEMORY, d + 1)
        self.steps, self.results = (like.new_empty(n, self.size, d) for _ in range(2))
        self.gram = like.new_zeros(n, self.size, self.size)
        self.ridge = torch.finfo(like.dtype).eps * torch.eye(self.size, dtype=like.dtype, device=like.device)
        self.added = 0

    def keep(self, which: Tensor) -> None:
        """Go on with these samples only."""
        self.steps, self.results, self.gram = self.steps[which], self.results[which], self.gram[which]

    def add(self, x: Tensor, step: Tensor, noise: Tensor | float) -> None:
        """A step from x, of which so much is expected to be noise: the square of its length."""
        slot = self.added % self.size
        self.added += 1
        self.steps[:, slot] = step
        torch.add(x, step, out=self.results[:, slot])
        products = (self.steps[:, slot, None] @ self.steps[:, : self.added].mT)[:, 0]
        self.gram[:, slot, : self.added] = products
        self.gram[:, : self.added, slot] = products
        self.gram[:, slot, slot] += noise

    def forget(self, which: Tensor) -> None:
        """All steps of these samples."""
        self.gram.masked_fill_(which[:, None, None], 0)

    def best(self) -> Tensor:
        """The best combination; where there is none, the last step's result."""
        last, used = (self.added - 1) % self.size, min(self.added, self.size)
        gram, tiny = self.gram[:, :used, :used], torch.finfo(self.gram.dtype).tiny
        squares = gram.diagonal(dim1=1, dim2=2)
        # Steps shorten as x converges: made equally long, they are solved for equally well.
        scale = torch.where(squares > tiny, squares.clamp_min(tiny).rsqrt(), 0)
        gram = torch.addcmul(self.ridge[:used, :used], gram, scale[:, :, None] * scale[:, None])
        weights = scale * torch.linalg.solve_ex(gram, scale[:, :, None]).result[:, :, 0]
        weights = weights / weights.sum(1, keepdim=True)
        known = torch.isfinite(weights).all(1, keepdim=True)
        if not bool(known.all()):
            weights = torch.where(known, weights, torch.eye(used, dtype=scale.dtype, device=scale.device)[last])
        return (weights.unsqueeze(1) @ self.results[:, :used])[:, 0]
