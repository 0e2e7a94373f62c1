"""The wave that a convolution lengthens most.

Where there are no edges, a convolution turns a wave of frequency f and channels c into one of the same frequency:

    exp(i f.p) c  ->  exp(i f.p) K(f) c,    K(f) = sum_t K_t exp(i f.t) over the kernel's taps t.

A zero-padded convolution is a part (a compression) of this one, so its norm is at most max_f |K(f)|, and on large
images hardly less: a wave that fades towards the edges comes near. K(f) is smooth, so a coarse grid of frequencies
shows where the largest norm is, wherever it was before. Nothing is kept from step to step.

The norms come from the Gram matrices K(f) K(f)* = sum_l C_l exp(i f.l), with C_l the sum of K_s K_t^T over taps
s - t = l, or from K(f)* K(f) where that is smaller. In all tensors the first dimension counts convolutions of equal
shape, and a dimension of frequencies comes second.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from idn.flows.norms import units

GRID = 10
"""Frequencies per axis of the grid for a 3x3 kernel; in proportion for larger ones, whose K(f) varies faster."""
STEPS = 8
"""Lanczos steps at every frequency of the grid."""
BEST = 6
BEST_STEPS = 8
"""So many frequencies are then moved to their best places off the grid, and get so many steps more."""
OFFSETS = 5
"""Places per axis that a frequency can be moved to, between one neighbour's half way and the other's."""
SQUARINGS = 7
"""A power of 2^7 = 128 leaves little but the largest eigenvalue."""


class Wave(NamedTuple):
    """Per convolution: the gain max_f |K(f)|, and the wave that has it, fading towards the edges, as one image."""

    gain: Tensor
    image: Tensor


def strongest_wave(weight: Tensor, size: tuple[int, int]) -> Wave:
    """For convolutions L x O x I x k x k with odd k on images of `size`."""
    wide = weight.shape[1] <= weight.shape[2]
    lags = autocorrelation(weight if wide else weight.transpose(1, 2))
    frequencies, offsets = (x.to(weight) for x in grid(weight.shape[-1]))
    frequencies = frequencies.expand(len(weight), -1, -1)
    start = _noise(lags.shape[-1]).to(lags.dtype.to_complex()).expand(*frequencies.shape[:2], -1)
    _, channels = lanczos(gram(lags, frequencies), start, STEPS)

    places = frequencies.unsqueeze(2) + offsets
    gains, place = lengths_at(lags, channels, places).max(2)
    best = gains.topk(min(BEST, gains.shape[1]), dim=1).indices
    frequencies = _pick(places.flatten(1, 2), best * len(offsets) + place.gather(1, best))
    squares, channels = lanczos(gram(lags, frequencies), _pick(channels, best), BEST_STEPS)

    square, first = squares.max(1, keepdim=True)
    frequency, channels = _pick(frequencies, first)[:, 0], _pick(channels, first)[:, 0]
    # Of K^T the Gram matrix is the complex conjugate of K* K; and K* takes the channels put out to those put in.
    inputs = _transposed(weight, frequency, channels) if wide else channels.conj()
    return Wave(square[:, 0].clamp_min(0).sqrt(), fading(frequency, inputs, size))


def autocorrelation(weight: Tensor) -> Tensor:
    """C_l for all lags l of -(k-1) .. k-1 in both directions: L x (2k-1)^2 x O x O."""
    count, outputs, inputs, kernel, _ = weight.shape
    rows = weight.permute(0, 3, 4, 1, 2).reshape(count, -1, inputs)
    products = (rows @ rows.mT).view(count, kernel**2, outputs, kernel**2, outputs).transpose(2, 3).flatten(1, 2)
    lags = products.new_zeros(count, (2 * kernel - 1) ** 2, outputs, outputs)
    return lags.index_add_(1, _lag_of_pair(kernel).to(lags.device), products)


def gram(lags: Tensor, frequencies: Tensor) -> Tensor:
    """sum_l C_l exp(i f.l): L x F x O x O."""
    turns = frequencies @ _places(math.isqrt(lags.shape[1])).to(frequencies).mT
    flat = lags.flatten(2)
    return torch.complex(turns.cos() @ flat, turns.sin() @ flat).unflatten(2, lags.shape[2:])


def lengths_at(lags: Tensor, channels: Tensor, places: Tensor) -> Tensor:
    """|K(f)* c|^2 of each frequency's channels c at several places f near it: L x F x P."""
    parts = torch.view_as_real(channels).permute(0, 2, 1, 3).flatten(2)
    pulled = torch.view_as_complex((lags @ parts.unsqueeze(1)).unflatten(3, (-1, 2)))
    forms = torch.einsum("lfo,ltof->lft", channels.conj(), pulled)
    turns = places @ _places(math.isqrt(lags.shape[1])).to(places).mT
    return (turns.cos() * forms.real.unsqueeze(2) - turns.sin() * forms.imag.unsqueeze(2)).sum(3)


