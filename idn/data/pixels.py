"""What happens to decoded pixels: resize, flip, dequantise."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from idn.streams import stream_seed


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Bilinear resize of N x C x H x W uint8 to size x size, equal to Pillow's on each image.

    Pillow resizes the rows, rounds, then the columns; a whole batch stacked into one tall picture takes the
    same two passes in two calls.
    """
    for _ in range(2):
        n, c, h, w = images.shape
        tall = Image.fromarray(np.ascontiguousarray(images).reshape(n * c * h, w))
        wide = np.asarray(tall.resize((size, n * c * h), Image.Resampling.BILINEAR)) if n else images
        images = wide.reshape(n, c, h, size).swapaxes(2, 3)
    return np.ascontiguousarray(images)


def flips(seed: int, epoch: int, positions: Sequence[int]) -> np.ndarray:
    """Which samples to mirror: a fair coin that depends on the sample's place in the epoch alone."""
    return np.array([stream_seed(seed, "flip", epoch, place) & 1 for place in positions], dtype=bool)


def dequantise(images: Tensor, generator: torch.Generator | Sequence[torch.Generator]) -> Tensor:
    """uint8 pixels to float32 (255 * x01 + u) / 256 with u uniform in [0, 1).

    A list of generators, one per sample, makes a sample's noise independent of the batch it is in.

    >>> from idn.streams import stream
    >>> x = dequantise(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), stream(0, "dequantise", 0, 0))
    >>> bool((x >= 0).all() and (x < 1).all())
    True
    """
    if isinstance(generator, torch.Generator):
        noise = torch.rand(images.shape, generator=generator)
    else:
        if len(generator) != len(images):
            raise ValueError(f"{len(generator)} generators for {len(images)} images")
        noise = torch.empty(images.shape)
        for row, own in zip(noise, generator, strict=True):
            torch.rand(row.shape, generator=own, out=row)
    # Beyond 128 a float32 has steps of 2^-16: larger noise would round up into the next pixel value.
    noise.clamp_(max=1 - 2**-16)
    return (images + noise.to(images.device)).div_(256)
