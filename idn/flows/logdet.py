"""log det(I + J_g) per sample: exact, by the trace, by a truncated series or by Russian roulette.

    log det(I + J) = sum_k (-1)^(k+1) / k tr(J^k)

All stochastic rules are the same series with other coefficients c_k: 1 up to a fixed term (truncated), or
1 / P(N >= k - e) after e exact terms (roulette), with tr(J^k) replaced by v^T J^k v for a probe v ~ N(0, I).
The gradient is that of w^T J v with w = sum_k (-1)^k c_(k+1) (J^T)^k v held fixed (the Neumann series). J v is a
tangent and w needs no graph, so memory does not grow with the number of terms. The value is the unbiased series,
which the same products give for free.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from idn.errors import UserError
from idn.flows.draws import Draws
from idn.flows.maps import Gradients, Map, Pull
from idn.flows.rows import channels_last, per_point

RULES = ("exact", "trace", "series", "roulette")
LENGTHS = ("poisson", "geometric")
MOST_TERMS = 1000
NEGLIGIBLE = 1e-8
"""Nats per dimension: evaluation ends a series whose whole remainder is provably below this, far under roundoff."""
CHECKED = 5
"""Terms before the first look at what is left."""
PARTS = 4
"""Pieces in which a batch is recomputed on a GPU."""
PIXELS = 8192
"""Pixels of a piece for every two threads of a CPU."""


@dataclass(frozen=True)
class LogdetRule:
    """How the log-det of a block is computed."""

    rule: Literal["exact", "trace", "series", "roulette"] = "roulette"
    """exact: from the whole Jacobian; trace: exact traces, `terms` terms; series: probes, `terms` terms; roulette."""
    terms: int = 10
    """Number of terms of a truncated series."""
    exact_terms: int = 2
    """Terms that the roulette always takes."""
    lengths: Literal["poisson", "geometric"] = "poisson"
    """Distribution of the number of further terms."""
    parameter: float = 2.0
    """Rate of the Poisson, or success probability of the geometric distribution."""
    samples: int = 1
    """Roulette lengths whose coefficients are averaged."""
    probes: int = 1
    """Probe vectors per sample."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UserError(f"unknown log-det rule {self.rule!r}; expected one of {', '.join(RULES)}")
        if self.lengths not in LENGTHS:
            raise UserError(f"unknown roulette {self.lengths!r}; expected one of {', '.join(LENGTHS)}")
        if self.terms < 1 or self.samples < 1 or self.probes < 1 or self.exact_terms < 0:
            raise UserError(
                f"terms {self.terms}, samples {self.samples}, probes {self.probes} must be at least 1 "
                f"and exact_terms {self.exact_terms} at least 0"
            )
        if not (self.parameter > 0 and (self.lengths == "poisson" or self.parameter < 1)):
            raise UserError(f"roulette parameter {self.parameter} is out of range for {self.lengths}")

    def survival(self, n: int) -> float:
        """P(N >= n)."""
        if n <= 0:
            return 1.0
        if self.lengths == "geometric":
            return (1 - self.parameter) ** (n - 1)
        term = math.exp(-self.parameter + n * math.log(self.parameter) - math.lgamma(n + 1))
        tail = 0.0
        for k in range(n, n + 100):
            tail += term
            term *= self.parameter / (k + 1)
        return max(tail, sys.float_info.min)

    def length(self, uniform: float) -> int:
        """The draw of N that a uniform number stands for."""
        n = 0
        while self.survival(n + 1) > uniform and n < MOST_TERMS:
            n += 1
        return n

    def coefficients(self, draws: Draws) -> list[float]:
        """c_1, c_2, ..., c_K."""
        if self.rule != "roulette":
            return [1.0] * self.terms
        lengths = [self.length(draws.uniform()) for _ in range(self.samples)]
        return [
            sum(n >= k - self.exact_terms for n in lengths) / self.samples / self.survival(k - self.exact_terms)
            for k in range(1, self.exact_terms + max(lengths) + 1)
        ]