def lanczos(matrices: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of each Hermitian matrix without negative ones, in `steps` steps, and its vector."""
    vectors: list[Tensor] = []
    diagonal, beside, rest = [], [], start
    for step in range(min(steps, start.shape[-1])):
        length = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        vector = rest / length.clamp_min(torch.finfo(length.dtype).tiny)
        image = (matrices @ vector.unsqueeze(-1)).squeeze(-1)
        along = (vector.conj() * image).real.sum(-1, keepdim=True)
        rest = image - along * vector - (length * vectors[-1] if step else 0)
        vectors.append(vector)
        diagonal.append(along)
        beside.append(length)
    off = torch.cat(beside, -1)[..., 1:]
    small = torch.diag_embed(torch.cat(diagonal, -1)) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    value, mix = _largest(small)
    return value, units((mix.to(start.dtype).unsqueeze(-2) @ torch.stack(vectors, -2)).squeeze(-2))


def _largest(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalue and vector; for thousands of small matrices powers are far faster than `eigh`."""
    power, tiny = matrices, torch.finfo(matrices.dtype).tiny
    for _ in range(SQUARINGS):
        power = power / torch.diagonal(power, dim1=-2, dim2=-1).amax(-1).clamp_min(tiny)[..., None, None]
        power = power @ power
    column = torch.diagonal(power, dim1=-2, dim2=-1).argmax(-1)
    vector = units(torch.take_along_dim(power, column[..., None, None], -2).squeeze(-2))
    return ((matrices @ vector.unsqueeze(-1)).squeeze(-1) * vector).sum(-1), vector


def fading(frequency: Tensor, channels: Tensor, size: tuple[int, int]) -> Tensor:
    """Re exp(i f.p) c, largest in the middle of the image and 0 just outside: L x C x H x W."""
    rows, columns = (torch.arange(n).to(frequency) for n in size)
    windows = [torch.sin(math.pi * (x + 1) / (len(x) + 1)) for x in (rows, columns)]
    down = torch.polar(windows[0].expand(len(frequency), -1), frequency[:, :1] * rows)
    across = torch.polar(windows[1].expand(len(frequency), -1), frequency[:, 1:] * columns)
    return torch.einsum("lc,lh,lw->lchw", channels, down, across).real


def _transposed(weight: Tensor, frequency: Tensor, channels: Tensor) -> Tensor:
    turns = frequency @ _places(weight.shape[-1]).to(frequency).mT
    symbol = torch.einsum("lt,loit->loi", torch.polar(torch.ones_like(turns), turns), weight.flatten(3).to(channels))
    return torch.einsum("loi,lo->li", symbol.conj(), channels)


def _pick(values: Tensor, indices: Tensor) -> Tensor:
    """Of each convolution's rows, those at its indices."""
    return torch.take_along_dim(values, indices.unsqueeze(-1), 1)


@cache
def grid(kernel: int) -> tuple[Tensor, Tensor]:
    """Frequencies, one of each pair f and -f, which are alike for a real kernel, and the offsets to try around each."""
    size = GRID * (kernel - 1) // 2
    step = 2 * math.pi / size
    pairs = {min((y, x), (-y % size, -x % size)) for y in range(size) for x in range(size)}
    offset = torch.linspace(-step / 2, step / 2, OFFSETS, dtype=torch.float64)
    return torch.tensor(sorted(pairs), dtype=torch.float64) * step, torch.cartesian_prod(offset, offset)


@cache
def _places(width: int) -> Tensor:
    """The places of a square that is `width` wide, counted from its centre."""
    axis = torch.arange(width) - width // 2
    return torch.cartesian_prod(axis, axis)


@cache
def _lag_of_pair(kernel: int) -> Tensor:
    """Which of the lags s - t each pair of taps s, t has."""
    taps, width = _places(kernel), 2 * kernel - 1
    lag = (taps[:, None] - taps[None]) + kernel - 1
    return (lag[..., 0] * width + lag[..., 1]).flatten()


@cache
def _noise(size: int) -> Tensor:
    """Channels to start from: at random, so that they are orthogonal to nothing."""
    return torch.randn(size, dtype=torch.complex128, generator=torch.Generator().manual_seed(size))
