"""Images survive their files bit by bit; dequantisation keeps every pixel in its own bin."""

import contextlib
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from idn.data import dequantise
from idn.data.images import BadImage, decode, encode_png
from idn.streams import stream

shapes = st.tuples(st.sampled_from([1, 3]), st.integers(1, 40), st.integers(1, 40))


@given(shapes, st.integers(0, 2**32), st.integers(1, 256))
def test_png_round_trip_and_agreement_with_pillow(shape: tuple[int, int, int], seed: int, levels: int) -> None:
    image = np.random.default_rng(seed).integers(0, levels, shape, np.uint8)
    png = encode_png(image)
    assert np.array_equal(decode(png, "png", shape).transpose(2, 0, 1), image)
    pillow = np.atleast_3d(np.asarray(Image.open(io.BytesIO(png))))
    assert np.array_equal(pillow.transpose(2, 0, 1), image)


@given(shapes, st.sampled_from(["PNG", "BMP", "PPM"]))
def test_other_writers_files_are_read(shape: tuple[int, int, int], kind: str) -> None:
    image = np.add.outer(np.arange(shape[1]), np.arange(shape[2])).astype(np.uint8)[:, :, None].repeat(shape[0], 2)
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if shape[0] == 1 else image).save(file, kind)
    assert np.array_equal(decode(file.getvalue(), kind.lower(), shape), image)


@given(st.data())
def test_a_flipped_bit_is_found_or_harmless(data: st.DataObject) -> None:
    image = np.random.default_rng(0).integers(0, 256, (3, 8, 8), np.uint8)
    png = bytearray(encode_png(image))
    png[data.draw(st.integers(0, len(png) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(BadImage):
        assert np.array_equal(decode(bytes(png), "png", (3, 8, 8)).transpose(2, 0, 1), image)


def test_arrays_are_read_without_pickle() -> None:
    file = io.BytesIO()
    np.save(file, np.full((4, 5, 3), 7, np.uint8))
    assert decode(file.getvalue(), "npy", (3, 4, 5)).shape == (4, 5, 3)
    evil = io.BytesIO()
    np.save(evil, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(BadImage):
        decode(evil.getvalue(), "npy")
    wrong = io.BytesIO()
    np.save(wrong, np.zeros((4, 4)))
    with pytest.raises(BadImage, match="float64"):
        decode(wrong.getvalue(), "npy")


def test_dequantise_is_the_formula_and_never_leaves_the_bin() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(4000).reshape(1000, 1, 32, 32)
    x = dequantise(pixels, stream(0, "noise"))
    assert x.dtype == torch.float32
    assert torch.equal((x * 256).floor().to(torch.uint8), pixels)
    u = (x.double() * 256 - pixels).flatten()
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=3e-3)
    assert float(u.var()) == pytest.approx(1 / 12, abs=1e-3)
    assert torch.equal(x, dequantise(pixels, stream(0, "noise")))
    assert not torch.equal(x, dequantise(pixels, stream(1, "noise")))


def test_the_largest_noise_stays_below_the_next_value() -> None:
    white = torch.full((2000, 1, 100, 100), 255, dtype=torch.uint8)
    assert float(dequantise(white, stream(3, "white")).max()) < 1


def test_one_generator_per_sample_makes_noise_independent_of_the_batch() -> None:
    images = torch.randint(0, 256, (6, 3, 4, 4), generator=stream(0, "x"), dtype=torch.uint8)
    whole = dequantise(images, [stream(0, "noise", i) for i in range(6)])
    part = dequantise(images[2:4], [stream(0, "noise", i) for i in (2, 3)])
    assert torch.equal(whole[2:4], part)
    with pytest.raises(ValueError, match="2 generators for 6 images"):
        dequantise(images, [stream(0), stream(1)])
