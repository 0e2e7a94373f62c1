"""Every form in which the datasets lie about, brought to one canonical form per dataset.

CIFAR10: binary records, python pickles, or pictures of 10,000 rows. MNIST family: idx files. Each may be in a
folder or an archive, gzipped or not.
"""

import gzip
import io
import json
import pickle
import re
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from idn.data.known import Known
from idn.data.shards import Split
from idn.errors import UserError

_RECORD = 1 + 3072
Content = Callable[[], bytes]


def read_files(path: Path, known: Known) -> dict[str, bytes]:
    """{canonical name: canonical bytes} of the known files that are found in a folder or archive."""
    found: dict[str, bytes] = {}
    wanted = {*known.train, *known.test}
    contents = dict(_entries(path))
    for name, content in contents.items():
        canonical = _canonical_name(name)
        if canonical not in wanted or canonical in found:
            continue
        try:
            if known.form == "idx":
                data = content()
                found[canonical] = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            elif name.endswith(".bin"):
                found[canonical] = content()
            elif name.endswith(".png"):
                found[canonical] = _rows_to_records(content(), _labels(contents, canonical))
            else:
                found[canonical] = _pickle_to_records(content())
        except UserError as error:
            raise UserError(f"{path}: {name}: {error}") from error
        except (OSError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise UserError(f"{path}: cannot read {name} ({error})") from error
    return found


def decode(known: Known, files: dict[str, bytes], names: dict[str, str]) -> Split:
    """Images and labels of canonical files."""
    if known.form == "cifar":
        records = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, _RECORD)
        images, labels = records[:, 1:].reshape(-1, *known.shape), records[:, 0]
    else:
        image_file, label_file = (files[name] for name in names)
        images = _idx(image_file).reshape(-1, *known.shape)
        labels = _idx(label_file)
    if len(images) != len(labels):
        raise UserError(f"{known.name}: {len(images)} images but {len(labels)} labels")
    return Split(images, labels, np.arange(len(labels)))


def read_image_folder(folder: Path, known: Known) -> Split:
    """folder/CLASS/*.png: classes by name or number, images in the order of their paths."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    numbers = _class_numbers([entry.name for entry in classes], known, folder)
    images, labels = [], []
    for entry, number in zip(classes, numbers, strict=True):
        for path in sorted(entry.iterdir()):
            try:
                with Image.open(path) as picture:
                    pixels = np.asarray(picture.convert("L" if known.shape[0] == 1 else "RGB"))
            except OSError as error:
                raise UserError(f"{path} is not a readable image ({error})") from error
            if pixels.shape[:2] != known.shape[1:]:
                size, expected = pixels.shape[:2], known.shape[1:]
                raise UserError(f"{path} has {size} pixels, {known.name} has {expected} (height, width)")
            images.append(np.atleast_3d(pixels).transpose(2, 0, 1))
            labels.append(number)
    if not images:
        raise UserError(f"{folder} has no class folders with images")
    return Split(np.stack(images), np.array(labels, np.uint8), np.arange(len(labels)))


def _class_numbers(names: list[str], known: Known, folder: Path) -> list[int]:
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in known.classes]
    given = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]
    if set(given) <= set(plain):
        return [plain.index(name) for name in given]
    if all(name.isdigit() and int(name) < len(plain) for name in given):
        return [int(name) for name in given]
    raise UserError(f"{folder}: class folders {', '.join(names[:12])}; expected {', '.join(known.classes)} or 0 to 9")


def _entries(path: Path) -> Iterator[tuple[str, Content]]:
    """(base name, reader) of every file below a folder or in a tar archive; a single file stands for itself."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                if file.name.endswith((".tar.gz", ".tgz", ".tar")):
                    yield from _archive(file)
                yield file.name, file.read_bytes
    elif tarfile.is_tarfile(path):
        yield from _archive(path)
    else:
        yield path.name, path.read_bytes


def _archive(path: Path) -> Iterator[tuple[str, Content]]:
    """Small enough to hold: the largest archive has 180 MB of content."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)):
                    content = file.read()
                    yield Path(member.name).name, lambda content=content: content  # type: ignore[misc]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"{path} is not a readable archive ({error})") from error


def _canonical_name(name: str) -> str:
    stem = re.sub(r"\.(gz|bin|png)$", "", name)
    return re.sub(r"\.(idx\d-ubyte)$", r"-\1", stem)


def _idx(data: bytes) -> np.ndarray:
    kind, dimensions = data[2], data[3]
    if data[:2] != b"\0\0" or kind != 8:
        raise UserError("not an idx file of bytes")
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _labels(contents: dict[str, Content], canonical: str) -> list[int]:
    """The picture form keeps its labels in JSON; the misspelling is the package's own."""
    if canonical == "test_batch":
        return list(json.loads(contents["test_lables.json"]()))
    first = 10_000 * (int(canonical.rsplit("_", 1)[1]) - 1)
    return list(json.loads(contents["train_lables.json"]())[first : first + 10_000])


def _rows_to_records(png: bytes, labels: list[int]) -> bytes:
    """Row i of the picture is image i, its pixels in reading order."""
    with Image.open(io.BytesIO(png)) as picture:
        rows = np.asarray(picture.convert("RGB"))
    planes = rows.transpose(0, 2, 1).reshape(len(rows), -1)
    return _records(planes, np.array(labels, np.uint8))


def _pickle_to_records(data: bytes) -> bytes:
    batch = ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    planes, labels = np.asarray(batch[b"data"]), np.array(batch[b"labels"], np.uint8)
    if planes.dtype != np.uint8 or planes.ndim != 2:
        raise ValueError(f"data is {planes.dtype} of shape {planes.shape}, expected uint8 rows of 3072")
    return _records(planes, labels)


def _records(planes: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None], planes], 1).tobytes()


class ArrayUnpickler(pickle.Unpickler):
    """Admits numpy arrays and plain values, and nothing that could run code."""

    _ADMITTED = (
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("_codecs", "encode"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a CIFAR10 batch has no use for")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)
