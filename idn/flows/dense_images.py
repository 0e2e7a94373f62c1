"""Dense branches of images by a kernel of our own (`native/dense.cpp`), on CPUs.

Image by image, a branch runs through all its layers while it is in the cache: features, their derivatives and what
gradients of weights are summed from never become tensors. The kernel is compiled on its first use and kept; where it is
not available or does not know how, `image_run` and `image_again` return None.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, islice
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

ROOM = 512
"""Bytes that recomputing may keep for a pixel: 128 channels in fp32, 256 in bf16."""


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
        self.call = self._call()

    def run(self) -> Run:
        """What products made is kept for the gradients, as far as it is not quickly made again. Of points alone, whose
        gradients come later if at all, it is that of the last layers, of as many images as there is room for."""
        rows, n, layers = self.rows, self.n, self.layers
        points_alone = len(rows) == n
        counts = self._counts() if points_alone else [0 if layer.quick else len(rows) for layer in layers]
        kept = [self._images_of(layer.padded, count) for layer, count in zip(layers, counts, strict=True)]
        slopes = [empty_rows(n, layer.padded * (1 + self.mirrored), rows) for layer in layers]
        out = torch.empty_like(rows, dtype=torch.float32)
        self.kernel.dense_forward(self._ready(), rows.data_ptr(), self._places(kept), addresses(slopes), out.data_ptr())

        def pull(u: Tensor) -> Tensor:
            u = channels_last(u)
            into = torch.empty_like(u, dtype=torch.float32)
            self.kernel.dense_pull(self._ready(), len(u), u.data_ptr(), addresses(slopes), into.data_ptr())
            return into

        return Run(out, pull, lambda grad: self._back(grad, kept), tuple(chain(*kept)) if points_alone else ())

    def again(self, kept: tuple[Tensor, ...]) -> Back:
        images = iter(kept)
        of_layers = [list(islice(images, count)) for count in self._counts()]
        return lambda grad: self._back(grad, of_layers)

    def _counts(self) -> list[int]:
        """Of each layer, the images of which recomputing keeps what the product made: the last ones take most of it."""
        counts, room = [], ROOM * self.n
        for layer in reversed(self.layers):
            bytes_each = layer.padded * self.rows.element_size()
            counts.append(0 if layer.quick else min(self.n, room // bytes_each))
            room -= counts[-1] * bytes_each
        return counts[::-1]

    def _images_of(self, channels: int, count: int) -> list[Tensor]:
        """Room for that many channels of so many images. Apart, they fit where gradients have been."""
        size = channels * self.rows[0, 0].numel()
        return [torch.empty(size, dtype=self.rows.dtype) for _ in range(count)]

    def _places(self, kept: Sequence[Sequence[Tensor]]) -> Any:
        """Of each layer's images, of the rows that are kept."""
        return addresses([image for images in kept for image in (*images, *[None] * (len(self.rows) - len(images)))])

    def _back(self, grad: Tensor, kept: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Gradients]:
        net, grad = self.net, channels_last(grad)
        into = torch.empty_like(self.rows, dtype=torch.float32)
        found: list[Tensor] = []
        for layer in self.layers:
            found += [torch.empty(layer.affine.weight.shape), torch.empty(len(layer.affine.bias)), torch.empty(())]
        found.append(torch.empty(net.last.weight.shape))
        along = [torch.empty(affine.inputs) for affine in (*(layer.affine for layer in self.layers), net.last)]
        given = self.rows.data_ptr(), self._places(kept), grad.data_ptr()
        self.kernel.dense_backward(self._ready(), *given, into.data_ptr(), addresses([*found, *along]))
        gradients: Gradients = []
        for i, (layer, into_factors) in enumerate(zip(self.layers, net.into_factors(along), strict=True)):
            weight, bias, beta = found[3 * i : 3 * i + 3]
            gradients += [weight, bias, beta.view_as(layer.swish.beta), *into_factors]
        return into, [*gradients, found[-1], over_points(grad[: self.n], net.last.bias.dtype)]

    def _padded(self, channels: int) -> int:
        lanes: int = self.kernel.dense_lanes()
        return (channels + lanes - 1) // lanes * lanes

    def _call(self) -> "_Call":
        net, shape = self.net, self.rows.shape
        biases = [*(layer.affine.bias for layer in self.layers), net.last.bias]
        biases = [F.pad(bias.detach(), (0, self._padded(len(bias)) - len(bias))) for bias in biases]
        starts, numbers = addresses(biases), self._numbers()
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
            biases=ctypes.cast(starts, ctypes.c_void_p),
        )
        call.alive = outputs, biases, starts, numbers
        return call

    def _ready(self) -> Any:
        """The call with the weights as the kernel reads them, made once for all parts of a batch."""
        if _packed.net() is not self.net:
            weights = [*(layer.affine.weight for layer in self.layers), self.net.last.weight]
            weights = [weight.detach().contiguous() for weight in weights]
            needed = self.kernel.dense_words(self.call.reference)
            if len(_packed.words) < needed:
                _packed.words = torch.empty(needed)
            _packed.words[:needed].zero_()
            self.kernel.dense_pack(self.call.reference, addresses(weights), _packed.words.data_ptr())
            _packed.net = weakref.ref(self.net)
        self.call.words = _packed.words.data_ptr()
        return self.call.reference

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


class _Packed(threading.local):
    """Of the branch that a thread works on: the words of all together would be as large as what they save."""

    def __init__(self) -> None:
        self.net: Callable[[], DenseNet | None] = lambda: None
        self.words = torch.empty(0)  # room that is kept, since large pieces of memory are hard to find again


_packed = _Packed()


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
        kernel.dense_backward.argtypes = [pointer] * 6
    return kernel
