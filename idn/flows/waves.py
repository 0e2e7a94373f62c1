"""The wave that a convolution lengthens most.

Where there are no edges, a convolution turns a wave of frequency f and channels c into one of the same frequency:

    exp(i f.p) c  ->  exp(i f.p) K(f) c,    K(f) = sum_t K_t exp(i f.t) over the kernel's taps t.

A zero-padded convolution is a part (a compression) of this one, so its norm is at most max_f |K(f)|, and on large
images hardly less: a wave that fades towards the edges comes near. K(f) is smooth, so a coarse grid of frequencies
shows about where the largest norm is, wherever it was before, and a few moves uphill lead there. The channels of each
frequency of the grid are kept from step to step.

Torch never makes K(f): taps are applied to the channels of all frequencies in one matrix product. (The kernel makes it,
since it can keep one in the cache, and multiplies a quarter as often.) In all tensors the first dimension counts
convolutions of equal shape, and a dimension of frequencies comes second. Complex numbers are pairs of real ones, in a
dimension before the channels.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from idn.flows.following import kernel_for, search
from idn.flows.norms import Operator, Wave, lengths, units

GRID = 8
"""Frequencies per axis of the grid for a 3x3 kernel; in proportion for larger ones, whose K(f) varies faster."""
STEPS = 8
"""Most Lanczos steps at every frequency of the grid."""
BEST = 8
"""So many frequencies are then moved to their best places off the grid, and get another step."""
CLIMBS = 2
"""So often they are then moved uphill. Between places, 0.8 % of the gain has been lost, and with it the bound."""
CLIMB_STEPS = 3
"""So many steps each of them gets after each move."""
FURTHER = 1.5
"""|K(f)| peaks beyond the peak that it has for the channels found at f, so moves go on for half as far again; even
after twice as far it would not be lower for those."""
NEAR = 0.2
"""A move ends here: two places of a 3x3 kernel are as far apart."""
NOISE = 0.05
"""Added to channels of length 1, lest they are orthogonal to what outgrows them."""
OFFSETS = 5
"""Places per axis that a frequency can be moved to, between one neighbour's half way and the other's."""
SQUARINGS = 7
"""A power of 2^7 = 128 leaves little but the largest eigenvalue."""


class Strongest(NamedTuple):
    """Per convolution: the gain max_f |K(f)|, the wave that has it, fading towards the edges, as two images, and the
    channels of all frequencies to go on from."""

    gain: Tensor
    wave: Wave
    channels: Tensor


def first_channels(weight: Tensor) -> Tensor:
    """For a kernel O x I x k x k: the same for every frequency, at random."""
    outputs, inputs, kernel, _ = weight.shape
    return _noise(min(outputs, inputs)).to(weight).repeat(len(grid(kernel)[0]), 1, 1)


def strongest_wave(weight: Tensor, size: tuple[int, int], channels: Tensor, steps: int = STEPS) -> Strongest:
    """For convolutions L x O x I x k x k with odd k on images of `size`, in `steps` steps at every frequency."""
    kernel = kernel_for(weight, "waves")
    if kernel is not None:
        known = tables(weight.shape[-1], min(weight.shape[1:3]))
        gain, images, responses, channels = search(kernel, weight, size, known, channels, BEST, steps)
        return Strongest(gain, Wave(images, responses), channels)
    wide = weight.shape[1] <= weight.shape[2]
    taps = Taps(weight if wide else weight.transpose(1, 2))
    frequencies, offsets = (x.to(weight) for x in grid(weight.shape[-1]))
    frequencies = frequencies.expand(len(weight), -1, -1)
    _, channels = largest_eigenvalue(taps.gram(frequencies), channels + NOISE * _noise(taps.outputs).to(weight), steps)

    places = frequencies.unsqueeze(2) + offsets
    gains, place = taps.lengths_at(places, channels).max(2)
    best = gains.topk(min(BEST, gains.shape[1]), dim=1).indices
    frequencies = _pick(places.flatten(1, 2), best * len(offsets) + place.gather(1, best))
    squares, best_channels = largest_eigenvalue(taps.gram(frequencies), _pick(channels, best), steps + 1)
    for _ in range(CLIMBS):
        frequencies = taps.uphill(frequencies, best_channels)
        squares, best_channels = largest_eigenvalue(taps.gram(frequencies), best_channels, CLIMB_STEPS)

    square, first = squares.max(1, keepdim=True)
    frequency, strongest = _pick(frequencies, first), _pick(best_channels, first)
    # K* takes channels put out to those put in. What K^T puts out is the complex conjugate of what goes into K.
    inputs = taps.pull(strongest, taps.turns(frequency)) if wide else strongest * strongest.new_tensor([[1.0], [-1.0]])
    return Strongest(square[:, 0].clamp_min(0).sqrt(), fading(weight, frequency[:, 0], inputs[:, 0], size), channels)


class Taps:
    """Kernels L x O x I x k x k as K(f) at any frequencies; O had better be the smaller one."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.kernel = weight.shape[1], weight.shape[-1]
        self.rows = weight.permute(0, 3, 4, 1, 2).flatten(1, 3)

    def turns(self, frequencies: Tensor) -> Tensor:
        """exp(i f.t) for all taps t as the matrix that turns and sums what they put out: L x F x 2 x 2T."""
        angles = frequencies @ _places(self.kernel).to(frequencies).mT
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([torch.cat([cos, -sin], -1), torch.cat([sin, cos], -1)], -2)

    def push(self, channels: Tensor, turns: Tensor) -> Tensor:
        """K(f) c = sum_t exp(i f.t) K_t c."""
        each_tap = channels.flatten(1, 2) @ self.rows.mT
        return turns @ each_tap.view(*turns.shape[:2], -1, self.outputs)

    def pull(self, channels: Tensor, turns: Tensor) -> Tensor:
        """K(f)* c, the transpose."""
        each_tap = (turns.mT @ channels).view(len(channels), 2 * channels.shape[1], -1)
        return (each_tap @ self.rows).view(*channels.shape[:3], -1)

    def gram(self, frequencies: Tensor) -> Operator:
        """c -> K(f) K(f)* c."""
        turns = self.turns(frequencies)
        return lambda channels: self.push(self.pull(channels, turns), turns)

    def lengths_at(self, places: Tensor, channels: Tensor) -> Tensor:
        """|K(f)* c|^2 of each frequency's channels c at several places f near it: L x F x P."""
        each_tap = self.pull_each(channels).flatten(2, 3)
        products = each_tap @ each_tap.mT
        turns = self.turns(-places.flatten(1, 2)).flatten(1, 2).view(*places.shape[:2], -1, products.shape[-1])
        return ((turns @ products) * turns).sum(-1).unflatten(2, (-1, 2)).sum(-1)

    def uphill(self, frequencies: Tensor, channels: Tensor) -> Tensor:
        """Frequencies moved towards the largest |K(f)* c|^2 near by, for their channels c, by a step of Newton's."""
        each_tap = self.pull_each(channels)
        pulled = torch.complex(each_tap[:, :, 0], each_tap[:, :, 1])
        apart = _places(self.kernel).to(frequencies)
        apart = apart.unsqueeze(1) - apart
        angles = (frequencies[:, :, None, None] * apart).sum(-1)
        pairs = torch.polar(torch.ones_like(angles), -angles) * (pulled @ pulled.mH)
        slope = (pairs.imag.unsqueeze(-1) * apart).sum((2, 3))
        a, b, c = (pairs.real.unsqueeze(-1) * apart[..., [0, 0, 1]] * apart[..., [0, 1, 1]]).sum((2, 3)).unbind(-1)
        # Where it does not bend down on all sides: as far as if it bent down as much as it can.
        hill = (a > 0) & (a * c > b.square())
        most = torch.sqrt(a.square() + 2 * b.square() + c.square())
        a, b, c = torch.where(hill, a, most), torch.where(hill, b, 0 * b), torch.where(hill, c, most)
        y, x = slope.unbind(-1)
        move = torch.stack([c * y - b * x, a * x - b * y], -1)
        move = FURTHER * move / (a * c - b.square()).clamp_min(torch.finfo(a.dtype).tiny).unsqueeze(-1)
        return frequencies + move * (NEAR / lengths(move).clamp_min(NEAR))

    def pull_each(self, channels: Tensor) -> Tensor:
        """K_t^T c of each tap: L x F x 2 x T x I."""
        pulled = channels.flatten(1, 2).unsqueeze(1) @ self.rows.unflatten(1, (-1, self.outputs))
        return pulled.unflatten(2, (-1, 2)).permute(0, 2, 3, 1, 4)


