"""What rounding does to the norms of weights. On CPUs bf16 goes through a kernel of our own (`native/rounding.cpp`).

Weights are L x outputs x inputs (with the taps of convolutions behind), each times a factor before it is rounded.
"""

import ctypes

import torch
from torch import Tensor

from idn.flows.following import kernel_for
from idn.flows.kernels import addresses

NOISE = 1.15
"""What rounding adds to a norm at most, over what it is expected to add."""
BEYOND = 2e-4
"""Share of the bound by which a rounded weight may be longer along v."""


class Rounding:
    """Weights that are rounded to a precision."""

    def __init__(self, weight: Tensor, precision: torch.dtype) -> None:
        self.weight, self.precision = weight.flatten(2).contiguous(), precision
        self.kernel = kernel_for(weight, "rounding") if precision == torch.bfloat16 else None

    def errors(self, factors: Tensor) -> Tensor:
        """The length of what rounding adds."""
        if self.kernel is not None:
            return self._call("rounding_errors", factors).sqrt()
        exact = self._times(factors)
        return torch.linalg.vector_norm(self._rounded(exact) - exact, dim=(1, 2))

    def along(self, factors: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """u^T R v for matrices R, with u of L x outputs and v of L x inputs."""
        if self.kernel is not None:
            return self._call("rounded_along", factors, u.contiguous(), v.contiguous())
        return (self._rounded(self._times(factors)) @ v.unsqueeze(-1)).squeeze(-1).mul(u).sum(1)

    def along_slope(self, factors: Tensor, slope: Tensor) -> Tensor:
        """The same for convolutions, given the slope of u^T R v over R, in R's shape."""
        if self.kernel is not None:
            return self._call("rounded_along", factors, None, slope.contiguous())
        return (self._rounded(self._times(factors)) * slope.flatten(2)).sum((1, 2))

    def _times(self, factors: Tensor) -> Tensor:
        return self.weight * factors[:, None, None]

    def _rounded(self, exact: Tensor) -> Tensor:
        return exact.to(self.precision).to(exact.dtype)

    def _call(self, name: str, factors: Tensor, *others: Tensor | None) -> Tensor:
        found = torch.empty_like(factors)
        tensors = (self.weight, factors.contiguous(), *others, found)
        addresses = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors)
        getattr(self.kernel, name)(*self.weight.shape, torch.get_num_threads(), *addresses)
        return found


def outweighed(weight: Tensor, slope: Tensor, sigma: Tensor, slack: Tensor, shrink: Tensor, coeff: float) -> bool:
    """Writes the factor for a convolution's bf16 weight, given the slope of its sigma, if a kernel can."""
    tensors = (weight, slope, sigma, slack)
    known = all(x.is_contiguous() and x.dtype == torch.float32 for x in tensors)
    kernel = kernel_for(weight, "rounding") if known else None
    if kernel is None:
        return False
    rules = (ctypes.c_float * 3)(NOISE, BEYOND, torch.finfo(torch.bfloat16).eps)
    sizes = (*weight.shape[:2], weight[0, 0].numel(), torch.get_num_threads())
    kernel.outweigh_rounding(
        *sizes, ctypes.c_float(coeff), rules, addresses(tensors), ctypes.c_void_p(shrink.data_ptr())
    )
    torch.autograd.graph.increment_version(shrink)
    return True
