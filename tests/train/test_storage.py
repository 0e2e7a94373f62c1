"""Disks that are full or read-only when a checkpoint is due: one line says so, and the one before stays whole."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.fs
import pytest

from idn.train import checkpoint
from idn.train.storage import refusal
from tests.train.disks import Disk, small_disk
from tests.train.test_checkpoint import save
from tests.train.test_run import finish, metrics, wait_for

LOCAL = pyarrow.fs.LocalFileSystem()
Start = Callable[..., "subprocess.Popen[str]"]
WORDS = ("train", "moons", "--size", "tiny", "--workers", "1", "--batch", "8", "--log-every", "1", "--limit-test", "8")
QUIET = ("--validate-every", "0", "--picture-every", "0", "--checkpoint-every", "5")
RUN = "moons-tiny-idensenet-lc"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", 24) as made:
        yield made


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint that is whole, after reading all of it."""
    path = checkpoint.newest(LOCAL, str(folder))
    assert path is not None
    restored = checkpoint.Restored(LOCAL, path)
    assert restored.moments()
    return restored.progress.step


@pytest.mark.parametrize("left", [0, 3_000, 20_000, 60_000, 120_000])
def test_wherever_the_disk_fills_up_the_checkpoint_before_stays_whole(disk: Disk, left: int) -> None:
    folder = disk.folder / "run" / "checkpoints"
    whole = save((LOCAL, str(folder)), 5)
    disk.fill(left)
    with pytest.raises(Exception) as failed:
        save((LOCAL, str(folder)), 10)
    assert refusal(failed.value) == "No space left on device"
    assert checkpoint.newest(LOCAL, str(folder)) == whole
    checkpoint.tidy(LOCAL, str(folder))
    assert checkpoint.list_checkpoints(LOCAL, str(folder)) == [whole]
    disk.empty()
    assert checkpoint.newest(LOCAL, str(folder)) != save((LOCAL, str(folder)), 10)
    assert newest_step(folder) == 10


def test_other_errors_are_not_taken_for_a_full_disk() -> None:
    assert refusal(ConnectionError("the bucket does not answer")) is None
    try:
        try:
            raise OSError(30, "Read-only file system")
        except OSError as error:
            raise RuntimeError("cannot save") from error
    except RuntimeError as error:
        assert refusal(error) == "Read-only file system"


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_run_whose_storage_takes_no_more_says_so_and_goes_on_later(
    idn: Start, disk: Disk, tmp_path: Path, trouble: str
) -> None:
    # Endless retries must not hide it, and neither must none.
    failures = ("--max-failures", "-1" if trouble == "full" else "0")
    words = (*WORDS, *QUIET, *failures, "--storage", str(disk.folder))
    folder, storage = tmp_path / "runs" / RUN, disk.folder / RUN / "checkpoints"
    process = idn(*words, "--steps", "100000")
    wait_for(lambda: any(record["step"] >= 10 for record in metrics(folder, "saved")), process)
    wait_for(lambda: spoil(disk, trouble), process)
    code, out, err = finish(process)
    assert code == 1, err
    said = [line for line in err.splitlines() if line.startswith("idn:")]
    reason = "No space left on device" if trouble == "full" else "Read-only file system"
    mend = "make room there" if trouble == "full" else "make it writable"
    assert len(said) == 1 and "Traceback" not in out + err, err
    # Ray's own index may be the first file that cannot be written; then nobody knows the step.
    found = re.fullmatch(rf"idn: training failed: (?:step (\d+), .*)?no checkpoint, {reason}: (\S+); (.*)", said[0])
    assert found and found[2] == str(storage) and mend in found[3], err
    stays = newest_step(storage)
    assert 5 <= stays < int(found[1] or stays + 1)

    disk.empty() if trouble == "full" else disk.refuse(writes=False)
    code, out, err = finish(idn(*words, "--steps", str(stays + 7)))
    assert code == 0, err
    assert f"resuming at step {stays:,}" in err
    assert [record["step"] for record in metrics(folder, "metrics")] == list(range(1, stays + 8))


def spoil(disk: Disk, trouble: str) -> bool:
    """Fills the disk, or makes it read-only as soon as no file is open for writing."""
    if trouble == "full":
        disk.fill()
        return True
    try:
        disk.refuse()
    except subprocess.CalledProcessError:
        return False
    return True


def test_a_driver_without_room_for_its_own_files_says_so(idn: Start, disk: Disk) -> None:
    words = (*WORDS, *QUIET, "--runs", str(disk.folder))
    process = idn(*words, "--steps", "100000")
    wait_for(lambda: any(record["step"] >= 10 for record in metrics(disk.folder / RUN, "saved")), process)
    disk.fill()
    code, out, err = finish(process)
    assert code == 1, err
    said = [line for line in err.splitlines() if line.startswith("idn:")]
    assert len(said) == 1 and "Traceback" not in out + err, err
    assert "No space left on device" in said[0] and str(disk.folder / RUN) in said[0]
    assert newest_step(disk.folder / RUN / "checkpoints") >= 5
