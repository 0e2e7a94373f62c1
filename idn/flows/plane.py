"""Blocks of two dimensions by a kernel of our own (`native/`), compiled on its first use and kept in the cache.

A branch with its norms, etas and betas is one call forward and one backward: normalising and activating a few thousand
numbers by single operations takes torch as long as the products. CPUs only; what the kernel does not know
(`native_step` returns None) goes through the maps.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from idn.flows.activations import CLIPSWISH_SLOPE, LIPSWISH_SLOPE, CLipSwishActivation, LipSwishActivation
from idn.flows.branches import Branch, Concatenation, DenseLayer
from idn.flows.kernels import addresses, kernel_library
from idn.flows.layers import SpectralLayer

WIDEST = 4096
"""Features of a branch in all: a tile of points must stay in the cache."""
KINDS: dict[type[nn.Module], tuple[int, float]] = {
    LipSwishActivation: (1, LIPSWISH_SLOPE),
    CLipSwishActivation: (2, LIPSWISH_SLOPE * CLIPSWISH_SLOPE),
}


FIXED = (1, 2, 4, 5)
"""Of a layer's tensors u, v, slack and shrink get no gradient."""


class Step(NamedTuple):
    """A layer with the activation and the concatenation that follow it."""

    layer: SpectralLayer
    activation: nn.Module | None
    concatenation: Concatenation | None


class Recipe:
    """A branch as the kernel reads it: numbers that stay, and modules whose tensors change."""

    def __init__(self, first: nn.Module | None, steps: Sequence[Step]) -> None:
        self.first, self.steps = first, steps
        ints = [steps[0].concatenation is not None, len(steps), _kind(first)[0]]
        floats = [_kind(first)[1]]
        for layer, activation, concatenation in steps:
            kind, divisor = _kind(activation)
            ints += [layer.weight.shape[1], layer.weight.shape[0], kind]
            floats += [layer.coeff, 1.0 if concatenation is None else concatenation.coeff, divisor]
        self.ints, self.floats = (ctypes.c_int * len(ints))(*ints), (ctypes.c_float * len(floats))(*floats)
        # Of the first activation, then of every layer.
        self.trained = [0, *(1 + 8 * layer + i for layer in range(len(steps)) for i in range(8) if i not in FIXED)]

    def tensors(self) -> list[Tensor | None]:
        """In the kernel's order, from torch's dictionaries: as attributes they take ten times as long."""
        found: list[Tensor | None] = [_raw_beta(self.first)]
        for layer, activation, concatenation in self.steps:
            own, kept = layer._parameters, layer._buffers
            found += [own["weight"], kept["u"], kept["v"], own["bias"], kept["slack"], kept["shrink"]]
            found += [_raw_beta(activation), None if concatenation is None else concatenation.raw]
        return found


class _Plane(torch.autograd.Function):
    """x + g(x) and ln det(I + J) of a block, from x and the tensors of its branch's recipe."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, low: bool, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        kernel, n = library(), len(x)
        assert kernel is not None
        moved, logdet = torch.empty_like(x), x.new_empty(n)
        ctx.kept = x.new_empty(kernel.plane_kept(recipe.ints, n))
        ctx.recipe, ctx.call = recipe, (int(low), recipe.ints, recipe.floats, addresses(tensors), n)
        kernel.plane_forward(*ctx.call, torch.get_num_threads(), *map(_address, (x, moved, logdet, ctx.kept)))
        ctx.save_for_backward(x, *tensors)
        return moved, logdet

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernel = library()
        assert kernel is not None
        x, *tensors = ctx.saved_tensors
        into_moved, into_logdet = grads[0].contiguous(), grads[1].contiguous()
        into_x = torch.empty_like(x)
        found: list[Tensor | None] = [None] * len(tensors)
        for i in ctx.recipe.trained:
            found[i] = torch.empty_like(tensors[i]) if ctx.needs_input_grad[3 + i] else None
        wanted = addresses([found[i] for i in ctx.recipe.trained])
        given = map(_address, (x, into_moved, into_logdet, ctx.kept, into_x))
        kernel.plane_backward(*ctx.call, torch.get_num_threads(), *given, wanted)
        return None, None, into_x, *found


def native_step(x: Tensor, branch: Branch) -> tuple[Tensor, Tensor] | None:
    """x + g(x) and the exact log-det in two dimensions; None where the kernel is not available or does not know how."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or len(x) == 0:
        return None
    recipe = _recipe(branch)
    if recipe is None or branch.precision not in (None, torch.bfloat16):
        return None
    tensors = recipe.tensors()
    # ZeRO 3 leaves parameters empty until their module is called.
    if hasattr(tensors[1], "ds_id") or not all(t is None or _readable(t) for t in tensors):
        return None
    kernel, low = library(), branch.precision is not None
    if kernel is None or (low and not kernel.plane_low()):
        return None
    moved, logdet = _Plane.apply(recipe, low, x.contiguous(), *tensors)
    return moved, logdet


def _readable(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


_recipes: WeakKeyDictionary[Branch, Recipe | None] = WeakKeyDictionary()


def _recipe(branch: Branch) -> Recipe | None:
    if branch not in _recipes:
        _recipes[branch] = _read(list(branch.parts))
    return _recipes[branch]


def _read(parts: list[Any]) -> Recipe | None:
    """The recipe of dense layers and a last one, or of layers with activations between; None for anything else."""
    *before, last = parts
    first: nn.Module | None = None
    if before and all(isinstance(part, DenseLayer) for part in before):
        steps = [Step(part.layer, part.activation, part.concatenation) for part in before]
    else:
        if len(before) % 2:
            first = before.pop(0)
        steps = [Step(layer, phi, None) for layer, phi in zip(before[::2], before[1::2], strict=True)]
    activations = [step.activation for step in steps] + ([] if first is None else [first])
    steps.append(Step(last, None, None))
    layers = [step.layer for step in steps]
    if not all(isinstance(layer, SpectralLayer) and layer.padding is None for layer in layers):
        return None
    small = len(steps) > 1 and sum(layer.weight.shape[1] for layer in layers) <= WIDEST
    known = small and all(type(phi) in KINDS for phi in activations) and last.bias.shape == (2,)
    return Recipe(first, steps) if known else None


def _kind(activation: nn.Module | None) -> tuple[int, float]:
    return (0, 1.0) if activation is None else KINDS[type(activation)]


def _raw_beta(activation: nn.Module | None) -> Tensor | None:
    return activation._parameters["raw_beta"] if isinstance(activation, LipSwishActivation) else None


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where it cannot be had."""
    kernel = kernel_library("plane")
    if kernel is not None:
        kernel.plane_kept.restype = ctypes.c_int64
    return kernel