def block_logdet(
    g: Map, x: Tensor, draws: Draws, rule: LogdetRule, recompute: bool = False, again: Callable[[], Map] | None = None
) -> tuple[Tensor, Tensor]:
    """g(x) and log det(I + J_g(x)) per sample, both differentiable.

    Recomputing, `again` may make g anew in the backward pass, so that its normalised weights are not kept either.
    """
    if rule.rule == "exact":
        return exact_logdet(g, x)
    if rule.rule == "trace":
        return trace_logdet(g, x, rule.terms)
    coefficients = rule.coefficients(draws)
    v = channels_last(torch.cat([draws.normal(x) for _ in range(rule.probes)]))
    return series_logdet(g, channels_last(x), v, coefficients, (again or (lambda: g)) if recompute else None)


def series_logdet(
    g: Map, x: Tensor, v: Tensor, coefficients: list[float], again: Callable[[], Map] | None = None
) -> tuple[Tensor, Tensor]:
    """The series with probes v and coefficients c_k; its gradient by the Neumann series. `again`: recompute with it."""
    if torch.is_grad_enabled():
        gx, logdet = _Series.apply(g, x, v, coefficients, again, *g.tensors())
        return gx, logdet
    gx, pull, *_ = g.run(x, len(x))
    return gx, series_value(pull, v, coefficients, len(x))


def series_value(pull: Pull, v: Tensor, coefficients: list[float], n: int) -> Tensor:
    """The value sum_k (-1)^(k+1) c_k / k v^T J^k v alone.

    |J| < 1, so |v^T J^j v| <= |v| |(J^T)^k v| for all j >= k: where that bounds the rest to nothing, the rest is left
    out. Powers of a Jacobian fade faster than its norm says.
    """
    power, value = v, v.new_zeros(n)
    length, allowed = v.flatten(1).norm(dim=1), NEGLIGIBLE * v[0].numel()
    for k, c in enumerate(coefficients, start=1):
        power = pull(power)
        value = value + (-1.0) ** (k + 1) * c / k * per_sample_dot(power, v, n)
        rest = sum(later / j for j, later in enumerate(coefficients[k:], start=k + 1))
        if k >= CHECKED and bool((rest * length * power.flatten(1).norm(dim=1) <= allowed).all()):
            break
    return value


def power_series(pull: Pull, v: Tensor, jv: Tensor | None, coefficients: list[float], n: int) -> tuple[Tensor, Tensor]:
    """The value sum_k (-1)^(k+1) c_k / k v^T J^k v, and w = sum_k (-1)^k c_(k+1) (J^T)^k v.

    With J v at hand the last product is saved: v^T J^k v = ((J^T)^(k-1) v)^T (J v).
    """
    power, w, value = v, torch.zeros_like(v), v.new_zeros(n)
    for k, c in enumerate(coefficients, start=1):
        sign = -1.0 if k % 2 == 0 else 1.0
        w.add_(power, alpha=sign * c)
        if jv is not None:
            value.add_(per_sample_dot(power, jv, n), alpha=sign * c / k)
        if jv is None or k < len(coefficients):
            power = pull(power)
        if jv is None:
            value.add_(per_sample_dot(power, v, n), alpha=sign * c / k)
    return value, w


def per_sample_dot(a: Tensor, b: Tensor, n: int) -> Tensor:
    """Inner products of rows, averaged over the probes of each sample."""
    products = a * b
    sums = products.sum(list(range(1, products.dim())))  # as they lie, where flattening would copy them
    return sums if len(sums) == n else sums.view(-1, n).mean(0)


