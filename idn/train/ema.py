"""Averaged weights for evaluation."""

import torch
from torch import Tensor

from idn.flows.flow import Flow


class AveragedWeights:
    """shadow <- decay * shadow + (1 - decay) * weight after every update, in fp32, equal on all ranks."""

    def __init__(self, flow: Flow, decay: float) -> None:
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in flow.named_parameters()} if decay else {}

    def update(self, flow: Flow) -> None:
        """One step of the average; whole parameters are needed."""
        if self.decay:
            weights = [parameter.detach() for parameter in flow.parameters()]
            torch._foreach_lerp_(list(self.shadow.values()), weights, 1 - self.decay)

    def load(self, shadow: dict[str, Tensor]) -> None:
        """Continue from saved averages."""
        for name, tensor in self.shadow.items():
            tensor.copy_(shadow[name])

    def copy_to(self, flow: Flow) -> None:
        """Put the averages into another flow of the same shape."""
        for name, parameter in flow.named_parameters():
            if name in self.shadow:
                parameter.data.copy_(self.shadow[name])
