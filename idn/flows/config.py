"""What a flow is made of."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from idn.errors import UserError
from idn.flows.activations import ACTIVATIONS
from idn.flows.logdet import LogdetRule

BRANCHES = ("dense", "residual")


@dataclass(frozen=True)
class FlowConfig:
    """A flow's architecture and its log-det rules; everything that a weights file does not hold."""

    shape: tuple[int, ...]
    """(C, H, W) of an image or (d,) of a vector."""
    branch: Literal["dense", "residual"] = "dense"
    """dense: i-DenseNet; residual: Residual Flow."""
    learnable_concat: bool = False
    """Learn eta 1 and 2 of every dense layer (LC)."""
    blocks: tuple[int, ...] = (4, 4, 4)
    """Blocks of each scale; one number for vectors."""
    depth: int = 3
    """Dense layers in a branch."""
    growth: int = 124
    """Features that a dense layer adds."""
    width: int = 512
    """Features between a residual branch's layers."""
    kernels: tuple[int, ...] = (3, 1, 3)
    """Kernel sizes of a residual branch on images."""
    hidden: int = 4
    """Hidden layers of a residual branch on vectors."""
    fc_blocks: int = 4
    """Fully connected blocks at the end of an image flow."""
    fc_width: int = 128
    """Features of their residual branch."""
    fc_stem: int = 64
    """Features that their dense branch starts with."""
    fc_growth: int = 32
    """Growth of their dense branch."""
    activation: str = "lipswish"
    """lipswish, clipswish, relu, elu, tanh or identity."""
    first_activation: bool = False
    """Whether a residual image flow's very first branch starts with an activation, as all others do."""
    coeff: float = 0.98
    """Bound on the norm of every weight."""
    concat_coeff: float = 0.98
    """Bound on the Lipschitz constant of a concatenation."""
    logit_alpha: float | None = 0.05
    """Margin of the logit transform; None for data that is not in [0, 1]."""
    actnorm: bool = True
    """ActNorm at the start and after every block."""
    factor_out: bool = False
    """Half of the channels leave after each scale."""
    squeeze_first: bool = False
    """Space to depth before the first scale."""
    train_logdet: LogdetRule = field(default_factory=LogdetRule)
    """Log-det in training."""
    eval_logdet: LogdetRule = field(default_factory=lambda: LogdetRule(exact_terms=20))
    """Log-det in evaluation."""
    seed: int = 0
    """Seed of the first weights."""

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 3) or min(self.shape) < 1:
            raise UserError(f"shape {self.shape} is not an image (C, H, W) or a vector (d,)")
        if self.branch not in BRANCHES:
            raise UserError(f"unknown branch {self.branch!r}; expected one of {', '.join(BRANCHES)}")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"unknown activation {self.activation!r}; expected one of {', '.join(ACTIVATIONS)}")
        for name in ("coeff", "concat_coeff"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} must lie between 0 and 1, or blocks are not invertible")
        for name in ("depth", "growth", "width", "hidden", "fc_width", "fc_stem", "fc_growth"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} must be at least 1")
        if not self.blocks or min(self.blocks) < 0 or self.fc_blocks < 0:
            raise UserError(f"blocks {self.blocks} and fc_blocks {self.fc_blocks} must not be negative or empty")
        if self.logit_alpha is not None and not 0 <= self.logit_alpha < 0.5:
            raise UserError(f"logit_alpha {self.logit_alpha} must lie in [0, 0.5)")
        if len(self.shape) == 1 and len(self.blocks) != 1:
            raise UserError(f"blocks {self.blocks}: a vector flow has one number of blocks")
        if len(self.shape) == 3:
            halvings = len(self.blocks) - 1 + self.squeeze_first
            height, width = self.shape[1:]
            if height % 2**halvings or width % 2**halvings:
                raise UserError(f"a {height}x{width} image cannot be halved {halvings} times, once per scale")

    @property
    def dims(self) -> int:
        return math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "FlowConfig":
        """The inverse of `to_dict`, also after a trip through JSON."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UserError(f"unknown flow setting {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        for name in ("train_logdet", "eval_logdet"):
            if isinstance(values.get(name), dict):
                values[name] = LogdetRule(**values[name])
        return cls(**values)