class _Series(torch.autograd.Function):
    """g(x) and its log-det as one node of the graph, the gradient of w^T J v with it.

    The batch is taken in parts, one after the other, since what a pass makes on the way is many times larger than what
    it needs or leaves. Recomputing, only x, v and w are kept, and what the map itself finds worth it; the backward pass
    makes the activations again with the map that `again` gives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        g: Map,
        x: Tensor,
        v: Tensor,
        coefficients: list[float],
        again: Callable[[], Map] | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        points, values, ctx.parts, ctx.probes, ctx.again = [], [], [], len(v) // len(x), again
        for part in parts(x, again is not None):
            x_part, v_part = x[part], v.unflatten(0, (-1, len(x)))[:, part].flatten(0, 1)
            n, rows = len(x_part), torch.cat([x_part, v_part])
            if again is not None:
                gx, pull, _, kept = g.run(x_part, n)
                value, w = power_series(pull, v_part, None, coefficients, n)
                ctx.parts.append((part, w, (rows, n, kept)))
            else:
                out, pull, back, _ = g.run(rows, n)
                gx = out[:n]
                value, w = power_series(pull, v_part, out[n:], coefficients, n)
                ctx.parts.append((part, w, back))
            points.append(gx)
            values.append(value)
        return torch.cat(points), torch.cat(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        into_points, into_logdet = channels_last(grads[0]), grads[1]
        per_tangent = (into_logdet / ctx.probes).view(-1, *[1] * (into_points.dim() - 1))
        into_x: list[Tensor] = []
        sums: Gradients = []
        if not ctx.parts:
            raise RuntimeError("gradients were taken without retain_graph before, and what they need is freed")
        g = ctx.again() if ctx.again else None
        left = ctx.parts
        if torch._C._autograd._get_current_graph_task_keep_graph():  # retain_graph
            left = list(left)
        while left:  # the graph may outlive its gradients, so each part goes as soon as it is used
            part, w, kept = left.pop(0)
            n = len(into_points[part])
            back = kept if g is None else g.again(*kept)
            into_rows, found = back(torch.cat([into_points[part], per_point(w, per_tangent[part])]))
            into_x.append(into_rows[:n])
            sums = [total.add_(one) for total, one in zip(sums, found, strict=True)] if sums else found
            del w, kept, back, into_rows, found
        return (None, torch.cat(into_x), None, None, None, *sums)


def parts(x: Tensor, recompute: bool) -> list[slice]:
    """A batch in pieces. A CPU is as fast on some thousand pixels; a GPU gets smaller ones only to save memory."""
    if x.device.type == "cpu":
        pixels = PIXELS * max(1, torch.get_num_threads() // 2)
        size = max(1, pixels // math.prod(x.shape[2:]))
    else:
        size = math.ceil(len(x) / PARTS) if recompute else len(x)
    return [slice(start, start + size) for start in range(0, len(x), size)]


def jacobian(g: Map, x: Tensor) -> tuple[Tensor, Tensor]:
    """g(x) and the whole Jacobian, N x d x d, differentiable: one tangent per dimension."""
    n, d = len(x), x[0].numel()
    eye = torch.eye(d, dtype=x.dtype, device=x.device)
    if torch.is_grad_enabled():
        basis = eye[:, None].expand(d, n, d).reshape(d * n, *x.shape[1:])
        rows, _ = g.push(torch.cat([x, basis]), n)
        return rows[:n], rows[n:].reshape(d, n, d).permute(1, 2, 0)
    gx, pull, *_ = g.run(x, n)
    chunks = eye.split(max(1, 1024 // n))
    parts = [pull(part[:, None].expand(-1, n, d).reshape(-1, *x.shape[1:])).reshape(len(part), n, d) for part in chunks]
    return gx, torch.cat(parts).transpose(0, 1)


def exact_logdet(g: Map, x: Tensor) -> tuple[Tensor, Tensor]:
    """From the whole Jacobian. det(I + J) > 0 since Lip(g) < 1."""
    gx, j = jacobian(g, x)
    if j.shape[-1] == 2:
        return gx, plane_logdet(j[:, :, 0], j[:, :, 1])
    return gx, torch.linalg.slogdet(torch.eye(j.shape[-1], dtype=j.dtype, device=j.device) + j).logabsdet


def plane_logdet(first: Tensor, second: Tensor) -> Tensor:
    """ln det(I + J) in two dimensions, from the columns of J."""
    return torch.log((1 + first[:, 0]) * (1 + second[:, 1]) - first[:, 1] * second[:, 0])


def plane_step(x: Tensor, branch: Callable[[], Map]) -> tuple[Tensor, Tensor]:
    """g(x) and the exact log-det in two dimensions in plain torch: small work, made to be compiled as a whole."""
    n, eye = len(x), torch.eye(2, dtype=x.dtype, device=x.device)
    rows = branch().tangents(torch.cat([x, eye.repeat_interleave(n, 0)]), n)
    gx, first, second = rows.chunk(3)
    return gx, plane_logdet(first, second)


def trace_logdet(g: Map, x: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """The truncated series with exact traces."""
    gx, j = jacobian(g, x)
    power, total = j, torch.zeros_like(gx.flatten(1)[:, 0])
    for k in range(1, terms + 1):
        total = total + (-1.0) ** (k + 1) / k * power.diagonal(dim1=1, dim2=2).sum(1)
        power = power @ j
    return gx, total
