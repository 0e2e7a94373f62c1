"""Rows: the first n are points, and each further group of n rows holds one tangent per point.

Images are kept channels-last, so that the channels of a pixel lie side by side: to a kernel an image batch is a matrix
with a row per pixel, and channels of it are columns.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from idn.flows.fuse import fused, is_fusing
from idn.flows.kernels import kernel_library


def per_point(rows: Tensor, factor: Tensor) -> Tensor:
    """Multiplies each group of rows by `factor`, which has one row per point."""
    if len(rows) == len(factor):
        return rows * factor
    return (rows.unflatten(0, (-1, len(factor))) * factor).flatten(0, 1)


def overlap(tangents: Tensor, grads: Tensor, n: int) -> Tensor:
    """Products of tangents with their gradients, summed over the tangents of each point."""
    product = wide(tangents) * grads
    return product if len(product) == n else product.unflatten(0, (-1, n)).sum(0)


def wide(x: Tensor) -> Tensor:
    """Low precision is for products; elementwise functions are computed in fp32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def channels_last(x: Tensor) -> Tensor:
    if x.dim() != 4:
        return x.contiguous()
    x = x.contiguous(memory_format=torch.channels_last)
    channels, height, width = x.shape[1:]
    # A single channel is in both layouts at once: the strides tell torch which of them its convolutions shall keep.
    return x.as_strided(x.shape, (height * width, 1, width, 1)) if channels == 1 else x


def empty_rows(n: int, channels: int, like: Tensor) -> Tensor:
    """Room for n rows with so many channels."""
    layout = torch.channels_last if like.dim() == 4 else torch.contiguous_format
    return torch.empty((n, channels, *like.shape[2:]), dtype=like.dtype, device=like.device, memory_format=layout)


def along_channels(vector: Tensor, like: Tensor) -> Tensor:
    """A number per channel, shaped and typed to be multiplied with or added to `like`."""
    return vector.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def pixels(x: Tensor) -> Tensor:
    """An image batch as a matrix with one row per pixel; no copy if it is channels-last."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def over_points(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over all but the channels."""
    others = [0, *range(2, x.dim())]
    if x.dtype == dtype:
        return x.sum(others)
    kernel = row_kernel(x)
    if kernel is None or dtype != torch.float32:
        return widened_sum(x, others, dtype)
    out, channels = x.new_empty(x.shape[1], dtype=dtype), x.shape[1]
    low, threads = x.dtype == torch.bfloat16, torch.get_num_threads()
    kernel.sums_of_channels(low, x.numel() // channels, channels, threads, x.data_ptr(), out.data_ptr())
    return out


@fused
def widened_sum(x: Tensor, dims: list[int], dtype: torch.dtype) -> Tensor:
    """Uncompiled, a wider copy is made first."""
    return x.sum(dims, dtype=dtype)


def summed(sources: Sequence[Tensor], start: int, width: int) -> Tensor:
    """The sum of so many channels of each source."""
    total = sources[0][:, start : start + width]
    for source in sources[1:]:
        total = total + source[:, start : start + width]
    return total


def gathered(first: Tensor, others: Sequence[Tensor], number: Tensor) -> Tensor:
    """`first` and a number times the sum of the others' first channels, in fp32 at least."""
    kernel, channels = row_kernel(first, *others), first.shape[1]
    if kernel is None:
        return wide(first) + number * wide(summed(others, 0, channels))
    out = torch.empty_like(first, dtype=torch.float32)
    low, rows, count = first.dtype == torch.bfloat16, first.numel() // channels, len(others)
    given = *addresses(others), number.data_ptr(), first.data_ptr()
    kernel.gather_channels(low, rows, channels, count, *given, out.data_ptr())
    return out


def addresses(tensors: Sequence[Tensor], start: int = 0) -> tuple[Any, Any]:
    """Where a channel of each tensor begins, and how far it is from row to row."""
    starts = [x.data_ptr() + start * x.element_size() for x in tensors]
    return (ctypes.c_void_p * len(starts))(*starts), (ctypes.c_int64 * len(starts))(*[x.shape[1] for x in tensors])


def row_kernel(first: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """The kernels for rows (`native/swish.cpp`), where they are on, can be had and know how to read these tensors."""
    if not is_fusing() or first.device.type != "cpu" or first.dtype not in (torch.float32, torch.bfloat16):
        return None
    if not all(x.dtype == first.dtype and _packed(x) for x in (first, *others)):
        return None
    return _library()


def _packed(x: Tensor) -> bool:
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.dim() == 2 and x.is_contiguous()


@cache
def _library() -> ctypes.CDLL | None:
    kernel, pointer = kernel_library("swish"), ctypes.c_void_p
    if kernel is not None:
        kernel.swish_forward.argtypes = [pointer] * 4
        kernel.swish_pull.argtypes = [pointer] * 4
        kernel.swish_back.argtypes = [pointer] * 7
        sizes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        kernel.gather_channels.argtypes = [*sizes, *[pointer] * 5]
        kernel.sums_of_channels.argtypes = [*sizes, *[pointer] * 2]
    return kernel
