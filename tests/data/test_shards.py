"""Shards are plain WebDataset tars, written whole or not at all, and verified to the last byte."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import webdataset

from idn.data.cache import Cache
from idn.data.index import INDEX, Index
from idn.data.locate import load_index
from idn.data.shards import Split, hold_out, write_dataset
from idn.data.tars import BadShard, scan, split_name
from idn.data.verify import problems
from idn.errors import UserError
from tests.data.helpers import numbered, write_numbered


def found(folder: Path) -> list[str]:
    index = load_index(str(folder))
    assert index is not None
    return list(problems(str(folder), index, Cache(folder / "cache")))


def test_tar_and_webdataset_read_our_shards(tmp_path: Path) -> None:
    index = write_numbered(tmp_path, [6, 6], shape=(3, 5, 4))
    for number, shard in enumerate(index.shards):
        path = tmp_path / shard.name
        listing = subprocess.run(["tar", "tf", path], capture_output=True, text=True, check=True).stdout.split()
        assert listing[:2] == [f"{6 * number:06d}.png", f"{6 * number:06d}.cls"] and len(listing) == 12
        with tarfile.open(path) as archive:
            starts = [m.offset for m in archive.getmembers() if m.name.endswith(".png")]
        assert starts == shard.offsets().tolist()[:-1]
    urls = [str(tmp_path / shard.name) for shard in index.shards]
    stock = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("png", "cls"))
    expected = numbered(12, (3, 5, 4))
    assert [label for _, label in stock] == expected.labels.tolist()
    assert np.array_equal(np.stack([image for image, _ in stock]).transpose(0, 3, 1, 2), expected.images)


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    write_numbered(tmp_path, [5, 5])
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    write_numbered(tmp_path, [5, 5])
    assert before == {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}


def test_a_killed_writer_leaves_whole_files_and_can_be_run_again(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.data.helpers import write_numbered\n"
        "print('go', flush=True); write_numbered(sys.argv[1], [200] * 20, shape=(3, 32, 32))"
    )
    out = tmp_path / "out"
    writer = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE)
    while len(list(out.glob("*.tar"))) < 3:
        assert writer.poll() is None
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert not (out / INDEX).exists()
    for path in out.glob("*.tar"):
        with path.open("rb") as file:
            spans = scan(lambda at, n, file=file: os.pread(file.fileno(), n, at), path.stat().st_size)
        assert len(spans) == 200
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    index = write_numbered(out, [200] * 20, shape=(3, 32, 32))
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert len(index.shards) == 20 and found(out) == []


def test_the_index_says_it_all(tmp_path: Path) -> None:
    written = write_numbered(tmp_path, [4, 4, 1])
    plain = json.loads((tmp_path / INDEX).read_text())
    assert plain["dataset"] == "numbered" and plain["shape"] == [1, 4, 4] and plain["bits"] == 8
    assert [shard["samples"] for shard in plain["shards"]] == [4, 4, 1]
    assert [shard["bytes"] for shard in plain["shards"]] == [
        (tmp_path / shard["name"]).stat().st_size for shard in plain["shards"]
    ]
    assert load_index(str(tmp_path)) == written
    assert found(tmp_path) == []


def flip_byte(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_verify_finds_a_flipped_byte_wherever_it_is(tmp_path: Path) -> None:
    index = write_numbered(tmp_path, [4, 4])
    path = tmp_path / index.shards[1].name
    original = path.read_bytes()
    for at in range(0, len(original), 331):
        path.write_bytes(original)
        flip_byte(path, at)
        assert any(path.name in problem for problem in found(tmp_path)), at
    path.write_bytes(original)
    flip_byte(path, 512 + 60)
    assert any("sample '000004'" in problem for problem in found(tmp_path)), "the sample is named too"


def test_verify_finds_missing_and_short_shards(tmp_path: Path) -> None:
    index = write_numbered(tmp_path, [4, 4, 4])
    (tmp_path / index.shards[0].name).unlink()
    short = tmp_path / index.shards[2].name
    short.write_bytes(short.read_bytes()[:-2500])
    told = "\n".join(found(tmp_path))
    assert "train-000000.tar is missing" in told
    assert "train-000002.tar has" in told and "truncated" in told


def test_verify_finds_an_index_that_disagrees(tmp_path: Path) -> None:
    write_numbered(tmp_path, [4])
    text = (tmp_path / INDEX).read_text()
    plain = json.loads(text)
    plain["digests"]["train"] = "0" * 64
    plain["shards"][0]["blocks"][0] += 1
    plain["shards"][0]["blocks"][1] -= 1
    (tmp_path / INDEX).write_text(json.dumps(plain))
    assert any("other places than the index" in problem for problem in found(tmp_path))
    plain["shards"] = json.loads(text)["shards"]
    (tmp_path / INDEX).write_text(json.dumps(plain))
    assert any("content digest" in problem for problem in found(tmp_path))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"writer": "other-2"}, "other-2"),
        ({"shape": [1]}, "not a readable index"),
        ({"shards": []}, "not a readable index"),
        ({"surprise": 1}, "not a readable index"),
    ],
)
def test_unreadable_indexes_are_told(tmp_path: Path, change: dict[str, object], told: str) -> None:
    plain = json.loads(write_numbered(tmp_path, [2]).to_json())
    with pytest.raises(UserError, match=told):
        Index.from_json(json.dumps(plain | change), "here")
    plain["shards"][0]["name"] = "../elsewhere.tar"
    with pytest.raises(UserError, match="leaves the folder"):
        Index.from_json(json.dumps(plain), "here")
    with pytest.raises(UserError, match="here is not a readable index"):
        Index.from_json("{", "here")


def test_the_hold_out_does_not_depend_on_the_order_of_the_source() -> None:
    train = numbered(200)
    mixed = train.take(np.random.default_rng(1).permutation(200))
    rest, held = hold_out(train)
    rest2, held2 = hold_out(mixed)
    assert len(held.labels) == 20 and sorted(held.numbers) == sorted(held2.numbers)
    assert sorted([*rest.numbers, *held.numbers]) == list(range(200))
    assert sorted(rest2.numbers) == sorted(rest.numbers)


def test_a_full_disk_is_told_and_leaves_nothing_half(tmp_path: Path) -> None:
    """The kernel itself refuses: no file of this process may pass 100 kB."""
    code = (
        "import resource, signal, sys; from tests.data.helpers import write_numbered\n"
        "from idn.errors import UserError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: write_numbered(sys.argv[1], [40, 40], shape=(3, 32, 32))\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout and "train-000000.tar" in done.stdout and "free space" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_object_stores_take_shards_too(tmp_path: Path) -> None:
    import fsspec

    url = f"memory://{tmp_path.name}/shards"
    index = write_numbered(url, [3, 3])
    again = load_index(url)
    assert again == index
    assert list(problems(url, index, Cache(tmp_path / "cache"))) == []
    assert len(fsspec.filesystem("memory").ls(f"/{tmp_path.name}/shards")) == 3
    with pytest.raises(UserError, match="takes no uploads"):
        write_numbered("http://127.0.0.1:9/x", [3])


@pytest.mark.parametrize("name", ["../evil.png", "/etc/evil.png", "a/../../b.png", "a\\..\\b.png"])
def test_members_that_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(BadShard, match="leaves the shard's folder"):
        split_name(name)


def test_samples_stay_small_and_are_what_they_say() -> None:
    samples = Path(__file__).parents[2] / "idn" / "data" / "samples"
    assert sum(path.stat().st_size for path in samples.rglob("*") if path.is_file()) < 3_000_000
    for name in ("cifar10-sample", "mnist-sample"):
        index = load_index(str(samples / name))
        assert index is not None and sum(shard.samples for shard in index.shards) == 512
        assert list(problems(str(samples / name), index, Cache(Path("unused")))) == []


def test_empty_splits_are_possible_to_select_from(tmp_path: Path) -> None:
    splits = {"train": numbered(3), "test": Split(*(part[:2] for part in vars(numbered(2, first=3)).values()))}
    index = write_dataset(str(tmp_path), "two", splits, classes=10)
    assert [shard.split for shard in index.select("test+train")] == ["test", "train"]
