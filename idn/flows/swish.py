"""LipSwish between two products, r phi(a y + b), with its derivatives: y is what the product before it made.

In a dense branch what goes out is written to channels of the tensors that later products read, and gradients come from
channels of what those products give back. CPUs do both within the activation, by a kernel of our own
(`native/swish.cpp`); elsewhere it is torch, compiled where that is on.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idn.flows.fuse import fused
from idn.flows.rows import (
    addresses,
    along_channels,
    empty_rows,
    over_points,
    overlap,
    per_point,
    row_kernel,
    wide,
)
from idn.flows.slices import Slices

NARROW = 4
"""Most channels of an ending."""


class SwishGradients(NamedTuple):
    y: Tensor
    bias: Tensor | None
    beta: Tensor
    ending: Tensor | None
    """Of the columns of the ending's weight, where there is one."""


@dataclass(frozen=True)
class Swish:
    """r phi(a y + b) with phi(x) = x sigmoid(beta x) / divisor; mirrored, r [phi(x); phi(-x)] of x = a y + b."""

    beta: Tensor
    divisor: float
    mirrored: bool = False
    before: Tensor | None = None
    """a, one number."""
    bias: Tensor | None = None
    """b, a number per channel."""
    after: Tensor | None = None
    """r, one number."""

    def rows(self, y: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """What goes out, and its derivative by y, r a phi'(x): the slope that `pull` takes."""
        if row_kernel(y) is None:
            return lipswish_rows(y, n, *self._numbers())
        out = self._wider(y)
        return out, self.write_with_slope(y, n, Slices([out]))

    def write_with_slope(self, y: Tensor, n: int, into: Slices) -> Tensor:
        """Writes what goes out; returns the slope."""
        kernel = _kernel(y, into)
        if kernel is None:
            rows, slope = lipswish_rows(y, n, *self._numbers())
            into.write(rows)
            return slope
        slope = self._wider(y[:n])
        kernel.swish_forward(self._call(y, n, into), y.data_ptr(), slope.data_ptr(), _end(into))
        return slope

    def write(self, y: Tensor, n: int, into: Slices) -> None:
        """The same without the slope."""
        kernel = _kernel(y, into)
        if kernel is None:
            into.write(lipswish_rows(y, n, *self._numbers())[0])
        else:
            kernel.swish_forward(self._call(y, n, into), y.data_ptr(), None, _end(into))

    def pull(self, slope: Tensor, sources: Slices) -> Tensor:
        """J^T u, where u is what the sources hold."""
        kernel = _kernel(slope, sources)
        if kernel is None:
            return pull_rows(sources.read(slope.shape[1]), slope, self.mirrored)
        rows = len(sources.tensors[0] if sources.tensors else sources.ending.rows)  # type: ignore[union-attr]
        into = empty_rows(rows, slope.shape[1] // (1 + self.mirrored), slope)
        kernel.swish_pull(self._call(into, len(slope), sources), slope.data_ptr(), _end(sources), into.data_ptr())
        return into

    def back(self, y: Tensor, n: int, sources: Slices) -> SwishGradients:
        """Gradients, where the sources hold that of what went out."""
        kernel = _kernel(y, sources)
        width = y.shape[1] * (1 + self.mirrored)
        if kernel is None:
            found = lipswish_rows_back(y, sources.read(width), n, *self._numbers())
            rows = None if sources.ending is None else lipswish_rows(y, n, *self._numbers())[0]
            return SwishGradients(*found, None if rows is None else sources.into_ending(rows))
        into, into_beta = torch.empty_like(y), torch.empty(())
        into_bias = None if self.bias is None else torch.empty(y.shape[1])
        into_end = None if sources.ending is None else torch.empty(len(sources.ending.weight), width)
        results = into.data_ptr(), _address(into_bias), into_beta.data_ptr(), _address(into_end)
        kernel.swish_back(self._call(y, n, sources), y.data_ptr(), _end(sources), *results)
        return SwishGradients(into, into_bias, into_beta, into_end)

    def _numbers(self) -> tuple[Tensor, float, bool, Tensor | None, Tensor | None, Tensor | None]:
        return self.beta, self.divisor, self.mirrored, self.before, self.bias, self.after

    def _wider(self, y: Tensor) -> Tensor:
        return empty_rows(len(y), y.shape[1] * (1 + self.mirrored), y)

    def _call(self, rows: Tensor, n: int, slices: Slices) -> Any:
        channels, end = rows.shape[1], slices.ending
        starts, strides = addresses(slices.tensors, slices.start)
        call = _Call(
            low=rows.dtype == torch.bfloat16,
            mirror=self.mirrored,
            threads=torch.get_num_threads(),
            tangents=len(rows) // n - 1,
            channels=channels,
            count=len(slices.tensors),
            ends=0 if end is None else len(end.weight),
            points=n * (rows[0].numel() // channels),
            end_stride=0 if end is None else end.weight.shape[1],
            bias=_address(self.bias),
            beta=_address(self.beta),
            before=_address(self.before),
            after=_address(self.after),
            end=None if end is None else end.weight.data_ptr() + slices.start * end.weight.element_size(),
            slices=ctypes.cast(starts, ctypes.c_void_p),
            strides=ctypes.cast(strides, ctypes.c_void_p),
            divisor=self.divisor,
        )
        call.kept = starts, strides
        return ctypes.byref(call)


class _Call(ctypes.Structure):
    """`Around` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("low", "mirror", "threads", "tangents", "channels", "count", "ends")),
        *((name, ctypes.c_int64) for name in ("points", "end_stride")),
        *((name, ctypes.c_void_p) for name in ("bias", "beta", "before", "after", "end", "slices", "strides")),
        ("divisor", ctypes.c_float),
    )


def _kernel(rows: Tensor, slices: Slices) -> ctypes.CDLL | None:
    if slices.ending is None:
        return row_kernel(rows, *slices.tensors)
    # What goes out is summed in fp32.
    weight, ends = slices.ending
    same = ends.dtype in (weight.dtype, torch.float32) and len(weight) <= NARROW and weight.dtype == rows.dtype
    return row_kernel(rows, *slices.tensors) if same and row_kernel(ends) and row_kernel(weight) else None


def _end(slices: Slices) -> int | None:
    return None if slices.ending is None else slices.ending.rows.data_ptr()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


Number = Tensor | None


@fused
def lipswish_rows(
    rows: Tensor,
    n: int,
    beta: Tensor,
    divisor: float,
    mirrored: bool = False,
    before: Number = None,
    bias: Number = None,
    after: Number = None,
) -> tuple[Tensor, Tensor]:
    """What goes out, and its derivative by y."""
    x = _entering(rows[:n], before, bias)
    value, slope = lipswish(x, beta, divisor)
    if mirrored:
        other, falling = lipswish(-x, beta, divisor)
        value, slope = torch.cat([value, other], 1), torch.cat([slope, -falling], 1)
    value, slope = _times(value, after).to(rows.dtype), _times(_times(slope, after), before).to(rows.dtype)
    tangents = torch.cat([rows[n:]] * (1 + mirrored), 1)
    return (torch.cat([value, per_point(tangents, slope)]) if len(rows) > n else value), slope


@fused
def pull_rows(rows: Tensor, slope: Tensor, mirrored: bool) -> Tensor:
    into = per_point(rows, slope)
    return torch.add(*into.chunk(2, 1)) if mirrored else into


@fused
def lipswish_rows_back(
    rows: Tensor,
    grad: Tensor,
    n: int,
    beta: Tensor,
    divisor: float,
    mirrored: bool = False,
    before: Number = None,
    bias: Number = None,
    after: Number = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of the rows, of the bias, where there is one, and of beta."""
    x, tangents, grad = _entering(rows[:n], before, bias), _times(wide(rows[n:]), before), _times(wide(grad), after)
    if mirrored:
        x, tangents = torch.cat([x, -x], 1), torch.cat([tangents, -tangents], 1)
    through = overlap(tangents, grad[n:], n) if len(rows) > n else None
    into, slope, into_beta = lipswish_back(x, grad[:n], through, beta, divisor)
    if len(rows) > n:
        into = torch.cat([into, per_point(grad[n:], slope)])
    if mirrored:
        into = torch.sub(*into.chunk(2, 1))
    into_bias = None if bias is None else over_points(into[:n], into.dtype)
    return _times(into, before).to(rows.dtype), into_bias, into_beta


def _entering(points: Tensor, before: Number, bias: Number) -> Tensor:
    x = _times(wide(points), before)
    return x if bias is None else x + along_channels(bias, x)


def _times(x: Tensor, number: Number) -> Tensor:
    return x if number is None else x * number


# With q = beta x and s = sigmoid(q):  phi = x s / c,  phi' = (s + q s (1 - s)) / c,  and both phi'' = beta e and
# d phi' / d beta = x e share e = s (1 - s) (2 + q (1 - 2 s)) / c. Work is done in place: these tensors are large.


def lipswish(x: Tensor, beta: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """phi and phi'."""
    gate = torch.mul(x, beta).sigmoid_()
    value = torch.mul(x, gate).div_(divisor)
    # phi' = s / c + beta phi (1 - s)
    slope = torch.addcmul(value, value, gate, value=-1).mul_(beta).add_(gate.div_(divisor))
    return value, slope


def lipswish_back(
    x: Tensor, grad: Tensor, through: Tensor | None, beta: Tensor, divisor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x, phi', and gradient of beta; `through` is the gradient of phi', where there are tangents."""
    scaled = x * beta
    gate = torch.sigmoid(scaled)
    hill = torch.addcmul(gate, gate, gate, value=-1).div_(divisor)  # s (1 - s) / c
    slope = torch.addcmul(gate / divisor, scaled, hill)
    into = grad * slope
    into_beta = torch.mul(grad, x).mul_(x).mul_(hill)
    if through is not None:
        bend = torch.addcmul(scaled, scaled, gate, value=-2).add_(2).mul_(hill).mul_(through)
        into.addcmul_(bend, beta.expand_as(bend))
        into_beta.addcmul_(bend, x)
    return into, slope, into_beta.sum()
