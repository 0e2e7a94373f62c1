"""Starts for the inverse of narrow image branches by a kernel of our own (`native/images.cpp`).

On few channels, what torch does between convolutions takes as long as they do. The kernel takes image by image through
the whole search, all of it in the cache. It is compiled on its first use and kept; CPUs only. Where it is not available
or does not know how, `native_start` returns None.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from idn.flows.evaluation import Beside, Product, Step, Times, folded, mirrored_silu, silu
from idn.flows.inverse import NEAR, NOISE, ROUGH
from idn.flows.kernels import kernel_library
from idn.flows.maps import Affine, Map
from idn.flows.rows import channels_last

WIDEST = 128
"""Features of a pixel: more of them fill the cache, and torch's convolutions are as quick."""
MOST_EVALUATIONS = 16
"""A search that has not ended by then is left to others."""


class Layer(NamedTuple):
    """A convolution, and whether what it makes joins what entered it."""

    affine: Affine
    beside: bool


class Branch(NamedTuple):
    """Convolutions with silu between them, and the number that what enters is multiplied with for a silu before."""

    layers: list[Layer]
    scale: Tensor | None
    mirrored: bool
    """Whether a silu(q) stands for [silu(q) ; silu(-q)]."""

    @property
    def narrow(self) -> bool:
        """Whether all layers work on few channels."""
        return all(max(layer.affine.weight.shape[:2]) <= WIDEST for layer in self.layers)


def known_branch(g: Map) -> Branch | None:
    """g as kernels know it; None for anything else."""
    steps = folded(g)
    return _read(steps, silu) or _read(steps, mirrored_silu)


def _read(steps: list[Step], phi: Step) -> Branch | None:
    """With phi between the convolutions."""
    scale: Tensor | None = None
    match steps:
        case [Times(factor), first, *rest] if first is phi and factor.numel() == 1:
            scale, steps = factor, rest
    layers: list[Layer] = []
    while steps:
        match steps:
            case [Product(affine)]:
                layers.append(Layer(affine, False))
                steps = []
            case [Product(affine), after, *rest] if after is phi and rest:
                layers.append(Layer(affine, False))
                steps = rest
            case [Beside([Product(affine), after]), *rest] if after is phi and rest:
                layers.append(Layer(affine, True))
                steps = rest
            case _:
                return None
    return Branch(layers, scale, phi is not silu) if layers else None


def native_start(branch: Branch, y: Tensor, goals: Tensor, weight: Tensor, gate: float) -> Tensor | None:
    """About the x with x + g(x) = y, where the largest entry of each sample's residual is to be below its goal.

    `weight` and `gate`, the limit of what its second part multiplies, are those of `correction.py`.
    """
    if y.device.type != "cpu" or y.dtype != torch.float32 or y.dim() != 4 or len(y) == 0 or not branch.narrow:
        return None
    if branch.mirrored or not _knows(branch.layers) or (kernel := library()) is None:
        return None
    last = Layer(Affine(weight, weight.new_zeros(len(weight)), padding=weight.shape[2] // 2), beside=False)
    low = kernel.images_per_word() > 1
    ints = [*y.shape[1:], branch.scale is not None, weight.shape[1] > y.shape[1], ROUGH * low, MOST_EVALUATIONS]
    ints.append(len(branch.layers))
    tensors: list[Tensor] = []
    for affine, beside in (*branch.layers, last):
        outputs, inputs, kernel_size, _ = affine.weight.shape
        ints += [kernel_size, inputs, outputs, beside]
        full = _packed(affine.weight, kernel.images_lanes(), 1)
        low_weight = _packed(affine.weight, kernel.images_lanes(), 2).to(torch.bfloat16) if low else full
        tensors += [full, low_weight, _padded(affine.bias, kernel.images_lanes())]
    floats = [1.0 if branch.scale is None else float(branch.scale), gate, NEAR, NOISE]
    y, goals = channels_last(y), goals.contiguous()
    x = torch.empty_like(y)
    kernel.images_start(
        (ctypes.c_int * len(ints))(*ints),
        (ctypes.c_float * len(floats))(*floats),
        (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors]),
        ctypes.c_long(len(y)),
        torch.get_num_threads(),
        *(ctypes.c_void_p(t.data_ptr()) for t in (y, goals, x)),
    )
    return x


def _knows(layers: Sequence[Layer]) -> bool:
    """Whether all layers are convolutions that the kernel knows."""
    affines = [layer.affine for layer in layers]
    return all(affine.weight.dim() == 4 and affine.weight.shape[2] in (1, 3) for affine in affines) and all(
        affine.padding == affine.weight.shape[2] // 2 for affine in affines
    )


def _padded(bias: Tensor, lanes: int) -> Tensor:
    return F.pad(bias, (0, -len(bias) % lanes))


def _packed(weight: Tensor, lanes: int, per_word: int) -> Tensor:
    """Vectors of outputs, lines of taps, words of inputs, taps: in the order in which the kernel reads them."""
    outputs, inputs, height, width = weight.shape
    weight = F.pad(weight, (0, 0, 0, 0, 0, -inputs % per_word, 0, -outputs % lanes))
    return (
        weight.view(-1, lanes, weight.shape[1] // per_word, per_word, height, width)
        .permute(0, 4, 2, 5, 1, 3)
        .contiguous()
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where it cannot be had."""
    return kernel_library("images")
