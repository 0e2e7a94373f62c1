"""Kernels of our own (`native/`) for following the norms of convolutions, on CPUs.

Between the products, torch takes as long again: hundreds of operations on a few thousand numbers, and many passes over
long vectors.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from idn.flows.fuse import is_fusing
from idn.flows.kernels import kernel_library


def kernel_for(tensor: Tensor, name: str) -> ctypes.CDLL | None:
    """The kernel, where kernels are switched on, for what it knows and if it can be had."""
    known = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return kernel_library(name) if known and is_fusing() else None


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
    kernel.strongest_waves((ctypes.c_int * len(ints))(*ints), *_addresses(tensors))
    return gain, images, responses, channels


def longest(
    kernel: ctypes.CDLL, pair: Tensor, wave: Tensor, applied: Tensor, responses: Tensor, independent: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of two pairs of vectors L x 2 x n and their images: the combination of length 1 with the longest image, that
    image, and its length squared."""
    given = [x.contiguous() for x in (pair, wave, applied, responses)]
    vector, image, square = (
        torch.empty_like(given[0][:, :1]),
        torch.empty_like(given[2][:, :1]),
        pair.new_empty(len(pair)),
    )
    sizes = (ctypes.c_int64(x.shape[2]) for x in (pair, applied))
    threads, least = torch.get_num_threads(), ctypes.c_float(independent)
    kernel.longest(len(pair), *sizes, threads, least, *_addresses((*given, vector, image, square)))
    return vector, image, square


def gradients(kernel: ctypes.CDLL, pulled: Tensor, vector: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """A^T A v - |A v|^2 v in the place of A^T A v, if it can be had; and its length."""
    pulled, length = pulled.contiguous(), torch.empty_like(square)
    tensors, threads = (vector, square, pulled, length), torch.get_num_threads()
    kernel.gradients(len(pulled), ctypes.c_int64(pulled.shape[2]), threads, *_addresses(tensors))
    return pulled, length


def grams(kernel: ctypes.CDLL, weight: Tensor) -> Tensor:
    """A A^T of matrices L x outputs x inputs, or A^T A where that is smaller."""
    weight, size = weight.contiguous(), min(weight.shape[1:])
    found = weight.new_empty(len(weight), size, size)
    kernel.grams(*weight.shape, torch.get_num_threads(), *_addresses((weight, found)))
    return found


def _addresses(tensors: Sequence[Tensor]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]
