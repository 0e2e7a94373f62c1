"""Files written by torch.save, of both its formats, read without running anything in them."""

import io
import math
import mmap
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from idn.errors import UserError
from idn.reference.pickles import PickleError, Storage, StoredTensor, Value, read_pickle

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
WHAT_WE_READ = "expected a checkpoint that the published code wrote with torch.save"


@dataclass(frozen=True)
class TorchFile:
    """What a file holds: its content, with tensors still described, and the means to read those."""

    content: Value
    storage_bytes: Callable[[Storage], bytes]
    little_endian: bool = True

    def tensor(self, stored: StoredTensor) -> Tensor:
        """The tensor itself, on the CPU. A description that reaches outside its storage is refused."""
        storage, size, stride = stored.storage, stored.size, stored.stride
        numbers = (*size, *stride, stored.offset, storage.offset, storage.length)
        if len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
            raise PickleError(f"a tensor of size {size}, stride {stride}")
        last = stored.offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if math.prod(size) and (last >= storage.length or math.prod(size) > storage.length):
            raise PickleError(f"a tensor of size {size} in a storage of {storage.length} numbers")
        flat = torch.zeros(0, dtype=storage.dtype)
        if storage.length:
            flat = torch.frombuffer(bytearray(self._read(storage)), dtype=storage.dtype)
        return flat.as_strided(size, stride, stored.offset).clone() if math.prod(size) else flat.reshape(size)

    def _read(self, storage: Storage) -> bytes:
        raw, width = self.storage_bytes(storage), storage.dtype.itemsize
        if len(raw) != storage.length * width:
            raise PickleError(f"storage {storage.key!r} has {len(raw)} bytes, not {storage.length * width}")
        if self.little_endian:
            return raw
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, width).flip(1).numpy().tobytes()


@contextmanager
def open_torch_file(path: str | Path) -> Iterator[TorchFile]:
    """Open a torch.save file for reading; whatever is wrong with it is a UserError that names the file."""
    try:
        with Path(path).open("rb") as file:
            start = file.read(64)
            file.seek(0)
            if not start:
                raise PickleError("the file is empty")
            if start.lstrip()[:1] == b"<":
                raise PickleError("this is a web page, perhaps an error page saved in the checkpoint's place")
            yield _open_zip(file) if start.startswith(b"PK") else _open_legacy(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UserError:
        raise
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: damaged or foreign file: {reason}; {WHAT_WE_READ}") from error


def _open_zip(file: IO[bytes]) -> TorchFile:
    """The format since torch 1.6: NAME/data.pkl, and each storage in NAME/data/KEY, all uncompressed."""
    archive = zipfile.ZipFile(file)
    names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(names) != 1:
        raise PickleError("a zip archive without data.pkl")
    root = names[0].removesuffix("data.pkl")

    def member(name: str) -> bytes:
        try:
            info = archive.getinfo(root + name)
        except KeyError as error:
            raise PickleError(f"{name!r} is missing from the archive") from error
        # torch.save never compresses: a small file that unpacks to a huge one is no checkpoint.
        if info.compress_type != zipfile.ZIP_STORED:
            raise PickleError(f"{name} is compressed")
        return archive.read(info)

    little_endian = f"{root}byteorder" not in archive.namelist() or member("byteorder") == b"little"
    content = read_pickle(io.BytesIO(member("data.pkl")))
    return TorchFile(content, lambda storage: member(f"data/{storage.key}"), little_endian)


def _open_legacy(file: IO[bytes]) -> TorchFile:
    """The format before: five pickles (magic number, version, machine, content, keys), then the storages."""
    # Mapped, so that a length that lies cannot make us reserve memory for it.
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = cast(IO[bytes], mapped)
    if read_pickle(data) != LEGACY_MAGIC:
        raise PickleError("it does not begin as the files of torch.save do")
    storages: dict[str, Storage] = {}
    _version, _machine, content = read_pickle(data), read_pickle(data), read_pickle(data, storages)
    keys = read_pickle(data)
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in storages for key in keys):
        raise PickleError("its table of storages does not fit its content")
    starts: dict[str, int] = {}
    for key in keys:
        # Each storage is its length, 8 bytes, then its numbers: little-endian whatever machine wrote them.
        starts[key] = data.tell() + 8
        end = starts[key] + storages[key].length * storages[key].dtype.itemsize
        length = int.from_bytes(data.read(8), "little")
        if end > len(mapped) or length != storages[key].length:
            raise PickleError("it is cut short, or its storages are not where they should be")
        data.seek(end)

    def storage_bytes(storage: Storage) -> bytes:
        if storage.key not in starts or storage.offset + storage.length > storages[storage.key].length:
            raise PickleError(f"storage {storage.key!r} is missing")
        width = storage.dtype.itemsize
        data.seek(starts[storage.key] + storage.offset * width)
        return data.read(storage.length * width)

    return TorchFile(content, storage_bytes)
