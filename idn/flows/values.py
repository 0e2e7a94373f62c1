"""Values of dense image branches by a kernel of our own (`native/values.cpp`): Winograd's algorithm, on CPUs.

While the inverse is sought, a branch is evaluated again and again, and most of that is 3x3 convolutions. In tiles of
4x4 pixels they take four times fewer products, at the same rounding errors: sums are nine times shorter. The kernel is
compiled on its first use and kept; where it is not available or does not know how, `tiled_value` returns None.
"""

import ctypes
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from idn.flows.evaluation import Step
from idn.flows.images import Branch, Layer
from idn.flows.kernels import addresses, kernel_library
from idn.flows.rows import channels_last

TILE = 4
POINTS = (0.0, 0.75, -0.75, 1.5, -1.5)
"""Where polynomials are evaluated, beside infinity: those of the kernel."""
TOGETHER = 64
"""Tiles that a thread takes at least, if there are so many: turned weights pass through the cache for each time."""


def tiled_value(branch: Branch, like: Tensor) -> Step | None:
    """x -> g(x), for images of the size of those in `like`."""
    if like.device.type != "cpu" or like.dtype != torch.float32 or like.dim() != 4:
        return None
    if not _dense(branch.layers) or (kernel := _library()) is None:
        return None
    lanes, columns = kernel.values_lanes(), kernel.values_columns()
    *layers, last = (layer.affine for layer in branch.layers)
    weights = [_turned(affine.weight, lanes, columns) for affine in layers]
    weights.append(torch.cat(_padded(last.weight.flatten(1).mT, lanes).split(lanes, 1)))
    biases = [_padded(affine.bias, lanes) for affine in (*layers, last)]
    outputs = (ctypes.c_int32 * len(layers))(*[len(affine.bias) for affine in layers])
    starts = addresses(weights), addresses(biases)
    call = _Call(
        threads=torch.get_num_threads(),
        channels=like.shape[1],
        height=like.shape[2],
        width=like.shape[3],
        depth=len(layers),
        enters=branch.scale is not None,
        mirrored=branch.mirrored,
        scale=1.0 if branch.scale is None else float(branch.scale),
        outputs=ctypes.cast(outputs, ctypes.c_void_p),
        weights=ctypes.cast(starts[0], ctypes.c_void_p),
        biases=ctypes.cast(starts[1], ctypes.c_void_p),
    )
    call.alive = outputs, starts, weights, biases
    return _Value(kernel, call)


class _Value:
    """Images x to g(x)."""

    def __init__(self, kernel: ctypes.CDLL, call: "_Call") -> None:
        self.kernel, self.call = kernel, call
        self.tiles = -(-call.height // TILE) * -(-call.width // TILE)
        self.space = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        x, call = channels_last(x), self.call
        share = -(-len(x) // call.threads)
        call.images, call.together = len(x), max(1, min(-(-TOGETHER // self.tiles), share))
        needed = call.threads * self.kernel.values_space(call.reference)
        if len(self.space) < needed:
            self.space = torch.empty(needed)
        out = torch.empty_like(x)
        self.kernel.values(call.reference, x.data_ptr(), self.space.data_ptr(), out.data_ptr())
        return out


def _dense(layers: list[Layer]) -> bool:
    """Whether 3x3 convolutions add to what enters them, and a 1x1 one reads all."""
    *before, last = layers
    return (
        len(before) > 0
        and all(layer.beside and layer.affine.weight.shape[2:] == (3, 3) for layer in before)
        and all(layer.affine.padding == 1 for layer in before)
        and last.affine.weight.shape[2:] == (1, 1)
    )


def _turned(weight: Tensor, lanes: int, columns: int) -> Tensor:
    """Places of a tile, blocks of columns, inputs, columns; the last block may be of one vector."""
    weight = _padded(weight.permute(2, 3, 1, 0).flatten(0, 1), lanes)
    whole = weight.shape[-1] // columns * columns
    blocks = [part for part in (*weight[..., :whole].split(columns, -1), weight[..., whole:]) if part.numel()]
    return torch.kron(_turn(), _turn()) @ torch.cat([block.flatten(1) for block in blocks], 1)


def _padded(weight: Tensor, lanes: int) -> Tensor:
    return F.pad(weight, (0, -weight.shape[-1] % lanes))


@cache
def _turn() -> Tensor:
    """Three taps to values at the points, each over the product of its distances from the others; then the last tap."""
    rows = []
    for point in POINTS:
        distances = math.prod(point - other for other in POINTS if other != point)
        rows.append([1 / distances, point / distances, point**2 / distances])
    return torch.tensor([*rows, [0.0, 0.0, 1.0]])


class _Call(ctypes.Structure):
    """`Call` of the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("threads", "channels", "height", "width", "depth", "images", "together", "enters", "mirrored")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("outputs", "weights", "biases")),
    )

    @property
    def reference(self) -> Any:
        return ctypes.byref(self)


@cache
def _library() -> ctypes.CDLL | None:
    kernel, pointer = kernel_library("values"), ctypes.c_void_p
    if kernel is not None:
        kernel.values_space.restype = ctypes.c_int64
        kernel.values_space.argtypes = [pointer]
        kernel.values.argtypes = [pointer] * 4
    return kernel
