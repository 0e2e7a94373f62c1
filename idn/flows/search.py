"""The search for the strongest wave (`waves.py`) by a kernel of our own (`native/waves.cpp`), on CPUs.

Hundreds of operations on a few thousand numbers take torch as long as the products between them.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from idn.flows.fuse import is_fusing
from idn.flows.kernels import kernel_library


def kernel_for(weight: Tensor) -> ctypes.CDLL | None:
    """The kernel, where it is switched on, knows the weights and can be had."""
    known = weight.device.type == "cpu" and weight.dtype == torch.float32
    return kernel_library("waves") if known and is_fusing() else None


def search(
    kernel: ctypes.CDLL,
    weight: Tensor,
    size: tuple[int, int],
    tables: Sequence[Tensor],
    channels: Tensor,
    best: int,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gains, waves as images, what the convolutions make of them, and the channels to go on from.

    `tables` are the grid's frequencies, the offsets around them, cos and sin for distances between taps at all these
    places, and the noise to add.
    """
    count, outputs, inputs, width = weight.shape[:4]
    channels, weight = channels.clone(memory_format=torch.contiguous_format), weight.contiguous()
    pixels = size[0] * size[1]
    gain, images, responses = (weight.new_empty(count, *s) for s in ((), (2, inputs * pixels), (2, outputs * pixels)))
    places = (len(tables[0]), len(tables[1]))
    ints = (count, outputs, inputs, width, *size, *places, best, steps, torch.get_num_threads())
    tensors = (weight, *tables, channels, gain, images, responses)
    kernel.strongest_waves((ctypes.c_int * len(ints))(*ints), *(ctypes.c_void_p(t.data_ptr()) for t in tensors))
    return gain, images, responses, channels
