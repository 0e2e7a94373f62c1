"""Damaged shards stop the stream with an error that names shard and sample, or are skipped, counted and reported."""

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from idn.data import open_stream
from idn.data.images import encode_png
from idn.data.index import INDEX, Index, Shard
from idn.data.tars import BLOCK, END_MARK, sample_bytes
from idn.errors import UserError
from tests.data.helpers import epoch_of, write_numbered

GOOD = encode_png(np.zeros((1, 4, 4), np.uint8))


def write_samples(folder: Path, samples: list[dict[str, bytes]]) -> None:
    """A shard with exactly these files, and an index that agrees with it."""
    parts = [sample_bytes(f"{number:03d}", files) for number, files in enumerate(samples)]
    content = b"".join(parts) + END_MARK
    (folder / "train-000000.tar").write_bytes(content)
    blocks = np.array([len(part) // BLOCK for part in parts], np.uint32)
    shard = Shard("train-000000.tar", "train", len(parts), len(content), "", blocks)
    (folder / INDEX).write_text(Index("made", (1, 4, 4), 10, {}, (shard,)).to_json())


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "JPEG")
    return file.getvalue()


BAD = {
    "no image": ({"cls": b"1"}, r"no image among its files \(cls\)"),
    "no label": ({"png": GOOD}, r"no label"),
    "wrong label": ({"png": GOOD, "cls": b"ten"}, r"label 'ten', expected a number from 0 to 9"),
    "label too large": ({"png": GOOD, "cls": b"10"}, r"label '10', expected a number from 0 to 9"),
    "another shape": ({"png": encode_png(np.zeros((1, 4, 5), np.uint8)), "cls": b"1"}, r"1x4x5, expected 1x4x4"),
    "colour": ({"png": encode_png(np.zeros((3, 4, 4), np.uint8)), "cls": b"1"}, r"3x4x4, expected 1x4x4"),
    "flipped byte": ({"png": GOOD[:45] + b"\xff" + GOOD[46:], "cls": b"1"}, r"checksum"),
    "cut short": ({"png": GOOD[:40], "cls": b"1"}, r"not a readable png"),
    "no png at all": ({"png": b"hello", "cls": b"1"}, r"not a readable png"),
    "a cut jpeg": ({"jpg": jpeg()[:60], "cls": b"1"}, r"not a readable jpg"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_stops_or_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, workers: int
) -> None:
    files, told = BAD[case]
    good = {"png": GOOD, "cls": b"1"}
    write_samples(tmp_path, [good, good, files, good])
    with pytest.raises(UserError, match=rf"^train-000000\.tar, sample '002': .*{told}") as error:
        epoch_of(tmp_path, workers=workers)
    assert "\n" not in str(error.value)
    stream = open_stream(str(tmp_path), batch=2, on_bad_sample="skip", workers=workers)
    with caplog.at_level(logging.WARNING):
        assert sum(len(batch.images) for batch in stream) == 3
    assert stream.skipped == 1
    assert "skipped train-000000.tar, sample '002'" in caplog.text


def test_a_batch_of_nothing_but_bad_samples_stops_training(tmp_path: Path) -> None:
    write_samples(tmp_path, [{"cls": b"1"}] * 3)
    with pytest.raises(UserError, match="every sample of a batch is bad"):
        epoch_of(tmp_path, on_bad_sample="skip")
    evaluation = open_stream(str(tmp_path), shuffle=False, on_bad_sample="skip")
    assert [len(batch.images) for batch in evaluation] == [0] and evaluation.skipped == 3


def test_truncated_and_missing_shards(tmp_path: Path) -> None:
    index = write_numbered(tmp_path, [5, 5])
    path = tmp_path / index.shards[1].name
    content = path.read_bytes()
    path.write_bytes(content[:-4000])
    with pytest.raises(UserError, match=rf"{path.name} is truncated: {len(content) - 4000} bytes"):
        epoch_of(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name} is missing"):
        epoch_of(tmp_path, workers=1)


def test_truncated_foreign_shards(tmp_path: Path) -> None:
    write_numbered(tmp_path, [5])
    (tmp_path / INDEX).unlink()
    path = tmp_path / "train-000000.tar"
    content = path.read_bytes()
    for size in (len(content) - 1024, len(content) - 1700, 5000, 700, 100):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=rf"{path.name}: .*truncated"):
            open_stream(str(tmp_path))


def test_an_index_that_disagrees_with_its_shard(tmp_path: Path) -> None:
    write_numbered(tmp_path, [5])
    plain = json.loads((tmp_path / INDEX).read_text())
    blocks = plain["shards"][0]["blocks"]
    for change in ([1, -1], [-1, 1], [2, -2]):
        moved = [blocks[0] + change[0], blocks[1] + change[1], *blocks[2:]]
        plain["shards"][0]["blocks"] = moved
        (tmp_path / INDEX).write_text(json.dumps(plain))
        with pytest.raises(UserError, match=r"train-000000\.tar, sample"):
            epoch_of(tmp_path)
