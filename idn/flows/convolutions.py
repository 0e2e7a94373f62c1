"""Norms of 3x3 convolutions by a kernel of our own (`native/convolutions.cpp`), on CPUs.

One step of `top_beside_wave` with the search for the wave is one call, which works on a layer's tensors as they stand.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from idn.flows.following import kernel_for
from idn.flows.kernels import addresses
from idn.flows.norms import INDEPENDENT
from idn.flows.waves import BEST, tables


class Convolution(NamedTuple):
    """A layer's tensors, of which all but the weight are written. `others` are the channels of waves."""

    weight: Tensor
    u: Tensor
    v: Tensor
    climb: Tensor
    others: Tensor
    sigma: Tensor
    slack: Tensor


def follow_convolution(layer: Convolution, steps: int, adapts: float) -> bool:
    """Follows the norm for one step while compiled kernels are on; whether it did."""
    kernel = _kernel_for(layer)
    if kernel is None:
        return False
    known = tables(layer.weight.shape[-1], min(layer.weight.shape[:2]))
    ints = (*_shape(layer.weight, layer.v), len(known[0]), len(known[1]), BEST, steps)
    rules = ctypes.c_float(INDEPENDENT), ctypes.c_float(adapts)
    kernel.follow((ctypes.c_int * len(ints))(*ints), *rules, addresses(layer), addresses(known))
    # What has been derived from them is known by their versions.
    torch.autograd.graph.increment_version(layer[1:])
    return True


def slope_of(weight: Tensor, u: Tensor, v: Tensor) -> Tensor | None:
    """Of u^T W v over W, if a kernel can make it."""
    kernel = _kernel_for((weight, u, v))
    if kernel is None:
        return None
    found, ints = torch.empty_like(weight), _shape(weight, v)
    kernel.slope((ctypes.c_int * len(ints))(*ints), addresses((u, v)), ctypes.c_void_p(found.data_ptr()))
    return found


def _kernel_for(tensors: Sequence[Tensor]) -> ctypes.CDLL | None:
    """Weights may be in another precision or elsewhere, or, under ZeRO 3, empty."""
    known = tensors[0].shape[2:] == (3, 3) and all(x.is_contiguous() and x.dtype == torch.float32 for x in tensors)
    return kernel_for(tensors[0], "convolutions") if known else None


def _shape(weight: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*weight.shape[:2], *v.shape[2:], torch.get_num_threads())
