"""Norms of small matrices by a kernel of our own (`native/matrices.cpp`): the rules of `matrices.py`, all at once.

A toy flow has fifty of them, and following their norms by single operations takes torch a quarter of its step.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from idn.flows.fuse import is_fusing
from idn.flows.kernels import addresses, kernel_library
from idn.flows.matrices import PRODUCTS, ROUNDOFF, SMALL, SQUARINGS, VAGUE
from idn.flows.rounding import BEYOND, NOISE


class SmallMatrix(NamedTuple):
    """A layer's tensors, of which all but the weight are written."""

    weight: Tensor
    u: Tensor
    v: Tensor
    sigma: Tensor
    slack: Tensor
    shrink: Tensor
    coeff: float
    precision: torch.dtype | None


def follow_small(matrices: Sequence[SmallMatrix]) -> list[bool]:
    """Follows norms while compiled kernels are on; whether each was proven. What was not is left as it is."""
    known = [is_fusing() and _known(matrix) for matrix in matrices]
    chosen = [matrix for matrix, it_is in zip(matrices, known, strict=True) if it_is]
    kernel = kernel_library("matrices") if chosen else None
    if kernel is None or kernel.matrices_most() < SMALL:
        return [False] * len(matrices)
    ints = [n for m in chosen for n in (m.weight.shape[0], m.weight[0].numel(), m.precision is not None)]
    proven = (ctypes.c_ubyte * len(chosen))()
    kernel.matrices_follow(
        len(chosen),
        torch.get_num_threads(),
        (ctypes.c_int * len(ints))(*ints),
        (ctypes.c_float * len(chosen))(*[matrix.coeff for matrix in chosen]),
        addresses([tensor for matrix in chosen for tensor in matrix[:6]]),
        _rules(),
        proven,
    )
    answers = iter(proven)
    return [bool(next(answers)) if it_is else False for it_is in known]


def _known(matrix: SmallMatrix) -> bool:
    """Weights may be in another precision or elsewhere, or, under ZeRO 3, empty; the rest is where they are."""
    weight = matrix.weight
    return (
        matrix.precision in (None, torch.bfloat16)
        and weight.dtype == matrix.v.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and 0 < weight.numel() <= SMALL * max(weight.shape)
    )


@cache
def _rules() -> ctypes.Array[ctypes.c_float]:
    eps = torch.finfo(torch.bfloat16).eps
    return (ctypes.c_float * 6)(PRODUCTS * 2**SQUARINGS, VAGUE, ROUNDOFF, NOISE, BEYOND, eps)