def largest_eigenvalue(matrix: Operator, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Of each symmetric matrix without negative eigenvalues by `steps` Lanczos steps; and its vector."""
    vectors: list[Tensor] = []
    diagonal, beside, rest = [], [], start.flatten(2)
    for step in range(min(steps, start.shape[-1])):
        length = torch.linalg.vector_norm(rest, dim=-1, keepdim=True)
        vector = rest / length.clamp_min(torch.finfo(length.dtype).tiny)
        image = matrix(vector.view_as(start)).flatten(2)
        along = (vector * image).sum(-1, keepdim=True)
        rest = image - along * vector - (length * vectors[-1] if step else 0)
        vectors.append(vector)
        diagonal.append(along)
        beside.append(length)
    off = torch.cat(beside, -1)[..., 1:]
    small = torch.diag_embed(torch.cat(diagonal, -1)) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    value, mix = _largest(small)
    return value, units((mix.unsqueeze(-2) @ torch.stack(vectors, -2)).squeeze(-2)).view_as(start)


def _largest(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalue and vector; for thousands of small matrices powers are far faster than `eigh`."""
    power, tiny = matrices, torch.finfo(matrices.dtype).tiny
    for squaring in range(SQUARINGS):
        if squaring % 3 == 0:  # in between, what was 1 does not leave the range
            power = power / torch.diagonal(power, dim1=-2, dim2=-1).amax(-1).clamp_min(tiny)[..., None, None]
        power = power @ power
    column = torch.diagonal(power, dim1=-2, dim2=-1).argmax(-1)
    vector = units(torch.take_along_dim(power, column[..., None, None], -2).squeeze(-2))
    return ((matrices @ vector.unsqueeze(-1)).squeeze(-1) * vector).sum(-1), vector


def fading(weight: Tensor, frequency: Tensor, channels: Tensor, size: tuple[int, int]) -> Wave:
    """Real and imaginary part of exp(i f.p) c, largest in the middle of the image and 0 outside; and what the
    convolutions make of them.

    Each tap t sees the wave from its own place p + t, and puts out K_t c there: so many channels times two images.
    """
    kernel = weight.shape[-1]
    arcs = [_arc(n, kernel // 2).to(frequency) for n in size]
    rows, columns = (torch.arange(len(arc)).to(frequency) - (len(arc) - 1) / 2 for arc in arcs)
    angles = frequency[:, 0, None, None] * rows[:, None] + frequency[:, 1, None, None] * columns
    cos, sin = (wave * torch.outer(*arcs) for wave in (angles.cos(), angles.sin()))
    seen = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
    seen = seen.unfold(3, size[0], 1).unfold(4, size[1], 1).flatten(5)  # L x 2 x 2 x k x k x pixels
    put_out = torch.einsum("loiyx,lci->locyx", weight, channels).flatten(2).unsqueeze(1)
    image = channels.mT.unsqueeze(1) @ seen[:, :, :, kernel // 2, kernel // 2]
    return Wave(image.flatten(2), (put_out @ seen.flatten(2, 4)).flatten(2))


@cache
def _arc(size: int, beyond: int) -> Tensor:
    """Half a sine over `size` places, and 0 at some more on both sides."""
    arc = torch.sin(math.pi * torch.arange(1, size + 1, dtype=torch.float64) / (size + 1))
    return torch.nn.functional.pad(arc, (beyond, beyond))


def _pick(values: Tensor, indices: Tensor) -> Tensor:
    """Of each convolution's rows, those at its indices."""
    return torch.take_along_dim(values, indices.view(*indices.shape, *[1] * (values.dim() - 2)), 1)


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
def _noise(size: int) -> Tensor:
    """Channels of length 1, orthogonal to nothing."""
    noise = torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    return noise / noise.norm()


@cache
def tables(kernel: int, channels: int) -> tuple[Tensor, ...]:
    """What `search` asks for."""
    frequencies, offsets = grid(kernel)
    angles = (frequencies.unsqueeze(1) + offsets) @ _places(2 * kernel - 1).to(frequencies).mT
    distances = torch.stack([angles.cos(), angles.sin()], -1)
    return tuple(x.float().contiguous() for x in (frequencies, offsets, distances, NOISE * _noise(channels)))
