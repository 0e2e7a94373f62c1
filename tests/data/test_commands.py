"""The commands, as a person types them, in processes of their own."""

import gzip
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from idn.cli import main
from idn.data import open_stream
from idn.data.known import KNOWN
from idn.data.shards import Split, write_dataset
from tests.data.helpers import write_numbered
from tests.data.test_sources import TinyMnist


def idn(*words: str | Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from idn.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)


def test_prepare_info_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = TinyMnist()
    monkeypatch.setitem(KNOWN, "mnist", tiny.known)
    (tmp_path / "have").mkdir()
    for name, data in tiny.files.items():
        (tmp_path / "have" / f"{name}.gz").write_bytes(gzip.compress(data))
    assert main(["data", "prepare", "mnist", "--source", str(tmp_path / "have")]) == 0
    assert "30 + 10 images, content verified" in capsys.readouterr().out
    folder = tmp_path / "data" / "mnist"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main(["data", "prepare", "mnist", "--source", "/nowhere"]) == 0, "what is complete is left alone"
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "test-000000.tar").unlink()
    assert main(["data", "prepare", "mnist", "--source", str(tmp_path / "have")]) == 0
    assert sorted(before) == sorted(folder.iterdir()), "what is missing is made again"
    assert main(["data", "verify", "mnist"]) == 0
    assert "all 40 samples are as the index says" in capsys.readouterr().out
    counts = [open_stream("mnist", split).samples for split in ("train", "validation", "test")]
    assert counts == [27, 3, 10]
    other = ["data", "prepare", "cifar10", "--out", str(folder)]
    assert main(other) == 2
    assert "holds mnist" in capsys.readouterr().err


def test_info_and_verify_in_processes(tmp_path: Path) -> None:
    told = idn("data", "info", "cifar10-sample")
    assert told.returncode == 0, told.stderr
    assert re.search(r"train +384 samples +4 shards", told.stdout)
    write_numbered(tmp_path, [4, 4])
    shard = tmp_path / "train-000001.tar"
    content = bytearray(shard.read_bytes())
    content[580] ^= 4
    shard.write_bytes(content)
    bad = idn("data", "verify", tmp_path)
    assert bad.returncode == 2
    assert "train-000001.tar has SHA-256" in bad.stdout and "sample '000004'" in bad.stdout
    assert bad.stderr.startswith("idn: error: ") and "Traceback" not in bad.stderr


def test_bench_prints_all_three_and_the_ratio(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (600, 3, 32, 32), np.uint8)
    split = Split(images, np.zeros(600, np.uint8), np.arange(600))
    write_dataset(str(tmp_path / "cifar"), "cifar10", {"train": split}, classes=10, shard_samples=200)
    told = idn("bench", "data", tmp_path / "cifar", "--seconds", "1", "--workers", "1")
    assert told.returncode == 0, told.stderr
    speeds = re.findall(r"(idn stream|stock WebDataset|DataLoader in memory) +([\d,]+) images/s", told.stdout)
    assert [name for name, _ in speeds] == ["idn stream", "stock WebDataset", "DataLoader in memory"]
    assert all(int(speed.replace(",", "")) > 0 for _, speed in speeds)
    assert re.search(r"the stream is [\d.]+x stock WebDataset", told.stdout)


def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    """Peak memory of a whole shuffled epoch over 6 MB and over 60 MB of decoded images."""
    code = (
        "import re, sys, torch; from idn.data import open_stream\n"
        "torch.set_num_threads(1)\n"
        "for batch in open_stream(sys.argv[1], batch=64): pass\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    peaks = []
    for count in (500, 5000):
        images = np.zeros((count, 3, 64, 64), np.uint8)
        split = Split(images, np.zeros(count, np.uint8), np.arange(count))
        write_dataset(str(tmp_path / f"{count}"), "plain", {"train": split}, classes=10, shard_samples=500)
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / f"{count}")], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 10e6
