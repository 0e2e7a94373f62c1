"""Dense branches of images by a kernel of our own (`native/dense.cpp`), on CPUs.

Image by image, a branch runs through all its layers while it is in the cache: features, their derivatives and what
gradients of weights are summed from never become tensors. The kernel is compiled on its first use and kept; where it is
not available or does not know how, `image_run` and `image_again` return None.
"""

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from idn.flows.features import SwishFeature
from idn.flows.fuse import is_fusing
from idn.flows.kernels import addresses, kernel_library
from idn.flows.maps import Affine, Back, Gradients, Run
from idn.flows.rows import channels_last, empty_rows, over_points
from idn.flows.swish import Swish

if TYPE_CHECKING:
    from idn.flows.dense import DenseNet

FEW = 8
"""Channels that come in are few where so many times as many come out: then the product is quickly made again."""


def image_run(net: "DenseNet", rows: Tensor, n: int) -> Run | None:
    """`net.run(rows, n)`."""
    images = _images(net, rows, n)
    return None if images is None else images.run()


def image_again(net: "DenseNet", rows: Tensor, n: int, kept: tuple[Tensor, ...]) -> Back | None:
    """`net.again(rows, n, kept)`."""
    images = _images(net, rows, n)
    return None if images is None else images.again(kept)


def _images(net: "DenseNet", rows: Tensor, n: int) -> "_Images | None":
    if not is_fusing() or rows.device.type != "cpu" or rows.dim() != 4 or not _known(net, rows.dtype):
        return None
    kernel = _library()
    if kernel is None or (rows.dtype == torch.bfloat16 and not kernel.dense_low()):
        return None
    # A thread takes whole images.
    if n < torch.get_num_threads() or len(rows) // n > kernel.dense_most_rows():
        return None
    return _Images(kernel, net, channels_last(rows), n)


def _known(net: "DenseNet", dtype: torch.dtype) -> bool:
    """Whether the layers are 3x3 convolutions with LipSwish, mirrored everywhere or nowhere, and the last one 1x1."""
    steps, _ = net.steps()
    affines = [step.affine for step in steps]
    return (
        dtype in (torch.float32, torch.bfloat16)
        and all(affine.weight.dtype == dtype for affine in (*affines, net.last))
        and all(affine.weight.shape[2:] == (3, 3) and affine.padding == 1 for affine in affines)
        and net.last.weight.shape[2:] == (1, 1)
        and all(isinstance(step.feature, SwishFeature) for step in steps)
        and len({_swish(step.feature).mirrored for step in steps}) == 1
    )


def _swish(feature: Any) -> Swish:
    swish: Swish = feature.swish
    return swish


class _Layer(NamedTuple):
    affine: Affine
    swish: Swish
    padded: int
    """Channels that it makes, in whole vectors."""

    @property
    def quick(self) -> bool:
        return FEW * self.affine.inputs <= len(self.affine.bias)


