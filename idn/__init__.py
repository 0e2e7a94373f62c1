"""Training invertible residual networks at scale: i-DenseNets and Residual Flows."""

from idn.errors import UserError
from idn.flows.build import build
from idn.flows.config import FlowConfig
from idn.flows.draws import Draws
from idn.flows.files import load
from idn.flows.flow import Flow, Likelihood, bits_per_dim
from idn.flows.logdet import LogdetRule

__version__ = "0.1.0"
__all__ = [
    "Draws",
    "Flow",
    "FlowConfig",
    "Likelihood",
    "LogdetRule",
    "UserError",
    "bits_per_dim",
    "build",
    "load",
]
