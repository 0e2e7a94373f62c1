"""Image files of a shard: lossless PNG written so that it decodes fast, and everything Pillow reads."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

EXTENSIONS = ("png", "npy", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPE = {1: 0, 3: 2}


class BadImage(ValueError):
    """Bytes that are not an image of the expected shape."""


def encode_png(image: np.ndarray) -> bytes:
    """C x H x W uint8 as a PNG without row filters, so that decoding is one call of zlib.

    Photographs hardly shrink without filters: they are stored, which reads ten times faster than a tenth less.
    """
    channels, height, width = image.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = image.transpose(1, 2, 0).reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    packed = zlib.compress(rows.tobytes(), 9)
    if len(packed) > 0.75 * rows.size:
        packed = zlib.compress(rows.tobytes(), 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def decode(data: bytes, extension: str, shape: tuple[int, int, int] | None = None) -> np.ndarray:
    """Any supported image as H x W x C uint8; with `shape` (C, H, W), another shape is refused."""
    try:
        image = _decode_plain_png(data) if extension == "png" else None
        if image is None:
            image = _decode_npy(data) if extension == "npy" else _decode_with_pillow(data)
    except BadImage:
        raise
    except Exception as error:  # Pillow, zlib and numpy raise many kinds for damaged bytes
        raise BadImage(f"not a readable {extension} image ({error})") from error
    height, width, channels = image.shape
    if shape is not None and shape != (channels, height, width):
        raise BadImage(f"image of shape {channels}x{height}x{width}, expected {'x'.join(map(str, shape))}")
    return image


def _decode_plain_png(data: bytes) -> np.ndarray | None:
    """The form that `encode_png` writes; None for any other PNG."""
    if data[:8] != _SIGNATURE or data[12:16] != b"IHDR" or data[37:41] != b"IDAT":
        return None
    width, height, bits, colour, _, _, interlace = struct.unpack(">IIBBBBB", data[16:29])
    channels = {0: 1, 2: 3}.get(colour)
    end = 41 + int.from_bytes(data[33:37], "big")
    if bits != 8 or channels is None or interlace or data[end + 8 : end + 12] != b"IEND":
        return None
    row = 1 + width * channels
    if end > 2 * height * row + 1024:
        return None
    if zlib.crc32(data[37:end]) != int.from_bytes(data[end : end + 4], "big"):
        raise BadImage("the PNG's checksum does not match its pixels")
    raw = zlib.decompress(data[41:end], bufsize=height * row)
    if len(raw) != height * row or any(raw[::row]):
        return None
    return np.frombuffer(raw, np.uint8).reshape(height, row)[:, 1:].reshape(height, width, channels)


def _decode_with_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        pixels = np.asarray(picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB"))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _decode_npy(data: bytes) -> np.ndarray:
    pixels = np.load(io.BytesIO(data), allow_pickle=False)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise BadImage(f"array of {pixels.dtype} with {pixels.ndim} dimensions, expected uint8 H x W (x C)")
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