class _Images:
    """Passes of some images through a branch."""

    def __init__(self, kernel: ctypes.CDLL, net: "DenseNet", rows: Tensor, n: int) -> None:
        self.kernel, self.net, self.rows, self.n = kernel, net, rows, n
        steps, self.passed = net.steps()
        self.layers = [_Layer(step.affine, _swish(step.feature), self._padded(len(step.affine.bias))) for step in steps]
        self.mirrored = self.layers[0].swish.mirrored

    def run(self) -> Run:
        """What products made is kept for the gradients, as far as it is not quickly made again. Of points alone, which
        have no gradients unless tangents come later, it is what saves the most: that of the last layer."""
        rows, n, call = self.rows, self.n, self._call()
        points_alone = len(rows) == n
        kept = [
            None
            if layer.quick or (points_alone and layer is not self.layers[-1])
            else empty_rows(len(rows), layer.padded, rows)
            for layer in self.layers
        ]
        slopes = [empty_rows(n, layer.padded * (1 + self.mirrored), rows) for layer in self.layers]
        out = torch.empty_like(rows, dtype=torch.float32)
        self.kernel.dense_forward(call.reference, rows.data_ptr(), addresses(kept), addresses(slopes), out.data_ptr())

        def pull(u: Tensor) -> Tensor:
            u, call = channels_last(u), self._call()
            into = torch.empty_like(u, dtype=torch.float32)
            self.kernel.dense_pull(call.reference, len(u), u.data_ptr(), addresses(slopes), into.data_ptr())
            return into

        worth = tuple(one for one in kept[-1:] if one is not None and points_alone)
        return Run(out, pull, lambda grad: self._back(grad, kept), worth)

    def again(self, kept: tuple[Tensor, ...]) -> Back:
        missing: list[Tensor | None] = [None] * (len(self.layers) - len(kept))
        return lambda grad: self._back(grad, [*missing, *kept])

    def _back(self, grad: Tensor, kept: Sequence[Tensor | None]) -> tuple[Tensor, Gradients]:
        net, call, grad = self.net, self._call(), channels_last(grad)
        into = torch.empty_like(self.rows, dtype=torch.float32)
        found: list[Tensor] = []
        for layer in self.layers:
            found += [torch.empty(layer.affine.weight.shape), torch.empty(len(layer.affine.bias)), torch.empty(())]
        found.append(torch.empty(net.last.weight.shape))
        known = (ctypes.c_int32 * len(kept))(*[0 if one is None else len(one) // self.n for one in kept])
        given = self.rows.data_ptr(), addresses(kept), known, grad.data_ptr()
        self.kernel.dense_backward(call.reference, *given, into.data_ptr(), addresses(found))
        gradients: Gradients = []
        for i, (layer, into_factors) in enumerate(zip(self.layers, net.into_factors(found[::3]), strict=True)):
            weight, bias, beta = found[3 * i : 3 * i + 3]
            gradients += [weight, bias, beta.view_as(layer.swish.beta), *into_factors]
        return into, [*gradients, found[-1], over_points(grad[: self.n], net.last.bias.dtype)]

    def _padded(self, channels: int) -> int:
        lanes: int = self.kernel.dense_lanes()
        return (channels + lanes - 1) // lanes * lanes

    def _call(self) -> "_Call":
        net, shape = self.net, self.rows.shape
        biases = [net.last.bias, *(layer.affine.bias for layer in self.layers)]
        biases = [F.pad(bias, (0, self._padded(len(bias)) - len(bias))) for bias in (*biases[1:], biases[0])]
        numbers = self._numbers()
        outputs = (ctypes.c_int32 * len(self.layers))(*[len(layer.affine.bias) for layer in self.layers])
        call = _Call(
            low=self.rows.dtype == torch.bfloat16,
            mirrored=self.mirrored,
            threads=torch.get_num_threads(),
            channels=shape[1],
            height=shape[2],
            width=shape[3],
            depth=len(self.layers),
            points=self.n,
            rows=len(self.rows) // self.n,
            outputs=ctypes.cast(outputs, ctypes.c_void_p),
            numbers=numbers.data_ptr(),
            biases=ctypes.cast(addresses(biases), ctypes.c_void_p),
        )
        call.alive = outputs, biases, numbers
        call.words = self._words(call).data_ptr()
        return call

    def _numbers(self) -> Tensor:
        """beta, a, r and the divisor of each layer's r phi(a y + b), then what x is multiplied with: the first layer
        reads x as the others do."""
        found: list[Tensor] = []
        for layer in self.layers:
            beta, before, after, divisor = layer.swish.beta, layer.swish.before, layer.swish.after, layer.swish.divisor
            assert after is not None
            before = 1 / self.passed if before is None else before
            found += [beta.reshape(1), before.reshape(1), after.reshape(1), beta.new_full((1,), divisor)]
        return torch.cat([*found, self.passed.reshape(1)]).detach()

    def _words(self, call: "_Call") -> Tensor:
        """The weights as the kernel reads them, made once for all parts of a batch."""
        global _packed
        if _packed is None or _packed.net() is not self.net:
            weights = [*(layer.affine.weight for layer in self.layers), self.net.last.weight]
            weights = [weight.detach().contiguous() for weight in weights]
            words = torch.zeros(self.kernel.dense_words(call.reference))
            self.kernel.dense_pack(call.reference, addresses(weights), words.data_ptr())
            _packed = _Packed(weakref.ref(self.net), words)
        return _packed.words


class _Packed(NamedTuple):
    net: "weakref.ref[DenseNet]"
    words: Tensor


_packed: _Packed | None = None
"""Of the branch that is worked on: those of all blocks together would be as large as what they save."""


class _Call(ctypes.Structure):
    """`Call` of the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("low", "mirrored", "threads", "channels", "height", "width", "depth", "points", "rows")
        ),
        *((name, ctypes.c_void_p) for name in ("outputs", "numbers", "biases", "words")),
    )

    @property
    def reference(self) -> Any:
        return ctypes.byref(self)


@cache
def _library() -> ctypes.CDLL | None:
    kernel, pointer = kernel_library("dense"), ctypes.c_void_p
    if kernel is not None:
        kernel.dense_words.restype = ctypes.c_int64
        kernel.dense_pack.argtypes = [pointer] * 3
        kernel.dense_forward.argtypes = [pointer] * 5
        kernel.dense_pull.argtypes = [pointer, ctypes.c_int, pointer, pointer, pointer]
        kernel.dense_backward.argtypes = [pointer] * 7
    return kernel
