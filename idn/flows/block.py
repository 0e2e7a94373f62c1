"""The invertible residual block F(x) = x + g(x) with Lip(g) < 1."""

from typing import Any

import torch
from torch import Tensor

from idn.flows.branches import Branch
from idn.flows.correction import Inverter
from idn.flows.draws import Draws
from idn.flows.elementary import Layer
from idn.flows.fuse import fused_or, is_fusing
from idn.flows.logdet import LogdetRule, block_logdet, exact_logdet, parts, plane_step
from idn.flows.maps import InPrecision
from idn.flows.plane import native_step

_plane_step = fused_or(plane_step, otherwise=lambda x, branch: exact_logdet(branch(), x))


class Block(Layer):
    """F(x) = x + g(x), its log-det by a rule, its inverse by a fixed point."""

    def __init__(self, branch: Branch, name: str) -> None:
        super().__init__()
        self.branch = branch
        self.name = name
        self._recompute = False
        self.inverter = Inverter()

    @property
    def recompute(self) -> bool:
        """Whether activations, and slopes of norms, are made again in the backward pass instead of kept."""
        return self._recompute

    @recompute.setter
    def recompute(self, on: bool) -> None:
        self._recompute = on
        for layer in self.branch.spectral_layers():
            layer.sparing = on

    def forward(self, x: Tensor, draws: Draws, rule: LogdetRule, *_: Any) -> tuple[Tensor, Tensor]:
        if rule.rule == "exact" and x.shape[1:] == (2,) and torch.is_grad_enabled():
            if is_fusing() and (found := native_step(x, self.branch)):
                return found
            gx, logdet = _plane_step(x, self.branch)
        else:
            gx, logdet = block_logdet(self.branch(), x, draws, rule, self.recompute, again=self.branch)
        return x + gx, logdet

    def moved(self, x: Tensor) -> Tensor:
        """F(x) alone, outside any graph."""
        g = self.branch()
        return x + torch.cat([g.value(x[part]) for part in parts(x, self.recompute)])

    def inverse(self, y: Tensor, tolerance: float | None = None) -> Tensor:
        g = self.branch()
        # The noise of low-precision products has no fixed point: the rounded weights are multiplied in y's precision.
        exact = g.inner.with_tensors(t.to(y.dtype) for t in g.inner.tensors()) if isinstance(g, InPrecision) else g
        return self.inverter(exact, y, tolerance, self._version_of_weights())

    def _version_of_weights(self) -> tuple[tuple[int, int], ...]:
        return tuple((tensor.data_ptr(), tensor._version) for tensor in self.branch.parameters())
