"""Shards that somebody else made are indexed on first sight, whatever wrote them."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from idn.data import open_stream
from idn.errors import UserError
from tests.data.helpers import WebServer, epoch_of, numbered, numbers_of


def write_stock(path: Path, first: int, count: int, **extra: object) -> None:
    """With WebDataset's own writer, which puts pax headers before its members."""
    split = numbered(count, first=first)
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for image, label, number in zip(split.images, split.labels.tolist(), split.numbers, strict=True):
            writer.write({"__key__": f"img/{number:04d}", "png": image[0], "cls": int(label), **extra})


def write_tar(path: Path, members: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def png(number: int, size: tuple[int, int] = (4, 4)) -> bytes:
    image = np.zeros(size, np.uint8)
    image[0, 0], image[0, 1] = divmod(number, 256)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_a_folder_a_file_and_a_pattern(tmp_path: Path) -> None:
    for number in range(3):
        write_stock(tmp_path / f"shard-{number:03d}.tar", 10 * number, 10, json={"note": "kept out of the way"})
    assert epoch_of(tmp_path, shuffle=False) == list(range(30))
    assert epoch_of(tmp_path / "shard-{000..001}.tar", shuffle=False) == list(range(20))
    assert epoch_of(tmp_path / "shard-002.tar", shuffle=False) == list(range(20, 30))
    assert sorted(epoch_of(tmp_path, world=1, workers=2, batch=4)) == list(range(30))
    labels = [label for batch in open_stream(str(tmp_path), shuffle=False) for label in batch.labels.tolist()]
    assert labels == [n % 10 for n in range(30)]


def test_the_index_is_made_once_and_again_when_a_shard_changes(tmp_path: Path) -> None:
    shard = tmp_path / "shards" / "a.tar"
    write_stock(shard, 0, 5)
    assert epoch_of(shard.parent, shuffle=False) == list(range(5))
    kept = list((tmp_path / "cache" / "indexes").iterdir())
    assert epoch_of(shard.parent, shuffle=False) == list(range(5))
    assert list((tmp_path / "cache" / "indexes").iterdir()) == kept and len(kept) == 1
    write_stock(shard, 100, 7)
    assert epoch_of(shard.parent, shuffle=False) == list(range(100, 107))
    assert list(shard.parent.iterdir()) == [shard], "nothing is written beside somebody else's shards"


def test_over_the_web(tmp_path: Path) -> None:
    for number in range(3):
        write_stock(tmp_path / "x" / f"s{number}.tar", 10 * number, 10)
    with WebServer(tmp_path) as web:
        assert epoch_of(f"{web.url}/x/s{{0..2}}.tar", shuffle=False) == list(range(30))
        assert sorted(epoch_of(f"{web.url}/x/s{{0..2}}.tar", batch=4)) == list(range(30))
        assert all(count == 1 for path, count in web.requests.items())


def test_splits_are_read_from_names(tmp_path: Path) -> None:
    for name, first in (("train-0.tar", 0), ("train-1.tar", 5), ("val-0.tar", 10), ("test-0.tar", 15)):
        write_stock(tmp_path / name, first, 5)
    assert epoch_of(tmp_path, shuffle=False) == list(range(10))
    assert epoch_of(tmp_path, split="validation", shuffle=False) == list(range(10, 15))
    assert epoch_of(tmp_path, split="test", shuffle=False) == list(range(15, 20))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_tar_forms_long_names_folders_and_gzip(tmp_path: Path, form: int) -> None:
    long = "folder/" * 12 + "n" * 60
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w", format=form) as archive:
        for number in range(6):
            folder = tarfile.TarInfo(f"folder{number}")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            for extension, data in (("png", png(number)), ("cls", b"3\n")):
                info = tarfile.TarInfo(f"{long}{number}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        readme = tarfile.TarInfo("README")
        archive.addfile(readme)
    assert epoch_of(path, shuffle=False) == list(range(6))
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert sorted(epoch_of(packed, batch=2)) == list(range(6))


def test_images_without_labels_and_arrays(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.array([[0, 7], [1, 1]], np.uint8))
    write_tar(tmp_path / "a.tar", {"1.npy": array.getvalue()})
    (batch,) = open_stream(str(tmp_path / "a.tar"))
    assert batch.labels.tolist() == [-1] and numbers_of(batch.images) == [7] and batch.images.shape == (1, 1, 2, 2)


@pytest.mark.parametrize("name", ["../up.png", "/abs.png", "a/../../b.png"])
def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "evil.tar", {"fine.png": png(1), name: png(2)})
    with pytest.raises(UserError, match=r"evil\.tar.*leaves the shard's folder"):
        open_stream(str(tmp_path / "evil.tar"))


def test_what_is_no_dataset_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no shards at"):
        open_stream(str(tmp_path))
    with pytest.raises(UserError, match="no shards at"):
        open_stream(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="idn data prepare cifar10"):
        open_stream("cifar10")
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    with pytest.raises(UserError, match=r"empty\.tar: it holds no sample"):
        open_stream(str(tmp_path / "empty.tar"))
    write_tar(tmp_path / "text.tar", {"a.txt": b"hello"})
    with pytest.raises(UserError, match=r"text\.tar: sample 'a': no image among its files \(txt\)"):
        open_stream(str(tmp_path / "text.tar"))
