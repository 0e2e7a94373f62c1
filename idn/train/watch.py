"""Notices where values stop being finite, at the cost of one reduction per tensor and no wait inside the step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from idn.flows.flow import Flow


class FiniteWatch:
    """Sums that stay finite as long as every block's output and every parameter's local gradient does.

    Local means before any reduction over ranks: afterwards one rank's NaN is everybody's.
    """

    def __init__(self, flow: Flow) -> None:
        self.names: list[str] = []
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        modules = {module: name for name, module in flow.named_modules()}
        blocks = {modules[block]: block for block in flow.blocks}
        for block in blocks.values():
            index = self._add(block.name)
            self._handles.append(block.register_forward_hook(self._output_hook(index)))
        for name, parameter in flow.named_parameters():
            owner = next((block.name for prefix, block in blocks.items() if name.startswith(prefix + ".")), None)
            index = self._add(f"{owner} ({name})" if owner else name)
            self._handles.append(parameter.register_hook(self._gradient_hook(index)))

    def first_bad(self) -> tuple[int, bool]:
        """Index in `names` of this step's first non-finite tensor or -1, and whether it was a gradient; forgets."""
        found = (-1, False)
        # A bad activation spoils all gradients, so outputs are asked first, and gradients in the order they were made.
        for sums, is_gradient in ((self._outputs, False), (self._gradients, True)):
            if sums and found[0] < 0:
                finite = torch.stack(list(sums.values())).isfinite().tolist()
                bad = [index for index, good in zip(sums, finite, strict=True) if not good]
                found = (bad[0], is_gradient) if bad else found
        self._outputs, self._gradients = {}, {}
        return found

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()

    def _add(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def _output_hook(self, index: int) -> Callable[[nn.Module, object, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
            for part in output:
                _add(self._outputs, index, part)

        return hook

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda gradient: _add(self._gradients, index, gradient)


def _add(sums: dict[int, Tensor], index: int, tensor: Tensor) -> None:
    """A sum is finite as long as all of its parts are; opposite infinities make it NaN."""
    total = tensor.detach().sum()
    sums[index] = sums[index] + total if index in sums else total
